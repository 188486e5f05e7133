// SPDX-License-Identifier: Apache-2.0
#include "token_strip.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>

#include <fmt/format.h>

namespace kvpolicy::tools {

TokenStrip::TokenStrip(std::vector<std::string> proposers, bool bytes, bool colour)
    : proposers_{std::move(proposers)}, bytes_{bytes}, colour_{colour} {}

// Shades that differ without red and green; the target's stands out.
const char* TokenStrip::shade(unsigned level) const {
  if (level == 0) return "\033[1;35m";
  return level + 1 == proposers_.size() ? "\033[36m" : "\033[33m";
}

char TokenStrip::mark(unsigned level) const {
  if (level == 0) return 'T';
  return level + 1 == proposers_.size() ? '.' : 's';
}

std::string TokenStrip::legend() const {
  std::string line = "proposed by";
  for (std::size_t level = proposers_.size(); level-- > 0;) {
    const auto number = static_cast<unsigned>(level);
    if (colour_) {
      line += fmt::format("  {}{}\033[0m", shade(number), proposers_[level]);
    } else {
      line += fmt::format("  {} {}", mark(number), proposers_[level]);
    }
  }
  return line;
}

std::string TokenStrip::coloured(const NewToken& token) const {
  std::string shown = fmt::format("{} ", token.token);
  if (bytes_) {
    const auto byte = static_cast<std::uint8_t>(token.token);
    shown.assign(1, static_cast<char>(byte));
    if ((byte < 0x20 && byte != '\n' && byte != '\t') || byte == 0x7F) shown = "?";
  }
  return colour_ ? shade(token.level) + shown + "\033[0m" : shown;
}

std::string TokenStrip::marked(std::span<const NewToken> tokens, std::size_t width) const {
  std::string out;
  std::string text;
  std::string marks;
  const auto end_line = [&] {
    if (text.empty()) return;
    out += text + '\n' + marks + '\n';
    text.clear();
    marks.clear();
  };
  for (const NewToken& token : tokens) {
    std::string shown =
        bytes_ ? std::string(1, static_cast<char>(token.token)) : fmt::format("{} ", token.token);
    // Each byte takes one column; a byte that is no printable ASCII becomes a dot, as in a hex
    // dump.
    if (bytes_ && (token.token < 0x20 || token.token > 0x7E))
      shown = token.token == '\n' ? " " : ".";
    if (text.size() + shown.size() > width) end_line();
    text += shown;
    marks += mark(token.level);
    marks.append(shown.size() - 1, ' ');
    if (bytes_ && token.token == '\n') end_line();
  }
  end_line();
  return out;
}

}  // namespace kvpolicy::tools
