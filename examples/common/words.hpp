// SPDX-License-Identifier: Apache-2.0
//
// The words and facts that tasks are made of.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "random.hpp"

namespace kvpolicy::tools {

/// "amber lantern": distinct things in random order. @throws ConfigError for more than there are
[[nodiscard]] std::vector<std::string> draw_things(Random& random, std::size_t count);
inline constexpr std::size_t most_things = 48 * 48;

/// So many decimal digits, the first of which is not 0.
[[nodiscard]] std::string draw_digits(Random& random, std::size_t digits);
/// A UUID of version 4.
[[nodiscard]] std::string draw_uuid(Random& random);
/// So many letters from `first` on: 'a' or 'A'.
[[nodiscard]] std::string draw_letters(Random& random, std::size_t letters, char first);

/// The words of a list, which a space separates.
[[nodiscard]] std::vector<std::string_view> words_in(std::string_view list);

/// Words of one kind: "fish" and its members.
struct WordKind {
  std::string_view name;
  std::string_view words;  ///< words_in() takes them apart.
};
[[nodiscard]] std::span<const WordKind> word_kinds();

struct WordPair {
  std::string_view first;
  std::string_view second;
};
[[nodiscard]] std::span<const WordPair> capitals();   ///< country, city
[[nodiscard]] std::span<const WordPair> opposites();  ///< no word twice

}  // namespace kvpolicy::tools
