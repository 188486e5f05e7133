// SPDX-License-Identifier: Apache-2.0
//
// What the Llama family does to rows besides matrix products and attention: RMSNorm (Zhang and
// Sennrich, arXiv:1910.07467), SwiGLU (Shazeer, arXiv:2002.05202) and rotary positions. The forward
// pass (llama.cpp) and the one that can be gone back (gradient/) share them. All rows lie one behind
// the other; nothing is checked, the model's shapes were.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace kvpolicy::reference {

/// Every row [weight.size()] to unit mean square, times a learned weight.
void normalise(const float* x, std::size_t rows, const std::vector<float>& weight, float eps,
               float* out);

/// gate = silu(gate) * up.
void swiglu(float* gate, const float* up, std::size_t count);

/// cos and sin of every token's angles, the same for all heads and layers.
class Rotation {
 public:
  /// `frequencies` [head_dim / 2]: radians per position.
  Rotation(std::span<const std::size_t> positions, std::span<const float> frequencies);

  /// Turns the rows [first, first + count) of x [tokens, heads, head_dim]: channel i together with
  /// channel i + head_dim / 2.
  void apply(float* x, std::size_t heads, std::size_t first, std::size_t count) const {
    turn(x, heads, first, count, 1.0F);
  }

  /// Turns them back, which is also the way of a gradient: the inverse of a turn is its transpose.
  void undo(float* x, std::size_t heads, std::size_t first, std::size_t count) const {
    turn(x, heads, first, count, -1.0F);
  }

 private:
  void turn(float* x, std::size_t heads, std::size_t first, std::size_t count,
            float direction) const;

  std::size_t pairs_;
  std::vector<float> cosine_, sine_;  // [tokens, pairs]
};

}  // namespace kvpolicy::reference
