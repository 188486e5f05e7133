// SPDX-License-Identifier: Apache-2.0
//
// One warp reads the exact rows of a block's share of a head: cached rows and the call's own. Used
// by decode.cuh.
#pragma once

#include <kvpolicy/cuda/kernels/block_slice.cuh>
#include <kvpolicy/cuda/kernels/fragments.cuh>
#include <kvpolicy/cuda/kernels/online_softmax.cuh>

namespace kvpolicy::gpu {

/// Addresses of a row's key and value. Lane i computes those of row i % 16 of a unit, and the lanes
/// that load the row get them by shuffle. So pages, rings, strides and lists of chunks all cost the
/// same and need no branch.
struct RowAddress {
  unsigned long long key;
  unsigned long long value;
};

/// Which row of a segment this lane computes the address of. Rows beyond the end repeat the last row, which some query
/// sees, so its numbers are finite.
KVPOLICY_DEVICE int row_of_lane(const DeviceSegment& segment, const UnitCursor& at) {
  return segment.row(smaller(at.unit * tile_rows + lane_index() % tile_rows, segment.rows - 1));
}

template <int HeadDim>
KVPOLICY_DEVICE RowAddress address_of_row(const AttendParams& p, const BlockSlice& slice,
                                          const UnitCursor& at) {
  const DeviceSegment& segment = slice.list.segment[at.segment];
  const int row = row_of_lane(segment, at);
  if (segment.source == DeviceSegment::Source::call) {
    const CallTokens& own = slice.tokens;
    return {reinterpret_cast<unsigned long long>(p.k.row(own.sequence, own.first + row, slice.kv_head)),
            reinterpret_cast<unsigned long long>(p.v.row(own.sequence, own.first + row, slice.kv_head))};
  }
  const int slot = slice.head.exact_slot(row);
  const auto page = reinterpret_cast<unsigned long long>(slice.head.exact_pages[page_of(slot, p.page_rows)]);
  const auto key =
      page + static_cast<unsigned>(place_in_page(slot, p.page_rows) * slice.head.exact_row_stride);
  return {key, key + static_cast<unsigned long long>(slice.head.exact_values_offset)};
}

KVPOLICY_DEVICE const std::byte* address_from(unsigned long long address, int lane) {
  return reinterpret_cast<const std::byte*>(shuffle(address, lane));
}

/// `offset`: bytes to the first of the channels.
template <int Channels>
KVPOLICY_DEVICE void load_keys(KeyTile<Channels>& keys, const RowAddress& address, int offset = 0) {
  const int g = lane_index() / 4;
  keys.load(address_from(address.key, g) + offset, address_from(address.key, g + 8) + offset);
}
template <int HeadDim>
KVPOLICY_DEVICE void load_values(ValueTile<HeadDim>& values, const RowAddress& address) {
  const int t = lane_index() % 4;
  const std::byte* const rows[4] = {
      address_from(address.value, 2 * t), address_from(address.value, 2 * t + 1),
      address_from(address.value, 2 * t + 8), address_from(address.value, 2 * t + 9)};
  values.load(rows);
}

/// The keys of the next unit are
/// loaded as soon as the products with the current keys are done, and its values as soon as the
/// current values are added, so loads are always in flight. If registers do not suffice, the two
/// halves of the keys and then the values are loaded one after another, and only other warps' loads
/// are in flight meanwhile.
template <Element E, int HeadDim, int ColumnTiles, int Warps>
KVPOLICY_DEVICE void attend_exact(const AttendParams& p, const BlockSlice& slice, const std::byte* plain,
                                  const std::byte* turned, OnlineSoftmax<HeadDim, ColumnTiles>& softmax) {
  constexpr bool overlaps = HeadDim * (1 + ColumnTiles) < 768;
  UnitCursor at = UnitCursor::first(slice);
  bool more = at.skip(slice, false, warp_index());
  if (!more) return;
  RowAddress address = address_of_row<HeadDim>(p, slice, at);
  constexpr int key_channels = overlaps ? HeadDim : HeadDim / 2;
  constexpr int key_step = QueryOperands<key_channels, ColumnTiles>::bytes;
  KeyTile<key_channels> keys;
  ValueTile<HeadDim> values;
  if constexpr (overlaps) {
    load_keys(keys, address);
    load_values(values, address);
  }
  while (more) {
    const UnitCursor now = at;
    more = at.skip(slice, false, Warps);
    if (overlaps && more) address = address_of_row<HeadDim>(p, slice, at);

    float logits[1][ColumnTiles][4] = {};
    const std::byte* queries = slice.list.segment[now.segment].rotated ? turned : plain;
    if constexpr (overlaps) {
      keys.template multiply<E>(logits[0], queries);
      if (more) load_keys(keys, address);
    } else {
      load_keys(keys, address);
      keys.template multiply<E>(logits[0], queries);
      load_keys(keys, address, 2 * key_channels);
      keys.template multiply<E>(logits[0], queries + key_step);
    }
    KVPOLICY_UNROLL
    for (int n = 0; n < ColumnTiles; ++n) {
      KVPOLICY_UNROLL
      for (int i = 0; i < 4; ++i) logits[0][n][i] *= p.scale_log2;
    }
    cap_and_mask(logits, p, slice, now.segment, now.unit * tile_rows);
    softmax.weigh(logits);
    std::uint32_t weights[ColumnTiles][2];
    weight_operands<E>(weights, logits[0]);
    if constexpr (!overlaps) {
      load_values(values, address);
      if (more) address = address_of_row<HeadDim>(p, slice, at);
    }
    KVPOLICY_UNROLL
    for (int step = 0; step < HeadDim / 16; ++step) {
      std::uint32_t a[4];
      values.operand(a, step);
      softmax.template add<E>(step, a, weights);
    }
    if (overlaps && more) load_values(values, address);
  }
}

}  // namespace kvpolicy::gpu
