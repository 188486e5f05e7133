// SPDX-License-Identifier: Apache-2.0
#include <reference_model/identify/headkv_scores.hpp>

#include <algorithm>
#include <numeric>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy::reference {

void NeedleSample::check() const {
  require<ShapeError>(!prompt.empty() && !answer.empty(), "NeedleSample: the prompt has ", prompt.size(),
                      " tokens and the answer ", answer.size(), ", both must have at least 1");
  require<ShapeError>(
      needle_tokens > 0 && needle_tokens <= prompt.size() && needle <= prompt.size() - needle_tokens,
      "NeedleSample: ", needle_tokens, " tokens from ", needle, " on are no part of a prompt of ",
      prompt.size());
}

NeedleScorer::NeedleScorer(const NeedleSample& sample, NeedleRule rule, std::size_t layers,
                           std::size_t q_heads)
    : sample_{&sample}, rule_{rule}, scores_{layers, q_heads}, most_attended_{layers, q_heads} {
  sample.check();
}

void NeedleScorer::attended(std::size_t layer, std::size_t q_head, std::span<const float> attention) {
  if (rule_ == NeedleRule::retrieval) {
    most_attended_(layer, q_head) = static_cast<std::size_t>(std::ranges::max_element(attention) -
                                                             attention.begin());  // the first of equal ones
    return;
  }
  const std::size_t most = std::min(sample_->needle_tokens, attention.size());
  ranked_.resize(attention.size());
  std::iota(ranked_.begin(), ranked_.end(), std::size_t{0});
  std::ranges::partial_sort(ranked_, ranked_.begin() + static_cast<std::ptrdiff_t>(most),
                            [&](std::size_t a, std::size_t b) {
                              return attention[a] != attention[b] ? attention[a] > attention[b] : a < b;
                            });
  double mass = 0.0;
  for (std::size_t i = 0; i < most; ++i) {
    if (in_needle(ranked_[i])) mass += static_cast<double>(attention[ranked_[i]]);
  }
  scores_(layer, q_head) += mass / static_cast<double>(sample_->needle_tokens);
}

void NeedleScorer::wrote(int token) {
  if (rule_ != NeedleRule::retrieval) return;
  for (std::size_t layer = 0; layer < scores_.layers(); ++layer) {
    for (std::size_t head = 0; head < scores_.heads(); ++head) {
      const std::size_t row = most_attended_(layer, head);
      if (in_needle(row) && sample_->prompt[row] == token) {
        scores_(layer, head) += 1.0 / static_cast<double>(sample_->needle_tokens);
      }
    }
  }
}

}  // namespace kvpolicy::reference
