// SPDX-License-Identifier: Apache-2.0
//
// Reads one side of a row by one thread, number by number in the order of the channels, as the host does. For what is
// computed of rows one at a time before a compression: the thread's own sum then equals the host's.
#pragma once

#include <kvpolicy/cuda/kernels/append.cuh>
#include <kvpolicy/cuda/kernels/compact.cuh>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::cuda {

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

}  // namespace kvpolicy::cuda
