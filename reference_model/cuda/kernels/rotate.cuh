// SPDX-License-Identifier: Apache-2.0
//
// Rotary positions: rotates the queries and keys of a joint [rows, q | k | v] in place, by the
// angles of embed.cuh. Channel i is paired with channel i + head_dim / 2.
#pragma once

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu::llama {

struct RotateParams {
  std::uint16_t* rows = nullptr;   ///< [rows, row_width], bfloat16
  const float* cosines = nullptr;  ///< [rows, pairs]
  const float* sines = nullptr;
  int row_width = 0;
  int heads = 0;  ///< heads that are rotated: the first ones of a row
  int pairs = 0;  ///< head_dim / 2, even
};

inline constexpr int rotate_threads = 256;

/// One block for each row; a thread rotates two neighbouring pairs at a time.
template <int Threads = rotate_threads>
KVPOLICY_KERNEL(Threads, 1)
rotate_kernel(const KVPOLICY_GRID_CONSTANT RotateParams p) {
  const long long row = block_x();
  const int words = p.pairs / 2;
  const float* cosines = p.cosines + row * p.pairs;
  const float* sines = p.sines + row * p.pairs;
  for (int i = thread_index(); i < p.heads * words; i += thread_count()) {
    const int word = i % words;
    auto* low = reinterpret_cast<std::uint32_t*>(p.rows + row * p.row_width) + i / words * 2 * words + word;
    std::uint32_t* high = low + words;
    float a[2];
    float b[2];
    for (int n = 0; n < 2; ++n) {
      const float x = to_float<bfloat16>(static_cast<std::uint16_t>(*low >> (16 * n)));
      const float y = to_float<bfloat16>(static_cast<std::uint16_t>(*high >> (16 * n)));
      const float cosine = cosines[2 * word + n];
      const float sine = sines[2 * word + n];
      a[n] = x * cosine - y * sine;
      b[n] = y * cosine + x * sine;
    }
    *low = pack<bfloat16>(a[0], a[1]);
    *high = pack<bfloat16>(b[0], b[1]);
  }
}

}  // namespace kvpolicy::gpu::llama
