// SPDX-License-Identifier: Apache-2.0
//
// How large the logits of rows in halves can be, by the upper halves of their keys (Read::bounded). core/key_width.hpp
// says why that bounds them; choose_units.cuh chooses by it. A unit is a tile of 16 rows, because the decode kernel
// reads tiles whole.
//
// The logits of upper halves are those of the decode kernel (packed_keys.cuh). Their widths are sums over channels of
// the query's magnitudes times scales and times the zeros' magnitudes. For keys with scales per channel these sums are
// products as well, of operands without their signs, for all rows of a group at once.
#pragma once

#include <cstdint>

#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/key_width.hpp>
#include <kvpolicy/cuda/kernels/attend.cuh>
#include <kvpolicy/cuda/kernels/block_slice.cuh>
#include <kvpolicy/cuda/kernels/decode.cuh>
#include <kvpolicy/cuda/kernels/decode_queries.cuh>
#include <kvpolicy/cuda/kernels/packed_keys.cuh>

namespace kvpolicy::gpu {

/// What a call with a bound keeps until its end. All pointers are device pointers; `columns` are queries times group.
struct BoundMemory {
  HeadView* heads = nullptr;      ///< [kv_heads], as the call reads them
  Selections* choices = nullptr;  ///< [kv_heads]: the chosen units, as chunks of 16 rows
  int* ends = nullptr;            ///< [kv_heads]
  int* counts = nullptr;          ///< [kv_heads]
  int* chosen = nullptr;          ///< [kv_heads, units], ascending
  float* most = nullptr;     ///< [kv_heads, columns, units]: log2 of what a unit can weigh; NaN: not known
  float* likely = nullptr;   ///< the same: of what it may be expected to weigh
  float* largest = nullptr;  ///< [kv_heads, units], of choose_units.cuh
  float* slack = nullptr;  ///< [kv_heads, blocks, columns]: how far arithmetic may have a logit off, in log2
  float* log_sum_exp = nullptr;   ///< [tokens, q_heads]
  CallSequence* again = nullptr;  ///< the call once more, with 0 tokens if that is not needed
};

/// What is bounded. Of `call` the heads are those of the cache.
struct BoundParams {
  AttendParams call = {};
  BoundMemory memory = {};
  int units = 0;   ///< room for those of a head; 0: all rows are read
  int blocks = 1;  ///< that share a head
  int most_units = 0;
  float epsilon = 0.0F;
  bool sure = true;                         ///< Certainty::sure; else Certainty::none
  float* unread = nullptr;                  ///< as ReadBound has it, or null
  unsigned long long* rows_read = nullptr;  ///< as ReadBound has it, or null

