// SPDX-License-Identifier: Apache-2.0
//
// The softmax of the prefill kernel: converts logits of a tile of keys to weights, in registers. Of
// each 16 query rows of its warp, a lane has rows lane / 4 and lane / 4 + 8, and of each 8 keys it
// has numbers 2 (lane % 4) and + 1 (multiply_add in simt.cuh).
#pragma once

#include <cmath>
#include <type_traits>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/kernels/hadamard.cuh>
#include <kvpolicy/cuda/kernels/prefill_tile.cuh>

namespace kvpolicy::gpu {

template <int Rows, int Columns>
struct Accumulators {
  float at[Rows][Columns][4];

  KVPOLICY_DEVICE void clear() {
    KVPOLICY_UNROLL
    for (int m = 0; m < Rows; ++m) {
      KVPOLICY_UNROLL
      for (int n = 0; n < Columns; ++n) {
        KVPOLICY_UNROLL
        for (int i = 0; i < 4; ++i) at[m][n][i] = 0.0F;
      }
    }
  }
};

template <class Shape>
using LogitTile = Accumulators<Shape::row_tiles, Shape::key_rows / 8>;
template <class Shape>
using OutputTile = Accumulators<Shape::row_tiles, Shape::head_dim / 8>;

/// Rotates the outputs, or rotates them back. The channels' lowest bit is that of a pair, the next two are the
/// lane's, the others are those of `n`.
template <class Shape>
KVPOLICY_DEVICE void rotate_output(OutputTile<Shape>& output) {
  constexpr int HeadDim = Shape::head_dim;
  static_assert(HeadDim == 64 || HeadDim == 128);
  KVPOLICY_UNROLL
  for (int m = 0; m < Shape::row_tiles; ++m) {
    KVPOLICY_UNROLL
    for (int half = 0; half < 2; ++half) {
      float x[HeadDim / 4];
      KVPOLICY_UNROLL
      for (int i = 0; i < HeadDim / 4; ++i) x[i] = output.at[m][i / 2][half * 2 + i % 2];
      add_apart<1>(x);
      add_across(x, 1);
      add_across(x, 2);
      add_apart<2>(x);
      add_apart<4>(x);
      add_apart<8>(x);
      if constexpr (HeadDim == 128) add_apart<16>(x);
      scale_rotated<HeadDim>(x);
      KVPOLICY_UNROLL
      for (int i = 0; i < HeadDim / 4; ++i) output.at[m][i / 2][half * 2 + i % 2] = x[i];
    }
  }
}

/// Unnormalised probabilities as the first operand of products with 16 values each. Lanes already
/// have the layout of this operand, because each has the logits of two neighbouring groups of 8
/// keys.
template <class Shape>
struct WeightTile {
  std::uint32_t at[Shape::row_tiles][Shape::key_rows / 16][4];
};

/// The row of a tile of queries to which half `half` of a lane's row tile `m` belongs.
template <class Shape>
KVPOLICY_DEVICE int query_row(int m, int half) {
  return warp_index() * Shape::warp_rows + m * 16 + half * 8 + lane_index() / 4;
}

/// Softmax state. All four lanes of a row have its maximum; until `gather`, each lane has only the
/// sum over its own columns.
template <class Shape>
struct RowStates {
  static constexpr int row_tiles = Shape::row_tiles;
  float max[row_tiles][2];  ///< in units of unscaled logits until `gather`, then in units of log 2
  float sum[row_tiles][2];

  KVPOLICY_DEVICE RowStates() {
    KVPOLICY_UNROLL
    for (int m = 0; m < row_tiles; ++m) {
      KVPOLICY_UNROLL
      for (int half = 0; half < 2; ++half) {
        max[m][half] = minus_infinity();
        sum[m][half] = 0.0F;
      }
    }
  }

  KVPOLICY_DEVICE void gather(float scale) {
    KVPOLICY_UNROLL
    for (int m = 0; m < row_tiles; ++m) {
      KVPOLICY_UNROLL
      for (int half = 0; half < 2; ++half) {
        float& all = sum[m][half];
        all += shuffle_xor(all, 1);
        all += shuffle_xor(all, 2);
        max[m][half] *= scale;
      }
    }
  }
  KVPOLICY_DEVICE PartialState of(int m, int half) const { return {max[m][half], sum[m][half]}; }
};

/// Logits stay unscaled if the factor can be part of the exponential's multiply-add. A soft cap, or
/// a negative factor, which would turn maxima into minima, is applied to each logit first.
struct LogitScale {
  float factor;  ///< converts logits to units of log 2, in the softmax
  float before;  ///< the same, applied to logits before
  float softcap;
  bool early;

