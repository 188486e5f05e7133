// SPDX-License-Identifier: Apache-2.0
//
// UTF-8, one character at a time. Broken text is replaced as Unicode recommends and as Python's
// errors="replace" does: each longest beginning of a character that does not end becomes one
// U+FFFD.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace kvpolicy::reference {

inline constexpr std::string_view replacement_character = "\xEF\xBF\xBD";

struct Utf8Character {
  std::size_t bytes = 0;   ///< How many it takes up, at least 1.
  bool valid = false;      ///< Otherwise these bytes stand for one U+FFFD.
  bool truncated = false;  ///< The text ends inside a character that is valid so far.
};

/// The first character of `text`, which must not be empty.
[[nodiscard]] inline Utf8Character first_character(std::string_view text) noexcept {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {1, true, false};
  const std::size_t length = lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
  if (length == 0) return {1, false, false};
  // The second byte's range excludes long spellings, surrogates, and what lies above U+10FFFF.
  unsigned lowest = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  unsigned highest = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  for (std::size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {i, false, true};
    if (byte(i) < lowest || byte(i) > highest) return {i, false, false};
    lowest = 0x80;
    highest = 0xBF;
  }
  return {length, true, false};
}

/// The code of the first character of `text`, which must be UTF-8 and not empty.
[[nodiscard]] inline char32_t first_code(std::string_view text) noexcept {
  const std::size_t bytes = first_character(text).bytes;
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  if (bytes == 1) return byte(0);
  auto code = static_cast<char32_t>(byte(0) & (0x7FU >> bytes));
  for (std::size_t i = 1; i < bytes; ++i) code = code << 6U | (byte(i) & 0x3FU);
  return code;
}

/// Where the last character of `text` begins, which must be UTF-8 and not empty.
[[nodiscard]] inline std::size_t last_character(std::string_view text) noexcept {
  std::size_t at = text.size() - 1;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0U) == 0x80U) --at;
  return at;
}

/// Appends `text` with what is not UTF-8 replaced. Returns how many bytes at its end are the
/// beginning of a character; with `keep_truncated` these are not appended.
inline std::size_t append_valid_utf8(std::string_view text, std::string& out, bool keep_truncated = false) {
  while (!text.empty()) {
    const Utf8Character next = first_character(text);
    if (next.truncated && keep_truncated) return text.size();
    out.append(next.valid ? text.substr(0, next.bytes) : replacement_character);
    text.remove_prefix(next.bytes);
  }
  return 0;
}

[[nodiscard]] inline std::string valid_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  append_valid_utf8(text, out);
  return out;
}

}  // namespace kvpolicy::reference
