// SPDX-License-Identifier: Apache-2.0
//
// Summarises full chunks of keys: by the mean key (TriForce, arXiv:2404.11912) or by the smallest
// and largest value of each channel (Quest, arXiv:2406.10774). The numbers equal those of
// policy/chunk_summary.hpp. A chunk is read once, when its last row is committed.
#pragma once

#include <cstdint>

#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

/// Chunks that a block of `threads` summarises at a time; each thread has 8 channels of a chunk.
template <int HeadDim>
KVPOLICY_HOST_DEVICE constexpr int chunks_at_a_time(int threads) {
  return threads / (HeadDim / 8);
}

/// Summarises chunks [first, last); `key(row)` returns the address of a row's key.
template <Element E, int HeadDim, class Key>
KVPOLICY_DEVICE void close_chunks(const HeadView& head, int page_rows, int first, int last, Key key) {
  constexpr int lanes = HeadDim / 8;
  const int channel = thread_index() % lanes * 8;
  const int at_a_time = chunks_at_a_time<HeadDim>(thread_count());
  if (thread_index() / lanes >= at_a_time) return;
  for (int chunk = first + thread_index() / lanes; chunk < last; chunk += at_a_time) {
    const int begin = chunk * head.chunk_rows;
    const auto load = [&](int row, float(&x)[8]) {
      const Words4 raw = *reinterpret_cast<const Words4*>(key(row) + channel);
      KVPOLICY_UNROLL
      for (int j = 0; j < 8; ++j) {
        const std::uint32_t pair = raw.word[j / 2];
        x[j] = to_float<E>(static_cast<std::uint16_t>(j % 2 == 0 ? pair & 0xffffU : pair >> 16));
      }
    };
    std::uint16_t* out = reinterpret_cast<std::uint16_t*>(head.summary_pages[chunk / page_rows]) +
                         chunk % page_rows * HeadDim + channel;
    const auto store = [&](int vector, const float(&x)[8]) {
      Words4 rounded;
      KVPOLICY_UNROLL
      for (int j = 0; j < 4; ++j) rounded.word[j] = pack<E>(x[2 * j], x[2 * j + 1]);
      *reinterpret_cast<Words4*>(out + vector * page_rows * HeadDim) = rounded;
    };
    float x[8];
    if (head.min_max) {
      float min[8], max[8];
      KVPOLICY_UNROLL
      for (int j = 0; j < 8; ++j) {
        min[j] = float_of_bits(0x7f800000U);  // infinity
        max[j] = float_of_bits(0xff800000U);
      }
      for (int row = begin; row < begin + head.chunk_rows; ++row) {
        load(row, x);
        KVPOLICY_UNROLL
        for (int j = 0; j < 8; ++j) {
          min[j] = x[j] < min[j] ? x[j] : min[j];
          max[j] = x[j] > max[j] ? x[j] : max[j];
        }
      }
      store(0, min);
      store(1, max);
    } else {
      float sum[8] = {};
      for (int row = begin; row < begin + head.chunk_rows; ++row) {
        load(row, x);
        KVPOLICY_UNROLL
        for (int j = 0; j < 8; ++j) sum[j] += x[j];
      }
      KVPOLICY_UNROLL
      for (int j = 0; j < 8; ++j) sum[j] /= static_cast<float>(head.chunk_rows);
      store(0, sum);
    }
  }
}

}  // namespace kvpolicy::gpu