  KVPOLICY_DEVICE explicit LogitScale(const AttendParams& params)
      : before{params.scale_log2},
        softcap{params.softcap},
        early{params.softcap != 0.0F || !(params.scale_log2 > 0.0F)} {
    factor = early ? 1.0F : params.scale_log2;
  }

  template <int Rows, int Columns>
  KVPOLICY_DEVICE void prepare(Accumulators<Rows, Columns>& logits) const {
    if (!early) return;
    // A row tile at a time, because code that caps each logit would be an eighth of the kernel's.
    KVPOLICY_NO_UNROLL
    for (int turn = 0; turn < Rows; ++turn) {
      KVPOLICY_UNROLL
      for (int n = 0; n < Columns; ++n) {
        KVPOLICY_UNROLL
        for (int i = 0; i < 4; ++i) {
          float logit = logits.at[0][n][i];
          KVPOLICY_UNROLL
          for (int m = 1; m < Rows; ++m) logit = turn == m ? logits.at[m][n][i] : logit;
          logit = capped(logit * before, softcap);
          KVPOLICY_UNROLL
          for (int m = 0; m < Rows; ++m) logits.at[m][n][i] = turn == m ? logit : logits.at[m][n][i];
        }
      }
    }
  }
};

/// Which rows of a tile a lane's queries see: 16 bits (8 of tiles of 32 rows, 32 of those of 128) for each of its
/// query rows, in order, and of these bit 2 n + i for its column 8 n + i.
template <class Shape>
struct SeenRows {
  static constexpr int columns = Shape::key_rows / 4;
  static constexpr int rows = Shape::row_tiles * 2;
  static_assert(rows * columns <= 64);
  using Bits = std::conditional_t<(columns < 32), std::uint32_t, std::uint64_t>;  // holds 2^columns

  std::uint64_t bits = 0;

  KVPOLICY_DEVICE static int query(int row) { return query_row<Shape>(row / 2, row % 2); }
  /// The lane's first column, as a row of the segment.
  KVPOLICY_DEVICE static int begin(const LiveSegment& live, int tile) {
    return tile * Shape::key_rows - live.lead + lane_index() % 4 * 2;
  }
  /// How many of the lane's columns come before column `end` of the tile (from the lane's first one).
  KVPOLICY_DEVICE static int columns_before(int end) {
    const int inside = smaller(larger(end, 0), Shape::key_rows);
    return inside / 8 * 2 + smaller(inside % 8, 2);
  }

  /// Finds the bits of a range of rows.
  KVPOLICY_DEVICE void find_range(const LiveSegment& live, int tile, const QueryTile& queries) {
    const DeviceSegment& segment = live.segment;
    const int first = begin(live, tile);
    KVPOLICY_UNROLL
    for (int row = rows - 1; row >= 0; --row) {
      const int position = queries.position(query(row));
      const int from =
          segment.window == unlimited ? 0 : larger(0, position - segment.window + 1 - segment.position);
      const int to = smaller(segment.rows, position - segment.position + 1);
      const auto below = [&](int end) { return (Bits{1} << columns_before(end - first)) - 1; };
      bits = bits << columns | (below(to) & ~below(from));
    }
  }
  /// Finds those of chunks and of trees, one by one, in a loop, because what finds a bit would be most of the kernel's
  /// code if it stood here for each of them.
  KVPOLICY_DEVICE void find_each(const LiveSegment& live, int tile, const QueryTile& queries,
                                 const Request& request) {
    const DeviceSegment& segment = live.segment;
    const int first = begin(live, tile);
    KVPOLICY_NO_UNROLL
    for (int i = rows * columns - 1; i >= 0; --i) {
      const int token_row = query(i / columns);
      const int row = first + i % columns / 2 * 8 + i % 2;
      bool seen = false;
      if (request.tree.nodes > 0) {
        seen = TreeQuery{request, queries.token(token_row)}.sees(segment, queries.first_position, row);
      } else {
        seen = row < segment.rows && segment.position_of(row) <= queries.position(token_row);
      }
      bits = bits << 1 | (seen ? 1U : 0U);
    }
  }
};

/// Masks, for each query, the rows of a tile that it does not see. All bits are found first, because the logits leave
/// few registers.
template <class Shape>
KVPOLICY_DEVICE void hide(LogitTile<Shape>& logits, const LiveSegment& live, int tile,
                          const QueryTile& queries, const Request& request) {
  SeenRows<Shape> seen;
  if (request.tree.nodes > 0 || live.segment.chunks != nullptr) {
    seen.find_each(live, tile, queries, request);
  } else {
    seen.find_range(live, tile, queries);
  }
  KVPOLICY_UNROLL
  for (int m = 0; m < Shape::row_tiles; ++m) {
    KVPOLICY_UNROLL
    for (int n = 0; n < Shape::key_rows / 8; ++n) {
      KVPOLICY_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int bit = (m * 2 + i / 2) * seen.columns + n * 2 + i % 2;
        if ((seen.bits >> bit & 1U) == 0) logits.at[m][n][i] = minus_infinity();
      }
    }
  }
}

