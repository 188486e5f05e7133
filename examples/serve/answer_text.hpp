// SPDX-License-Identifier: Apache-2.0
//
// The text of an answer as it comes, without the stop text that ends it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <reference_model/tokenizer/tokenizer.hpp>

namespace kvpolicy::serve {

/// Holds back the end of the text while it may be the beginning of a stop text.
class AnswerText {
 public:
  /// `before`: the prompt's tokens, of which the last one counts (tools::NewText).
  AnswerText(const reference::Tokenizer& tokenizer, std::vector<std::string> stops,
             std::span<const int> before)
      : stream_{tokenizer}, stops_{std::move(stops)} {
    if (!before.empty()) static_cast<void>(stream_.next(before.back()));
  }

  /// What can be said after one more token.
  [[nodiscard]] std::string add(int token) { return release(stream_.next(token), false); }
  /// What was held back.
  [[nodiscard]] std::string finish() { return release(stream_.finish(), true); }
  [[nodiscard]] bool stopped() const { return stopped_; }

 private:
  [[nodiscard]] std::string release(const std::string& more, bool all) {
    if (stopped_) return {};
    held_ += more;
    std::size_t first = std::string::npos;
    for (const std::string& stop : stops_) first = std::min(first, held_.find(stop));
    if (first != std::string::npos) {
      stopped_ = true;
      held_.resize(first);
      return std::exchange(held_, {});
    }
    std::size_t kept = 0;
    for (const std::string& stop : stops_) {
      for (std::size_t size = std::min(stop.size() - 1, held_.size()); !all && size > kept; --size) {
        if (held_.ends_with(std::string_view{stop}.substr(0, size))) kept = size;
      }
    }
    std::string said = held_.substr(0, held_.size() - kept);
    held_.erase(0, said.size());
    return said;
  }

  reference::TextStream stream_;
  std::vector<std::string> stops_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace kvpolicy::serve
