// SPDX-License-Identifier: Apache-2.0
//
// The texts that models are evaluated on, and how each is split.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace kvpolicy::tools {

/// The first one ships; scripts/fetch-texts brings the others, which say there what they are: three
/// kinds of prose and code.
inline constexpr std::array<std::string_view, 5> text_names{"kjv", "novels", "lexicon", "manual", "code"};

/// A text by its name. @throws ConfigError for another name, FormatError if its file does not exist
[[nodiscard]] std::string text_named(std::string_view name);

/// The parts of a text share no byte, so that no head is evaluated on a text that identified it.
enum class Split : std::uint8_t {
  whole,
  validation,  ///< the first 30 %, to the end of a sentence or line; what identifies or chooses
               ///< uses it
  test,        ///< the rest
};

[[nodiscard]] std::string part_of(std::string text, Split split);

/// Where a sentence, a clause or a line begins.
[[nodiscard]] bool is_unit_start(std::string_view text, std::size_t at);

}  // namespace kvpolicy::tools
