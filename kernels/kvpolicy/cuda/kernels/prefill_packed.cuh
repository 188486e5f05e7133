// SPDX-License-Identifier: Apache-2.0
//
// Quantised rows for the prefill kernel: converts a tile of codes in fragment order (packing.cuh)
// to a tile of 16-bit rows in shared memory. With hundreds of query rows the products cost more
// than unpacking, so rows are converted once and then treated like exact rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/kernels/packing.cuh>
#include <kvpolicy/cuda/kernels/prefill_tile.cuh>

namespace kvpolicy::gpu {

/// Eight neighbouring channels of one row of E.
struct alignas(16) RowChunk {
  std::uint32_t pair[4];
};

/// Codes of eight neighbouring channels of a row, from channel 8 * chunk on. Their bit addresses
/// differ from the first one's by constants, which are the same in every row.
template <int Width, int HeadDim, bool Values>
KVPOLICY_DEVICE void unpack_chunk(const std::byte* tile, int row, int chunk, float (&number)[8]) {
  std::uint32_t code[8] = {};
  const auto add = [&](auto index) KVPOLICY_INLINE_LAMBDA {
    constexpr TilePart part = tile_part(Width, decltype(index)::value);
    constexpr auto bit_of = [](int r, int channel) {
      return bit_of_code(Values ? offset_of_value(r, channel, HeadDim) : offset_of_key(r, channel, HeadDim),
                         tile_part(Width, decltype(index)::value), HeadDim);
    };
    const int first = bit_of(row, chunk * 8);
    const auto* words = reinterpret_cast<const std::uint32_t*>(tile) + first / 32;
    const int shift = first % 32;
    KVPOLICY_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int apart = bit_of(0, i) - bit_of(0, 0);
      code[i] |= (words[apart / 32] >> shift >> (apart % 32) & ((1U << part.bits) - 1U)) << part.shift;
    }
  };
  add(std::integral_constant<int, 0>{});
  if constexpr (tile_parts(Width) > 1) add(std::integral_constant<int, 1>{});
  KVPOLICY_UNROLL
  for (int i = 0; i < 8; ++i) number[i] = static_cast<float>(code[i]);
}

/// Converts the rows of a packed tile; called by all threads of the block.
template <Element E, int HeadDim, bool Values>
struct PackedLoader {
  using Shape = PrefillShape<HeadDim>;
  static_assert(Shape::key_rows == quantized_together);

  const HeadView& head;
  int page_rows;

  KVPOLICY_DEVICE void load(int tile_memory, const LiveSegment& live, int tile) const {
    switch (head.widths().of(!Values)) {
      case both_halves: return widen<both_halves>(tile_memory, live, tile);
      case upper_halves: return widen<upper_halves>(tile_memory, live, tile);
      case 8: return widen<8>(tile_memory, live, tile);
      case 6: return widen<6>(tile_memory, live, tile);
      case 5: return widen<5>(tile_memory, live, tile);
      case 4: return widen<4>(tile_memory, live, tile);
      case 3: return widen<3>(tile_memory, live, tile);
      default: return widen<2>(tile_memory, live, tile);
    }
  }

 private:
  /// A warp converts 16 rows; each lane converts the chunks in its words of the packed tile.
  template <int Width>
  KVPOLICY_DEVICE void widen(int tile_memory, const LiveSegment& live, int tile) const {
    const PackedLayout layout = head.packed_layout(HeadDim, page_rows);
    const int lane = unforeseen(lane_index());  // else this loop's many addresses are spilled
    KVPOLICY_NO_UNROLL
    for (int step = 0; step < Shape::chunks / 2; ++step) {
      int row = warp_index() * tile_rows;
      int chunk = 0;
      if constexpr (Values) {
        row += step % 4 / 2 * 8 + lane % 4 * 2 + step % 2;
        chunk = step / 4 * 8 + lane / 4;
      } else {
        row += step % 2 * 8 + lane / 4;
        chunk = step / 2 * 4 + lane % 4;
      }
      // Only the last tile of a list can have missing rows.
      const int column = tile * quantized_together + row;
      const int slot = live.segment.chunks == nullptr
                           ? head.packed_slot(live.segment.first - live.lead + column)
                           : head.packed_slot(live.segment.row(smaller(column, live.segment.rows - 1)));
      const std::byte* page = head.packed_pages[page_of(slot, page_rows)];
      *reinterpret_cast<RowChunk*>(tile_chunk<Shape>(tile_memory, row, chunk)) =
          chunk_of<Width>(page, layout, place_in_page(slot, page_rows), chunk);
    }
  }

