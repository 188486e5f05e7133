// SPDX-License-Identifier: Apache-2.0
//
// A question about a text, as tokens, and the judgement of what a model says to it.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "retrieval_text.hpp"
#include "sequence.hpp"
#include "text_model.hpp"

namespace kvpolicy::tools {

/// Question and answer are encoded together, after the end of the text before them. A token that
/// begins in the question and ends in the answer, such as a space and a word, belongs to the answer,
/// so the model is asked as it would continue the whole text.
class AskedQuestion {
 public:
  /// `model` must outlive this object.
  AskedQuestion(const TextModel& model, std::string_view body, const Question& question);

  [[nodiscard]] const std::vector<int>& question() const { return question_; }
  [[nodiscard]] const std::vector<int>& answer() const { return answer_; }
  [[nodiscard]] std::size_t size() const { return question_.size() + answer_.size(); }

  /// Whether the model should go on: it has said fewer tokens than the right answer has, or its text
  /// is the beginning of an answer, spelled with more tokens. An end of the text is one here, too.
  [[nodiscard]] bool goes_on(std::span<const int> said) const;

  /// '1' if the text begins with the right answer; 'o' if with that for the other name of a
  /// two-step question; '0' otherwise.
  [[nodiscard]] char mark(std::span<const int> said) const;
  [[nodiscard]] bool is_right(std::span<const int> said) const { return mark(said) == '1'; }

  /// What the cache answers, always with the likeliest token, after the logits of the question's
  /// last one.
  [[nodiscard]] std::vector<int> decode(Sequence& cache, std::span<const float> logits,
                                        const Reading& reading = {}) const;

 private:
  [[nodiscard]] std::vector<int> after_question(std::string_view body, const std::string& question,
                                                const std::string& answer) const;

  const TextModel* model_;
  std::vector<int> question_, answer_;
  std::string right_, other_;  // as decoded from their tokens
};

/// A text as tokens, with its questions.
struct EncodedText {
  std::vector<int> body;
  std::vector<AskedQuestion> questions;

  EncodedText(const TextModel& model, const RetrievalText& text);
};

/// Draws a text of at most and nearly `length` tokens: the body, and the longest of its questions
/// with its answer. `config.length` is ignored. Texts are drawn by bytes, so that of a tokenizer that
/// reads bytes has exactly this length; for others a few texts are drawn until one fits.
/// @throws ConfigError as draw_text
[[nodiscard]] RetrievalText draw_text_in_tokens(const TextModel& model, std::string_view plain,
                                                std::size_t length, RetrievalTextConfig config);

/// The first `length` tokens of a text that draw_plain_text draws. @throws ConfigError as that
[[nodiscard]] std::vector<int> draw_plain_tokens(const TextModel& model, std::string_view plain,
                                                 std::size_t length, RetrievalTextConfig config);

}  // namespace kvpolicy::tools
