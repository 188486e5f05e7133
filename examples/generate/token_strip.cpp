// SPDX-License-Identifier: Apache-2.0
#include "token_strip.hpp"

#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "../common/terminal.hpp"
#include "../common/text_model.hpp"

namespace kvpolicy::tools {

namespace {

// The text on one line, at least one column wide.
std::string in_columns(std::string_view text) {
  constexpr std::string_view broken = "\uFFFD";
  std::string shown;
  while (!text.empty()) {
    const auto byte = static_cast<unsigned char>(text.front());
    const bool is_broken = text.starts_with(broken);
    if (is_broken || byte == 0x7F || (byte < 0x20 && byte != '\n')) {
      shown += '.';
    } else {
      shown += byte == '\n' ? ' ' : text.front();
    }
    text.remove_prefix(is_broken ? broken.size() : 1);
  }
  return shown.empty() ? "." : shown;
}

}  // namespace

TokenStrip::TokenStrip(std::vector<std::string> proposers, reference::Tokenizer tokenizer, bool colour)
    : proposers_{std::move(proposers)}, tokenizer_{std::move(tokenizer)}, colour_{colour} {}

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
  const std::string shown = printable(text_of_token(tokenizer_, token.token));
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
    const std::string own = text_of_token(tokenizer_, token.token);
    std::string shown = in_columns(own);
    const std::size_t columns = display_width(shown);
    if (display_width(text) + columns > width) end_line();
    text += shown;
    marks += mark(token.level);
    marks.append(columns - 1, ' ');
    if (own.ends_with('\n')) end_line();
  }
  end_line();
  return out;
}

}  // namespace kvpolicy::tools
