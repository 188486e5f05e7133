// SPDX-License-Identifier: Apache-2.0
//
// Logits of a unit of quantised keys. A key is scale * code + zero, so a product with a query is
// scale * (sum of q * code) + zero * (sum of q) wherever a scale is the same: the matrix products
// take the codes themselves. There is a class for each Grouping; its `request` asks for scales and
// zeros ahead of time, and its `logits` needs them. Of its `staged_bytes` of shared memory the first
// `lasting_bytes` are the same for all units. Used by decode_packed.cuh.
#pragma once

#include <kvpolicy/cuda/kernels/packed_tile.cuh>

namespace kvpolicy::gpu {

/// What the classes share. CodeTile multiplies some codes by powers of two. For rows g + 8 the
/// scale of the product takes this back, and for the second half of a step's channels the query does.
template <class Shape, int ColumnTiles>
struct KeyProducts {
  using Tile = typename Shape::KeyTile;
  using Queries = QueryOperands<Shape::head_dim, ColumnTiles>;

  /// For this lane's columns: [tile of columns][column].
  struct Columns {
    float code_scale[ColumnTiles][2];
    float scale[ColumnTiles][2];

    /// For products with codes of rows g (`upper` = 0) or g + 8.
    KVPOLICY_DEVICE float of_codes(int n, int j, int upper) const {
      return code_scale[n][j] * (upper == 0 ? 1.0F : 1.0F / (1 << Tile::row_shift));
    }
  };
  KVPOLICY_DEVICE static Columns columns(const PackedHead& head) {
    Columns all;
    KVPOLICY_UNROLL
    for (int n = 0; n < ColumnTiles; ++n) {
      const CodeColumn* two = head.queries.columns + n * tile_columns + head.lane % 4 * 2;
      KVPOLICY_UNROLL
      for (int j = 0; j < 2; ++j) {
        all.code_scale[n][j] = two[j].code_scale;
        all.scale[n][j] = two[j].scale;
      }
    }
    return all;
  }
  /// The sum of the halves of column `column`, channels 8 first .. 8 (first + count) - 1.
  KVPOLICY_DEVICE static float sum(const CodeQueries& queries, int column, int first, int count) {
    float all = 0.0F;
    for (int i = first; i < first + count; ++i) all += queries.sums[column * (Shape::head_dim / 8) + i];
    return all;
  }

  /// The operands of two steps for products with codes.
  KVPOLICY_DEVICE static Words4 for_codes(Words4 q) {
    if constexpr (Tile::inner_shift == 4) {
      constexpr std::uint32_t sixteenth = 0x2c002c00U;
      q.word[1] = half2_multiply_add(q.word[1], sixteenth, 0);
      q.word[3] = half2_multiply_add(q.word[3], sixteenth, 0);
    }
    return q;
  }
  template <int Count>
  KVPOLICY_DEVICE static void clear(float (&products)[Count][4]) {
    KVPOLICY_UNROLL
    for (int n = 0; n < Count; ++n) {
      KVPOLICY_UNROLL
      for (int i = 0; i < 4; ++i) products[n][i] = 0.0F;
    }
  }
  /// Adds the products of channels 32 pair .. 32 pair + 31.
  KVPOLICY_DEVICE static void add(float (&products)[ColumnTiles][4], const Tile& keys, int pair,
                                  const Words4 (&q)[ColumnTiles]) {
    KVPOLICY_UNROLL
    for (int step = 0; step < 2; ++step) {
      std::uint32_t a[4];
      keys.operand(a, 2 * pair + step);
      add_step(products, a, step, q);
    }
  }
  KVPOLICY_DEVICE static void add_step(float (&products)[ColumnTiles][4], const std::uint32_t (&a)[4],
                                       int step, const Words4 (&q)[ColumnTiles]) {
    KVPOLICY_UNROLL
    for (int n = 0; n < ColumnTiles; ++n) {
      multiply_add<float16>(products[n], a, q[n].word[2 * step], q[n].word[2 * step + 1]);
    }
  }
};

template <class Shape, int ColumnTiles, Grouping = Shape::grouping>
class PackedKeys;

// ---- one scale for each key --------------------------------------------------------------------
template <class Shape, int ColumnTiles>
class PackedKeys<Shape, ColumnTiles, Grouping::row> {
  using Products = KeyProducts<Shape, ColumnTiles>;

