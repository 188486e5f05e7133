// SPDX-License-Identifier: Apache-2.0
//
// What tests of weights have in common: the formats, and numbers to store in them.
#pragma once

#include <cstddef>
#include <random>
#include <vector>

#include <reference_model/weight_matrix.hpp>

namespace kvpolicy::reference {

inline constexpr WeightFormat weight_formats[] = {WeightFormat::float32, WeightFormat::float16,
                                                  WeightFormat::bfloat16, WeightFormat::int8};

inline std::vector<float> normal_floats(std::size_t count, unsigned seed) {
  std::mt19937 random{seed};
  std::normal_distribution<float> normal;
  std::vector<float> numbers(count);
  for (float& x : numbers) x = normal(random);
  return numbers;
}

}  // namespace kvpolicy::reference
