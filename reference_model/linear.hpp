// SPDX-License-Identifier: Apache-2.0
//
// A linear layer, y = x Wᵀ + b, of float activations and weights in any format. Weights are never rounded
// further and activations stay float, so the format of the weights is the only loss. Where bfloat16 is
// multiplied by AMX, activations are split into two bfloat16 terms, which keeps 16 bits of each number, unless
// `round_activations` asks for one.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <utility>
#include <vector>

#include <reference_model/weight_matrix.hpp>

namespace kvpolicy::reference {

struct Linear {
  WeightMatrix weight;      // [outputs, inputs], as checkpoints store it
  std::vector<float> bias;  // [outputs], or empty
  /// Where AMX multiplies bfloat16, activations are rounded to it, as others run such checkpoints: half the products.
  bool round_activations = false;

  Linear() = default;
  explicit Linear(WeightMatrix weight_, std::vector<float> bias_ = {})
      : weight{std::move(weight_)}, bias{std::move(bias_)} {}
  /// `numbers` is [outputs, inputs]. @throws ShapeError
  Linear(std::size_t inputs, std::size_t outputs, std::vector<float> numbers, std::vector<float> bias_)
      : weight{outputs, inputs, std::move(numbers)}, bias{std::move(bias_)} {}

  [[nodiscard]] std::size_t inputs() const noexcept { return weight.columns(); }
  [[nodiscard]] std::size_t outputs() const noexcept { return weight.rows(); }

  /// Computes y [rows, outputs] = x [rows, inputs] Wᵀ + b. x and y must not overlap.
  void apply(const float* x, std::size_t rows, float* y) const;

  /// Computes y += x Wᵀ + b, for a residual connection without a buffer of its own.
  void add_to(const float* x, std::size_t rows, float* y) const;

  /// The backward pass: dx [rows, inputs] = dy [rows, outputs] W, where dx and dy are the
  /// derivatives of a loss with respect to x and y. They must not overlap.
  void back(const float* dy, std::size_t rows, float* dx) const;

  /// Computes dx += dy W, for an x that several layers read.
  void add_back(const float* dy, std::size_t rows, float* dx) const;
};

/// A layer, and where its result is to be written.
struct LinearResult {
  const Linear* layer;
  float* y;  ///< [rows, outputs]
};

/// Applies several layers of equal inputs to one x [rows, inputs]; faster than one `apply` after the other.
void apply_all(std::initializer_list<LinearResult> layers, const float* x, std::size_t rows);

}  // namespace kvpolicy::reference
