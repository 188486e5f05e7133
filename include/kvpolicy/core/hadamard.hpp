// SPDX-License-Identifier: Apache-2.0
//
// The Hadamard rotation of a row. Every channel of a rotated row has a share of each channel of the row, so an outlier
// is spread over all of them and one scale serves a whole row (QuaRot, arXiv:2404.00456). The rotation is its own
// inverse and changes no dot product: a rotated query meets rotated keys, and a sum of rotated values is rotated back
// once. So rows stay rotated, and engines rotate queries and results.
#pragma once

#include <cstddef>
#include <span>

namespace kvpolicy {

/// Channels that are rotated together: the largest power of two that divides their number.
[[nodiscard]] constexpr std::size_t hadamard_block(std::size_t channels) {
  return channels & (~channels + 1);
}

/// The factor of every number of a rotated block: 1 / sqrt(block), as float rounds the root and then the quotient.
[[nodiscard]] constexpr float hadamard_unit(std::size_t block) {
  float unit = 1.0F;
  for (; block >= 4; block /= 4) unit /= 2.0F;
  return block == 2 ? unit * (1.0F / 1.41421356F) : unit;
}

/// Rotates the numbers in place, in blocks of `hadamard_block(row.size())` channels.
inline void rotate_hadamard(std::span<float> row) {
  if (row.empty()) return;
  const std::size_t block = hadamard_block(row.size());
  for (std::size_t half = 1; half < block; half *= 2) {
    for (std::size_t first = 0; first < row.size(); first += 2 * half) {
      float* low = row.data() + first;
      float* high = low + half;
      for (std::size_t i = 0; i < half; ++i) {
        const float sum = low[i] + high[i];
        high[i] = low[i] - high[i];
        low[i] = sum;
      }
    }
  }
  const float unit = hadamard_unit(block);
  for (float& number : row) number *= unit;
}

}  // namespace kvpolicy
