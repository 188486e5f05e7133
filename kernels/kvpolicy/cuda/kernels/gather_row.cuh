// SPDX-License-Identifier: Apache-2.0
//
// Reads single rows of a head that is compressed: by one thread, number by number in the order of the channels, as the
// host does, so that the thread's own sum equals the host's; or by several lanes, eight numbers each, into shared
// memory.
#pragma once

#include <kvpolicy/cuda/kernels/append.cuh>
#include <kvpolicy/cuda/kernels/compact.cuh>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

/// Calls `gather.add(number)` for each number of a row's key or value. The head has no sinks, and its rows before
/// `packed_end` are packed; numbers of rotated rows are rotated back.
template <Element E, int HeadDim, class Gather>
KVPOLICY_DEVICE void gather_row(const HeadView& head, int page_rows, int row, int packed_end, bool is_key,
                                Gather& gather) {
  if (can_quantize<HeadDim> && row < packed_end) {
    if constexpr (can_quantize<HeadDim>) {
      if (is_key ? head.key_hadamard : head.value_hadamard) {
        float numbers[HeadDim];  // in memory; few rows are read once they are quantised
        for (int channel = 0; channel < HeadDim; channel += 8) {
          PackedVector<HeadDim>{head, page_rows, row, channel, is_key}.load(numbers + channel);
        }
        rotate_row<HeadDim>(numbers);
        for (const float number : numbers) gather.add(number);
      } else {
        for (int channel = 0; channel < HeadDim; channel += 8) {
          const PackedVector<HeadDim> vector{head, page_rows, row, channel, is_key};
          for (int i = 0; i < 8; ++i) gather.add(vector.number(i));
        }
      }
    }
    return;
  }
  const std::uint16_t* numbers = exact_row<HeadDim>(head, page_rows, row, is_key);
  for (int channel = 0; channel < HeadDim; channel += 8) {
    const Words4 words = *reinterpret_cast<const Words4*>(numbers + channel);
    KVPOLICY_UNROLL
    for (int i = 0; i < 8; ++i) {
      gather.add(to_float<E>(static_cast<std::uint16_t>(words.word[i / 2] >> 16 * (i % 2))));
    }
  }
}

/// Writes the keys of `count` rows from `first` on to shared memory, a row at `pitch` numbers. Called by all threads,
/// whose neighbours read neighbouring numbers. Barriers are the caller's.
template <Element E, int HeadDim>
KVPOLICY_DEVICE void load_keys(const HeadView& head, int page_rows, int first, int count, int packed_end,
                               float* tile, int pitch) {
  constexpr int vectors = HeadDim / 8;
  // A warp's lanes stay together, because all of them take part in a rotation.
  for (int i = thread_index(); i - lane_index() < count * vectors; i += thread_count()) {
    const int at = smaller(i, count * vectors - 1);
    const int row = first + at / vectors;
    const int channel = at % vectors * 8;
    float x[8] = {};
    const bool packed = can_quantize<HeadDim> && row < packed_end;
    if constexpr (can_quantize<HeadDim>) {
      if (packed) PackedVector<HeadDim>{head, page_rows, row, channel, true}.load(x);
      if (head.key_hadamard) rotate_vectors<HeadDim>(x);
    }
    if (i >= count * vectors) continue;
    if (!packed) {
      const Words4 words =
          *reinterpret_cast<const Words4*>(exact_row<HeadDim>(head, page_rows, row, true) + channel);
      KVPOLICY_UNROLL
      for (int j = 0; j < 8; ++j) {
        x[j] = to_float<E>(static_cast<std::uint16_t>(words.word[j / 2] >> 16 * (j % 2)));
      }
    }
    KVPOLICY_UNROLL
    for (int j = 0; j < 8; ++j) tile[(row - first) * pitch + channel + j] = x[j];
  }
}

}  // namespace kvpolicy::gpu
