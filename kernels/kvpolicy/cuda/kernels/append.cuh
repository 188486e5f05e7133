// SPDX-License-Identifier: Apache-2.0
//
// Adds new rows to the cache: writes them to their slots, and commits the rows that can no longer
// be rolled back, which quantises them in blocks and summarises them in chunks. A row is written,
// quantised and read for its summary once each, and never moved.
//
// A call of few rows is one kernel (append_kernel, one thread block for each head). A long call is
// two kernels that spread over the device: commit_kernel reads what it needs of the earlier rows,
// and then write_kernel may overwrite them in their ring. The counters in LayerState advance last.
#pragma once

#include <cstddef>
#include <cstdint>

#include <kvpolicy/cuda/kernels/call_sequence.cuh>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/quantize.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>
#include <kvpolicy/cuda/kernels/slow_rows.cuh>
#include <kvpolicy/cuda/kernels/summarize.cuh>

namespace kvpolicy::gpu {

/// A step appends `rows` and commits them (`commit_rows` = rows) except the last `max_rollback`. An
/// append alone commits nothing new (0). A commit appends no rows and leaves none to roll back.
struct AppendParams {
  const HeadView* heads = nullptr;  ///< [sequences, kv_heads]
  LayerState* states = nullptr;     ///< [sequences]
  /// [sequences], of a ragged call; or null: all sequences have as many rows. The table then says which heads and
  /// states change, how many rows come and how many may be taken back, and tensors are [tokens, heads, head_dim],
  /// with a sequence stride of 0.
  const CallSequence* ragged = nullptr;
  int sequences = 1;
  int kv_heads = 0;
  int page_rows = 64;
  int rows = 0;         ///< new rows of each sequence; of a ragged call the most of a sequence
  int commit_rows = 0;  ///< of a ragged call: 0, or `rows` for those of each sequence
  int max_rollback = 0;
  Tensor k = {};  ///< [sequences, rows, kv_heads, head_dim]; rows are aligned to 16 bytes
  Tensor v = {};
  Tensor q = {};  ///< [tokens, kv_heads * group, head_dim], for sequences that keep queries; or none
  int group = 0;  ///< of q
  std::uint32_t* tickets = nullptr;  ///< [sequences]; 0 before and after a call
  int* out_of_range = nullptr;       ///< counts numbers that had to be clamped; or null

  KVPOLICY_HOST_DEVICE const HeadView& head_of(int sequence, int kv_head) const {
    return ragged == nullptr ? heads[sequence * kv_heads + kv_head] : ragged[sequence].heads[kv_head];
  }
  KVPOLICY_HOST_DEVICE LayerState& state_of(int sequence) const {
    return ragged == nullptr ? states[sequence] : *ragged[sequence].state;
  }
  KVPOLICY_HOST_DEVICE CallTokens tokens_of(int sequence) const {
    if (ragged == nullptr) return {sequence, 0, rows};
    return {0, ragged[sequence].first, ragged[sequence].tokens};
  }
  /// Whether the call changes nothing of a sequence.
  KVPOLICY_HOST_DEVICE bool is_empty(int sequence) const {
    return ragged != nullptr && ragged[sequence].tokens == 0;
  }
  KVPOLICY_HOST_DEVICE LayerState after(int sequence) const {
    const LayerState& before = state_of(sequence);
    if (ragged == nullptr) return before.after(rows, commit_rows, max_rollback);
    const CallSequence& own = ragged[sequence];
    return before.after(own.tokens, commit_rows == 0 ? 0 : own.tokens, own.max_rollback);
  }
};

/// Whether rows of this head_dim may be quantised. A program that says so in all its files has no kernels for them.
#ifdef KVPOLICY_EXACT_ROWS_ONLY
template <int HeadDim>
inline constexpr bool can_quantize = false;
#else
template <int HeadDim>
inline constexpr bool can_quantize = HeadDim == 64 || HeadDim == 128;
#endif

/// Shared memory of append_kernel, commit_kernel and flush_kernel; write_kernel needs none.
template <int HeadDim>
constexpr std::size_t append_shared_bytes() {
  if constexpr (can_quantize<HeadDim>) {
    return QuantizerMemory<HeadDim>::bytes;
  } else {
    return 0;
  }
}

/// One head's part of a call, of a sequence that is not empty.
template <Element E, int HeadDim>
struct HeadAppend {
  const AppendParams& params;
  const HeadView& head;
  int sequence;
  int kv_head;
  CallTokens tokens;
  LayerState before;
  LayerState after;
  // Pages that the text used before the call and uses after it, for a head in slow memory.
  int entered_before = 0;
  int entered = 0;

