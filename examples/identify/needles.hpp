// SPDX-License-Identifier: Apache-2.0
//
// Needles for HeadKV's head scores: a fact at a given depth of a text, a question about it, and the
// position of the right answer in the prompt.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include <common/text_model.hpp>
#include <reference_model/identify/headkv_scores.hpp>

namespace kvpolicy::tools {

struct NeedleConfig {
  std::size_t length = 1024;  ///< Tokens of text, question and answer together.
  double depth = 0.5;         ///< Where the fact should be: 0 is the text's beginning, 1 its end.
  double tolerance = 0.05;    ///< How far from there it may be, as a share of the text.
  /// Two facts lead to the answer, and the wrong answer is in the text as well.
  bool reasoning = false;
  std::uint64_t seed = 1;
  std::uint64_t number = 0;  ///< Which of a seed's needles.
};

/// For a model of bytes, the haystack is a text in the format of the shipped model's training
/// (retrieval_text.hpp), with as many other facts as such a text of this length has. The question
/// asks for the fact nearest to the depth, and the right answer is the whole sentence. Reasoning
/// asks for the key of the older of two names.
///
/// For a model with a tokenizer, it is prose with one pass key, drawn as the family niah_depths.
/// Reasoning asks for the pass key of a thing's owner: each of two things has an owner, named right
/// before the owner's pass key, and the question names one thing. The question ends with the
/// opening of the answer; the needle is the number, and the answer is a space and the number.
///
/// A text without a fact within the tolerance is drawn again.
/// @throws ConfigError for an impossible length, or if no text has a fact there
[[nodiscard]] reference::NeedleSample draw_needle(const TextModel& model, std::string_view plain,
                                                  const NeedleConfig& config);

/// Accepts what is said if the first number in its text, before an end of the text, is the key: the
/// digits of the right answer. `model` must outlive the result.
[[nodiscard]] reference::AnswerCheck says_key(const TextModel& model, const reference::NeedleSample& sample);

}  // namespace kvpolicy::tools
