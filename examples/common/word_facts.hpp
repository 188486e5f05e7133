// SPDX-License-Identifier: Apache-2.0
//
// Facts whose answers are words, to be hidden in a text and asked for: what a model that reads
// English can be asked, and what people like to read. Each is about something else, so a model that
// finds one does not mistake it for another.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "random.hpp"

namespace kvpolicy::tools {

struct WordFact {
  std::string sentence;  ///< "The captain has learned to play the trombone. "
  std::string question;  ///< "\nWhat has the captain learned to play? "
  std::string answer;    ///< "The captain has learned to play the trombone"
};

inline constexpr std::size_t most_word_facts = 12;

/// Distinct facts in random order, with words drawn for them. @throws ConfigError for more than
/// there are
[[nodiscard]] std::vector<WordFact> draw_word_facts(Random& random, std::size_t count);

}  // namespace kvpolicy::tools
