// SPDX-License-Identifier: Apache-2.0
//
// The sequences of a ragged call, as kernels receive them: a table in device memory. A launch has blocks for
// each line of the table, taken or not, so that a captured launch serves whatever sequences are in the table when
// it is replayed.
#pragma once

#include <cstdint>
#include <type_traits>

#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

/// One sequence in one layer. All pointers are device pointers. In the call's tensors, which are
/// [tokens of all sequences, heads, head_dim], its tokens are [first, first + tokens).
struct CallSequence {
  const HeadView* read_heads = nullptr;  ///< [kv_heads]: as the call's queries read them
  const HeadView* heads = nullptr;       ///< [kv_heads]: as its rows are written
  LayerState* state = nullptr;
  int* out_of_range = nullptr;          ///< see AppendParams
  std::uint16_t* query_ring = nullptr;  ///< [query_slots, q_heads, head_dim] (queries.cuh), or null
  float* log_sum_exp = nullptr;         ///< [tokens, q_heads], or null
  CallTree tree = {};
  int query_slots = 0;
  int first = 0;
  int tokens = 0;  ///< 0: nothing is read or written for it
  int max_rollback = 0;
  int selected = 0;    ///< 1: Read::selected
  int upper_half = 0;  ///< 1: Read::upper_half
};
// Two of them can be compared byte by byte.
static_assert(sizeof(CallSequence) % 8 == 0 && std::has_unique_object_representations_v<CallSequence>);

/// Where a sequence's tokens are in a call's tensors: row `token` of tensor t is t.row(sequence, first + token).
struct CallTokens {
  int sequence = 0;
  int first = 0;
  int count = 0;
};

}  // namespace kvpolicy::gpu
