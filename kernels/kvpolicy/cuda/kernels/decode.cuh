// SPDX-License-Identifier: Apache-2.0
//
// Attention of a few queries over all heads of all sequences of a layer, in one launch, whatever
// the heads' policies, lengths and formats. Decoding reads each cached number once and computes
// little with it, so the kernel is designed to keep loads in flight:
//
// - Keys and values go from memory to registers in operand order (fragments.cuh), 16 bytes a lane,
//   without shared memory and without barriers. The queries of a GQA group are the few columns of
//   the matrix product.
// - Each warp reads its own rows of the block independently, with its own online softmax
//   (online_softmax.cuh, decode_exact.cuh, decode_packed.cuh).
// - The work of all heads forms one line, of which each block takes an equal slice
//   (partition.cuh). If several blocks share a head, the last one to finish merges their results
//   (merge.cuh) in the order of the rows.
// - A warp describes a block's head (block_slice.cuh): the first one while the others load its queries,
//   each later one while the results of the one before are merged; its first rows are requested then
//   (first_rows.cuh).
#pragma once

#include <algorithm>

#include <kvpolicy/cuda/kernels/attend.cuh>
#include <kvpolicy/cuda/kernels/block_slice.cuh>
#include <kvpolicy/cuda/kernels/block_sums.cuh>
#include <kvpolicy/cuda/kernels/decode_exact.cuh>
#include <kvpolicy/cuda/kernels/decode_packed.cuh>
#include <kvpolicy/cuda/kernels/decode_queries.cuh>
#include <kvpolicy/cuda/kernels/first_rows.cuh>
#include <kvpolicy/cuda/kernels/merge.cuh>
#include <kvpolicy/cuda/kernels/partials.cuh>
#include <kvpolicy/cuda/kernels/partition.cuh>

namespace kvpolicy::gpu {

/// Queries times group must not exceed this (8 for each column tile).
inline constexpr int decode_most_columns = 16;

/// One block occupies a multiprocessor, because fewer and larger blocks leave fewer partial results
/// to merge. It has as many warps as the registers allow without spills. A warp's registers grow
/// with the channels of a row and with the columns' values, and unpacking needs more of them.
KVPOLICY_HOST_DEVICE constexpr int decode_warps(int head_dim, int column_tiles, bool packed) {
  const int held = head_dim * (1 + column_tiles) * (packed ? 2 : 1);
  if (held <= 128) return 16;
  return held <= 256 ? 12 : 8;
}
template <int HeadDim, int ColumnTiles, bool Packed>
inline constexpr int decode_threads = decode_warps(HeadDim, ColumnTiles, Packed) * warp_lanes;
inline constexpr int decode_blocks_per_multiprocessor = 1;

/// Number of slots that `Workspace` needs for a launch of `grid` blocks, each with 8 * ColumnTiles
/// columns (values 16-byte aligned). It also needs a ticket for each head.
KVPOLICY_HOST_DEVICE constexpr int decode_workspace_slots(int grid) { return 2 * grid; }

/// A block's slice of the line of all heads' work, [from, to).
struct WorkSlice {
  long long from;
  long long to;
  int first_head;  ///< the head in which it begins
};

/// How a block's shared memory is divided.
template <Element E, int HeadDim, int ColumnTiles, bool Packed>
struct DecodeLayout {
  static constexpr int threads = decode_threads<HeadDim, ColumnTiles, Packed>;
  static constexpr int warps = threads / warp_lanes;
  static constexpr int columns = ColumnTiles * tile_columns;
  using Queries = DecodeQueries<E, HeadDim, ColumnTiles, Packed>;
  using Merge = WarpMerge<HeadDim, ColumnTiles, warps>;
  using Sums = BlockSums<long long, threads>;

