// SPDX-License-Identifier: Apache-2.0
//
// The exact sentences that the shipped model was trained on (reference_model/training/README.md
// defines them): facts about keys, questions for them, answers.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "random.hpp"

namespace kvpolicy::tools {

/// Distinct names of three syllables, "Bamelo", in random order.
[[nodiscard]] std::vector<std::string> draw_names(Random& random, std::size_t count);
/// Five digits.
[[nodiscard]] std::string draw_key(Random& random);

/// "The key of Bamelo is 48213. "
[[nodiscard]] std::string key_fact(std::string_view name, std::string_view key);
/// "Bamelo is older than Kituna. "
[[nodiscard]] std::string key_older(std::string_view elder, std::string_view younger);
/// "\nWhat is the key of Bamelo? "
[[nodiscard]] std::string ask_key(std::string_view name);
/// "\nWhat is the key of the older of Bamelo and Kituna? "
[[nodiscard]] std::string ask_key_of_older(std::string_view first, std::string_view second);
/// "The key of Bamelo is 48213."
[[nodiscard]] std::string key_answer(std::string_view name, std::string_view key);

/// Whether a sentence or a clause ends before `at`: facts are inserted and slices begin at such
/// positions.
[[nodiscard]] bool is_sentence_start(std::string_view text, std::size_t at);

}  // namespace kvpolicy::tools
