// SPDX-License-Identifier: Apache-2.0
//
// Texts with facts hidden in them, and questions that ask for the facts. Facts about keys have the
// format of the shipped model's training (reference_model/training/README.md defines it); the text
// around them is not of that training. Facts whose answers are words suit pretrained models. A seed, a length and a
// number give the same text on every machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvpolicy::tools {

struct Question {
  std::string text;          ///< "\nWhat is the key of Bamelo? "
  std::string answer;        ///< "The key of Bamelo is 48213."
  std::size_t distance = 0;  ///< Bytes from the end of the fact asked for to the end of the text.
  /// Two-step questions: the answer for the other name. A model gives it that finds the pair and
  /// its keys but not who is older.
  std::string other = {};
};

struct RetrievalText {
  std::string body;
  std::size_t facts = 0;
  std::vector<Question> questions;  ///< Each is asked by itself, after the body.
};

enum class FactKind : std::uint8_t {
  keys,   ///< "The key of Bamelo is 48213.", as the shipped model was trained
  words,  ///< "The captain has learned to play the trombone." (word_facts.hpp)
};

struct RetrievalTextConfig {
  std::size_t length = 8192;  ///< Bytes of text, one question and its answer together.
  std::size_t questions = 8;  ///< At most so many; a text hides one fact per 128 bytes, 4 to 32 in
                              ///< all, of words at most 12.
  FactKind kind = FactKind::keys;
  /// The question ends with the opening of its answer, "The key of Bamelo is ", and five digits
  /// answer it. Such an answer takes fewer tokens, and the question makes the model look at the
  /// fact; benchmarks such as RULER ask this way. Not for two-step questions, because the opening
  /// would reveal who is older.
  bool lead_in = false;
  bool two_step = false;  ///< "the key of the older of A and B": two facts lead to the answer.
  std::uint64_t seed = 1;
  std::uint64_t number = 0;  ///< Which of a seed's texts.
  /// Puts a fact at each of these shares of the text (0 is its beginning, 1 its end), moved to the
  /// nearest boundary; question i asks for the fact at depth i. Empty: facts are anywhere. Not with
  /// `two_step`.
  std::vector<double> depths = {};
};

/// The number of questions that a text of this length can have.
[[nodiscard]] std::size_t questions_per_text(std::size_t length, bool two_step);

/// The longest text that `plain` is long enough for.
[[nodiscard]] std::size_t longest_text(std::string_view plain);

/// Hides facts in a slice of `plain`.
/// @throws ConfigError for an impossible length or depths, and for two-step questions about words
[[nodiscard]] RetrievalText draw_text(std::string_view plain, const RetrievalTextConfig& config);

/// A slice of `plain` that begins at a sentence, without facts. Only length, seed and number of the
/// config are used. @throws ConfigError for an impossible length.
[[nodiscard]] RetrievalText draw_plain_text(std::string_view plain, const RetrievalTextConfig& config);

/// The part of the King James text that the shipped model was not trained on, on one line.
/// @throws FormatError if the file does not exist
[[nodiscard]] std::string held_out_text();

/// Its two splits (texts.hpp). Everything that identifies or chooses (gates, scores, settings, a
/// plan) draws from the first, evaluations draw from the second.
/// @throws as held_out_text
[[nodiscard]] std::string identification_text();
[[nodiscard]] std::string evaluation_text();

}  // namespace kvpolicy::tools
