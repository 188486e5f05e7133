// SPDX-License-Identifier: Apache-2.0
//
// Prints new tokens with their proposers: in colours on a terminal, elsewhere with a line of marks
// below each line of text.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <kvpolicy/speculation/decoder.hpp>
#include <reference_model/tokenizer/tokenizer.hpp>

namespace kvpolicy::tools {

class TokenStrip {
 public:
  /// `proposers` names each NewToken::level, the target first.
  TokenStrip(std::vector<std::string> proposers, reference::Tokenizer tokenizer, bool colour);

  /// Explains the colours or marks on one line.
  [[nodiscard]] std::string legend() const;

  /// One token in its colour, for a terminal; control characters except line ends become '?'.
  [[nodiscard]] std::string coloured(const NewToken& token) const;

  /// Lines of text, each with a line of marks below it, at most `width` columns wide. A token takes
  /// at least one column, and what is no character is a dot, as in a hex dump.
  [[nodiscard]] std::string marked(std::span<const NewToken> tokens, std::size_t width = 96) const;

  [[nodiscard]] bool has_colour() const { return colour_; }

 private:
  [[nodiscard]] const char* shade(unsigned level) const;
  [[nodiscard]] char mark(unsigned level) const;

  std::vector<std::string> proposers_;
  reference::Tokenizer tokenizer_;
  bool colour_;
};

}  // namespace kvpolicy::tools
