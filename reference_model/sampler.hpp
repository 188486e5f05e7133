// SPDX-License-Identifier: Apache-2.0
//
// Chooses the next token from logits: the likeliest, or at random by temperature, top-k and top-p
// (nucleus sampling, Holtzman et al., arXiv:1904.09751). The same seed gives the same tokens with
// every standard library: the C++ standard fixes the generator's bits, and the distribution is
// implemented here because std::discrete_distribution differs from library to library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

namespace kvpolicy::reference {

struct SamplerConfig {
  float temperature = 0.0F;  ///< 0 takes the likeliest token; 1 samples the model's distribution.
  std::size_t top_k = 0;     ///< Only the k likeliest; 0 for all.
  float top_p = 1.0F;        ///< Only the likeliest that together reach this share.
  std::uint64_t seed = 0;
};

class Sampler {
 public:
  /// @throws ConfigError for a temperature below 0, a top_p outside (0, 1], or NaN.
  explicit Sampler(const SamplerConfig& config = {});

  /// Returns a token for logits [vocabulary]. Ties go to the lower token; -infinity bans a token.
  /// @throws ShapeError if there are no logits, one is NaN or +infinity, or all are banned
  [[nodiscard]] int next(std::span<const float> logits);

 private:
  struct Candidate {
    float logit;
    int token;
  };

  /// A number in [0, 1) with all of a double's 53 bits.
  [[nodiscard]] double uniform();

  SamplerConfig config_;
  std::mt19937_64 bits_;
  std::vector<Candidate> candidates_;
};

/// The likeliest token; ties go to the lower one. @throws as Sampler::next
[[nodiscard]] int likeliest(std::span<const float> logits);

}  // namespace kvpolicy::reference
