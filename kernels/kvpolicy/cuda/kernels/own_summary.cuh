// SPDX-License-Identifier: Apache-2.0
//
// Chunk summaries of the caller's own (SummaryChannel of policy/chunk_summary.hpp): one kernel closes the
// chunks that a call fills, one scores them. The shipped summaries are part of larger kernels instead
// (summarize.cuh, score.cuh), which leave heads with another summary alone.
#pragma once

#include <cstdint>

#include <kvpolicy/cuda/kernels/append.cuh>
#include <kvpolicy/cuda/kernels/score.cuh>

namespace kvpolicy::gpu {

struct OwnSummaryParams {
  AppendParams call;          ///< the call that follows, or the one that commits
  std::uint64_t summary = 0;  ///< of the heads that this launch serves
};

/// Before the kernels of a call, whose rows are read where the caller has them. A thread has one channel of a
/// chunk. Grid (any, kv_heads * sequences), no shared memory.
template <Element E, int HeadDim, class Channel>
KVPOLICY_KERNEL(write_threads, 4)
own_summary_kernel(const KVPOLICY_GRID_CONSTANT OwnSummaryParams p) {
  const AppendParams& call = p.call;
  if (call.is_empty(block_y() / call.kv_heads)) return;
  const HeadAppend<E, HeadDim> task{call, block_y() / call.kv_heads, block_y() % call.kv_heads};
  const HeadView& head = task.head;
  if (head.own_summary != p.summary) return;
  const int first = head.closed_chunks(task.before.committed);
  const int last = head.closed_chunks(task.after.committed);
  for (int i = first * HeadDim + block_x() * thread_count() + thread_index(); i < last * HeadDim;
       i += grid_x() * thread_count()) {
    const int chunk = i / HeadDim;
    Channel channel;
    for (int row = chunk * head.chunk_rows; row < (chunk + 1) * head.chunk_rows; ++row) {
      channel.add(to_float<E>(task.exact(row, true)[i % HeadDim]));
    }
    auto* out = reinterpret_cast<std::uint16_t*>(head.summary_pages[chunk / call.page_rows]) +
                chunk % call.page_rows * HeadDim + i % HeadDim;
    for (int vector = 0; vector < static_cast<int>(Channel::vectors); ++vector) {
      out[vector * call.page_rows * HeadDim] = from_float<E>(channel.finish(vector));
    }
  }
}

struct OwnScoreParams {
  ScoreParams scored;
  std::uint64_t summary = 0;
};

/// As score_kernel, for the heads that have this summary.
template <Element E, int HeadDim, class Channel>
KVPOLICY_KERNEL(score_threads, 3)
own_score_kernel(const KVPOLICY_GRID_CONSTANT OwnScoreParams own) {
  const ScoreParams& p = own.scored;
  const HeadView& head = p.heads[block_y()];
  if (head.own_summary != own.summary) return;
  const int sequence = block_y() / p.kv_heads;
  const int chunks = head.closed_chunks(p.states[sequence].committed);
  if (chunks <= head.budget_chunks) return;

  constexpr int vectors = static_cast<int>(Channel::vectors);
  auto* query = reinterpret_cast<float*>(shared_memory());
  const int first_head = block_y() % p.kv_heads * p.group;
  for (int c = thread_index(); c < HeadDim; c += thread_count()) {
    for (int vector = 0; vector < vectors; ++vector) {
      float sum = 0.0F;
      for (int member = 0; member < p.group; ++member) {
        sum += Channel::split(vector, to_float<E>(p.q.row(sequence, p.queries - 1, first_head + member)[c]));
      }
      query[vector * HeadDim + c] = sum;
    }
  }
  sync_block();
  score_chunks<E, HeadDim, vectors>(head, chunks, p.page_rows, query, head.scores);
}

}  // namespace kvpolicy::gpu
