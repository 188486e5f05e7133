// SPDX-License-Identifier: Apache-2.0
//
// Compares what two models, or one model under two caches, predict for the next token: surprise and
// the divergence of the two distributions. Logits are floats, sums are doubles.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy::tools {

/// Logarithm of the sum of exponentials. @throws ShapeError for no logits.
[[nodiscard]] inline double log_sum_exp(std::span<const float> logits) {
  require<ShapeError>(!logits.empty(), "log_sum_exp: there are no logits");
  const auto most = static_cast<double>(*std::ranges::max_element(logits));
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - most);
  return most + std::log(sum);
}

/// Minus the logarithm of the probability of `token`, in nats.
/// @throws ShapeError if there is no such token.
[[nodiscard]] inline double surprise(std::span<const float> logits, std::size_t token) {
  require<ShapeError>(token < logits.size(), "surprise: token ", token, " of ", logits.size());
  return log_sum_exp(logits) - static_cast<double>(logits[token]);
}

/// The Kullback-Leibler divergence KL(truth || guess) in nats: never negative, 0 for equal
/// distributions. @throws ShapeError if the numbers of logits differ.
[[nodiscard]] inline double divergence(std::span<const float> truth, std::span<const float> guess) {
  require<ShapeError>(truth.size() == guess.size(), "divergence: ", truth.size(), " logits and ",
                      guess.size());
  const double of_truth = log_sum_exp(truth);
  const double of_guess = log_sum_exp(guess);
  double sum = 0;
  for (std::size_t i = 0; i < truth.size(); ++i) {
    const double log_p = static_cast<double>(truth[i]) - of_truth;
    const double log_q = static_cast<double>(guess[i]) - of_guess;
    sum += std::exp(log_p) * (log_p - log_q);
  }
  return std::max(sum, 0.0);  // a negative sum is rounding
}

}  // namespace kvpolicy::tools
