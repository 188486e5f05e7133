// SPDX-License-Identifier: Apache-2.0
//
// Scores the rows of heads that are compressed by how their keys differ from what all keys of the head have in common
// (KeyDiff, arXiv:2504.15364): the negative cosine between the key and the mean direction of the keys, as
// policy/key_diff_scorer.hpp defines it.
//
// The keys are read twice. sum_directions_kernel adds up the directions of each block's rows, in double and in the
// order of the rows; score_directions_kernel joins the blocks' sums, in their order, and scores a row with each thread.
// So results do not depend on timing, and are the host's but for the last bits of sums in double.
#pragma once

#include <kvpolicy/cuda/kernels/gather_row.cuh>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/select.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

/// One layer of one sequence, whose rows are all committed. Both kernels have the same grid: any number of blocks, then
/// kv_heads.
struct KeyDirectionsParams {
  const HeadView* heads = nullptr;  ///< [kv_heads]
  const LayerState* state = nullptr;
  const CompressionSettings* compressions = nullptr;  ///< [kv_heads]
  int page_rows = 64;
  double* sums = nullptr;   ///< [kv_heads, blocks, head_dim]
  float* scores = nullptr;  ///< [kv_heads, pitch]
  long long pitch = 0;
};

inline constexpr int directions_threads = 128;
inline constexpr int directions_rows = 32;  ///< rows of a tile in shared memory

template <int HeadDim>
constexpr std::size_t sum_directions_shared_bytes() {
  return directions_rows * (sizeof(double) + (HeadDim + 1) * sizeof(float));
}
template <int HeadDim>
constexpr std::size_t score_directions_shared_bytes() {
  return (HeadDim + 1) * sizeof(double);
}

template <Element E, int HeadDim>
KVPOLICY_KERNEL(directions_threads, 4)
sum_directions_kernel(const KVPOLICY_GRID_CONSTANT KeyDirectionsParams p) {
  const CompressionSettings how = p.compressions[block_y()];
  if (how.ranking != Ranking::key_directions) return;
  const HeadView& head = p.heads[block_y()];
  const int rows = p.state->tokens - head.evicted;
  const int packed_end = head.packed_end(p.state->committed);
  const int tiles = quotient_up(rows, directions_rows);
  const int first_tile = static_cast<int>(static_cast<long long>(tiles) * block_x() / grid_x());
  const int last_tile = static_cast<int>(static_cast<long long>(tiles) * (block_x() + 1) / grid_x());

  constexpr int pitch = HeadDim + 1;  // so that threads with a row each read from different banks
  constexpr int own = (HeadDim + directions_threads - 1) / directions_threads;  // channels of a thread
  auto* lengths = reinterpret_cast<double*>(shared_memory());
  auto* keys = reinterpret_cast<float*>(lengths + directions_rows);
  double sums[own] = {};
  for (int tile = first_tile; tile < last_tile; ++tile) {
    const int first = tile * directions_rows;
    const int count = smaller(directions_rows, rows - first);
    sync_block();  // the previous tile is read
    load_keys<E, HeadDim>(head, p.page_rows, first, count, packed_end, keys, pitch);
    sync_block();
    if (thread_index() < count) {
      double squares = 0.0;
      for (int channel = 0; channel < HeadDim; ++channel) {
        const auto number = static_cast<double>(keys[thread_index() * pitch + channel]);
        squares += number * number;
      }
      lengths[thread_index()] = square_root(squares);
    }
    sync_block();
    KVPOLICY_UNROLL
    for (int i = 0; i < own; ++i) {
      const int channel = i * directions_threads + thread_index();
      if (channel >= HeadDim) continue;
      for (int row = 0; row < count; ++row) {
        // A key without a length has no direction.
        if (lengths[row] == 0.0) continue;
        sums[i] += static_cast<double>(keys[row * pitch + channel]) / lengths[row];
      }
    }
  }
  KVPOLICY_UNROLL
  for (int i = 0; i < own; ++i) {
    const int channel = i * directions_threads + thread_index();
    if (channel >= HeadDim) continue;
    p.sums[(static_cast<long long>(block_y()) * grid_x() + block_x()) * HeadDim + channel] = sums[i];
  }
}

/// The cosine of a key, number by number, and the sum of all directions.
struct DirectionCosine {
  const double* sum;   ///< [head_dim]
  double sum_squares;  ///< of its numbers
  int channel = 0;
  double product = 0.0;
  double squares = 0.0;

  KVPOLICY_DEVICE void add(float number) {
    product += static_cast<double>(number) * sum[channel++];
    squares += static_cast<double>(number) * static_cast<double>(number);
  }
  /// 0 where the key or the sum has no length.
  KVPOLICY_DEVICE double cosine() const {
    const double lengths = square_root(squares) * square_root(sum_squares);
    return lengths > 0.0 ? product / lengths : 0.0;
  }
};

/// After sum_directions_kernel.
template <Element E, int HeadDim>
KVPOLICY_KERNEL(directions_threads, 4)
score_directions_kernel(const KVPOLICY_GRID_CONSTANT KeyDirectionsParams p) {
  const CompressionSettings how = p.compressions[block_y()];
  if (how.ranking != Ranking::key_directions) return;
  const HeadView& head = p.heads[block_y()];
  const int candidates = how.rule().candidates(p.state->tokens - head.evicted);
  const int packed_end = head.packed_end(p.state->committed);
  auto* sum = reinterpret_cast<double*>(shared_memory());
  const double* of_blocks = p.sums + static_cast<long long>(block_y()) * grid_x() * HeadDim;
  for (int channel = thread_index(); channel < HeadDim; channel += directions_threads) {
    double total = 0.0;
    for (int block = 0; block < grid_x(); ++block) total += of_blocks[block * HeadDim + channel];
    sum[channel] = total;
  }
  sync_block();
  if (thread_index() == 0) {
    double squares = 0.0;
    for (int channel = 0; channel < HeadDim; ++channel) squares += sum[channel] * sum[channel];
    sum[HeadDim] = squares;
  }
  sync_block();
  for (int row = block_x() * directions_threads + thread_index(); row < candidates;
       row += grid_x() * directions_threads) {
    DirectionCosine key{sum, sum[HeadDim]};
    gather_row<E, HeadDim>(head, p.page_rows, row, packed_end, true, key);
    p.scores[block_y() * p.pitch + row] = -static_cast<float>(key.cosine());
  }
}

}  // namespace kvpolicy::gpu
