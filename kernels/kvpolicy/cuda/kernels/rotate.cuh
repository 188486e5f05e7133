// SPDX-License-Identifier: Apache-2.0
//
// Rotates queries to another position, for sinks that are read as if they came right before the
// window.
#pragma once

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

/// Rotates eight channels of a query, `low`, and their partners half a row later, `high`, by `steps`
/// positions. `inverse_frequencies` are those of the eight channels.
template <Element E>
KVPOLICY_DEVICE void rotate_channels(Words4& low, Words4& high, int steps, const float* inverse_frequencies) {
  KVPOLICY_UNROLL
  for (int w = 0; w < 4; ++w) {
    float a[2], b[2];
    KVPOLICY_UNROLL
    for (int j = 0; j < 2; ++j) {
      const float x = to_float<E>(static_cast<std::uint16_t>(low.word[w] >> 16 * j));
      const float y = to_float<E>(static_cast<std::uint16_t>(high.word[w] >> 16 * j));
      float sine, cosine;
      sine_cosine(static_cast<double>(steps) * static_cast<double>(inverse_frequencies[2 * w + j]), sine,
                  cosine);
      a[j] = x * cosine - y * sine;
      b[j] = y * cosine + x * sine;
    }
    low.word[w] = pack<E>(a[0], a[1]);
    high.word[w] = pack<E>(b[0], b[1]);
  }
}

}  // namespace kvpolicy::gpu
