// SPDX-License-Identifier: Apache-2.0
//
// Holds rows of keys in a warp's registers and multiplies them with any number of tiles of queries.
// The kernels that observe attention use it, because they need many queries for the same keys and
// never read values.
#pragma once

#include <type_traits>

#include <kvpolicy/cuda/kernels/fragments.cuh>
#include <kvpolicy/cuda/kernels/hadamard.cuh>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/packing.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

/// Exact rows are `parts` tiles of 16 rows. Quantised rows are one tile in two parts: the keys
/// rounded to E, and the rounding errors, so that the products lose nothing. (Few rows of a head
/// that is compressed are quantised, so the extra cost does not matter.)
template <Element E, int HeadDim>
struct HeldKeys {
  static constexpr int parts = HeadDim <= 128 ? 2 : 1;
  static constexpr int rows = parts * tile_rows;
  KeyTile<HeadDim> part[parts];

  /// Loads row `row + i` from `keys` + i `stride` bytes; a row outside [low, high] is replaced by the
  /// nearest one inside.
  KVPOLICY_DEVICE void load_exact(const std::byte* keys, long long stride, int row, int low, int high) {
    KVPOLICY_UNROLL
    for (int i = 0; i < parts; ++i) {
      const int at = row + i * tile_rows + lane_index() / 4;
      const int lower = smaller(larger(at, low), high) - row;
      const int upper = smaller(larger(at + 8, low), high) - row;
      part[i].load(keys + lower * stride, keys + upper * stride);
    }
  }

  /// Loads the tile of quantised rows that begins at `slot`.
  KVPOLICY_DEVICE void load_packed(const HeadView& head, int page_rows, int slot) {
    static_assert(parts == 2 && HeadDim % 32 == 0);
    const int width = head.widths().keys;
    const PackedLayout layout = head.packed_layout(HeadDim, page_rows);
    const std::byte* page = head.packed_pages[slot / page_rows];
    const int first = slot % page_rows;
    const auto* codes =
        reinterpret_cast<const std::uint32_t*>(page + first / tile_rows * layout.tile_bytes.keys);
    const auto* scales = reinterpret_cast<const std::uint16_t*>(page + layout.key_scales_offset);
    const auto* zeros = reinterpret_cast<const std::uint16_t*>(page + layout.key_zeros_offset);
    const auto number = [&](int step, int reg, int high) {
      const TileOffset place{.lane = lane_index(), .step = step, .reg = reg, .high = high};
      const std::uint32_t code = code_at(place, width, HeadDim, [&](int i) { return codes[i]; });
      const RowOffset at = key_at(place, HeadDim);
      const int grid =
          key_param(first + at.row, at.channel, HeadDim, page_rows, head.key_per_channel, head.key_group);
      return to_float<float16>(scales[grid]) * static_cast<float>(code) + to_float<float16>(zeros[grid]);
    };
    const auto keep = [&](int step, int reg, float low, float high) {
      const std::uint32_t kept = pack<E>(low, high);
      const int word = step % 2 * 2 + reg / 2;
      part[0].block[step / 2][reg % 2].word[word] = kept;
      part[1].block[step / 2][reg % 2].word[word] =
          pack<E>(low - to_float<E>(static_cast<std::uint16_t>(kept)),
                  high - to_float<E>(static_cast<std::uint16_t>(kept >> 16)));
    };
    if (!head.key_hadamard) {
      KVPOLICY_UNROLL
      for (int step = 0; step < HeadDim / 16; ++step) {
        KVPOLICY_UNROLL
        for (int reg = 0; reg < 4; ++reg) keep(step, reg, number(step, reg, 0), number(step, reg, 1));
      }
      return;
    }
    // Keys are rotated back, and not queries rotated, whose rounding to E would be one more error. Channels of
    // a lane: two in a register, four in a step, eight in two.
    KVPOLICY_UNROLL
    for (int upper = 0; upper < 2; ++upper) {
      float key[HeadDim / 4];
      KVPOLICY_UNROLL
      for (int i = 0; i < HeadDim / 4; ++i) key[i] = number(i / 4, upper + i % 4 / 2 * 2, i % 2);
      rotate_quarters<HeadDim>(key);
      KVPOLICY_UNROLL
      for (int i = 0; i < HeadDim / 4; i += 2) keep(i / 4, upper + i % 4 / 2 * 2, key[i], key[i + 1]);
    }
  }

