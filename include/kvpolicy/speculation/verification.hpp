// SPDX-License-Identifier: Apache-2.0
//
// Verifies draft tokens by a model's logits. The model has read the text's last token and all draft tokens
// in one pass. At each position the draft tokens for it are tried in order. The first one that is accepted
// leads to the next position. If none is accepted, the model draws a token itself, and verification ends.
//
// If there are several draft tokens for one position, each is verified against what the earlier refusals
// left of p: SpecInfer, arXiv:2305.09781, and for tokens drawn without replacement Sequoia,
// arXiv:2402.12374. This is lossless for tokens drawn one after another from any distributions, as long as
// each reports its distribution (`DraftToken::from`) and none depends on p.
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/speculation/draft.hpp>
#include <kvpolicy/speculation/sampling.hpp>

namespace kvpolicy {

/// The result of a verification.
struct Verification {
  std::vector<std::size_t> path;  ///< indices of the accepted draft tokens, in the order of the text
  int next = 0;                   ///< the model's own token after them
  /// The model's distribution for each token of the path and for `next`: [path + 1]. The token at a
  /// position has exactly this distribution, whether a draft token was accepted or the token was drawn.
  std::vector<Distribution> distributions;
  std::size_t positions = 0;  ///< text positions at which draft tokens were tried
};

/// Decides which draft tokens are accepted, and draws the token after them. `logits` are [1 + draft tokens,
/// vocabulary]: those after the text, then those after each draft token.
/// @throws ShapeError for logits of another size, a NaN among those that are used, or a draft token that
/// the rule refuses
template <class Rule = SpeculativeSampling>
[[nodiscard]] Verification verify(std::span<const DraftToken> guesses, std::span<const float> logits,
                                  const SamplingOptions& sampling, Random& random) {
  const std::size_t rows = guesses.size() + 1;
  require<ShapeError>(!logits.empty() && logits.size() % rows == 0, "verify: ", logits.size(), " logits for ",
                      rows, " rows, must be vocabulary numbers for each");
  const std::size_t vocabulary = logits.size() / rows;
  // Checks all draft tokens, including those that would not be tried: an error that depended on which are
  // accepted would bias the texts of a caller that continues after it.
  if constexpr (requires(const DraftToken& guess) { Rule::check(guess.from, guess.token); }) {
    for (const DraftToken& guess : guesses) Rule::check(guess.from, guess.token);
  }
  Verification verification;
  std::size_t node = TokenTree::text;
  for (;;) {
    const std::size_t row = node == TokenTree::text ? 0 : node + 1;
    const Distribution& p = verification.distributions.emplace_back(
        distribution_of(logits.subspan(row * vocabulary, vocabulary), sampling));
    Distribution left = p;
    bool tried = false;
    std::size_t stayed = TokenTree::text;
    for (std::size_t i = node == TokenTree::text ? 0 : node + 1;
         i < guesses.size() && stayed == TokenTree::text; ++i) {
      if (guesses[i].parent != node) continue;
      tried = true;
      if (Rule::accepts(left, guesses[i].from, guesses[i].token, random)) {
        stayed = i;
      } else {
        left = Rule::after_refusal(left, guesses[i].from);
      }
    }
    if (tried) ++verification.positions;
    if (stayed == TokenTree::text) {
      verification.next = left.draw(random.uniform());
      return verification;
    }
    verification.path.push_back(stayed);
    node = stayed;
  }
}

}  // namespace kvpolicy
