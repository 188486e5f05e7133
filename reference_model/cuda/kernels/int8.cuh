// SPDX-License-Identifier: Apache-2.0
//
// Conversions before and after a product of 8-bit integers. Activations get a scale for each token,
// weights have one for each output, and the sums of the product are multiplied by both. The scheme
// is that of SmoothQuant (Xiao et al., arXiv:2211.10438) without its smoothing.
#pragma once

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu::llama {

struct QuantizeRowsParams {
  const std::uint16_t* x = nullptr;  ///< [rows, width], bfloat16, rows aligned to 8 bytes
  std::uint32_t* codes = nullptr;    ///< [padded rows, width / 4]: four codes a word
  float* scales = nullptr;           ///< [padded rows]
  int rows = 0;                      ///< the padding after them is filled with zeros
  int width = 0;                     ///< a multiple of 4
};

inline constexpr int quantize_rows_threads = 256;
constexpr std::size_t quantize_rows_shared_bytes() {
  return quantize_rows_threads / warp_lanes * sizeof(float);
}

KVPOLICY_DEVICE float magnitude(float x) { return x < 0.0F ? -x : x; }

/// One block for each padded row. x ~ scale * code, with codes from -127 to 127.
template <int Threads = quantize_rows_threads>
KVPOLICY_KERNEL(Threads, 1)
quantize_rows_kernel(const KVPOLICY_GRID_CONSTANT QuantizeRowsParams p) {
  const int row = block_x();
  const int words = p.width / 4;
  std::uint32_t* codes = p.codes + static_cast<long long>(row) * words;
  if (row >= p.rows) {
    for (int i = thread_index(); i < words; i += Threads) codes[i] = 0;
    if (thread_index() == 0) p.scales[row] = 0.0F;
    return;
  }
  const auto* x = reinterpret_cast<const Words2*>(p.x + static_cast<long long>(row) * p.width);
  const auto number = [](const Words2& four, int n) {
    return to_float<bfloat16>(static_cast<std::uint16_t>(four.word[n / 2] >> (16 * (n % 2))));
  };
  float largest = 0.0F;
  for (int i = thread_index(); i < words; i += Threads) {
    const Words2 four = x[i];
    for (int n = 0; n < 4; ++n) {
      const float m = magnitude(number(four, n));
      if (m > largest) largest = m;
    }
  }
  for (int mask = warp_lanes / 2; mask > 0; mask /= 2) {
    const float other = shuffle_xor(largest, mask);
    if (other > largest) largest = other;
  }
  auto* of_warps = reinterpret_cast<float*>(shared_memory());
  if (lane_index() == 0) of_warps[warp_index()] = largest;
  sync_block();
  for (int warp = 0; warp < Threads / warp_lanes; ++warp) {
    if (of_warps[warp] > largest) largest = of_warps[warp];
  }
  const float codes_of_one = largest > 0.0F ? 127.0F / largest : 0.0F;
  for (int i = thread_index(); i < words; i += Threads) {
    const Words2 four = x[i];
    std::uint32_t word = 0;
    for (int n = 0; n < 4; ++n) {
      const float code = number(four, n) * codes_of_one;
      const int nearest = static_cast<int>(code + (code < 0.0F ? -0.5F : 0.5F));
      word |= (static_cast<std::uint32_t>(nearest) & 0xffU) << (8 * n);
    }
    codes[i] = word;
  }
  if (thread_index() == 0) p.scales[row] = largest / 127.0F;
}

struct DequantizeParams {
  const int* sums = nullptr;             ///< [rows, width]
  const float* row_scales = nullptr;     ///< [rows]
  const float* column_scales = nullptr;  ///< [width]
  const float* bias = nullptr;           ///< [width] or null
  float* added = nullptr;                ///< [rows, width]: the product is added to this, or
  float* floats = nullptr;               ///< written to this, or
  std::uint16_t* out = nullptr;          ///< written to this as bfloat16
  int width = 0;
};

inline constexpr int dequantize_threads = 256;
inline constexpr int dequantize_columns_of_block = 4 * dequantize_threads;

/// Grid: rows, and blocks of columns.
template <int Threads = dequantize_threads>
KVPOLICY_KERNEL(Threads, 1)
dequantize_kernel(const KVPOLICY_GRID_CONSTANT DequantizeParams p) {
  const long long start = static_cast<long long>(block_x()) * p.width;
  const float row_scale = p.row_scales[block_x()];
  const int first = block_y() * dequantize_columns_of_block;
  const int end = first + dequantize_columns_of_block;
  const int last = end < p.width ? end : p.width;
  for (int i = first + thread_index(); i < last; i += Threads) {
    float y = static_cast<float>(p.sums[start + i]) * (row_scale * p.column_scales[i]);
    if (p.bias != nullptr) y += p.bias[i];
    if (p.added != nullptr) {
      p.added[start + i] += y;
    } else if (p.floats != nullptr) {
      p.floats[start + i] = y;
    } else {
      p.out[start + i] = from_float<bfloat16>(y);
    }
  }
}

}  // namespace kvpolicy::gpu::llama
