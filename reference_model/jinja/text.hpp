// SPDX-License-Identifier: Apache-2.0
//
// A template's texts, which remember what of them the caller gave. A special token's spelling in a message is text like any
// other, so whoever makes tokens of a rendered template must know where the messages are, after all that the template did to them.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <reference_model/byte_range.hpp>

namespace kvpolicy::reference::jinja {

struct Text {
  std::string text;              ///< UTF-8
  std::vector<ByteRange> given;  ///< by the caller; in order, not empty and not adjacent
  bool safe = false;             ///< Python's Markup: text that a filter marked as HTML

  Text() = default;
  explicit Text(std::string of, bool is_given = false) : text{std::move(of)} {
    if (is_given && !text.empty()) given.push_back({0, text.size()});
  }
};

/// How many bytes a text may have.
inline constexpr std::size_t most_bytes = std::size_t{64} << 20;
/// @throws ConfigError for a text of more than most_bytes
void append(Text& to, const Text& more);
void append(Text& to, std::string_view more);
/// The bytes of `range`, which must begin and end between characters.
[[nodiscard]] Text part(const Text& text, ByteRange range);
/// Marks all of it as given, if any of it was: after changes that move its bytes.
void mark_like(Text& text, const Text& from);

/// Where each character begins, and the end of the text.
[[nodiscard]] std::vector<std::size_t> character_starts(std::string_view text);

enum class Side { left, right, both };
/// What is left without the characters of `set` at its sides, or without Python's white space.
[[nodiscard]] ByteRange stripped(std::string_view text, const std::optional<std::string>& set, Side side);
[[nodiscard]] bool is_python_space(char32_t code) noexcept;

}  // namespace kvpolicy::reference::jinja