  static constexpr int aligned(int bytes) { return (bytes + 15) / 16 * 16; }
  static constexpr int stage_at = aligned(Queries::bytes);
  static constexpr int stage_bytes = Packed ? warps * packed_stage_bytes < Packed ? HeadDim : 64,
                       ColumnTiles >        : 0;
  // Queries and scales are never needed at the same time as the warps' values.
  static constexpr int slice_at = aligned(std::max(stage_at + stage_bytes, Merge::bytes));
  static constexpr int next_at = slice_at + aligned(sizeof(BlockSlice));
  static constexpr int work_at = next_at + aligned(sizeof(BlockSlice));
  static constexpr int states_at = work_at + aligned(sizeof(WorkSlice));
  static constexpr int finished_at = states_at + (warps + 1) * columns * sizeof(PartialState);
  static constexpr int code_columns_at = finished_at + columns * sizeof(FinishedRow);
  static constexpr int query_sums_at = code_columns_at + columns * sizeof(CodeColumn);
  static constexpr int sums_at = query_sums_at + (Packed ? columns * HeadDim / 8 * 4 : 0);
  static constexpr int line_at = sums_at + aligned(sizeof(typename Sums::Memory));
};

/// What more of them there are takes of a block's dynamic shared memory.
KVPOLICY_HOST_DEVICE constexpr std::size_t decode_shared_bytes_of_heads(int heads) {
  return sizeof(long long) * static_cast<std::size_t>(heads);
}
/// Dynamic shared memory of a launch over `heads` heads (of all sequences).
template <Element E, int HeadDim, int ColumnTiles, bool Packed>
KVPOLICY_HOST_DEVICE constexpr std::size_t decode_shared_bytes(int heads) {
  return DecodeLayout<E, HeadDim, ColumnTiles, Packed>::line_at + decode_shared_bytes_of_heads(heads + 2);
}

/// The most heads of a launch where a block may have `shared_bytes`; 0 if not even one fits.
template <Element E, int HeadDim, bool Packed>
constexpr std::size_t decode_most_heads(std::size_t shared_bytes) {
  const auto most = [&](std::size_t without, std::size_t with_one) {
    return shared_bytes < without ? 0 : (shared_bytes - without) / (with_one - without);
  };
  return std::min(
      most(decode_shared_bytes<E, HeadDim, 1, Packed>(0), decode_shared_bytes<E, HeadDim, 1, Packed>(1)),
      most(decode_shared_bytes<E, HeadDim, 2, Packed>(0), decode_shared_bytes<E, HeadDim, 2, Packed>(1)));
}

template <Element E, int HeadDim, int ColumnTiles, bool Packed>
class DecodeBlock {
  using Layout = DecodeLayout<E, HeadDim, ColumnTiles, Packed>;
  static constexpr int columns = Layout::columns;

 public:
  KVPOLICY_DEVICE explicit DecodeBlock(const AttendParams& params)
      : p{params}, shared{shared_memory()}, heads{params.sequences * params.kv_heads} {}

  KVPOLICY_DEVICE void run() {
    scan_work();
    const long long* const place = work_prefix();
    for (int head = block_x(); head < heads; head += grid_x()) {
      if (place[head] == place[head + 1]) write_nothing(head);
    }
    const Partition line = whole_line();
    if (line.total == 0 || block_x() >= line.blocks) return;
    // What is needed after a head's rows lies in shared memory meanwhile, because rows leave it no registers.
    const int first = work().first_head;
    if (warp_index() == 0) {
      describe(slice(), first);
    } else {
      load_queries(first, thread_index() - warp_lanes, Layout::threads - warp_lanes);
    }
    sync_block();
    if (slice().index != first) {  // the slice begins within that head's last unit, the block's before
      if (slice().index == heads) return;
      load_queries(slice().index, thread_index(), Layout::threads);
      sync_block();
    }
    for (;;) {
      attend();
      sync_block();  // the head before no longer uses shared memory
      if (next().index == heads) return;
      copy_words(slice(), next(), thread_index(), Layout::threads);
      load_queries(next().index, unforeseen(thread_index()), Layout::threads);
      sync_block();
    }
  }

