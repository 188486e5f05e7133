// SPDX-License-Identifier: Apache-2.0
//
// Sampling by explicit distributions. Speculative decoding needs the distributions of the model that
// proposed a token and of the model that verifies it, both shaped by the same temperature, top-k and top-p
// (nucleus sampling, Holtzman et al., arXiv:1904.09751).
//
// Speculative sampling is lossless: Leviathan et al., arXiv:2211.17192; Chen et al.,
// arXiv:2302.01318. A token x drawn from q is accepted with probability min(1, p(x) / q(x));
// otherwise the next token is drawn from the normalised positive part of p - q. Greedy decoding is
// the limit: if p and q each have one token, it is accepted if they agree.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy {

/// Options for drawing a token from logits; the default takes the likeliest token.
struct SamplingOptions {
  float temperature = 0.0F;  ///< 0 takes the likeliest token; 1 samples the model's distribution
  std::size_t top_k = 0;     ///< only the k likeliest tokens; 0: all
  float top_p = 1.0F;        ///< only the likeliest tokens that together reach this probability

  /// @throws ConfigError
  void validate() const {
    // Written so that NaN fails.
    require(temperature >= 0.0F && std::isfinite(temperature), "SamplingOptions: temperature is ",
            temperature, ", must be 0 or more");
    require(top_p > 0.0F && top_p <= 1.0F, "SamplingOptions: top_p is ", top_p,
            ", must be above 0 and at most 1");
  }
};

/// Uniform numbers in [0, 1) with all of a double's 53 bits. The same seed gives the same numbers
/// with every standard library, where std::uniform_real_distribution would differ.
class Random {
 public:
  explicit Random(std::uint64_t seed = 0) : bits_{seed} {}
  [[nodiscard]] double uniform() { return static_cast<double>(bits_() >> 11) * 0x1p-53; }

 private:
  std::mt19937_64 bits_;
};

/// Probabilities of the next token; tokens that are not listed have probability 0.
class Distribution {
 public:
  /// A token and its probability.
  struct Outcome {
    int token;
    double probability;
    friend bool operator==(const Outcome&, const Outcome&) = default;
  };

  /// The distribution without tokens.
  Distribution() = default;
  /// Takes outcomes in ascending order of tokens, and normalises their weights.
  /// @throws ShapeError for tokens in another order, a weight that is NaN or below 0, and weights
  /// that sum to 0 or beyond what a double holds
  explicit Distribution(std::vector<Outcome> outcomes) : outcomes_{std::move(outcomes)} {
    double total = 0.0;
    for (std::size_t i = 0; i < outcomes_.size(); ++i) {
      const auto& [token, weight] = outcomes_[i];
      require<ShapeError>(i == 0 || outcomes_[i - 1].token < token, "Distribution: token ", token,
                          " comes after token ", outcomes_[i == 0 ? 0 : i - 1].token,
                          ", must come in ascending order");
      // Written so that NaN fails.
      require<ShapeError>(weight >= 0.0, "Distribution: the weight of token ", token, " is ", weight,
                          ", must be 0 or more");
      total += weight;
    }
    require<ShapeError>(outcomes_.empty() || (total > 0.0 && std::isfinite(total)),
                        "Distribution: the weights of ", outcomes_.size(), " tokens sum to ", total,
                        ", must be above 0 and finite");
    for (Outcome& outcome : outcomes_) outcome.probability /= total;
  }
  [[nodiscard]] static Distribution certain(int token) { return Distribution{{{token, 1.0}}}; }

  [[nodiscard]] std::span<const Outcome> outcomes() const { return outcomes_; }
  [[nodiscard]] bool empty() const { return outcomes_.empty(); }

  [[nodiscard]] double operator()(int token) const {
    const auto at = std::ranges::lower_bound(outcomes_, token, {}, &Outcome::token);
    return at != outcomes_.end() && at->token == token ? at->probability : 0.0;
  }

  /// The token at which the cumulative probability exceeds `uniform`, a number in [0, 1); never a token of
  /// probability 0.
  /// @throws ShapeError if the distribution has no token
  [[nodiscard]] int draw(double uniform) const {
    require<ShapeError>(!empty(), "Distribution: drawn from one without tokens, expected at least 1");
    double left = uniform;
    int last = outcomes_.front().token;
    for (const Outcome& outcome : outcomes_) {
      if (outcome.probability <= 0.0) continue;
      last = outcome.token;  // rounding errors go to the last token
      left -= outcome.probability;
      if (left < 0.0) break;
    }
    return last;
  }

  /// The distribution given that the token is not `token`; empty if there is no other token.
  [[nodiscard]] Distribution without(int token) const {
    std::vector<Outcome> rest;
    rest.reserve(outcomes_.size());
    for (const Outcome& outcome : outcomes_) {
      if (outcome.token != token && outcome.probability > 0.0) rest.push_back(outcome);
    }
    return rest.empty() ? Distribution{} : Distribution{std::move(rest)};
  }