  KVPOLICY_HOST_DEVICE int columns() const { return call.request.queries * call.group; }
};

inline constexpr int bound_threads = 256;

/// The units of a head whose rows are bounded; 0 for a head that reads all its rows, as one does of a text that has
/// outgrown the room that a graph was recorded with.
KVPOLICY_HOST_DEVICE int bounded_units(const BoundParams& p, const HeadView& head, const LayerState& state) {
  const bool can_be = p.units > 0 && head.key_encoding == Encoding::uint4x2 && head.recent == 0 &&
                      head.evicted == 0 && head.slow == nullptr;
  const int units = can_be ? larger(head.packed_end(state.committed) - head.sinks, 0) / tile_rows : 0;
  return units <= p.units ? units : 0;
}

/// Whose exact rows alone are read, until some units are chosen.
KVPOLICY_HOST_DEVICE HeadView bounded_view(const BoundParams& p, const HeadView& head, int index, int units) {
  HeadView view = head;
  view.chunk_rows = units > 0 ? tile_rows : 0;
  view.chunk_origin = head.sinks;
  view.budget_chunks = p.units;
  view.selections = p.memory.choices + index;
  return view;
}

/// What arithmetic may have a logit off by, as a part of the sum of |query| (|zero| + 15 |scale|): a query, and where
/// keys have scales per channel its product with a scale, are rounded to half, once for the bound and once for the
/// row itself.
inline constexpr float bound_rounding = 0x1p-9F;

/// The sums that a width consists of, of two columns.
struct WidthSums {
  float scales[2] = {0.0F, 0.0F};  ///< of |query| |scale|
  float zeros[2] = {0.0F, 0.0F};   ///< of |query| |zero|
};

/// How a block's shared memory is divided.
template <Element E, int HeadDim, int ColumnTiles>
struct BoundLayout {
  static constexpr int warps = bound_threads / warp_lanes;
  static constexpr int columns = ColumnTiles * tile_columns;
  static constexpr int vectors = HeadDim / 8;
  using Queries = DecodeQueries<E, HeadDim, ColumnTiles, true>;
  static constexpr int aligned(int size) { return (size + 15) / 16 * 16; }
  static constexpr int stage_at = aligned(Queries::bytes);
  static constexpr int slice_at = stage_at + warps * packed_stage_bytes<HeadDim, ColumnTiles>;
  static constexpr int code_columns_at = slice_at + aligned(sizeof(BlockSlice));
  static constexpr int sums_at = code_columns_at + aligned(columns * sizeof(CodeColumn));
  static constexpr int magnitudes_at = sums_at + columns * vectors * 4;
  static constexpr int slack_at = magnitudes_at + columns * vectors * 4;
  static constexpr int bytes = slack_at + warps * columns * 4;
};
template <Element E, int HeadDim, int ColumnTiles>
constexpr std::size_t bound_shared_bytes() {
  return BoundLayout<E, HeadDim, ColumnTiles>::bytes;
}

template <Element E, int HeadDim, int ColumnTiles>
class BoundBlock {
  using KeyWidth = kvpolicy::detail::KeyWidth;
  using Layout = BoundLayout<E, HeadDim, ColumnTiles>;
  static constexpr int columns = Layout::columns;
  static constexpr int vectors = Layout::vectors;

 public:
  KVPOLICY_DEVICE explicit BoundBlock(const BoundParams& params) : p{params}, shared{shared_memory()} {}

  KVPOLICY_DEVICE void run() {
    const HeadView& head = p.call.heads[block_y()];
    const LayerState& state = *p.call.states;
    units = bounded_units(p, head, state);
    if (block_x() == 0 && thread_index() == 0) describe(head, state);
    if (units == 0) return;
    if (thread_index() == 0) {
      slice().head = head;
      slice().head.upper_half = true;
      slice().request = p.call.request;
    }
    const typename Layout::Queries queries{
        .plain = shared,
        .code_columns = reinterpret_cast<CodeColumn*>(shared + Layout::code_columns_at),
        .sums = reinterpret_cast<float*>(shared + Layout::sums_at)};
    queries.load(p.call, 0, block_y(), thread_index(), thread_count());
    sync_block();
    queries.convert(p.call, head.key_hadamard);
    sync_block();
    codes = queries.for_codes();
    sum_magnitudes();
    sync_block();
    const bool fine = head.key_group < 32;
    constexpr std::integral_constant<Grouping, Grouping::channels> channels{};
    constexpr std::integral_constant<Grouping, Grouping::rows> rows{};
    constexpr std::integral_constant<int, 32> coarse{};
    constexpr std::integral_constant<int, 8> finest{};
    if (head.key_per_channel) {
      fine ? bound(rows, finest) : bound(rows, coarse);
    } else {
      fine ? bound(channels, finest) : bound(channels, coarse);
    }
    sync_block();
    for (int column = thread_index(); column < p.columns(); column += thread_count()) {
      float most = 0.0F;
      for (int warp = 0; warp < Layout::warps; ++warp) most = more(most, slacks()[warp * columns + column]);
      p.memory.slack[(block_y() * p.blocks + block_x()) * p.columns() + column] = most;
    }
  }

 private:
  KVPOLICY_DEVICE BlockSlice& slice() const {
    return *reinterpret_cast<BlockSlice*>(shared + Layout::slice_at);
  }
  KVPOLICY_DEVICE float* magnitudes() const {
    return reinterpret_cast<float*>(shared + Layout::magnitudes_at);
  }
  KVPOLICY_DEVICE float* slacks() const { return reinterpret_cast<float*>(shared + Layout::slack_at); }
  KVPOLICY_DEVICE static float more(float a, float b) { return a > b ? a : b; }
  KVPOLICY_DEVICE static float size_of(float x) { return x < 0.0F ? -x : x; }