 private:
  KVPOLICY_DEVICE long long* work_prefix() const {
    return reinterpret_cast<long long*>(shared + Layout::line_at);
  }
  /// After scan_work.
  KVPOLICY_DEVICE Partition whole_line() const { return {work_prefix()[heads], grid_x(), Layout::warps}; }
  KVPOLICY_DEVICE WorkSlice& work() const { return *reinterpret_cast<WorkSlice*>(shared + Layout::work_at); }
  /// The head that the block works at.
  KVPOLICY_DEVICE BlockSlice& slice() const {
    return *reinterpret_cast<BlockSlice*>(shared + Layout::slice_at);
  }
  /// The head after it; its index is `heads` if there is none.
  KVPOLICY_DEVICE BlockSlice& next() const {
    return *reinterpret_cast<BlockSlice*>(shared + Layout::next_at);
  }
  /// Describes the first head from `head` on of which the block has rows; the index is `heads` if there is none.
  /// Called by all lanes of a warp.
  KVPOLICY_DEVICE void describe(BlockSlice& of_head, int head) const {
    const long long* const place = work_prefix();
    KVPOLICY_NO_UNROLL
    for (; head < heads && place[head] < work().to; ++head) {
      if (place[head] == place[head + 1]) continue;
      of_head.describe(p, whole_line(), head, place[head], place[head + 1], work().from, work().to);
      if (of_head.has_rows) return;
    }
    if (lane_index() == 0) of_head.index = heads;
  }
  KVPOLICY_DEVICE typename Layout::Queries queries() const {
    return {.plain = shared,
            .code_columns = reinterpret_cast<CodeColumn*>(shared + Layout::code_columns_at),
            .sums = reinterpret_cast<float*>(shared + Layout::query_sums_at)};
  }
  KVPOLICY_DEVICE void load_queries(int head, int thread, int threads) const {
    queries().load(p, head / p.kv_heads, head % p.kv_heads, thread, threads);
  }
  /// The cost of a head of any sequence; 0: there is nothing to read.
  KVPOLICY_DEVICE int cost(int head) const {
    const int sequence = head / p.kv_heads;
    const Request request = p.request_of(sequence);
    if (request.queries == 0) return 0;
    return cost_of(p.head_of(sequence, head % p.kv_heads), p.state_of(sequence), request);
  }
  KVPOLICY_DEVICE FinishedRow* finished() const {
    return reinterpret_cast<FinishedRow*>(shared + Layout::finished_at);
  }

  /// Fills work_prefix() with the prefix sum of the heads' weights: work_prefix()[head] is where a head begins,
  /// and work_prefix()[heads] is the total. Fills work() if the block has a slice.
  KVPOLICY_DEVICE void scan_work() const {
    long long* const place = work_prefix();
    const int share_of_thread = quotient_up(heads, Layout::threads);
    const int first = smaller(thread_index() * share_of_thread, heads);
    const int last = smaller(first + share_of_thread, heads);
    long long mine = 0;
    for (int head = first; head < last; ++head) {
      place[head] = cost(head);
      mine += place[head];
    }
    using Sums = typename Layout::Sums;
    const auto sums = Sums::of(mine, *reinterpret_cast<typename Sums::Memory*>(shared + Layout::sums_at));
    const Partition line{sums.total, grid_x(), Layout::warps};
    const long long bound = line.begin(block_x() + lane_index() % 2);  // one division for both ends
    const long long from = shuffle(bound, 0);
    const long long to = shuffle(bound, 1);
    long long before = sums.before;
    for (int head = first; head < last; ++head) {
      const long long weight = place[head];
      place[head] = before;
      if (before <= from && from < before + weight) work() = {from, to, head};
      before += weight;
    }
    if (thread_index() == 0) place[heads] = sums.total;
    sync_block();
  }

  /// Computes this block's share of slice(), whose queries are loaded, and describes next().
  KVPOLICY_DEVICE void attend() const {
    const int used_columns = slice().request.queries * p.group;
    const bool packed = Packed && slice().has_packed_rows;
    if (slice().rotated) queries().turn(p, slice());
    if constexpr (Packed) {
      if (packed) queries().convert(p, slice().head.key_hadamard);
    }
    if (slice().rotated || packed) sync_block();

    OnlineSoftmax<HeadDim, ColumnTiles> softmax;
    softmax.clear();
    if constexpr (Packed) {
      if (packed) {
        attend_packed<HeadDim, ColumnTiles, Layout::warps>(p, slice(), queries().for_codes(),
                                                           shared + Layout::stage_at, softmax);
        if (slice().head.value_hadamard) softmax.rotate_values();
      }
    }
    attend_exact<E, HeadDim, ColumnTiles, Layout::warps>(p, slice(), queries().plain, queries().turned(),
                                                         softmax);
    const typename Layout::Merge warps{.values = reinterpret_cast<float*>(shared),
                                       .states = reinterpret_cast<PartialState*>(shared + Layout::states_at)};
    warps.merge_states(softmax, [&] { describe(next(), slice().index + 1); });
    const FirstRows<HeadDim, Packed> first_rows{p, next(), next().index < heads};
    warps.merge_values(softmax, used_columns);
    first_rows.request();
    write(slice().index, unforeseen(thread_index()), warps, used_columns);
  }

