// SPDX-License-Identifier: Apache-2.0
//
// The operations of the Llama family on rows besides matrix products and attention: RMSNorm (Zhang
// and Sennrich, arXiv:1910.07467), SwiGLU (Shazeer, arXiv:2002.05202) and rotary positions. The
// forward pass (llama.cpp) and the one with gradients (gradient/) share them. Rows are contiguous.
// Sizes are not checked here, because the model's shapes were checked at loading.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace kvpolicy::reference {

/// Scales every row [weight.size()] to unit mean square and multiplies it by a learned weight; `out` may
/// be x.
void normalise(const float* x, std::size_t rows, const std::vector<float>& weight, float eps, float* out);

/// gate = silu(gate) * up.
void swiglu(float* gate, const float* up, std::size_t count);

/// Cosines and sines of every token's angles, which are the same for all heads and layers.
class Rotation {
 public:
  /// `frequencies` [head_dim / 2]: radians per position.
  Rotation(std::span<const std::size_t> positions, std::span<const float> frequencies);

  /// Rotates the rows [first, first + count) of x [tokens, heads, head_dim]. Channel i is paired
  /// with channel i + head_dim / 2.
  void apply(float* x, std::size_t heads, std::size_t first, std::size_t count) const {
    rotate(x, heads, first, count, 1.0F);
  }

  /// Rotates back. Gradients go the same way, because the inverse of a rotation is its transpose.
  void undo(float* x, std::size_t heads, std::size_t first, std::size_t count) const {
    rotate(x, heads, first, count, -1.0F);
  }

 private:
  void rotate(float* x, std::size_t heads, std::size_t first, std::size_t count, float direction) const;

  std::size_t pairs_;
  std::vector<float> cosine_, sine_;  // [tokens, pairs]
};

}  // namespace kvpolicy::reference
