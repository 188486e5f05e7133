// SPDX-License-Identifier: Apache-2.0
//
// Adds a unit of quantised values to an online softmax. A value is scale * code + zero. While a warp
// reads quantised rows, the softmax's values are in units of the codes and of a power of two, and
// the zeros' share is kept apart; `finish` puts both together. Used by decode_packed.cuh.
#pragma once

#include <kvpolicy/cuda/kernels/online_softmax.cuh>
#include <kvpolicy/cuda/kernels/packed_tile.cuh>

namespace kvpolicy::gpu {

/// A power of two that is larger than all scales so far, so that scales divided by it are below 1
/// and no product in half overflows. Half would otherwise not suffice for weights times scales.
class ScaleUnit {
 public:
  /// Whether a scale (a half's bits) is too large.
  KVPOLICY_DEVICE bool below(std::uint32_t scale) const { return exponent <= scale >> 10; }
  /// Whether one of a word's two scales is too large. The sum has no carry between the halves.
  KVPOLICY_DEVICE std::uint32_t below_either(std::uint32_t scales) const {
    return (scales + (0x8000U - (exponent << 10)) * 0x00010001U) & 0x80008000U;
  }
  /// Makes the unit larger than `largest` of every lane; returns the factor for earlier products.
  KVPOLICY_DEVICE float raise(std::uint32_t largest) {
    KVPOLICY_UNROLL
    for (int mask = 1; mask < warp_lanes; mask *= 2) {
      const std::uint32_t other = shuffle_xor(largest, mask);
      largest = other > largest ? other : largest;
    }
    const std::uint32_t earlier = exponent;
    exponent = (largest >> 10) + 1 > earlier ? (largest >> 10) + 1 : earlier;
    return float_of_bits((127 + earlier - exponent) << 23);
  }
  KVPOLICY_DEVICE float value() const { return float_of_bits((112 + exponent) << 23); }
  KVPOLICY_DEVICE float inverse() const { return float_of_bits((142 - exponent) << 23); }
  /// 1 / value as both halves of a word; the last two are subnormal. A scale that is no number may have come with a
  /// file: the shift takes 5 bits, as the instruction does, and the product is no number either.
  KVPOLICY_DEVICE std::uint32_t inverse_halves() const {
    return (exponent < 30 ? (30 - exponent) << 10 : 0x400U >> ((exponent - 29) & 31U)) * 0x00010001U;
  }

 private:
  std::uint32_t exponent = 0;  ///< of a half: 0 before the first unit, 31 for 2^16
};

/// Multiplies a softmax's values.
template <int HeadDim, int ColumnTiles>
KVPOLICY_DEVICE void scale_values(OnlineSoftmax<HeadDim, ColumnTiles>& softmax, float factor) {
  KVPOLICY_UNROLL
  for (int step = 0; step < HeadDim / 16; ++step) {
    KVPOLICY_UNROLL
    for (int n = 0; n < ColumnTiles; ++n) {
      KVPOLICY_UNROLL
      for (int i = 0; i < 4; ++i) softmax.values[step][n][i] *= factor;
    }
  }
}

template <class Shape, int ColumnTiles, Grouping = Shape::grouping>
class PackedValues;

// ---- one scale for each value --------------------------------------------------------------------
/// The scales go to the weights, whose products with them are rounded to half. So that the error
/// does not grow with the codes' mean, the codes count from their middle, as those of keys do.
template <class Shape, int ColumnTiles>
class PackedValues<Shape, ColumnTiles, Grouping::row> {
  using Tile = typename Shape::ValueTile;
  using Softmax = OnlineSoftmax<Shape::head_dim, ColumnTiles>;

 public:
  static constexpr int staged_bytes = 0;

  KVPOLICY_DEVICE PackedValues(const PackedHead& packed_head, std::byte*) : head{packed_head} {}

