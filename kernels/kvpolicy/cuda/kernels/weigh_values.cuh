// SPDX-License-Identifier: Apache-2.0
//
// Multiplies the scores of rows that are ranked by attention by the length of the row's value, in heads that ask for
// it: a row that adds little to a result may go, however much attention it gets (Expected Attention, arXiv:2510.00636;
// CriticalKV, arXiv:2502.03805). policy/head_budget_cache.hpp defines the product.
//
// A thread gathers one value in the order of the channels, as the host does. Each value is read once.
#pragma once

#include <cfloat>

#include <kvpolicy/cuda/kernels/gather_row.cuh>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/select.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::cuda {

/// One layer of one sequence, whose rows are all committed and scored.
struct WeighValuesParams {
  const HeadView* heads = nullptr;  ///< [kv_heads]
  const LayerState* state = nullptr;
  const CompressionSettings* compressions = nullptr;  ///< [kv_heads]
  int page_rows = 64;
  float* scores = nullptr;  ///< [kv_heads, pitch]; heads that add up attention get theirs here
  long long pitch = 0;
};

inline constexpr int weigh_values_threads = 128;

/// The squares of a row's numbers, in double.
struct SquareSum {
  double total = 0.0;

  KVPOLICY_DEVICE void add(float number) {
    total += static_cast<double>(number) * static_cast<double>(number);
  }
};

/// Grid: any number of blocks, then kv_heads.
template <Element E, int HeadDim>
KVPOLICY_KERNEL(weigh_values_threads, 4)
weigh_values_kernel(const KVPOLICY_GRID_CONSTANT WeighValuesParams p) {
  const CompressionSettings how = p.compressions[block_y()];
  if (!how.weighs_values) return;
  const HeadView& head = p.heads[block_y()];
  const int candidates = how.rule().candidates(p.state->tokens - head.evicted);
  const int packed_end = head.packed_end(p.state->committed);
  float* scores = p.scores + block_y() * p.pitch;
  for (int row = block_x() * thread_count() + thread_index(); row < candidates;
       row += grid_x() * thread_count()) {
    const float score =
        how.ranking == Ranking::accumulated ? static_cast<float>(head.sums[row]) : scores[row];
    SquareSum squares;
    gather_row<E, HeadDim>(head, p.page_rows, row, packed_end, false, squares);
    const double weighed = static_cast<double>(score) * square_root(squares.total);
    constexpr double most = FLT_MAX;
    // Rows with the largest score are kept in any case, and no product comes to more. NaN stays.
    scores[row] = score >= FLT_MAX ? score : static_cast<float>(weighed > most ? most : weighed);
  }
}

}  // namespace kvpolicy::cuda
