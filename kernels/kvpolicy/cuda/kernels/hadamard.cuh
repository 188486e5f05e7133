// SPDX-License-Identifier: Apache-2.0
//
// The Hadamard rotation of rows whose channels are spread over lanes. The additions are those of
// core/hadamard.hpp in the same order, so both give the same bits.
#pragma once

#include <kvpolicy/core/hadamard.hpp>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

/// Replaces numbers of this lane whose indices differ by `Apart`, a power of two, by their sum and difference.
template <int Apart, int Count>
KVPOLICY_DEVICE void add_apart(float (&x)[Count]) {
  KVPOLICY_UNROLL
  for (int i = 0; i < Count; ++i) {
    if ((i & Apart) != 0) continue;
    const float sum = x[i] + x[i + Apart];
    x[i + Apart] = x[i] - x[i + Apart];
    x[i] = sum;
  }
}
/// The same with the numbers of the lane whose index differs by `mask`. Called by all lanes.
KVPOLICY_DEVICE float add_across(float x, int mask) {
  const float other = shuffle_xor(x, mask);
  return (lane_index() & mask) == 0 ? x + other : other - x;
}
template <int Count>
KVPOLICY_DEVICE void add_across(float (&x)[Count], int mask) {
  KVPOLICY_UNROLL
  for (int i = 0; i < Count; ++i) x[i] = add_across(x[i], mask);
}

template <int HeadDim>
inline constexpr float rotation_unit = hadamard_unit(HeadDim);

template <int HeadDim, int Count>
KVPOLICY_DEVICE void scale_rotated(float (&x)[Count]) {
  static_assert((HeadDim & (HeadDim - 1)) == 0);  // one block, as in every head_dim with quantised rows
  KVPOLICY_UNROLL
  for (int i = 0; i < Count; ++i) x[i] = rounded_product(x[i], rotation_unit<HeadDim>);
}

/// Rotates rows of which each lane has 8 neighbouring channels; neighbouring lanes have a row, lane 0 the
/// first channels of one. Called by all lanes.
template <int HeadDim>
KVPOLICY_DEVICE void rotate_vectors(float (&x)[8]) {
  add_apart<1>(x);
  add_apart<2>(x);
  add_apart<4>(x);
  KVPOLICY_UNROLL
  for (int mask = 1; mask < HeadDim / 8; mask *= 2) add_across(x, mask);
  scale_rotated<HeadDim>(x);
}

/// Rotates rows of which four neighbouring lanes have 8 neighbouring channels of each 32. Called by all lanes.
template <int HeadDim>
KVPOLICY_DEVICE void rotate_quarters(float (&x)[HeadDim / 4]) {
  add_apart<1>(x);
  add_apart<2>(x);
  add_apart<4>(x);
  add_across(x, 1);
  add_across(x, 2);
  add_apart<8>(x);
  if constexpr (HeadDim > 64) add_apart<16>(x);
  scale_rotated<HeadDim>(x);
}

/// Rotates a row that this thread has as a whole.
template <int HeadDim>
KVPOLICY_DEVICE void rotate_row(float (&x)[HeadDim]) {
  KVPOLICY_NO_UNROLL
  for (int apart = 1; apart < HeadDim; apart *= 2) {
    KVPOLICY_NO_UNROLL
    for (int pair = 0; pair < HeadDim / 2; ++pair) {
      const int low = pair / apart * 2 * apart + pair % apart;
      const float sum = x[low] + x[low + apart];
      x[low + apart] = x[low] - x[low + apart];
      x[low] = sum;
    }
  }
  KVPOLICY_NO_UNROLL
  for (int i = 0; i < HeadDim; ++i) x[i] = rounded_product(x[i], rotation_unit<HeadDim>);
}

}  // namespace kvpolicy::gpu