  /// The head as the call reads it, with nothing chosen yet.
  KVPOLICY_DEVICE void describe(const HeadView& head, const LayerState& state) const {
    const BoundMemory& memory = p.memory;
    memory.heads[block_y()] = bounded_view(p, head, block_y(), units);
    memory.ends[block_y()] = head.packed_end(state.committed);
    memory.counts[block_y()] = 0;
    memory.choices[block_y()] = {.latest = 0,
                                 .valid = units > 0 ? 1 : 0,
                                 .slots = 1,
                                 .tokens = nullptr,
                                 .ends = memory.ends + block_y(),
                                 .counts = memory.counts + block_y(),
                                 .chunks = memory.chosen + block_y() * static_cast<long long>(p.units)};
    if (block_y() > 0) return;
    *memory.again = {.read_heads = memory.heads,
                     .heads = p.call.heads,
                     .state = const_cast<LayerState*>(p.call.states),
                     .tree = p.call.request.tree,
                     .selected = 1};
  }

  /// Sums of the magnitudes of the queries' halves, of 8 channels each.
  KVPOLICY_DEVICE void sum_magnitudes() const {
    using Operands = QueryOperands<HeadDim, ColumnTiles>;
    for (int i = thread_index(); i < columns * vectors; i += thread_count()) {
      const Words4 q = *Operands::place(const_cast<std::byte*>(codes.halves), i / vectors, i % vectors * 8);
      float sum = 0.0F;
      KVPOLICY_UNROLL
      for (int w = 0; w < 4; ++w) sum += size_of(low_half(q.word[w])) + size_of(high_half(q.word[w]));
      magnitudes()[i] = sum;
    }
  }

  template <class Groups, class Finest>
  KVPOLICY_DEVICE void bound(Groups, Finest) const {
    using Shape = PackedShape<any_width, any_width, HeadDim, Groups::value, Finest::value>;
    using Keys = PackedKeys<Shape, ColumnTiles>;
    static_assert(Shape::tiles == 2);
    const HeadView& view = slice().head;
    const Sides widths = view.widths();
    const PackedHead head{
        .p = p.call,
        .slice = slice(),
        .widths = widths,
        .layout = view.packed_layout(HeadDim, p.call.page_rows),
        .queries = codes,
        .stage = shared + Layout::stage_at + warp_index() * packed_stage_bytes<HeadDim, ColumnTiles>,
        .lane = lane_index()};
    Keys keys{head};
    sync_warp();
    float slack[ColumnTiles][2] = {};
    float magnitude[ColumnTiles][2];  // of this lane's columns, over all channels
    KVPOLICY_UNROLL
    for (int n = 0; n < ColumnTiles; ++n) {
      KVPOLICY_UNROLL
      for (int j = 0; j < 2; ++j) {
        magnitude[n][j] = 0.0F;
        const float* of_column = magnitudes() + (n * tile_columns + lane_index() % 4 * 2 + j) * vectors;
        for (int i = 0; i < vectors; ++i) magnitude[n][j] += of_column[i];
      }
    }
    const int warps = grid_x() * Layout::warps;
    KVPOLICY_NO_UNROLL
    for (int pair = block_x() * Layout::warps + warp_index(); pair < units / 2; pair += warps) {
      const int slot = (pair * 2 + lane_index() % 2) * tile_rows;
      const TileAddress address{
          reinterpret_cast<unsigned long long>(view.packed_pages[page_of(slot, p.call.page_rows)]),
          place_in_page(slot, p.call.page_rows)};
      typename Shape::KeyTile tiles[2];
      load_codes(tiles, address, 0, widths.keys, head.lane);
      keys.request(address);
      cp_async_commit();
      cp_async_wait<0>();
      sync_warp();
      widen_codes(tiles, widths.keys);
      float logits[2][ColumnTiles][4];
      keys.logits(logits, tiles);
      KVPOLICY_UNROLL
      for (int n = 0; n < ColumnTiles; ++n) {
        WidthSums of_rows;  // the same for all rows of a group, which has a tile or both
        KVPOLICY_UNROLL
        for (int tile = 0; tile < 2; ++tile) {
          if constexpr (Groups::value == Grouping::rows) {
            if (tile == 0 || Finest::value < 32) of_rows = sums_of_channels(head, address.of(tile), n);
          }
          const auto sums = [&](int upper) {
            if constexpr (Groups::value == Grouping::rows) {
              return of_rows;
            } else {
              return sums_of_groups(head, address.of(tile), upper * 8 + lane_index() / 4, n);
            }
          };
          bound_unit(logits[tile][n], sums, magnitude[n], pair * 2 + tile, n, slack[n]);
        }
      }
      sync_warp();  // the staged scales are read
    }
    KVPOLICY_UNROLL
    for (int n = 0; n < ColumnTiles; ++n) {
      KVPOLICY_UNROLL
      for (int j = 0; j < 2; ++j) {
        if (lane_index() < 4) {
          slacks()[warp_index() * columns + n * tile_columns + lane_index() * 2 + j] = slack[n][j];
        }
      }
    }
  }