 public:
  static constexpr int lasting_bytes = 0;
  static constexpr int staged_bytes = 0;

  KVPOLICY_DEVICE explicit PackedKeys(const PackedHead& packed_head) : head{packed_head} {
    KVPOLICY_UNROLL
    for (int n = 0; n < ColumnTiles; ++n) {
      KVPOLICY_UNROLL
      for (int j = 0; j < 2; ++j) {
        const int column = n * tile_columns + head.lane % 4 * 2 + j;
        sums[n][j] =
            Products::sum(head.queries, column, 0, Shape::head_dim / 8) * head.queries.columns[column].scale;
      }
    }
  }

  KVPOLICY_DEVICE void request(const TileAddress& address) {
    grids.load(address, head.layout.key_scales_offset, head.p.page_rows, head.lane);
  }
  KVPOLICY_DEVICE void logits(float (&out)[Shape::tiles][ColumnTiles][4],
                              const typename Shape::KeyTile (&keys)[Shape::tiles]) const {
    KVPOLICY_UNROLL
    for (int tile = 0; tile < Shape::tiles; ++tile) Products::clear(out[tile]);
    KVPOLICY_UNROLL
    for (int pair = 0; pair < Shape::head_dim / 32; ++pair) {
      Words4 q[ColumnTiles];
      KVPOLICY_UNROLL
      for (int n = 0; n < ColumnTiles; ++n) {
        q[n] = Products::for_codes(Products::Queries::of_steps(head.queries.halves, pair, n));
      }
      KVPOLICY_UNROLL
      for (int tile = 0; tile < Shape::tiles; ++tile) Products::add(out[tile], keys[tile], pair, q);
    }
    const auto columns = Products::columns(head);
    KVPOLICY_UNROLL
    for (int row = 0; row < 2 * Shape::tiles; ++row) {
      const std::uint32_t grid = grids.of(row * 8, head.lane);
      KVPOLICY_UNROLL
      for (int n = 0; n < ColumnTiles; ++n) {
        KVPOLICY_UNROLL
        for (int j = 0; j < 2; ++j) {
          float& logit = out[row / 2][n][row % 2 * 2 + j];
          logit = logit * high_half(grid) * columns.of_codes(n, j, row % 2) + low_half(grid) * sums[n][j];
        }
      }
    }
  }

 private:
  const PackedHead& head;
  RowGrids<Shape::rows> grids;
  float sums[ColumnTiles][2];  ///< of a column's query, in the units of logits
};

// ---- one scale for each group of channels of a key -----------------------------------------------
/// Each group's product is scaled and added to the logit. The zeros are one more product: zeros
/// [16 rows, groups] with the groups' sums of the query [groups, columns]. The sums are two halves
/// each, whose sum is exact to 22 bits.
template <class Shape, int ColumnTiles>
class PackedKeys<Shape, ColumnTiles, Grouping::channels> {
  using Products = KeyProducts<Shape, ColumnTiles>;
  static constexpr int groups = Shape::head_dim / Shape::finest;
  static constexpr int eights = groups > 8 ? groups / 8 : 1;  ///< matrices of 8 groups for 8 rows
  static constexpr int tiles_at_once = 2 / eights;            ///< by one matrix load
  static constexpr int parts = 32 / Shape::finest;            ///< groups in two steps
  static_assert(eights <= 2 && parts * groups >= parts);

