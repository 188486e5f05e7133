// SPDX-License-Identifier: Apache-2.0
//
// Multiplies the scores of rows that are ranked by attention by the length of the row's value, in heads that ask for
// it: a row that adds little to a result may go, however much attention it gets (Expected Attention, arXiv:2510.00636;
// CriticalKV, arXiv:2502.03805). policy/weighed_scores.hpp defines the product. Norms through the output projection are
// weigh_outputs.cuh's.
//
// A thread gathers one value in the order of the channels, as the host does. Each value is read once.
#pragma once

#include <cfloat>

#include <kvpolicy/cuda/kernels/gather_row.cuh>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/select.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

/// One layer of one sequence, whose rows are all committed and scored.
struct WeighValuesParams {
  const HeadView* heads = nullptr;  ///< [kv_heads]
  const LayerState* state = nullptr;
  const CompressionSettings* compressions = nullptr;  ///< [kv_heads]
  int page_rows = 64;
  const float* scores = nullptr;  ///< [kv_heads, pitch]; of heads that add up attention not read
  float* weighed = nullptr;       ///< the same shape: scores times norms
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

/// The score of a row by all the attention that it got, before it is weighed.
KVPOLICY_DEVICE float score_of_row(const WeighValuesParams& p, const CompressionSettings& how, int row) {
  return how.ranking == Ranking::accumulated ? static_cast<float>(p.heads[block_y()].sums[row])
                                             : p.scores[block_y() * p.pitch + row];
}
/// A score times a norm. Rows with the largest score are kept in any case, and no product comes to more. NaN stays.
KVPOLICY_DEVICE float score_times_norm(float score, double norm) {
  constexpr double most = FLT_MAX;
  const double weighed = static_cast<double>(score) * norm;
  return score >= FLT_MAX ? score : static_cast<float>(weighed > most ? most : weighed);
}

/// Grid: any number of blocks, then kv_heads.
template <Element E, int HeadDim>
KVPOLICY_KERNEL(weigh_values_threads, 4)
weigh_values_kernel(const KVPOLICY_GRID_CONSTANT WeighValuesParams p) {
  const CompressionSettings how = p.compressions[block_y()];
  if (!how.weighs_values || how.weighs_outputs()) return;
  const HeadView& head = p.heads[block_y()];
  const int candidates = how.rule().candidates(p.state->tokens - head.evicted);
  const int packed_end = head.packed_end(p.state->committed);
  float* weighed = p.weighed + block_y() * p.pitch;
  for (int row = block_x() * thread_count() + thread_index(); row < candidates;
       row += grid_x() * thread_count()) {
    SquareSum squares;
    gather_row<E, HeadDim>(head, p.page_rows, row, packed_end, false, squares);
    weighed[row] = score_times_norm(score_of_row(p, how, row), square_root(squares.total));
  }
}

}  // namespace kvpolicy::gpu