  KVPOLICY_DEVICE HeadAppend(const AppendParams& p, int of_sequence, int of_head)
      : params{p},
        head{p.head_of(of_sequence, of_head)},
        sequence{of_sequence},
        kv_head{of_head},
        tokens{p.tokens_of(of_sequence)},
        before{p.state_of(of_sequence)},
        after{p.after(of_sequence)} {
    if (head.slow == nullptr) return;
    entered_before = head.slow->state->entered;
    entered = larger(entered_before, pages_come_to(head, head.slow->packed != 0, params.page_rows, after));
  }

  /// Rows that were in the cache before the call.
  KVPOLICY_DEVICE int stored() const { return before.tokens - head.evicted; }

  /// The address of a row that is not packed yet.
  KVPOLICY_DEVICE const std::uint16_t* exact(int row, bool key) const {
    const int own = row - stored();
    if (own >= 0) return (key ? params.k : params.v).row(tokens.sequence, tokens.first + own, kv_head);
    return exact_row<HeadDim>(head, params.page_rows, row, key);
  }

  /// Does every `stride`th job, from `first` on; a job quantises a block or closes a chunk.
  KVPOLICY_DEVICE void commit(int first, int stride) const {
    int blocks = 0;
    if constexpr (can_quantize<HeadDim>) {
      const int end = head.packed_end(after.committed);
      int begin = head.packed_end(before.committed);
      // Skips rows that the ring of packed rows would overwrite within this call.
      if (head.packed_ring > 0) begin = larger(begin, end - head.packed_ring);
      blocks = (end - begin) / quantized_together;
      for (; first < blocks; first += stride) {
        const int row = begin + first * quantized_together;
        quantize_block<E, HeadDim>(
            head, params.page_rows, row, [&](int i) { return exact(i, true); },
            [&](int i) { return exact(i, false); }, shared_memory(), out_of_range(), entered,
            head.keys_end(before.committed) - row, head.values_end(before.committed) - row);
      }
    }
    if (head.chunk_rows == 0 || head.own_summary != 0) return;
    const int at_a_time = chunks_at_a_time<HeadDim>(write_threads);
    const int end = head.closed_chunks(after.committed);
    int chunk = head.closed_chunks(before.committed) + (first - blocks) * at_a_time;
    for (; chunk < end; chunk += stride * at_a_time) {
      close_chunks<E, HeadDim>(head, params.page_rows, chunk, smaller(chunk + at_a_time, end),
                               [&](int row) { return exact(row, true); });
    }
  }

  /// The keys that KIVI's flush quantises now, though their block is not full.
  KVPOLICY_DEVICE RowRange<int> flushed() const {
    if (!head.kivi_flush) return {};
    return {larger(head.keys_end(before.committed), head.packed_end(after.committed)),
            head.keys_end(after.committed)};
  }
  /// Quantises them. Their exact slots are written here.
  KVPOLICY_DEVICE void flush() const {
    if constexpr (can_quantize<HeadDim>) {
      const RowRange<int> keys = flushed();
      if (keys.rows() == 0) return;
      int row = head.sinks + (keys.begin - head.sinks) / quantized_together * quantized_together;
      for (; row < keys.end; row += quantized_together) {
        quantize_keys<E, HeadDim>(
            head, params.page_rows, row, larger(row, keys.begin), smaller(row + quantized_together, keys.end),
            [&](int i) { return exact(i, true); }, shared_memory(), out_of_range(), entered);
      }
    }
  }