 public:
  static constexpr int lasting_bytes = ColumnTiles * eights * warp_lanes * 8;
  static constexpr int staged_bytes = lasting_bytes + GroupGrids<Shape>::bytes;

  KVPOLICY_DEVICE explicit PackedKeys(const PackedHead& packed_head)
      : head{packed_head},
        grids{packed_head.stage + lasting_bytes, packed_head.slice.head.key_group, packed_head.lane} {
    constexpr int vectors = Shape::finest / 8;
    KVPOLICY_UNROLL
    for (int n = 0; n < ColumnTiles; ++n) {
      KVPOLICY_UNROLL
      for (int eight = 0; eight < eights; ++eight) {
        float sum[2] = {};
        KVPOLICY_UNROLL
        for (int i = 0; i < 2; ++i) {
          const int group = eight * 8 + head.lane % 4 * 2 + i;
          if (group >= groups) continue;
          sum[i] = Products::sum(head.queries, n * tile_columns + head.lane / 4, group * vectors, vectors);
        }
        const std::uint32_t high = pack<float16>(sum[0], sum[1]);
        sums_of(n, eight) = {high, pack<float16>(sum[0] - low_half(high), sum[1] - high_half(high))};
      }
    }
    // Matrices of a load: rows g, g + 8 of the first tile or of its first 8 groups, then the others.
    const int row = head.lane % 8;
    const int matrix = head.lane / 8;
    const int eight = eights == 2 ? matrix / 2 : 0;
    const int tile = eights == 2 ? 0 : matrix / 2;
    zeros = grids.scales_of(grids.group_of((eight * 8 + row) % groups * Shape::finest)) +
            GroupGrids<Shape>::zeros_at + (tile * tile_rows + matrix % 2 * 8) * 2;
  }

  KVPOLICY_DEVICE void request(const TileAddress& address) {
    grids.copy(address, head.layout.key_scales_offset, head.layout.key_zeros_offset, head.p.page_rows);
  }
  KVPOLICY_DEVICE void logits(float (&out)[Shape::tiles][ColumnTiles][4],
                              const typename Shape::KeyTile (&keys)[Shape::tiles]) const {
    KVPOLICY_UNROLL
    for (int tile = 0; tile < Shape::tiles; tile += tiles_at_once) {
      std::uint32_t zero[4];
      load_matrix_x4_transposed(zero, zeros + tile * tile_rows * 2);
      KVPOLICY_UNROLL
      for (int k = 0; k < tiles_at_once; ++k) add_zeros(out[tile + k], zero, 2 * k);
    }
    const int t = head.lane % 4;
    const std::byte* const scales = grids.scales_of(0) + head.lane / 4 * 2;
    KVPOLICY_UNROLL
    for (int pair = 0; pair < Shape::head_dim / 32; ++pair) {
      Words4 all[ColumnTiles];
      KVPOLICY_UNROLL
      for (int n = 0; n < ColumnTiles; ++n) {
        all[n] = Products::for_codes(Products::Queries::of_steps(head.queries.halves, pair, n));
      }
      const auto add_group = [&](int part) {
        const std::byte* const of_group =
            scales + grids.group_of(pair * 32 + part * Shape::finest) * GroupGrids<Shape>::pitch;
        Words4 q[ColumnTiles];
        KVPOLICY_UNROLL
        for (int n = 0; n < ColumnTiles; ++n) {
          // Lane t has channels 8t .. 8t + 7 of the 32.
          KVPOLICY_UNROLL
          for (int w = 0; w < 4; ++w) q[n].word[w] = t * parts / 4 == part ? all[n].word[w] : 0;
        }
        KVPOLICY_UNROLL
        for (int tile = 0; tile < Shape::tiles; ++tile) {
          float products[ColumnTiles][4];
          Products::clear(products);
          Products::add(products, keys[tile], pair, q);
          KVPOLICY_UNROLL
          for (int upper = 0; upper < 2; ++upper) {
            const float scale = to_float<float16>(
                *reinterpret_cast<const std::uint16_t*>(of_group + (tile * tile_rows + upper * 8) * 2));
            KVPOLICY_UNROLL
            for (int n = 0; n < ColumnTiles; ++n) {
              KVPOLICY_UNROLL
              for (int j = 0; j < 2; ++j) out[tile][n][upper * 2 + j] += products[n][upper * 2 + j] * scale;
            }
          }
        }
      };
      if constexpr (parts == 1) {
        add_group(0);
      } else {  // one after another, because together they need more registers than there are
        KVPOLICY_NO_UNROLL
        for (int part = 0; part < parts; ++part) add_group(part);
      }
    }
    const auto columns = Products::columns(head);
    KVPOLICY_UNROLL
    for (int tile = 0; tile < Shape::tiles; ++tile) {
      KVPOLICY_UNROLL
      for (int n = 0; n < ColumnTiles; ++n) {
        KVPOLICY_UNROLL
        for (int i = 0; i < 4; ++i) out[tile][n][i] *= columns.of_codes(n, i % 2, i / 2);
      }
    }
  }

