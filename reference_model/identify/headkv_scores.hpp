// SPDX-License-Identifier: Apache-2.0
//
// How much each query head helps to look something up: a needle is hidden in a text, a question
// asks for it, and while the model writes the answer its heads are watched. From the scores come
// budgets (plan/headkv_budgets.hpp).
//
// Methods: retrieval heads, Wu et al., arXiv:2404.15574, and the enhanced estimation of HeadKV, Fu
// et al., arXiv:2410.19258. HeadKV's reasoning scores are enhanced scores over needles with a
// reasoning step. Where the published code differs: it counts samples that are answered about right
// (a word overlap above 50 %), here they must be right token for token; and an older commit of it
// (75016c0) also divides enhanced scores by the answer's length and multiplies them by 10, which
// weighs samples of other lengths otherwise and changes nothing among the heads of one sample. Ties
// between rows go to the lower position.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvpolicy/plan/headkv_budgets.hpp>
#include <reference_model/identify/observed_text.hpp>
#include <reference_model/llama.hpp>
#include <reference_model/sampler.hpp>

namespace kvpolicy::reference {

/// What a head earns for a token of the answer; N is the needle's number of tokens.
enum class NeedleRule : std::uint8_t {
  /// 1 / N if the row that it attends to most is the needle's and holds the token that is written.
  retrieval,
  /// Of the N rows that it attends to most, the attention of those that are the needle's, / N.
  enhanced
};

struct NeedleSample {
  std::vector<int> prompt;         ///< text and question
  std::vector<int> answer;         ///< what the model should write
  std::size_t needle = 0;          ///< place in the prompt where the right answer stands
  std::size_t needle_tokens = 0;   ///< at least 1

  /// @throws ShapeError if there is nothing to read or write, or the needle is not in the prompt.
  void check() const;
};

/// Adds up what the heads earn over one answer, token by token. Keeps the sample by reference.
class NeedleScorer {
 public:
  /// @throws ShapeError as NeedleSample::check.
  NeedleScorer(const NeedleSample& sample, NeedleRule rule, std::size_t layers,
               std::size_t q_heads);

  /// What a head attends to, [tokens read so far], where the next token is about to be written.
  void attended(std::size_t layer, std::size_t q_head, std::span<const float> attention);
  /// The token that was written then.
  void wrote(int token);

  /// [layers, q_heads]; over a whole answer as long as the needle, 0 to 1.
  [[nodiscard]] const HeadScores& scores() const { return scores_; }

 private:
  [[nodiscard]] bool in_needle(std::size_t row) const {
    return row >= sample_->needle && row - sample_->needle < sample_->needle_tokens;
  }

  const NeedleSample* sample_;
  NeedleRule rule_;
  HeadScores scores_;
  HeadTable<std::size_t> most_attended_;  // retrieval: by each head, since the latest token
  std::vector<std::size_t> ranked_;       // scratch
};

struct NeedleResult {
  bool right = false;  ///< whether the model wrote the answer; only then do the scores count
  HeadScores scores;   ///< [layers, q_heads]
};

/// Reads the prompt and writes the answer, greedily, until it is done or wrong.
/// @throws ShapeError as NeedleSample::check, or for a token outside the vocabulary.
template <AttentionEngine Engine = ScalarEngine>
[[nodiscard]] NeedleResult score_needle(const Llama& model, const NeedleSample& sample,
                                        NeedleRule rule) {
  NeedleScorer scorer{sample, rule, model.config().layers, model.config().q_heads};
  ObservedText<Engine> text{model};
  const std::span<const int> prompt{sample.prompt};
  text.read(prompt.first(prompt.size() - 1));
  NeedleResult result;
  int token = prompt.back();
  for (const int wanted : sample.answer) {
    const std::vector<float> logits = text.observe(
        token, [&](std::size_t layer, std::size_t q_head, std::span<const float> attention) {
          scorer.attended(layer, q_head, attention);
        });
    token = likeliest(logits);
    scorer.wrote(token);
    result.right = token == wanted;
    if (!result.right) break;
  }
  result.scores = scorer.scores();
  return result;
}

}  // namespace kvpolicy::reference