  /// Writes this block's share of a head, or merges it with others'. What follows from `head` and `thread` is not
  /// computed before rows are read, because they are not known there.
  KVPOLICY_DEVICE void write(int head, int thread, const typename Layout::Merge& warps,
                             int used_columns) const {
    if (slice().first_block == slice().last_block) {
      if (thread < used_columns) finish(head, thread, warps.state(thread));
      sync_block();
      for (int i = thread; i < used_columns * HeadDim; i += thread_count()) {
        const int column = i / HeadDim;
        out(head, column)[i % HeadDim] =
            from_float<E>(warps.value(column, i % HeadDim) * finished()[column].factor);
      }
      return;
    }
    const long long slot = Partials::slot(block_x(), block_x() == slice().first_block);
    for (int i = thread; i < used_columns * HeadDim; i += thread_count()) {
      p.workspace.values[slot * columns * HeadDim + i] = warps.value(i / HeadDim, i % HeadDim);
    }
    if (thread < used_columns) p.workspace.states[slot * columns + thread] = warps.state(thread);
    merge_if_last(head);
  }

  /// The last one to get here of the blocks that share a head merges their results.
  KVPOLICY_DEVICE void merge_if_last(int head) const {
    const Partials partials{p.workspace, slice().first_block, slice().last_block - slice().first_block + 1};
    const int used_columns = slice().request.queries * p.group;
    auto& arrived = *reinterpret_cast<std::uint32_t*>(shared);
    if (!is_last_block(&p.workspace.tickets[head], partials.count, arrived)) return;
    for (int i = thread_index(); i < used_columns * HeadDim / 4; i += thread_count()) {
      const int column = i / (HeadDim / 4);
      const int channel = i % (HeadDim / 4) * 4;
      const MergedValues all = merge_partials<columns, HeadDim>(partials, column, channel);
      const FinishedRow row = finish_row(all.state, sink_logit(head, column));
      if (channel == 0) write_log_sum_exp(head, column, row);
      *reinterpret_cast<Words2*>(out(head, column) + channel) =
          Words2{{pack<E>(all.value[0] * row.factor, all.value[1] * row.factor),
                  pack<E>(all.value[2] * row.factor, all.value[3] * row.factor)}};
    }
  }

  /// Turns the state of a column into the factor for its values and the log-sum-exp.
  KVPOLICY_DEVICE void finish(int head, int column, const PartialState& state) const {
    finished()[column] = finish_row(state, sink_logit(head, column));
    write_log_sum_exp(head, column, finished()[column]);
  }
  KVPOLICY_DEVICE const float* sink_logit(int head, int column) const {
    return p.attention_sink_bias == nullptr ? nullptr : p.attention_sink_bias + query_head(head, column);
  }
  KVPOLICY_DEVICE void write_log_sum_exp(int head, int column, const FinishedRow& row) const {
    float* log_sum_exp = p.log_sum_exp_of(head / p.kv_heads);
    if (log_sum_exp == nullptr) return;
    log_sum_exp[column / p.group * p.state_heads() + query_head(head, column)] = row.log_sum_exp;
  }
  /// Writes the output of a head without visible rows.
  KVPOLICY_DEVICE void write_nothing(int head) const {
    const int used_columns = p.request_of(head / p.kv_heads).queries * p.group;
    if (thread_index() < used_columns) finish(head, thread_index(), {minus_infinity(), 0.0F});
    for (int i = thread_index(); i < used_columns * HeadDim; i += thread_count()) {
      out(head, i / HeadDim)[i % HeadDim] = 0;
    }
  }

  KVPOLICY_DEVICE int query_head(int head, int column) const {
    return head % p.kv_heads * p.group + column % p.group;
  }
  KVPOLICY_DEVICE std::uint16_t* out(int head, int column) const {
    const CallTokens tokens = p.tokens_of(head / p.kv_heads);
    return p.out.row(tokens.sequence, tokens.first + column / p.group, query_head(head, column));
  }

  const AttendParams& p;
  std::byte* shared;
  int heads;
};

/// Requires queries * group <= 8 * ColumnTiles, of every sequence. Runs in `decode_threads` threads and any
/// number of blocks, ideally one for each multiprocessor. `Packed`: heads may be quantised.
template <Element E, int HeadDim, int ColumnTiles, bool Packed>
KVPOLICY_KERNEL((decode_threads<HeadDim, ColumnTiles, Packed>), 1)
decode_kernel(const KVPOLICY_GRID_CONSTANT AttendParams p) {
  wait_for_kernel_before();
  DecodeBlock<E, HeadDim, ColumnTiles, Packed>{p}.run();
}

}  // namespace kvpolicy::gpu
