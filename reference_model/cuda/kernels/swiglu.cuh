// SPDX-License-Identifier: Apache-2.0
//
// SwiGLU (Shazeer, arXiv:2002.05202): silu(gate) * up, of the joint product [rows, gate | up].
#pragma once

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu::llama {

struct SwigluParams {
  const std::uint32_t* gate_up = nullptr;  ///< [rows, 2, words]: two bfloat16 a word
  std::uint32_t* out = nullptr;            ///< [rows, words]
  int words = 0;
};

inline constexpr int swiglu_threads = 256;
inline constexpr int swiglu_words_of_block = 4 * swiglu_threads;

KVPOLICY_DEVICE float gated(std::uint32_t gate, std::uint32_t up, int index) {
  const float g = to_float<bfloat16>(static_cast<std::uint16_t>(gate >> (16 * index)));
  const float u = to_float<bfloat16>(static_cast<std::uint16_t>(up >> (16 * index)));
  constexpr float log2_of_e = 1.4426950408889634F;
  return g * u / (1.0F + exp2_exact(-g * log2_of_e));
}

/// Grid: rows, and blocks of words.
template <int Threads = swiglu_threads>
KVPOLICY_KERNEL(Threads, 1)
swiglu_kernel(const KVPOLICY_GRID_CONSTANT SwigluParams p) {
  const std::uint32_t* gate = p.gate_up + 2LL * block_x() * p.words;
  std::uint32_t* out = p.out + static_cast<long long>(block_x()) * p.words;
  const int first = block_y() * swiglu_words_of_block;
  const int last = first + swiglu_words_of_block < p.words ? first + swiglu_words_of_block : p.words;
  for (int i = first + thread_index(); i < last; i += Threads) {
    const std::uint32_t g = gate[i];
    const std::uint32_t u = gate[p.words + i];
    out[i] = pack<bfloat16>(gated(g, u, 0), gated(g, u, 1));
  }
}

}  // namespace kvpolicy::gpu::llama