 private:
  /// Sets a tile's logits to the zeros' share, in units of products with codes.
  KVPOLICY_DEVICE void add_zeros(float (&out)[ColumnTiles][4], const std::uint32_t (&zero)[4], int at) const {
    Products::clear(out);
    KVPOLICY_UNROLL
    for (int n = 0; n < ColumnTiles; ++n) {
      const Words2 sums = sums_of(n, 0);
      if constexpr (eights == 2) {
        const Words2 others = sums_of(n, 1);
        multiply_add<float16>(out[n], zero, sums.word[0], others.word[0]);
        multiply_add<float16>(out[n], zero, sums.word[1], others.word[1]);
      } else {
        const std::uint32_t a[4] = {zero[at], zero[at + 1], zero[at], zero[at + 1]};
        multiply_add<float16>(out[n], a, sums.word[0], sums.word[1]);
      }
      KVPOLICY_UNROLL
      for (int i = 0; i < 4; ++i) out[n][i] *= i < 2 ? 0x1p-24F : 0x1p-24F * (1 << Shape::KeyTile::row_shift);
    }
  }

  /// This lane's sums of the query over groups 2t and 2t + 1 of eight, and what rounding took from
  /// them. They are in shared memory, because registers are scarce.
  KVPOLICY_DEVICE Words2& sums_of(int n, int eight) const {
    return reinterpret_cast<Words2*>(head.stage)[(n * eights + eight) * warp_lanes + head.lane];
  }

  const PackedHead& head;
  GroupGrids<Shape> grids;
  const std::byte* zeros;  ///< what this lane points to in the first matrix load
};

// ---- one scale for each channel of a group of keys -----------------------------------------------
/// The scales go to the query, whose products with them are rounded to half. So that the error does
/// not grow with the codes' mean, the codes count from their middle: the logit is
/// sum of round(q * scale) * (code - middle) + sum of q * (zero + middle * scale).
template <class Shape, int ColumnTiles>
class PackedKeys<Shape, ColumnTiles, Grouping::rows> {
  using Products = KeyProducts<Shape, ColumnTiles>;
  static constexpr int tiles_in_group = Shape::finest == 32 ? 2 : 1;
  static constexpr int groups = Shape::tiles / tiles_in_group;
  static constexpr int vectors = Shape::head_dim / 8;
  static constexpr int zeros_at = Shape::head_dim * 2;
  static constexpr int group_bytes = 2 * zeros_at;

 public:
  static constexpr int lasting_bytes = 0;
  static constexpr int staged_bytes = groups * group_bytes;

  KVPOLICY_DEVICE explicit PackedKeys(const PackedHead& packed_head) : head{packed_head} {}

