// SPDX-License-Identifier: Apache-2.0
//
// The text that a model writes, token by token, up to a stop text.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <utility>

#include <reference_model/tokenizer/tokenizer.hpp>

namespace kvpolicy::tools {

/// The text ends with the first occurrence of the stop text, which is part of it. It may begin and
/// end inside tokens. Without a stop text the text has no end.
class NewText {
 public:
  /// `before`: the tokens that the text goes on after, of which the last one counts. A tokenizer that
  /// drops the space in front of a text's first word keeps it after them.
  NewText(const reference::Tokenizer& tokenizer, std::string stop, std::span<const int> before = {})
      : stream_{tokenizer}, stop_{std::move(stop)} {
    if (!before.empty()) static_cast<void>(stream_.next(before.back()));
  }

  /// The characters that this token completes; none after the stop text.
  std::string add(int token) { return append(stream_.next(token)); }

  /// What remains of a character that the tokens did not complete.
  std::string finish() { return append(stream_.finish()); }

  [[nodiscard]] bool stopped() const { return stopped_; }
  [[nodiscard]] const std::string& text() const { return text_; }

 private:
  std::string append(const std::string& more) {
    if (stopped_) return {};
    const std::size_t before = text_.size();
    text_ += more;
    if (!stop_.empty()) {
      const std::size_t first = before - std::min(before, stop_.size() - 1);
      if (const std::size_t found = text_.find(stop_, first); found != std::string::npos) {
        text_.resize(found + stop_.size());
        stopped_ = true;
      }
    }
    return text_.substr(before);
  }

  reference::TextStream stream_;
  std::string stop_;
  std::string text_;
  bool stopped_ = false;
};

}  // namespace kvpolicy::tools