  KVPOLICY_DEVICE void request(const TileAddress& address) {
    grids.load(address, head.layout.value_scales_offset, head.p.page_rows, head.lane);
  }
  KVPOLICY_DEVICE void rescale(int n, int j, float factor) {
    offsets[n][j] *= factor;
    middles[n][j] *= factor;
    middles[n][j + 2] *= factor;
  }
  /// Adds the values, with the weights that `weigh` computed.
  KVPOLICY_DEVICE void add(Softmax& softmax, const Tile (&values)[Shape::tiles],
                           float (&weights)[Shape::tiles][ColumnTiles][4]) {
    bool beyond = false;
    KVPOLICY_UNROLL
    for (const std::uint32_t word : grids.word) beyond = beyond || unit.below(word >> 16);
    if (any(beyond)) raise(softmax);
    // The second half of a tile's rows has codes times 2^inner_shift.
    const float inverse[2] = {unit.inverse(), unit.inverse() * (1.0F / (1 << Tile::inner_shift))};
    KVPOLICY_UNROLL
    for (int tile = 0; tile < Shape::tiles; ++tile) {
      KVPOLICY_UNROLL
      for (int upper = 0; upper < 2; ++upper) {
        const std::uint32_t grid = grids.of(tile * tile_rows + upper * 8, head.lane);
        const float scale = high_half(grid);
        const float offset = low_half(grid) + Tile::middle(head.widths.values) * scale;
        const float factor = scale * inverse[upper];
        KVPOLICY_UNROLL
        for (int n = 0; n < ColumnTiles; ++n) {
          KVPOLICY_UNROLL
          for (int j = 0; j < 2; ++j) {
            float& weight = weights[tile][n][upper * 2 + j];
            offsets[n][j] += weight * offset;
            weight *= factor;
          }
        }
      }
      std::uint32_t operands[ColumnTiles][2];
      weight_operands<float16>(operands, weights[tile]);
      std::uint32_t a[4];
      Tile::minus_middle(a, head.widths.values);
      KVPOLICY_UNROLL
      for (int n = 0; n < ColumnTiles; ++n) {
        multiply_add<float16>(middles[n], a, operands[n][0], operands[n][1]);
      }
      KVPOLICY_UNROLL
      for (int step = 0; step < Shape::head_dim / 16; ++step) {
        values[tile].operand(a, step);
        softmax.template add<float16>(step, a, operands);
      }
    }
  }
  /// Turns the softmax's values into those of the rows.
  KVPOLICY_DEVICE void finish(Softmax& softmax) {
    const float scale[2] = {unit.value() * 0x1p24F, unit.value() * (0x1p24F / (1 << Tile::row_shift))};
    KVPOLICY_UNROLL
    for (int n = 0; n < ColumnTiles; ++n) {
      KVPOLICY_UNROLL
      for (int j = 0; j < 2; ++j) {
        KVPOLICY_UNROLL
        for (int mask = 4; mask < warp_lanes; mask *= 2) offsets[n][j] += shuffle_xor(offsets[n][j], mask);
      }
      KVPOLICY_UNROLL
      for (int step = 0; step < Shape::head_dim / 16; ++step) {
        KVPOLICY_UNROLL
        for (int i = 0; i < 4; ++i) {
          float& value = softmax.values[step][n][i];
          value = (value + middles[n][i]) * scale[i / 2] + offsets[n][i % 2];
        }
      }
    }
  }

 private:
  KVPOLICY_DEVICE void raise(Softmax& softmax) {
    std::uint32_t largest = 0;
    KVPOLICY_UNROLL
    for (const std::uint32_t word : grids.word) largest = word >> 16 > largest ? word >> 16 : largest;
    const float factor = unit.raise(largest);
    scale_values(softmax, factor);
    KVPOLICY_UNROLL
    for (int n = 0; n < ColumnTiles; ++n) {
      KVPOLICY_UNROLL
      for (int i = 0; i < 4; ++i) middles[n][i] *= factor;
    }
  }

  const PackedHead& head;
  RowGrids<Shape::rows> grids;
  ScaleUnit unit;
  float offsets[ColumnTiles][2] = {};  ///< weights times zero + middle * scale, over this lane's rows
  float middles[ColumnTiles][4] = {};  ///< what each of the softmax's values lacks for codes from the middle
};

// ---- one scale for each group of channels of a value ---------------------------------------------
/// The channels of a product's rows belong to several groups, so each code is multiplied by its scale in
/// half, exactly but for one rounding. The zeros are one more product: zeros [groups of 8 channels,
/// 16 rows] with the weights. Its row g is that of the lane's channels 8g .. 8g + 7 of the first 64, its
/// row g + 8 that of the second 64.
template <class Shape, int ColumnTiles>
class GroupedValues {
  using Tile = typename Shape::ValueTile;
  using Softmax = OnlineSoftmax<Shape::head_dim, ColumnTiles>;
  using Grids = GroupGrids<Shape>;

 public:
  static constexpr int staged_bytes = Grids::bytes;

  KVPOLICY_DEVICE GroupedValues(const PackedHead& packed_head, std::byte* stage)
      : head{packed_head},
        grids{stage, packed_head.slice.head.value_group, packed_head.lane},
        bias{shuffle(code_bias, 0)} {  // a constant would take a second instruction for each operand
    // Matrices of a load: channels from 0 on of rows 0 .. 7, from 64 on, then the same of rows 8 .. 15.
    const int matrix = head.lane / 8;
    const int channel = matrix % 2 * 64 % Shape::head_dim + head.lane % 8 * 8;
    first = grids.scales_of(grids.group_of(channel)) + matrix / 2 * 16;
  }

