// SPDX-License-Identifier: Apache-2.0
//
// Scores how much each query head helps to look something up. A needle is hidden in a text, a
// question asks for it, and the attention of the heads is recorded while the model writes the
// answer. Budgets are made from the scores (plan/headkv_budgets.hpp).
//
// Methods: retrieval heads, Wu et al., arXiv:2404.15574, and the enhanced estimation of HeadKV, Fu
// et al., arXiv:2410.19258. HeadKV's reasoning scores are enhanced scores for needles with a
// reasoning step. Samples count that are answered rightly. The published code lets the model write up to 50
// tokens and counts an answer that has more than half of the needle's words (ROUGE-1 recall above 50 %),
// whatever else it says. Here an answer must be right token for token, or, with an AnswerCheck, satisfy the
// caller; `identify_heads headkv` then asks that the first number in its text is the key, so an answer of the
// right form with the wrong key does not count. An older commit of that code (75016c0) also divides enhanced
// scores by the answer's length and multiplies them by 10, which changes the weights of samples of other
// lengths but nothing among the heads of one sample. Ties between rows go to the lower position.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include <kvpolicy/plan/headkv_budgets.hpp>
#include <reference_model/identify/observed_text.hpp>
#include <reference_model/llama.hpp>
#include <reference_model/sampler.hpp>

namespace kvpolicy::reference {

/// The credit of a head for a token of the answer; N is the needle's number of tokens.
enum class NeedleRule : std::uint8_t {
  /// 1 / N if the row that it attends to most is in the needle and holds the token that is written.
  retrieval,
  /// The attention of those of its N most attended rows that are in the needle, divided by N.
  enhanced
};

struct NeedleSample {
  std::vector<int> prompt;        ///< text and question
  std::vector<int> answer;        ///< what the model should write
  std::size_t needle = 0;         ///< position in the prompt of the right answer
  std::size_t needle_tokens = 0;  ///< at least 1

  /// @throws ShapeError if prompt or answer is empty, or the needle is not in the prompt
  void check() const;
};

/// Adds up the credits of all heads over one answer, token by token. Keeps a reference to the
/// sample.
class NeedleScorer {
 public:
  /// @throws ShapeError as NeedleSample::check
  NeedleScorer(const NeedleSample& sample, NeedleRule rule, std::size_t layers, std::size_t q_heads);

  /// Reports a head's attention, [tokens read so far], before the next token is written.
  void attended(std::size_t layer, std::size_t q_head, std::span<const float> attention);
  /// Reports the token that was written then.
  void wrote(int token);

  /// [layers, q_heads]; from 0 to 1 for a whole answer as long as the needle.
  [[nodiscard]] const HeadScores& scores() const { return scores_; }

 private:
  [[nodiscard]] bool in_needle(std::size_t row) const {
    return row >= sample_->needle && row - sample_->needle < sample_->needle_tokens;
  }

  const NeedleSample* sample_;
  NeedleRule rule_;
  HeadScores scores_;
  HeadTable<std::size_t> most_attended_;  // retrieval: one for each head, since the latest token
  std::vector<std::size_t> ranked_;       // scratch
};

struct NeedleResult {
  bool right = false;  ///< whether the model wrote the answer; only then do the scores count
  HeadScores scores;   ///< [layers, q_heads]
};

/// A tolerant judgement: the model writes on until its answer is judged or has `most_tokens` tokens.
struct AnswerCheck {
  /// Whether the answer is right; nothing while that is open.
  std::function<std::optional<bool>(std::span<const int> said)> judge;
  std::size_t most_tokens = 50;  ///< as in the published code
};

/// Reads the prompt and writes the answer, greedily, until it is right or wrong. Without a check, each token
/// must be the sample's. The credits of all tokens written add up.
/// @throws ShapeError as NeedleSample::check, or for a token outside the vocabulary
template <AttentionEngine Engine = ScalarEngine>
[[nodiscard]] NeedleResult score_needle(const Llama& model, const NeedleSample& sample, NeedleRule rule,
                                        const AnswerCheck& check = {}) {
  NeedleScorer scorer{sample, rule, model.config().layers, model.config().q_heads};
  ObservedText<Engine> text{model};
  const std::span<const int> prompt{sample.prompt};
  text.read(prompt.first(prompt.size() - 1));
  NeedleResult result;
  int token = prompt.back();
  std::vector<int> said;
  const std::size_t most = check.judge ? check.most_tokens : sample.answer.size();
  while (said.size() < most) {
    const std::vector<float> logits =
        text.observe(token, [&](std::size_t layer, std::size_t q_head, std::span<const float> attention) {
          scorer.attended(layer, q_head, attention);
        });
    token = likeliest(logits);
    scorer.wrote(token);
    said.push_back(token);
    if (check.judge) {
      const std::optional<bool> verdict = check.judge(said);
      result.right = verdict.value_or(false);
      if (verdict) break;
    } else {
      result.right = token == sample.answer[said.size() - 1];
      if (!result.right) break;
    }
  }
  result.scores = scorer.scores();
  return result;
}

}  // namespace kvpolicy::reference
