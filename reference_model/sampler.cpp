// SPDX-License-Identifier: Apache-2.0
#include <reference_model/sampler.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy::reference {

int likeliest(std::span<const float> logits) {
  require<ShapeError>(!logits.empty(), "sampler: no logits, expected one per token");
  for (std::size_t token = 0; token < logits.size(); ++token) {
    require<ShapeError>(logits[token] < std::numeric_limits<float>::infinity(),
                        "sampler: the logit of token ", token, " is ", logits[token],
                        ", expected a finite number");
  }
  const auto best = std::ranges::max_element(logits);  // the first of equal ones
  require<ShapeError>(std::isfinite(*best), "sampler: all ", logits.size(),
                      " tokens are banned, expected a finite logit");
  return static_cast<int>(best - logits.begin());
}

Sampler::Sampler(const SamplerConfig& config) : config_{config}, bits_{config.seed} {
  require(config.temperature >= 0.0F && std::isfinite(config.temperature), "SamplerConfig: temperature is ",
          config.temperature, ", must be 0 or more");
  require(config.top_p > 0.0F && config.top_p <= 1.0F, "SamplerConfig: top_p is ", config.top_p,
          ", must be above 0 and at most 1");
}

int Sampler::next(std::span<const float> logits) {
  const int best = likeliest(logits);
  if (config_.temperature == 0.0F || config_.top_k == 1) return best;

  candidates_.clear();
  for (std::size_t token = 0; token < logits.size(); ++token) {
    candidates_.push_back({logits[token], static_cast<int>(token)});
  }
  const auto likelier = [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
  };
  std::ranges::sort(candidates_, likelier);
  if (config_.top_k > 0 && config_.top_k < candidates_.size()) candidates_.resize(config_.top_k);

  // Weights relative to the likeliest token, so that no exponential overflows.
  const auto weight = [&](const Candidate& candidate) {
    const double distance =
        static_cast<double>(candidate.logit) - static_cast<double>(candidates_.front().logit);
    return std::exp(distance / static_cast<double>(config_.temperature));
  };
  double total = 0;
  for (const Candidate& candidate : candidates_) total += weight(candidate);
  const double wanted = static_cast<double>(config_.top_p) * total;
  double kept = 0;  // the sum of weights of the shortest prefix that reaches top_p
  std::size_t count = 0;
  while (count < candidates_.size() && (count == 0 || kept < wanted)) {
    kept += weight(candidates_[count++]);
  }
  double left = uniform() * kept;
  for (std::size_t i = 0; i + 1 < count; ++i) {
    left -= weight(candidates_[i]);
    if (left < 0) return candidates_[i].token;
  }
  // Rounding may leave a remainder for the last candidate, so that one must not be a banned token.
  while (count > 1 && weight(candidates_[count - 1]) == 0.0) --count;
  return candidates_[count - 1].token;
}

double Sampler::uniform() { return static_cast<double>(bits_() >> 11) * 0x1p-53; }

}  // namespace kvpolicy::reference