/// A number for each of a lane's rows.
template <class Shape>
struct RowNumbers {
  float at[Shape::row_tiles][2];
};

/// Finds the rows' maxima including a tile; returns whether that of some row of the warp has grown.
template <class Shape>
KVPOLICY_DEVICE bool find_maxima(RowNumbers<Shape>& latest, const LogitTile<Shape>& logits,
                                 const RowStates<Shape>& states) {
  bool grown = false;
  KVPOLICY_UNROLL
  for (int m = 0; m < Shape::row_tiles; ++m) {
    KVPOLICY_UNROLL
    for (int half = 0; half < 2; ++half) {
      float max = states.max[m][half];
      KVPOLICY_UNROLL
      for (int n = 0; n < Shape::key_rows / 8; ++n) {
        max = fmaxf(max, fmaxf(logits.at[m][n][half * 2], logits.at[m][n][half * 2 + 1]));
      }
      max = fmaxf(max, shuffle_xor(max, 1));
      max = fmaxf(max, shuffle_xor(max, 2));
      grown = grown || max > states.max[m][half];
      latest.at[m][half] = max;
    }
  }
  return any(grown);
}

/// Replaces the maxima of the states, whose sums shrink; `factors` are what outputs of before are multiplied by.
template <class Shape>
KVPOLICY_DEVICE void raise_maxima(RowStates<Shape>& states, const RowNumbers<Shape>& latest, float scale,
                                  RowNumbers<Shape>& factors) {
  KVPOLICY_UNROLL
  for (int m = 0; m < Shape::row_tiles; ++m) {
    KVPOLICY_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float before = states.max[m][half];
      const float factor =
          before == latest.at[m][half] ? 1.0F : exp2_approximate((before - latest.at[m][half]) * scale);
      states.max[m][half] = latest.at[m][half];
      states.sum[m][half] *= factor;
      factors.at[m][half] = factor;
    }
  }
}

template <class Shape>
KVPOLICY_DEVICE void multiply_rows(OutputTile<Shape>& output, const RowNumbers<Shape>& factors) {
  KVPOLICY_UNROLL
  for (int m = 0; m < Shape::row_tiles; ++m) {
    KVPOLICY_UNROLL
    for (int half = 0; half < 2; ++half) {
      KVPOLICY_UNROLL
      for (int n = 0; n < Shape::head_dim / 8; ++n) {
        output.at[m][n][half * 2] *= factors.at[m][half];
        output.at[m][n][half * 2 + 1] *= factors.at[m][half];
      }
    }
  }
}

/// Converts logits, none of which is above the states' maxima, to weights and adds these to the sums. A row that has
/// seen nothing yet has maximum -infinity and weights of 0. Calls use(m, n, half, low, high) with each two weights.
template <class Shape, class Use>
KVPOLICY_DEVICE void weigh(const LogitTile<Shape>& logits, RowStates<Shape>& states, float scale, Use use) {
  KVPOLICY_UNROLL
  for (int m = 0; m < Shape::row_tiles; ++m) {
    KVPOLICY_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float max = states.max[m][half];
      const float base = max == minus_infinity() ? 0.0F : max * scale;
      float sum = 0.0F;
      KVPOLICY_UNROLL
      for (int n = 0; n < Shape::key_rows / 8; ++n) {
        const float low = exp2_approximate(logits.at[m][n][half * 2] * scale - base);
        const float high = exp2_approximate(logits.at[m][n][half * 2 + 1] * scale - base);
        sum += low + high;
        use(m, n, half, low, high);
      }
      states.sum[m][half] += sum;
    }
  }
}

/// Converts a tile of logits to weights, and scales earlier sums and outputs down where the maximum
/// has grown.
template <Element E, class Shape>
KVPOLICY_DEVICE void soften(const LogitTile<Shape>& logits, RowStates<Shape>& states,
                            OutputTile<Shape>& output, WeightTile<Shape>& weights, float scale) {
  RowNumbers<Shape> latest;
  if (find_maxima<Shape>(latest, logits, states)) {
    RowNumbers<Shape> factors;
    raise_maxima<Shape>(states, latest, scale, factors);
    multiply_rows<Shape>(output, factors);
  }
  weigh<Shape>(logits, states, scale,
               [&](int m, int n, int half, float low, float high)
                   KVPOLICY_INLINE_LAMBDA { weights.at[m][n / 2][n % 2 * 2 + half] = pack<E>(low, high); });
}

}  // namespace kvpolicy::gpu
