// SPDX-License-Identifier: Apache-2.0
#include "terminal.hpp"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include <fmt/format.h>

namespace kvpolicy::tools {
namespace {

// Inserts commas into the digits before the decimal point.
std::string separated(std::string digits) {
  const std::size_t point = std::min(digits.find('.'), digits.size());
  const std::size_t first = digits.starts_with('-') ? 1 : 0;
  for (std::size_t at = point; at > first + 3;) {
    at -= 3;
    digits.insert(at, 1, ',');
  }
  return digits;
}

bool begins_character(char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; }

}  // namespace

bool is_terminal(std::FILE* stream) { return isatty(fileno(stream)) == 1; }

bool wants_colour(std::FILE* stream) {
  const char* no_colour = std::getenv("NO_COLOR");
  const char* terminal = std::getenv("TERM");
  const bool dumb = terminal != nullptr && std::string_view{terminal} == "dumb";
  return is_terminal(stream) && !dumb && (no_colour == nullptr || *no_colour == '\0');
}

std::size_t display_width(std::string_view text) {
  return static_cast<std::size_t>(std::ranges::count_if(text, begins_character));
}

std::string thousands(std::uint64_t number) { return separated(fmt::format("{}", number)); }

std::string fixed(double number, int digits) {
  return std::isfinite(number) ? separated(fmt::format("{:.{}f}", number, digits)) : "-";
}

std::string percent(double share) { return std::isfinite(share) ? fixed(100 * share, 1) + " %" : "-"; }

std::string duration(double seconds) {
  if (seconds < 60) return fixed(seconds, 1) + " s";
  const auto whole = static_cast<std::uint64_t>(seconds + 0.5);
  if (whole < 3600) return fmt::format("{} min {:02} s", whole / 60, whole % 60);
  return fmt::format("{} h {:02} min", whole / 3600, whole % 3600 / 60);
}

std::string printable(std::string_view text) {
  std::string shown;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    // U+0080 to U+009F are control characters too, of two bytes.
    const bool long_control =
        byte == 0xC2 && i + 1 < text.size() && static_cast<unsigned char>(text[i + 1]) < 0xA0;
    const bool control = byte == 0x7F || (byte < 0x20 && byte != '\n' && byte != '\t');
    shown += control || long_control ? '?' : text[i];
    if (long_control) ++i;
  }
  return shown;
}

std::string one_line(std::string_view text, std::size_t most) {
  std::string line;
  std::size_t width = 0;
  for (const char c : text) {
    std::string shown(1, c);
    if (c == '\n') {
      shown = std::string{"\\n"};
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
      shown = fmt::format("\\x{:02x}", static_cast<unsigned>(c));
    }
    if (width + display_width(shown) > most) return line + "…";
    width += display_width(shown);
    line += shown;
  }
  return line;
}

}  // namespace kvpolicy::tools
