// SPDX-License-Identifier: Apache-2.0
//
// Texts with facts hidden in them, and questions that ask for the facts: what the shipped model
// was trained on (reference_model/training/README.md defines the format), over text that it was not
// trained on. A seed, a length and a number give the same text on every machine.
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
  /// Two-step questions: the answer for the other name, which a model gives that finds the pair and
  /// its keys but not who is older.
  std::string other = {};
};

struct RetrievalText {
  std::string body;
  std::size_t facts = 0;
  std::vector<Question> questions;  ///< Each to be asked by itself, behind the body.
};

struct RetrievalTextConfig {
  std::size_t length = 8192;  ///< Bytes of text, one question and its answer together.
  std::size_t questions = 8;  ///< As many at most; a text hides one fact per 128 bytes, 4 to 32.
  /// The question ends with the opening of its answer, "The key of Bamelo is ", and five digits
  /// answer it. It takes less, and a question that is followed by its answer's opening shows what
  /// the model looks at: benchmarks such as RULER ask so. Not for two-step questions, whose answer
  /// it would give away.
  bool lead_in = false;
  bool two_step = false;  ///< "the key of the older of A and B": two facts lead to the answer.
  std::uint64_t seed = 1;
  std::uint64_t number = 0;  ///< Which of a seed's texts.
  /// A fact at each of these shares of the text, 0 its beginning and 1 its end, moved to the
  /// nearest boundary; question i asks for the fact at depth i. Empty: facts anywhere. Not with
  /// `two_step`.
  std::vector<double> depths = {};
};

/// The questions that a text of this length can take.
[[nodiscard]] std::size_t questions_per_text(std::size_t length, bool two_step);

/// The longest text that `plain` has room for.
[[nodiscard]] std::size_t longest_text(std::string_view plain);

/// Hides facts in a slice of `plain`. @throws ConfigError for a length or depths that cannot be.
[[nodiscard]] RetrievalText draw_text(std::string_view plain, const RetrievalTextConfig& config);

/// A slice of `plain` that begins behind a sentence, and nothing hidden in it. Of the config it
/// takes length, seed and number. @throws ConfigError for a length that cannot be.
[[nodiscard]] RetrievalText draw_plain_text(std::string_view plain,
                                            const RetrievalTextConfig& config);

/// The part of the King James text that the shipped model was not trained on, on one line.
/// @throws FormatError if the file is not there.
[[nodiscard]] std::string held_out_text();

/// That text in two parts that share no byte, so that no head is judged by a text that it was found
/// on. The split is the first boundary of sentences at or behind 30 % of it: what identifies heads
/// and chooses (gates, scores, settings, a plan) draws from the first part, the validation split,
/// what measures them from the rest, the test split.
/// @throws as held_out_text
[[nodiscard]] std::string identification_text();
[[nodiscard]] std::string evaluation_text();

}  // namespace kvpolicy::tools