  KVPOLICY_DEVICE void request(const TileAddress& address) {
    grids.copy(address, head.layout.value_scales_offset, head.layout.value_zeros_offset, head.p.page_rows);
  }
  KVPOLICY_DEVICE void rescale(int n, int j, float factor) {
    offsets[n][j] *= factor;
    offsets[n][j + 2] *= factor;
  }
  KVPOLICY_DEVICE void add(Softmax& softmax, const Tile (&values)[Shape::tiles],
                           float (&weights)[Shape::tiles][ColumnTiles][4]) {
    std::uint32_t beyond = 0;
    grids.each([&](int group, int chunk) {
      const Words4 scales = *reinterpret_cast<const Words4*>(grids.scales_of(group) + chunk * 16);
      KVPOLICY_UNROLL
      for (const std::uint32_t word : scales.word) beyond |= unit.below_either(word);
    });
    if (any(beyond != 0)) raise(softmax);
    const std::uint32_t inverse = unit.inverse_halves();
    KVPOLICY_UNROLL
    for (int tile = 0; tile < Shape::tiles; ++tile) {
      std::uint32_t operands[ColumnTiles][2];
      weight_operands<float16>(operands, weights[tile]);
      std::uint32_t scale[4], zero[4], offset[4];  // [rows 2t or 2t + 8][first or second 64 channels]
      load_matrix_x4(scale, first + tile * tile_rows * 2);
      load_matrix_x4(zero, first + Grids::zeros_at + tile * tile_rows * 2);
      KVPOLICY_UNROLL
      for (int n = 0; n < ColumnTiles; ++n) {
        multiply_add<float16>(offsets[n], zero, operands[n][0], operands[n][1]);
      }
      KVPOLICY_UNROLL
      for (int i = 0; i < 4; ++i) {
        if (i % 2 * 64 >= Shape::head_dim) continue;
        constexpr std::uint32_t minus_1024 = 0xe400e400U;
        scale[i] = half2_multiply_add(scale[i], inverse, 0);
        if (Tile::inner_shift == 4 && i / 2 == 1) scale[i] = half2_multiply_add(scale[i], 0x2c002c00U, 0);
        offset[i] = half2_multiply_add(scale[i], minus_1024, 0);
      }
      KVPOLICY_UNROLL
      for (int step = 0; step < Shape::head_dim / 16; ++step) {
        std::uint32_t a[4];
        values[tile].operand(a, step, bias);
        KVPOLICY_UNROLL
        for (int reg = 0; reg < 4; ++reg) {
          const int i = reg / 2 * 2 + step / 4;
          a[reg] = half2_multiply_add(a[reg], scale[i], offset[i]);
        }
        softmax.template add<float16>(step, a, operands);
      }
    }
  }
  KVPOLICY_DEVICE void finish(Softmax& softmax) {
    const float scale[2] = {unit.value(), unit.value() * (1.0F / (1 << Tile::row_shift))};
    KVPOLICY_UNROLL
    for (int step = 0; step < Shape::head_dim / 16; ++step) {
      KVPOLICY_UNROLL
      for (int n = 0; n < ColumnTiles; ++n) {
        KVPOLICY_UNROLL
        for (int i = 0; i < 4; ++i) {
          float& value = softmax.values[step][n][i];
          value = value * scale[i / 2] + offsets[n][step / 4 * 2 + i % 2];
        }
      }
    }
  }

 private:
  KVPOLICY_DEVICE void raise(Softmax& softmax) {
    std::uint32_t largest = 0;
    grids.each([&](int group, int chunk) {
      const Words4 scales = *reinterpret_cast<const Words4*>(grids.scales_of(group) + chunk * 16);
      KVPOLICY_UNROLL
      for (const std::uint32_t word : scales.word) {
        largest = word >> 16 > largest ? word >> 16 : largest;
        largest = (word & 0xffffU) > largest ? word & 0xffffU : largest;
      }
    });
    scale_values(softmax, unit.raise(largest));
  }

  const PackedHead& head;
  Grids grids;
  ScaleUnit unit;
  std::uint32_t bias;
  const std::byte* first;              ///< what this lane points to in the first matrix load
  float offsets[ColumnTiles][4] = {};  ///< weights times zeros
};

template <class Shape, int ColumnTiles>
class PackedValues<Shape, ColumnTiles, Grouping::channels> : public GroupedValues<Shape, ColumnTiles> {
  using GroupedValues<Shape, ColumnTiles>::GroupedValues;
};
template <class Shape, int ColumnTiles>
class PackedValues<Shape, ColumnTiles, Grouping::rows> : public GroupedValues<Shape, ColumnTiles> {
  using GroupedValues<Shape, ColumnTiles>::GroupedValues;
};

}  // namespace kvpolicy::gpu