  KVPOLICY_DEVICE void request(const TileAddress& address) {
    constexpr int items = groups * vectors;
    KVPOLICY_UNROLL
    for (int pass = 0; pass < items; pass += warp_lanes) {
      const int item = pass + head.lane;
      const int group = item / vectors % groups;
      const int vector = item % vectors;
      const TileAddress tile = address.of(group * tiles_in_group);
      if (item >= items) continue;
      const int of_rows = page_of(tile.row, head.slice.head.key_group);
      const std::byte* from = tile.at((of_rows * Shape::head_dim + vector * 8) * 2);
      std::byte* to = head.stage + group * group_bytes + vector * 16;
      cp_async_16(to, from + head.layout.key_scales_offset, true);
      cp_async_16(to + zeros_at, from + head.layout.key_zeros_offset, true);
    }
  }
  KVPOLICY_DEVICE void logits(float (&out)[Shape::tiles][ColumnTiles][4],
                              const typename Shape::KeyTile (&keys)[Shape::tiles]) const {
    const auto columns = Products::columns(head);
    KVPOLICY_UNROLL
    for (int group = 0; group < groups; ++group) {
      if constexpr (Shape::finest < 32) sync_warp();  // not all groups' scales at once, for want of registers
      KVPOLICY_UNROLL
      for (int k = 0; k < tiles_in_group; ++k) Products::clear(out[group * tiles_in_group + k]);
      float middles[ColumnTiles][4];
      float offsets[ColumnTiles][4];  // of zeros, and of scales in place of rows g + 8
      Products::clear(middles);
      Products::clear(offsets);
      KVPOLICY_UNROLL
      for (int pair = 0; pair < Shape::head_dim / 32; ++pair) {
        const auto* grid =
            reinterpret_cast<const Words4*>(head.stage + group * group_bytes) + pair * 4 + head.lane % 4;
        const Words4 scale = grid[0];
        const Words4 zero = grid[zeros_at / 16];
        Words4 q[ColumnTiles];
        KVPOLICY_UNROLL
        for (int n = 0; n < ColumnTiles; ++n)
          q[n] = Products::Queries::of_steps(head.queries.halves, pair, n);
        KVPOLICY_UNROLL
        for (int step = 0; step < 2; ++step) {
          const std::uint32_t a[4] = {zero.word[2 * step], scale.word[2 * step], zero.word[2 * step + 1],
                                      scale.word[2 * step + 1]};
          Products::add_step(offsets, a, step, q);
        }
        KVPOLICY_UNROLL
        for (int n = 0; n < ColumnTiles; ++n) {
          q[n] = Products::for_codes(q[n]);
          KVPOLICY_UNROLL
          for (int w = 0; w < 4; ++w) q[n].word[w] = half2_multiply_add(q[n].word[w], scale.word[w], 0);
        }
        std::uint32_t middle[4];
        Shape::KeyTile::minus_middle(middle, head.widths.keys);
        Products::add_step(middles, middle, 0, q);
        Products::add_step(middles, middle, 1, q);
        KVPOLICY_UNROLL
        for (int k = 0; k < tiles_in_group; ++k) {
          const int tile = group * tiles_in_group + k;
          Products::add(out[tile], keys[tile], pair, q);
        }
      }
      KVPOLICY_UNROLL
      for (int n = 0; n < ColumnTiles; ++n) {
        KVPOLICY_UNROLL
        for (int i = 0; i < 4; ++i) {
          const float scale = columns.of_codes(n, i % 2, i / 2);
          const float offset =
              offsets[n][i % 2] + Shape::KeyTile::middle(head.widths.keys) * offsets[n][2 + i % 2];
          const float constant = middles[n][i] * scale + offset * columns.scale[n][i % 2];
          KVPOLICY_UNROLL
          for (int k = 0; k < tiles_in_group; ++k) {
            float& logit = out[group * tiles_in_group + k][n][i];
            logit = logit * scale + constant;
          }
        }
      }
    }
  }

 private:
  const PackedHead& head;
};

}  // namespace kvpolicy::gpu