  /// The sums for a row of a tile, of keys with scales per token.
  KVPOLICY_DEVICE WidthSums sums_of_groups(const PackedHead& head, const TileAddress& tile, int row,
                                           int n) const {
    const HeadView& view = slice().head;
    const int vectors_of_group = view.key_group / 8;
    const int at = tile.row + row;
    const auto* scales = reinterpret_cast<const std::uint16_t*>(tile.at(head.layout.key_scales_offset)) + at;
    const auto* zeros = reinterpret_cast<const std::uint16_t*>(tile.at(head.layout.key_zeros_offset)) + at;
    WidthSums sums;
    KVPOLICY_NO_UNROLL
    for (int group = 0; group * vectors_of_group < vectors; ++group) {
      const float scale = to_float<float16>(scales[group * p.call.page_rows]);
      const float zero = size_of(to_float<float16>(zeros[group * p.call.page_rows]));
      KVPOLICY_UNROLL
      for (int j = 0; j < 2; ++j) {
        const float* of_column = magnitudes() + (n * tile_columns + lane_index() % 4 * 2 + j) * vectors;
        float magnitude = 0.0F;
        for (int i = 0; i < vectors_of_group; ++i) magnitude += of_column[group * vectors_of_group + i];
        sums.scales[j] += magnitude * scale;
        sums.zeros[j] += magnitude * zero;
      }
    }
    return sums;
  }

  /// The sums for all rows of a tile, of keys with scales per channel, by products without signs.
  KVPOLICY_DEVICE WidthSums sums_of_channels(const PackedHead& head, const TileAddress& tile, int n) const {
    using Queries = QueryOperands<HeadDim, ColumnTiles>;
    constexpr std::uint32_t magnitude = 0x7fff7fffU;
    const int of_rows = page_of(tile.row, slice().head.key_group) * HeadDim * 2;
    const std::byte* scales = tile.at(head.layout.key_scales_offset + of_rows);
    const std::byte* zeros = tile.at(head.layout.key_zeros_offset + of_rows);
    float products[4] = {0.0F, 0.0F, 0.0F, 0.0F};
    KVPOLICY_UNROLL
    for (int pair = 0; pair < HeadDim / 32; ++pair) {
      const int vector = pair * 4 + lane_index() % 4;
      const Words4 scale = *(reinterpret_cast<const Words4*>(scales) + vector);
      const Words4 zero = *(reinterpret_cast<const Words4*>(zeros) + vector);
      const Words4 q = Queries::of_steps(codes.halves, pair, n);
      KVPOLICY_UNROLL
      for (int step = 0; step < 2; ++step) {
        const std::uint32_t a[4] = {zero.word[2 * step] & magnitude, scale.word[2 * step] & magnitude,
                                    zero.word[2 * step + 1] & magnitude,
                                    scale.word[2 * step + 1] & magnitude};
        multiply_add<float16>(products, a, q.word[2 * step] & magnitude, q.word[2 * step + 1] & magnitude);
      }
    }
    return {.scales = {products[2], products[3]}, .zeros = {products[0], products[1]}};
  }

