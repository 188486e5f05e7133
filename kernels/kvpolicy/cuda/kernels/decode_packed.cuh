// SPDX-License-Identifier: Apache-2.0
//
// One warp reads the quantised rows of a block's share of a head and multiplies the codes, as halves,
// with the queries in half: packed_keys.cuh and packed_values.cuh say where scales and zeros go.
// Used by decode.cuh.
#pragma once

#include <type_traits>

#include <kvpolicy/cuda/kernels/block_slice.cuh>
#include <kvpolicy/cuda/kernels/decode_queries.cuh>
#include <kvpolicy/cuda/kernels/online_softmax.cuh>
#include <kvpolicy/cuda/kernels/packed_keys.cuh>
#include <kvpolicy/cuda/kernels/packed_values.cuh>

namespace kvpolicy::gpu {

/// Whether a unit's values are requested before its keys are used, as in decode_exact.cuh. Small
/// groups take more registers.
template <class Shape, int ColumnTiles>
inline constexpr bool packed_loads_overlap = Shape::head_dim * (1 + ColumnTiles) < 384 && Shape::finest == 32;

/// Shared memory that a warp needs for scales and zeros, whatever the head: that of the smallest
/// groups of keys.
template <int HeadDim, int ColumnTiles>
inline constexpr int packed_stage_bytes =
    PackedKeys<PackedShape<4, 4, HeadDim, Grouping::channels, 8>, ColumnTiles>::staged_bytes;

template <class Shape, int ColumnTiles, int Warps>
KVPOLICY_DEVICE void attend_packed(const PackedHead& head,
                                   OnlineSoftmax<Shape::head_dim, ColumnTiles>& softmax) {
  using Keys = PackedKeys<Shape, ColumnTiles>;
  using Values = PackedValues<Shape, ColumnTiles>;
  constexpr bool staged = Shape::grouping != Grouping::row;
  constexpr bool overlaps = packed_loads_overlap<Shape, ColumnTiles>;
  // Scales of values lie after those of keys, or else in their place.
  constexpr int values_at = overlaps ? Keys::staged_bytes : Keys::lasting_bytes;
  static_assert(Keys::staged_bytes <= packed_stage_bytes<Shape::head_dim, ColumnTiles>);
  static_assert(values_at + Values::staged_bytes <= packed_stage_bytes<Shape::head_dim, ColumnTiles>);
  const AttendParams& p = head.p;
  const BlockSlice& slice = head.slice;

  UnitCursor at = UnitCursor::first(slice);
  bool more = at.skip(slice, true, warp_index());
  if (!more) return;
  typename Shape::KeyTile key_codes[Shape::tiles];
  typename Shape::ValueTile value_codes[Shape::tiles];
  Keys keys{head};
  Values values{head, head.stage + values_at};
  const auto request_keys = [&](const TileAddress& address, bool wanted) KVPOLICY_INLINE_LAMBDA {
    if (wanted) {
      load_codes(key_codes, address, 0, head.widths.keys, head.lane);
      keys.request(address);
    }
    if constexpr (staged) cp_async_commit();
  };
  const auto request_values = [&](const TileAddress& address, bool wanted) KVPOLICY_INLINE_LAMBDA {
    if (wanted) {
      load_codes(value_codes, address, head.layout.values_offset, head.widths.values, head.lane);
      values.request(address);
    }
    if constexpr (staged) cp_async_commit();
  };
  // Waits for what was requested before the latest request, or for all.
  const auto arrive = [] {
    if constexpr (staged) {
      cp_async_wait<overlaps ? 1 : 0>();
      sync_warp();
    }
  };
  const auto leave = [] {  // before shared memory is written again
    if constexpr (staged) sync_warp();
  };

  TileAddress address = address_of_tile(p, slice, at, Shape::tiles);
  const auto advance = [&] {
    more = at.skip(slice, true, Warps);
    if (more) address = address_of_tile(p, slice, at, Shape::tiles);
  };
  request_keys(address, true);
  if constexpr (overlaps) request_values(address, true);
  while (more) {
    const UnitCursor now = at;
    const TileAddress here = address;
    if constexpr (overlaps) advance();

    float logits[Shape::tiles][ColumnTiles][4];
    arrive();
    if constexpr (Shape::widens) widen_codes(key_codes, head.widths.keys);
    keys.logits(logits, key_codes);
    leave();
    if constexpr (!overlaps) advance();  // later, for want of registers
    if constexpr (overlaps) request_keys(address, more);
    cap_and_mask(logits, p, slice, now.segment, now.unit * Shape::rows - slice.skipped[now.segment]);
    softmax.weigh(logits, [&](int n, int j, float factor) { values.rescale(n, j, factor); });
    if constexpr (!overlaps) request_values(here, true);
    arrive();
    if constexpr (Shape::widens) widen_codes(value_codes, head.widths.values);
    values.add(softmax, value_codes, logits);
    leave();
    if constexpr (overlaps) {
      request_values(address, more);
    } else {
      request_keys(address, more);
    }
  }
  values.finish(softmax);
}

/// Dispatches by the widths of the head's codes and by its groups. `stage` has packed_stage_bytes for each warp.
template <int HeadDim, int ColumnTiles, int Warps>
KVPOLICY_DEVICE void attend_packed(const AttendParams& p, const BlockSlice& slice, const CodeQueries& queries,
                                   std::byte* stage, OnlineSoftmax<HeadDim, ColumnTiles>& softmax) {
  const HeadView& view = slice.head;
  const bool by_rows = view.key_per_channel;
  const bool one_group = !by_rows && view.key_group == HeadDim && view.value_group == HeadDim;
  // Chosen chunks may begin anywhere in a group of rows.
  const bool fine = smaller(view.key_group, view.value_group) < 32 ||
                    (by_rows && view.chunk_rows > 0 && (view.chunk_rows % 32 != 0 || view.sinks % 32 != 0));
  const Sides widths = view.widths();
  const auto run_as = [&](auto key_bits, auto value_bits, auto grouping, auto finest) KVPOLICY_INLINE_LAMBDA {
    constexpr int KeyBits = decltype(key_bits)::value;
    constexpr int ValueBits = decltype(value_bits)::value;
    constexpr Grouping Groups = decltype(grouping)::value;
    using Shape = PackedShape<KeyBits, ValueBits, HeadDim, Groups, decltype(finest)::value>;
    const Sides of_shape =
        Shape::widens ? Sides{unforeseen(widths.keys), unforeseen(widths.values)} : Sides{KeyBits, ValueBits};
    const PackedHead head{
        .p = p,
        .slice = slice,
        .widths = of_shape,
        .layout{of_shape, HeadDim, p.page_rows, Groups == Grouping::rows,
                Groups == Grouping::row ? HeadDim : view.key_group,
                Groups == Grouping::row ? HeadDim : view.value_group},
        .queries = queries,
        .stage = stage + unforeseen(warp_index()) * packed_stage_bytes<HeadDim, ColumnTiles>,
        .lane = unforeseen(lane_index()) & (warp_lanes - 1)};
    attend_packed<Shape, ColumnTiles, Warps>(head, softmax);
  };
  const auto run = [&](auto keys, auto values) KVPOLICY_INLINE_LAMBDA {
    constexpr std::integral_constant<Grouping, Grouping::row> row{};
    constexpr std::integral_constant<Grouping, Grouping::channels> channels{};
    constexpr std::integral_constant<Grouping, Grouping::rows> rows{};
    constexpr std::integral_constant<int, 32> coarse{};
    constexpr std::integral_constant<int, 8> finest{};
    if constexpr (decltype(keys)::value != any_width) {  // a row may be read as one group of channels as well
      if (one_group) return run_as(keys, values, row, coarse);
    }
    if (by_rows) return fine ? run_as(keys, values, rows, finest) : run_as(keys, values, rows, coarse);
    return fine ? run_as(keys, values, channels, finest) : run_as(keys, values, channels, coarse);
  };
  constexpr std::integral_constant<int, 8> eight{};
  constexpr std::integral_constant<int, 4> four{};
  constexpr std::integral_constant<int, 2> two{};
  constexpr std::integral_constant<int, any_width> any{};
  if (has_own_shape(widths)) {
    if (widths.keys == 2) return run(two, two);
    if (widths.keys == 4) return widths.values == 4 ? run(four, four) : run(four, two);
    if (widths.values == 8) return run(eight, eight);
    return widths.values == 4 ? run(eight, four) : run(eight, two);
  }
  run(any, any);
}

}  // namespace kvpolicy::gpu
