// SPDX-License-Identifier: Apache-2.0
//
// Gradients by central differences in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <random>
#include <span>
#include <vector>

namespace kvpolicy::reference {

using Doubles = std::vector<double>;

inline Doubles random_numbers(std::size_t count, unsigned seed, double scale = 1.0) {
  std::mt19937 bits{seed};
  std::normal_distribution<double> draw{0.0, scale};
  Doubles x(count);
  // Rounds to float, so that both sides begin at the same numbers.
  for (double& one : x) one = static_cast<double>(static_cast<float>(draw(bits)));
  return x;
}

inline std::vector<float> to_float(const Doubles& x) { return {x.begin(), x.end()}; }

inline double dot(const Doubles& a, const Doubles& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// Returns d f / d x[i]; x is unchanged afterwards.
inline double difference(const std::function<double()>& f, double& x) {
  constexpr double step = 1e-5;
  const double at = x;
  x = at + step;
  const double above = f();
  x = at - step;
  const double below = f();
  x = at;
  return (above - below) / (2.0 * step);
}

/// The largest error of `gradient` at the indices i, i + stride, ..., as a share of the largest difference
/// there (at least 0.1); infinite for NaN or wrong sizes.
inline double gradient_error(const std::function<double()>& f, Doubles& x, std::span<const float> gradient,
                             std::size_t stride = 1) {
  if (gradient.size() != x.size()) return INFINITY;
  double error = 0.0;
  double largest = 0.1;  // for gradients that are nearly zero, such as those of a query that sees one row
  for (std::size_t i = 0; i < x.size(); i += stride) {
    const double expected = difference(f, x[i]);
    const double off = std::abs(expected - static_cast<double>(gradient[i]));
    if (!(off <= error)) error = std::isnan(off) ? INFINITY : off;
    largest = std::max(largest, std::abs(expected));
  }
  return error / largest;
}

}  // namespace kvpolicy::reference
