// SPDX-License-Identifier: Apache-2.0
//
// The fragment order of quantised rows: every number of a tile has one place of its own, and the
// inverse functions find their way back from every place.
#include <doctest/doctest.h>

#include <vector>

#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/cuda/kernels/packing.cuh>

#include "cuda/support/codes.hpp"

using namespace kvpolicy::gpu;

namespace {

template <class Place, class At>
void check_places(int head_dim, Place place, At at) {
  // lane, step, reg, high: 16 * head_dim numbers in head_dim / 16 steps of 32 lanes with 8 each.
  std::vector<int> taken(static_cast<std::size_t>(tile_rows * head_dim), 0);
  for (int row = 0; row < tile_rows; ++row) {
    for (int channel = 0; channel < head_dim; ++channel) {
      const TileOffset there = place(row, channel, head_dim);
      REQUIRE(there.lane >= 0);
      REQUIRE(there.lane < warp_lanes);
      REQUIRE(there.step < head_dim / 16);
      REQUIRE(there.reg < 4);
      REQUIRE(there.high < 2);
      ++taken.at(static_cast<std::size_t>(((there.step * warp_lanes + there.lane) * 4 + there.reg) * 2 +
                                          there.high));
      const RowOffset back = at(there, head_dim);
      CHECK(back.row == row);
      CHECK(back.channel == channel);
    }
  }
  for (const int count : taken) CHECK(count == 1);
}

}  // namespace

TEST_CASE("every key and value of a tile has a place of its own, and is found there") {
  for (const int head_dim : {64, 80, 96, 128, 256}) {
    CAPTURE(head_dim);
    check_places(head_dim, offset_of_key, key_at);
    check_places(head_dim, offset_of_value, value_at);
  }
}

TEST_CASE("codes fill a tile without gap or overlap, and a bit names its code") {
  for (const int head_dim : {64, 128, 256}) {
    for (const int width : {2, 3, 4, 5, 6, 8, both_halves}) {
      CAPTURE(head_dim);
      CAPTURE(width);
      const int bits = bits_stored(width);
      const int tile_bits = tile_rows * head_dim * bits;
      std::vector<int> taken(static_cast<std::size_t>(tile_bits), 0);
      for (int row = 0; row < tile_rows; ++row) {
        for (int channel = 0; channel < head_dim; ++channel) {
          for (const TileOffset there :
               {offset_of_key(row, channel, head_dim), offset_of_value(row, channel, head_dim)}) {
            int in_code = 0;
            for (int i = 0; i < tile_parts(width); ++i) {
              const TilePart part = tile_part(width, i);
              REQUIRE(part.shift == in_code);
              in_code += part.bits;
              const int address = bit_of_code(there, part, head_dim);
              REQUIRE(address % part.bits == 0);
              for (int b = 0; b < part.bits; ++b) ++taken.at(static_cast<std::size_t>(address + b));
              const TileOffset back = offset_of_bit(address, part, head_dim);
              CHECK(back.lane == there.lane);
              CHECK(back.step == there.step);
              CHECK(back.reg == there.reg);
              CHECK(back.high == there.high);
            }
            REQUIRE(in_code == bits);
          }
        }
      }
      for (const int count : taken) CHECK(count == 2);  // a key and a value
    }
  }
}

TEST_CASE("the parts of a page follow each other and take what two pages of the host take") {
  for (const int head_dim : {64, 128}) {
    for (const test::Codes& codes : test::all_codes) {
      const kvpolicy::gpu::Sides widths{code_width(codes.keys), code_width(codes.values)};
      const int key_bits = static_cast<int>(kvpolicy::bits_of(codes.keys));
      const int value_bits = static_cast<int>(kvpolicy::bits_of(codes.values));
      for (const bool per_channel : {false, true}) {
        for (const int page_rows : {64, 128}) {
          for (const int group : {16, 32, 64}) {
            const PackedLayout layout{widths, head_dim, page_rows, per_channel, group, group};
            CHECK(layout.values_offset == page_rows * head_dim * key_bits / 8);
            CHECK(layout.key_scales_offset == page_rows * head_dim * (key_bits + value_bits) / 8);
            const auto size = [](int n) { return static_cast<std::size_t>(n); };
            const kvpolicy::PageLayout keys{
                {codes.keys,
                 per_channel ? kvpolicy::Granularity::per_channel : kvpolicy::Granularity::per_token,
                 size(group)},
                size(head_dim),
                size(page_rows)};
            const kvpolicy::PageLayout values{{codes.values, kvpolicy::Granularity::per_token, size(group)},
                                              size(head_dim),
                                              size(page_rows)};
            CHECK(size(layout.page_bytes) == keys.page_bytes + values.page_bytes);
            // The last parameters of each side end where the next part begins.
            CHECK(layout.key_scales_offset +
                      2 * (key_param(page_rows - 1, head_dim - 1, head_dim, page_rows, per_channel, group) +
                           1) ==
                  layout.key_zeros_offset);
            CHECK(layout.value_scales_offset +
                      2 * (value_param(page_rows - 1, head_dim - 1, page_rows, group) + 1) ==
                  layout.value_zeros_offset);
          }
        }
      }
    }
  }
}

TEST_CASE(
    "upper halves lie as codes of 4 bits do, after the lower ones, with scales and zeros of their own") {
  using kvpolicy::gpu::Sides;
  for (const int head_dim : {64, 128}) {
    CAPTURE(head_dim);
    const TilePart four = tile_part(4, 0), upper = tile_part(upper_halves, 0);
    CHECK(tile_parts(upper_halves) == 1);
    for (int row = 0; row < tile_rows; ++row) {
      for (int channel = 0; channel < head_dim; ++channel) {
        for (const TileOffset at :
             {offset_of_key(row, channel, head_dim), offset_of_value(row, channel, head_dim)}) {
          const int address = bit_of_code(at, upper, head_dim);
          REQUIRE(address == tile_rows * head_dim * 4 + bit_of_code(at, four, head_dim));
          REQUIRE(address == bit_of_code(at, tile_part(both_halves, 1), head_dim));
        }
      }
    }
    for (const bool per_channel : {false, true}) {
      const PackedLayout both{{both_halves, both_halves}, head_dim, 64, per_channel, 32, 16};
      const PackedLayout read{{upper_halves, upper_halves}, head_dim, 64, per_channel, 32, 16};
      const PackedLayout keys{{upper_halves, 3}, head_dim, 64, per_channel, 32, 16};
      const int key_array = 2 * (per_channel ? 2 * head_dim : head_dim / 32 * 64);
      const int value_array = 2 * (head_dim / 16 * 64);
      CHECK(read.page_bytes == both.page_bytes);
      CHECK(read.tile_bytes.keys == 16 * head_dim);
      CHECK(read.values_offset == both.values_offset);
      CHECK(both.value_zeros_offset == both.value_scales_offset + value_array);
      CHECK(read.key_scales_offset == both.value_zeros_offset + value_array);
      CHECK(read.key_zeros_offset == read.key_scales_offset + key_array);
      CHECK(read.value_scales_offset == read.key_zeros_offset + key_array);
      CHECK(read.value_zeros_offset == read.value_scales_offset + value_array);
      CHECK(read.page_bytes == read.value_zeros_offset + value_array);
      CHECK(keys.key_scales_offset == keys.value_zeros_offset + value_array);
      CHECK(keys.page_bytes == keys.key_zeros_offset + key_array);
    }
  }
}