  /// Writes the bounds of a unit for 8 columns. `logits` are in the layout of products; `sums(upper)` are those of rows
  /// lane / 4 + 8 upper for the columns of this lane, whose largest slacks are kept.
  template <class Sums>
  KVPOLICY_DEVICE void bound_unit(const float (&logits)[4], const Sums& sums, const float (&magnitude)[2],
                                  int unit, int n, float (&slack)[2]) const {
    float highest[2][2], width[2] = {0.0F, 0.0F};
    KVPOLICY_UNROLL
    for (int upper = 0; upper < 2; ++upper) {
      const WidthSums own = sums(upper);
      KVPOLICY_UNROLL
      for (int j = 0; j < 2; ++j) {
        const int column = n * tile_columns + lane_index() % 4 * 2 + j;
        const float to_logit = size_of(codes.columns[column].scale);
        const float arithmetic =
            bound_rounding * to_logit * (own.zeros[j] + 15.0F * own.scales[j]) + KeyWidth::smallest_error;
        float wide = 0.0F;
        if (p.sure) {
          wide = arithmetic +
                 to_logit * (KeyWidth::half_range * own.scales[j] + KeyWidth::zero_error * own.zeros[j] +
                             KeyWidth::smallest_error * magnitude[j]);
        }
        float bound = logits[upper * 2 + j] + wide;
        if (p.call.softcap != 0.0F) {
          const float error = p.call.softcap * log2_e * kvpolicy::detail::cap_error;
          bound = capped(bound, p.call.softcap) + error;
          wide += error;
        }
        highest[upper][j] = bound;
        width[j] = more(width[j], wide);
        slack[j] = more(slack[j], arithmetic);
      }
    }
    KVPOLICY_UNROLL
    for (int j = 0; j < 2; ++j) {
      // Numbers that are not finite come through as NaN, whatever the others are.
      bool unknown = !(size_of(highest[0][j]) < 0x1p126F) || !(size_of(highest[1][j]) < 0x1p126F);
      float top = more(highest[0][j], highest[1][j]);
      KVPOLICY_UNROLL
      for (int mask = 4; mask < warp_lanes; mask *= 2) {
        top = more(top, shuffle_xor(top, mask));
        width[j] = more(width[j], shuffle_xor(width[j], mask));
        slack[j] = more(slack[j], shuffle_xor(slack[j], mask));
        unknown = shuffle_xor(unknown ? 1 : 0, mask) != 0 || unknown;
      }
      float mass = exp2_approximate(highest[0][j] - top) + exp2_approximate(highest[1][j] - top);
      KVPOLICY_UNROLL
      for (int mask = 4; mask < warp_lanes; mask *= 2) mass += shuffle_xor(mass, mask);
      const int column = n * tile_columns + lane_index() * 2 + j;
      if (lane_index() >= 4 || column >= p.columns()) continue;
      const long long place = (block_y() * static_cast<long long>(p.columns()) + column) * p.units + unit;
      const float most = top + log2_exact(mass) + 0x1p-14F + 0x1p-20F * size_of(top);
      p.memory.most[place] = unknown ? float_of_bits(0x7fc00000U) : most;
      p.memory.likely[place] = unknown ? float_of_bits(0x7fc00000U) : most - width[j];
    }
  }

  const BoundParams& p;
  std::byte* shared;
  int units = 0;
  CodeQueries codes = {};
};

/// Grid (BoundParams::blocks, kv_heads), bound_shared_bytes(). Requires columns() <= 8 * ColumnTiles, where units > 0.
template <Element E, int HeadDim, int ColumnTiles>
KVPOLICY_KERNEL(bound_threads, 1)
bound_kernel(const KVPOLICY_GRID_CONSTANT BoundParams p) {
  BoundBlock<E, HeadDim, ColumnTiles>{p}.run();
}

}  // namespace kvpolicy::gpu
