// SPDX-License-Identifier: Apache-2.0
//
// Judging guesses by what a model says at each of them. The model has read the text's last token
// and all guesses in one pass; from place to place the guesses there are tried in order, the first
// that stays leads on, and where none does the model's own draw ends the run.
//
// With several guesses at one place each is judged by what the refusals before it left of p:
// SpecInfer, arXiv:2305.09781, and for guesses drawn without replacement Sequoia, arXiv:2402.12374.
// That is lossless for guesses drawn one after another from any distributions, as long as each says
// which (`Guess::from`) and none was chosen in knowledge of p.
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/speculation/draft.hpp>
#include <kvpolicy/speculation/sampling.hpp>

namespace kvpolicy {

/// What became of guesses.
struct Verdict {
  std::vector<std::size_t> path;  ///< the guesses that stayed, one behind the other
  int next = 0;                   ///< the model's own token behind them
  /// What the model says at each place of the path and at `next`: [path + 1]. A token that stayed
  /// and a token drawn after a refusal both come, as seen from before the trial, from exactly this.
  std::vector<Distribution> distributions;
  std::size_t places = 0;         ///< where guesses were tried: the path, and the place it ended at
};

/// Which guesses stay, and the token behind them.
/// `logits` are [1 + guesses, vocabulary]: behind the text, then behind each guess.
/// @throws ShapeError for logits of another size, a NaN among those that decide, or a guess that the
/// rule refuses
template <class Rule = SpeculativeSampling>
[[nodiscard]] Verdict judge(std::span<const Guess> guesses, std::span<const float> logits,
                            const SamplingOptions& sampling, Random& random) {
  const std::size_t places = guesses.size() + 1;
  require<ShapeError>(!logits.empty() && logits.size() % places == 0, "judge: ", logits.size(),
                      " logits for ", places, " places, must be vocabulary numbers for each");
  const std::size_t vocabulary = logits.size() / places;
  // All of them, also those that would not be tried: an error that depends on which guesses stay would
  // bias the texts of whoever decodes on after it.
  if constexpr (requires(const Guess& guess) { Rule::check(guess.from, guess.token); }) {
    for (const Guess& guess : guesses) Rule::check(guess.from, guess.token);
  }
  Verdict verdict;
  std::size_t place = TokenTree::text;
  for (;;) {
    const std::size_t row = place == TokenTree::text ? 0 : place + 1;
    const Distribution& p = verdict.distributions.emplace_back(
        distribution_of(logits.subspan(row * vocabulary, vocabulary), sampling));
    Distribution left = p;
    bool tried = false;
    std::size_t stayed = TokenTree::text;
    for (std::size_t i = place == TokenTree::text ? 0 : place + 1;
         i < guesses.size() && stayed == TokenTree::text; ++i) {
      if (guesses[i].parent != place) continue;
      tried = true;
      if (Rule::accepts(left, guesses[i].from, guesses[i].token, random)) {
        stayed = i;
      } else {
        left = Rule::after_refusal(left, guesses[i].from);
      }
    }
    if (tried) ++verdict.places;
    if (stayed == TokenTree::text) {
      verdict.next = left.draw(random.uniform());
      return verdict;
    }
    verdict.path.push_back(stayed);
    place = stayed;
  }
}

}  // namespace kvpolicy