  friend bool operator==(const Distribution&, const Distribution&) = default;

 private:
  std::vector<Outcome> outcomes_;  // ascending tokens, probabilities that sum to 1
};

/// The normalised positive part of p - q: the distribution of the next token after a token drawn
/// from q was refused. If nothing is left, because p equals q and a refusal cannot happen, it is p.
[[nodiscard]] inline Distribution positive_part(const Distribution& p, const Distribution& q) {
  std::vector<Distribution::Outcome> rest;
  auto taken = q.outcomes().begin();
  for (const Distribution::Outcome& outcome : p.outcomes()) {
    while (taken != q.outcomes().end() && taken->token < outcome.token) ++taken;
    const bool both = taken != q.outcomes().end() && taken->token == outcome.token;
    const double left = outcome.probability - (both ? taken->probability : 0.0);
    if (left > 0.0) rest.push_back({outcome.token, left});
  }
  return rest.empty() ? p : Distribution{std::move(rest)};
}

/// The distribution of the next token by `logits` [vocabulary]. Ties go to the lower token;
/// -infinity bans a token.
/// @throws ShapeError if there are no logits, one is NaN or +infinity, or all tokens are banned;
/// ConfigError for options that do not work
[[nodiscard]] inline Distribution distribution_of(std::span<const float> logits,
                                                  const SamplingOptions& options) {
  options.validate();
  constexpr float infinity = std::numeric_limits<float>::infinity();
  require<ShapeError>(!logits.empty(), "sampling: no logits, expected one per token");
  for (std::size_t token = 0; token < logits.size(); ++token) {
    require<ShapeError>(logits[token] < infinity, "sampling: the logit of token ", token, " is ",
                        logits[token], ", expected a finite number");
  }
  const auto best = std::ranges::max_element(logits);  // the first of equals
  require<ShapeError>(*best > -infinity, "sampling: all ", logits.size(),
                      " tokens are banned, expected a finite logit");
  if (options.temperature == 0.0F || options.top_k == 1) {
    return Distribution::certain(static_cast<int>(best - logits.begin()));
  }
  // Weights relative to the likeliest token, so that no exponential overflows.
  const auto weight = [&](std::size_t token) {
    const double distance = static_cast<double>(logits[token]) - static_cast<double>(*best);
    return std::exp(distance / static_cast<double>(options.temperature));
  };
  std::vector<Distribution::Outcome> kept;
  kept.reserve(logits.size());
  for (std::size_t token = 0; token < logits.size(); ++token) {
    if (const double share = weight(token); share > 0.0) {
      kept.push_back({static_cast<int>(token), share});
    }
  }
  const auto likelier = [&](const Distribution::Outcome& a, const Distribution::Outcome& b) {
    const float x = logits[static_cast<std::size_t>(a.token)];
    const float y = logits[static_cast<std::size_t>(b.token)];
    return x != y ? x > y : a.token < b.token;
  };
  if (options.top_k > 0 && options.top_k < kept.size()) {
    std::ranges::nth_element(kept, kept.begin() + static_cast<std::ptrdiff_t>(options.top_k), likelier);
    kept.resize(options.top_k);
  }
  if (options.top_p < 1.0F) {
    std::ranges::sort(kept, likelier);
    double total = 0.0;
    for (const auto& outcome : kept) total += outcome.probability;
    const double wanted = static_cast<double>(options.top_p) * total;
    double reached = 0.0;
    std::size_t count = 0;
    while (count < kept.size() && (count == 0 || reached < wanted)) {
      reached += kept[count++].probability;
    }
    kept.resize(count);
  }
  std::ranges::sort(kept, {}, &Distribution::Outcome::token);
  return Distribution{std::move(kept)};
}

/// The rule by which draft tokens are verified. The decoders take it as a template parameter: another rule
/// may trade exactness for speed (typical acceptance, say), or be wrong on purpose for tests.
struct SpeculativeSampling {
  /// Refuses a draft token that cannot have been drawn from q, because the rule would divide by 0 and
  /// always accept it. `verify` checks all draft tokens before it verifies any. Optional in a rule.
  /// @throws ShapeError if q(guess) is 0
  static void check(const Distribution& q, int guess) {
    require<ShapeError>(q(guess) > 0.0, "SpeculativeSampling: token ", guess,
                        " is a draft token, but has probability 0 in what it is said to be drawn from "
                        "(DraftToken::from), must have more");
  }
  /// Whether the token `guess`, drawn from q, is accepted as a token of p. p(guess) and q(guess) are
  /// probabilities.
  /// @throws ShapeError as `check`
  [[nodiscard]] static bool accepts(const Distribution& p, const Distribution& q, int guess, Random& random) {
    check(q, guess);
    return random.uniform() * q(guess) < p(guess);
  }
  /// The distribution, after a refusal, by which the next sibling is verified or the token is drawn.
  [[nodiscard]] static Distribution after_refusal(const Distribution& p, const Distribution& q) {
    return positive_part(p, q);
  }
};

}  // namespace kvpolicy
