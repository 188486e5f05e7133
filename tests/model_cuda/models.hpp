// SPDX-License-Identifier: Apache-2.0
//
// Models for tests that run on a device and on the CPU. Their weights are bfloat16 numbers, so both have
// exactly the same weights and logits only differ by the rounding of activations. Also the accepted
// differences.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/dtype.hpp>
#include <reference_model/llama.hpp>

#include "model/golden.hpp"

namespace kvpolicy::reference {

[[nodiscard]] inline Llama rounded_to_bfloat16(const Llama& model) {
  LlamaWeights weights = model.weights();
  const auto round = [](std::vector<float>& numbers) {
    for (float& x : numbers) x = static_cast<float>(bfloat16{x});
  };
  const auto round_linear = [&](Linear& linear) {
    linear.weight = linear.weight.as(WeightFormat::bfloat16).as(WeightFormat::float32);
    round(linear.bias);
  };
  round_linear(weights.embedding);
  round_linear(weights.head);
  for (LlamaLayer& layer : weights.layers) {
    for (Linear* part : {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down}) {
      round_linear(*part);
    }
  }
  return Llama{model.config(), std::move(weights)};
}

/// The first tokens of a golden's text.
[[nodiscard]] inline std::vector<int> golden_tokens(const std::string& name, std::size_t count) {
  std::vector<int> tokens = load_golden(name).tokens;
  tokens.resize(count);
  return tokens;
}

/// The spread of logits about their mean, over all tokens.
[[nodiscard]] inline float spread(std::span<const float> logits) {
  double mean = 0;
  double squares = 0;
  for (const float x : logits) {
    mean += static_cast<double>(x) / static_cast<double>(logits.size());
    squares += static_cast<double>(x) * static_cast<double>(x) / static_cast<double>(logits.size());
  }
  return static_cast<float>(std::sqrt(squares - mean * mean));
}

/// The errors of logits, relative to the spread of logits.
struct Errors {
  float largest;
  float mean;  // root of the mean square
};
[[nodiscard]] inline Errors errors(std::span<const float> got, std::span<const float> want) {
  const float largest = largest_error(got, want);
  double squares = 0;
  for (std::size_t i = 0; i < std::min(got.size(), want.size()); ++i) {
    const double error = static_cast<double>(got[i]) - static_cast<double>(want[i]);
    squares += error * error / static_cast<double>(want.size());
  }
  return {largest / spread(want), static_cast<float>(std::sqrt(squares)) / spread(want)};
}

// Measured over all goldens: at most 0.065 and 0.0102. Rounding to bfloat16 changes an activation by about
// 2^-9 of itself, and happens eight times in each of two layers.
inline constexpr Errors of_bfloat16{.largest = 0.1F, .mean = 0.015F};
// Measured: 0.18 and 0.033.
inline constexpr Errors of_int8{.largest = 0.3F, .mean = 0.05F};

inline void check_errors(const Errors& met, const Errors& allowed) {
  CHECK(met.largest <= allowed.largest);
  CHECK(met.mean <= allowed.mean);
}

}  // namespace kvpolicy::reference