  template <int Width>
  KVPOLICY_DEVICE RowChunk chunk_of(const std::byte* page, const PackedLayout& layout, int row,
                                    int chunk) const {
    float number[8];
    constexpr int tile_bytes = tile_rows * HeadDim * bits_stored(Width) / 8;
    const std::byte* codes = page + (Values ? layout.values_offset : 0);
    unpack_chunk<Width, HeadDim, Values>(codes + row / tile_rows * tile_bytes, row % tile_rows, chunk,
                                         number);
    const auto* scales = reinterpret_cast<const std::uint16_t*>(
        page + (Values ? layout.value_scales_offset : layout.key_scales_offset));
    const auto* zeros = reinterpret_cast<const std::uint16_t*>(
        page + (Values ? layout.value_zeros_offset : layout.key_zeros_offset));
    if (!Values && head.key_per_channel) {
      const int param = key_param(row, chunk * 8, HeadDim, page_rows, true, head.key_group);
      const auto scale = *reinterpret_cast<const RowChunk*>(scales + param);
      const auto zero = *reinterpret_cast<const RowChunk*>(zeros + param);
      KVPOLICY_UNROLL
      for (int i = 0; i < 8; ++i) {
        const int at = i % 2 * 16;
        number[i] = number[i] * to_float<float16>(static_cast<std::uint16_t>(scale.pair[i / 2] >> at)) +
                    to_float<float16>(static_cast<std::uint16_t>(zero.pair[i / 2] >> at));
      }
    } else {
      const int param = Values ? value_param(row, chunk * 8, page_rows, head.value_group)
                               : key_param(row, chunk * 8, HeadDim, page_rows, false, head.key_group);
      const float scale = to_float<float16>(scales[param]);
      const float zero = to_float<float16>(zeros[param]);
      KVPOLICY_UNROLL
      for (int i = 0; i < 8; ++i) number[i] = number[i] * scale + zero;
    }
    RowChunk out;
    KVPOLICY_UNROLL
    for (int i = 0; i < 4; ++i) out.pair[i] = pack<E>(number[2 * i], number[2 * i + 1]);
    return out;
  }
};

/// Loads tiles of any source to shared memory; called by all threads of the block. Exact rows and
/// the call's rows arrive with the next committed group of copies, packed rows at once.
template <Element E, int HeadDim, bool Packed>
struct TileLoader {
  const AttendParams& params;
  const PrefillItem& item;
  const LiveTiles& live;
  RowLoader<PrefillShape<HeadDim>> rows{params, item};

  /// Called before the keys and the values of a tile are loaded.
  KVPOLICY_DEVICE void find(const TileCursor& at) {
    if (!is_packed(at)) rows.find(live.segment[at.segment], at.tile);
  }
  KVPOLICY_DEVICE void load_keys(int tile_memory, const TileCursor& at) const {
    if (is_packed(at)) {
      widen<false>(tile_memory, at);
    } else {
      rows.load_keys(tile_memory);
    }
  }
  KVPOLICY_DEVICE void load_values(int tile_memory, const TileCursor& at) const {
    if (is_packed(at)) {
      widen<true>(tile_memory, at);
    } else {
      rows.load_values(tile_memory, live.segment[at.segment], at.tile);
    }
  }

 private:
  KVPOLICY_DEVICE bool is_packed(const TileCursor& at) const {
    return Packed && live.segment[at.segment].segment.source == DeviceSegment::Source::packed;
  }
  template <bool Values>
  KVPOLICY_DEVICE void widen(int tile_memory, const TileCursor& at) const {
    if constexpr (Packed) {
      PackedLoader<E, HeadDim, Values>{item.head, params.page_rows}.load(tile_memory,
                                                                         live.segment[at.segment], at.tile);
    }
  }
};

}  // namespace kvpolicy::gpu