  /// Writes the call's rows in [first, last) that are kept: of these the sinks and the rows from
  /// `needed` on. `flush` writes the keys that it quantises.
  KVPOLICY_DEVICE void write(int first, int last, int needed) const {
    constexpr int vectors = HeadDim / 8;
    if (head.exact_ring > 0) needed = larger(needed, after.tokens - head.evicted - head.exact_ring);
    const RowRange<int> keys = flushed();
    for (int i = first * vectors + thread_index(); i < last * vectors; i += thread_count()) {
      const int own = i / vectors;
      const int row = stored() + own;
      if (row >= head.sinks && row < needed) continue;
      const int channel = i % vectors * 8;
      const int slot = head.exact_slot(row);
      const PageAddresses page = addresses_of_page(head, false, slot / params.page_rows, entered);
      KVPOLICY_UNROLL
      for (int side = 0; side < 2; ++side) {
        if (side == 0 && row >= keys.begin && row < keys.end) continue;
        const Words4 numbers = *reinterpret_cast<const Words4*>(
            (side == 0 ? params.k : params.v).row(tokens.sequence, tokens.first + own, kv_head) + channel);
        const auto write_to = [&](std::byte* to) {
          std::byte* row_address = head.exact_row(to, slot % params.page_rows, side == 0);
          *reinterpret_cast<Words4*>(row_address + channel * 2) = numbers;
        };
        write_to(page.first);
        if (page.second != nullptr) write_to(page.second);
      }
    }
  }

  /// Keeps the queries that the KV head serves, of the latest tokens in [first, last), in the ring of a sequence that
  /// has one (queries.cuh).
  KVPOLICY_DEVICE void keep_queries(int first, int last) const {
    if (params.ragged == nullptr || params.q.data == nullptr) return;
    const CallSequence& own = params.ragged[sequence];
    if (own.query_ring == nullptr) return;
    constexpr int vectors = HeadDim / 8;
    const int q_heads = params.kv_heads * params.group;
    const int of_token = params.group * vectors;
    first = larger(first, own.tokens - own.query_slots);
    for (int i = first * of_token + thread_index(); i < last * of_token; i += thread_count()) {
      const int token = i / of_token;
      const int q_head = kv_head * params.group + i % of_token / vectors;
      const int place = (before.tokens + token) % own.query_slots * q_heads + q_head;
      const auto* from = reinterpret_cast<const Words4*>(params.q.row(0, own.first + token, q_head));
      reinterpret_cast<Words4*>(own.query_ring)[static_cast<long long>(place) * vectors + i % vectors] =
          from[i % vectors];
    }
  }

  KVPOLICY_DEVICE int* out_of_range() const {
    return params.ragged == nullptr ? params.out_of_range : params.ragged[sequence].out_of_range;
  }

