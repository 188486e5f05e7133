// SPDX-License-Identifier: Apache-2.0
//
// New tokens as a reader sees them, each by who proposed it: in colours on a terminal, elsewhere
// with marks on a line of their own below the text.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <kvpolicy/speculation/decoder.hpp>

namespace kvpolicy::tools {

class TokenStrip {
 public:
  /// `proposers`: a name for each NewToken::level, the target first. `bytes`: whether tokens are
  /// bytes of a text; others are shown by number.
  TokenStrip(std::vector<std::string> proposers, bool bytes, bool colour);

  /// What the colours or marks mean, on a line.
  [[nodiscard]] std::string legend() const;

  /// One token in its colour, for a terminal: control characters but line ends become '?'.
  [[nodiscard]] std::string coloured(const NewToken& token) const;

  /// Lines of text, each with a line of marks below it, at most `width` columns wide.
  [[nodiscard]] std::string marked(std::span<const NewToken> tokens, std::size_t width = 96) const;

  [[nodiscard]] bool has_colour() const { return colour_; }

 private:
  [[nodiscard]] const char* shade(unsigned level) const;
  [[nodiscard]] char mark(unsigned level) const;

  std::vector<std::string> proposers_;
  bool bytes_;
  bool colour_;
};

}  // namespace kvpolicy::tools