  /// products[part][i] is that of row 16 part + 8 (i / 2) + lane / 4 with column 2 (lane % 4) + i %
  /// 2 of a tile of queries, in the order of QueryOperands<HeadDim, 1>. Keys in two parts (`Split`)
  /// have their products in part 0.
  template <bool Split>
  KVPOLICY_DEVICE void multiply(const std::byte* queries, float (&products)[parts][4]) const {
    using Queries = QueryOperands<HeadDim, 1>;
    KVPOLICY_UNROLL
    for (int p = 0; p < parts; ++p) {
      KVPOLICY_UNROLL
      for (int i = 0; i < 4; ++i) products[p][i] = 0.0F;
    }
    KVPOLICY_UNROLL
    for (int pair = 0; pair < HeadDim / 32; ++pair) {
      const Words4 q = Queries::of_steps(queries, pair, 0);  // loaded once for all parts
      KVPOLICY_UNROLL
      for (int p = 0; p < parts; ++p) {
        const auto& block = part[p].block[pair];
        KVPOLICY_UNROLL
        for (int step = 0; step < 4; step += 2) {
          const std::uint32_t a[4] = {block[0].word[step], block[1].word[step], block[0].word[step + 1],
                                      block[1].word[step + 1]};
          multiply_add<E>(products[p], a, q.word[step], q.word[step + 1]);
        }
      }
    }
    if constexpr (HeadDim % 32 != 0) {
      const Words2 q = Queries::of_tail(queries, 0);
      KVPOLICY_UNROLL
      for (int p = 0; p < parts; ++p) {
        const auto& tail = part[p].tail;
        const std::uint32_t a[4] = {tail[0].word[0], tail[1].word[0], tail[0].word[1], tail[1].word[1]};
        multiply_add<E>(products[p], a, q.word[0], q.word[1]);
      }
    }
    if constexpr (Split) {
      KVPOLICY_UNROLL
      for (int i = 0; i < 4; ++i) products[0][i] += products[1][i];
    }
  }
};

/// Where the keys of a segment are.
struct KeyRows {
  const HeadView& head;
  int page_rows;
  DeviceSegment::Source source;
  const std::byte* call = nullptr;  ///< row 0 of a call that brings the rows
  long long call_stride = 0;        ///< in bytes

  /// Row numbers of HeldKeys are this plus a multiple of HeldKeys::rows.
  KVPOLICY_DEVICE int origin(int row) const {
    return source == DeviceSegment::Source::call || row < head.sinks ? 0 : head.sinks;
  }
};

/// Calls `use(keys, row, split)` for the HeldKeys::rows rows from `row` on. It is called once for all
/// rows, or once for each tile if they are quantised; `split` is the type of multiply's argument. At
/// least one row is inside [low, high]; rows outside are not read and replaced by others.
template <Element E, int HeadDim, bool Packed, class Use>
KVPOLICY_DEVICE void for_keys(const KeyRows& from, int row, int low, int high, const Use& use) {
  const HeadView& head = from.head;
  HeldKeys<E, HeadDim> keys;
  if constexpr (Packed) {
    if (from.source == DeviceSegment::Source::packed) {
      KVPOLICY_NO_UNROLL
      for (int at = row; at < row + keys.rows; at += tile_rows) {
        if (at + tile_rows <= low || at > high) continue;
        keys.load_packed(head, from.page_rows, head.packed_slot(at));
        use(keys, at, std::true_type{});
      }
      return;
    }
  }
  if (from.source == DeviceSegment::Source::call) {
    keys.load_exact(from.call + row * from.call_stride, from.call_stride, row, low, high);
  } else {
    const int slot = head.exact_slot(row);
    keys.load_exact(head.exact_row(head.exact_pages[slot / from.page_rows], slot % from.page_rows, true),
                    head.exact_row_stride, row, low, high);
  }
  use(keys, row, std::false_type{});
}

}  // namespace kvpolicy::gpu