  /// `blocks` thread blocks call this for a sequence; the last one advances the counters.
  KVPOLICY_DEVICE void arrive(int blocks) const {
    sync_block();  // every thread has read the counters
    if (thread_index() > 0) return;
    if (gpu::arrive(params.tickets + sequence) == static_cast<std::uint32_t>(blocks) - 1U) {
      params.state_of(sequence) = after;
      params.tickets[sequence] = 0;
    }
  }
};

/// A call of few rows: grid (kv_heads, sequences), append_shared_bytes<HeadDim>().
template <Element E, int HeadDim>
KVPOLICY_KERNEL(write_threads, 4)
append_kernel(const KVPOLICY_GRID_CONSTANT AppendParams params) {
  wait_for_kernel_before();
  if (params.is_empty(block_y())) return;
  const HeadAppend<E, HeadDim> task{params, block_y(), block_x()};
  task.commit(0, 1);
  sync_block();  // a new row may use the slot of a row that was just quantised
  task.write(0, task.tokens.count, 0);
  task.flush();
  task.keep_queries(0, task.tokens.count);
  if (task.head.slow != nullptr) enter_pages(*task.head.slow, task.entered_before, task.entered);
  task.arrive(params.kv_heads);
}

/// First half of a long call: grid (any, kv_heads * sequences), append_shared_bytes<HeadDim>().
template <Element E, int HeadDim>
KVPOLICY_KERNEL(write_threads, 4)
commit_kernel(const KVPOLICY_GRID_CONSTANT AppendParams params) {
  if (params.is_empty(block_y() / params.kv_heads)) return;
  const HeadAppend<E, HeadDim> task{params, block_y() / params.kv_heads, block_y() % params.kv_heads};
  task.commit(block_x(), grid_x());
}

/// Between the halves, where a head has KIVI's flush: grid (1, kv_heads * sequences),
/// append_shared_bytes<HeadDim>(). A kernel of its own, because write_kernel needs few registers.
template <Element E, int HeadDim>
KVPOLICY_KERNEL(write_threads, 4)
flush_kernel(const KVPOLICY_GRID_CONSTANT AppendParams params) {
  if (params.is_empty(block_y() / params.kv_heads)) return;
  HeadAppend<E, HeadDim>{params, block_y() / params.kv_heads, block_y() % params.kv_heads}.flush();
}

/// Rows that a block of write_kernel writes at a time.
inline constexpr int write_tile_rows = 64;

/// Second half of a long call: grid (any, kv_heads * sequences), no shared memory.
template <Element E, int HeadDim>
KVPOLICY_KERNEL(write_threads, 4)
write_kernel(const KVPOLICY_GRID_CONSTANT AppendParams params) {
  if (params.is_empty(block_y() / params.kv_heads)) return;
  const HeadAppend<E, HeadDim> task{params, block_y() / params.kv_heads, block_y() % params.kv_heads};
  // Rows that are packed by now are never read as exact again, except for a chunk that is not full.
  const HeadView& head = task.head;
  int needed = head.packed_end(task.after.committed);
  if (head.chunk_rows > 0) {
    needed = smaller(needed, head.closed_chunks(task.after.committed) * head.chunk_rows);
  }
  const int rows = task.tokens.count;
  for (int first = block_x() * write_tile_rows; first < rows; first += grid_x() * write_tile_rows) {
    const int last = smaller(first + write_tile_rows, rows);
    task.write(first, last, needed);
    task.keep_queries(first, last);
  }
  task.arrive(grid_x() * params.kv_heads);
}

/// Sets counters, for a rollback for example: the texts of `count` layers or sequences get one
/// length.
struct SetStateParams {
  const HeadView* heads = nullptr;  ///< [count, kv_heads]
  LayerState* states = nullptr;     ///< [count]
  int count = 0;
  int kv_heads = 0;
  LayerState state;       ///< committed < 0: each keeps its own value
  int choices_until = 0;  ///< selections by queries after this many tokens are dropped
};

inline constexpr int set_state_threads = 128;

/// One thread for each head: grid (quotient_up(count * kv_heads, set_state_threads)).
template <int Threads = set_state_threads>
KVPOLICY_KERNEL(Threads, 1)
set_state_kernel(const KVPOLICY_GRID_CONSTANT SetStateParams params) {
  const int i = block_x() * thread_count() + thread_index();
  if (i >= params.count * params.kv_heads) return;
  if (i % params.kv_heads == 0) {
    LayerState& state = params.states[i / params.kv_heads];
    state.tokens = params.state.tokens;
    if (params.state.committed >= 0) state.committed = params.state.committed;
  }
  Selections* choices = params.heads[i].selections;
  if (choices == nullptr) return;
  const ChoiceRing<int> left = choices->ring().after_rollback(params.choices_until, choices->tokens);
  if (left.valid == choices->valid) return;
  choices->latest = left.latest;
  choices->valid = left.valid;
  if (params.heads[i].slow != nullptr) params.heads[i].slow->state->gathered = -1;
}

}  // namespace kvpolicy::gpu
