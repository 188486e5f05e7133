// SPDX-License-Identifier: Apache-2.0
//
// The text in which facts are hidden, cut to a number of tokens.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "../common/random.hpp"
#include "language_task.hpp"

namespace kvpolicy::tools {

struct Needle {
  std::string sentence;
  double depth = 0;  ///< Share of the text before it.
};

/// A text that can be cut after each of its words, and takes needles where a sentence begins.
class Haystack {
 public:
  /// Begins at a random sentence of `prose` and goes on at its beginning after its end. It is
  /// longer than `max_tokens` where the prose is.
  Haystack(std::string_view prose, std::size_t max_tokens, Random& random);
  /// One group of sentences again and again.
  explicit Haystack(std::size_t max_tokens);

  [[nodiscard]] const std::string& text() const noexcept { return text_; }
  /// Where sentences and lines begin in the text, and its end.
  [[nodiscard]] const std::vector<std::size_t>& sentences() const noexcept { return sentences_; }
  /// How many words there are.
  [[nodiscard]] std::size_t words() const noexcept { return word_ends_.size(); }
  /// The first `words` of the text with needles, each where the sentence nearest to its depth
  /// begins. Those in one position keep their order.
  [[nodiscard]] std::string with(std::size_t words, const std::vector<Needle>& needles) const;

 private:
  void find_boundaries();

  std::string text_;
  std::vector<std::size_t> sentences_;
  std::vector<std::size_t> word_ends_;
};

/// The text without the spaces and new lines that it ends in.
[[nodiscard]] std::string without_end_space(std::string_view text);

/// Gives each question its `max_tokens`, and returns the most tokens that a question takes with its
/// answer.
std::size_t reserve_answers(std::vector<LanguageQuestion>& questions, const CountTokens& count);

/// A body for each number of its parts: words, sentences or documents.
using MakeBody = std::function<std::string(std::size_t parts)>;

/// Reserves answers, and returns the longest body for which the task has at most `config.length`
/// tokens.
/// @throws ConfigError if `least` parts are too many or `most` of them leave more than a twentieth
/// of the length
[[nodiscard]] std::string fit_body(const LanguageTaskConfig& config, const CountTokens& count,
                                   std::vector<LanguageQuestion>& questions, std::size_t least,
                                   std::size_t most, const MakeBody& make_body);

/// A depth from 0 to 1.
[[nodiscard]] double draw_depth(Random& random);

}  // namespace kvpolicy::tools
