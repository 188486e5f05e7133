// SPDX-License-Identifier: Apache-2.0
//
// Online softmax in the registers of one warp, whose columns (the heads of a few queries) are the n
// dimension of the matrix products. Rows are rows of S^T, so a lane has two columns of each column
// tile, both in the logits and in the values, and rescaling after a new maximum needs no exchange
// between lanes.
//
// Method: Milakov & Gimelshein, arXiv:1805.02867, with two differences. The reference for exponents
// is set `lead` below the maximum, so that half's range covers weights above and below it. The
// reference moves only when a logit is `span` above it, which is rare, so most steps cost a vote
// instead of a reduction.
#pragma once

#include <kvpolicy/cuda/kernels/fragments.cuh>
#include <kvpolicy/cuda/kernels/hadamard.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

/// In powers of two. Weights are at most 2^span, which is below half's limit of 2^16.
inline constexpr float reference_lead = 7.0F;
inline constexpr float reference_span = 14.0F;
/// The state before any row was seen. It is finite, because -infinity - -infinity is NaN.
inline constexpr float no_reference = -1.0e38F;

template <int HeadDim, int ColumnTiles>
struct OnlineSoftmax {
  static constexpr int steps = HeadDim / 16;
  /// [channels, columns] of O^T, not normalised.
  float values[steps][ColumnTiles][4];
  float reference[ColumnTiles][2];
  float sum[ColumnTiles][2];  ///< over this lane's rows

  KVPOLICY_DEVICE void clear() {
    KVPOLICY_UNROLL
    for (int n = 0; n < ColumnTiles; ++n) {
      KVPOLICY_UNROLL
      for (int step = 0; step < steps; ++step) {
        KVPOLICY_UNROLL
        for (int i = 0; i < 4; ++i) values[step][n][i] = 0.0F;
      }
      KVPOLICY_UNROLL
      for (int j = 0; j < 2; ++j) {
        reference[n][j] = no_reference;
        sum[n][j] = 0.0F;
      }
    }
  }

  /// Converts the logits (units of log 2) of some tiles of rows to weights, and adds these to the
  /// sums. If the reference moves, `rescale(n, j, factor)` is called for what else the caller has
  /// added with weights of the earlier reference.
  template <int Tiles, class Rescale>
  KVPOLICY_DEVICE void weigh(float (&logits)[Tiles][ColumnTiles][4], Rescale rescale) {
    bool beyond = false;
    KVPOLICY_UNROLL
    for (int n = 0; n < ColumnTiles; ++n) {
      KVPOLICY_UNROLL
      for (int j = 0; j < 2; ++j) {
        const float limit = reference[n][j] + reference_span;
        KVPOLICY_UNROLL
        for (int tile = 0; tile < Tiles; ++tile) {
          beyond = beyond || logits[tile][n][j] > limit || logits[tile][n][j + 2] > limit;
        }
      }
    }
    if (any(beyond)) move_reference(logits, rescale);
    KVPOLICY_UNROLL
    for (int n = 0; n < ColumnTiles; ++n) {
      KVPOLICY_UNROLL
      for (int tile = 0; tile < Tiles; ++tile) {
        KVPOLICY_UNROLL
        for (int i = 0; i < 4; ++i) {
          logits[tile][n][i] = exp2_approximate(logits[tile][n][i] - reference[n][i % 2]);
          sum[n][i % 2] += logits[tile][n][i];
        }
      }
    }
  }

  template <int Tiles>
  KVPOLICY_DEVICE void weigh(float (&logits)[Tiles][ColumnTiles][4]) {
    weigh(logits, [](int, int, float) {});
  }

  /// Adds one step (16 channels, `a`) of the values of 16 rows with weights as `WeightOperands`.
  template <Element E>
  KVPOLICY_DEVICE void add(int step, const std::uint32_t (&a)[4],
                           const std::uint32_t (&weights)[ColumnTiles][2]) {
    KVPOLICY_UNROLL
    for (int n = 0; n < ColumnTiles; ++n) {
      multiply_add<E>(values[step][n], a, weights[n][0], weights[n][1]);
    }
  }

  /// Rotates the values, of rotated rows, back. The channels' lowest bit is a number's row of the matrix, g or
  /// g + 8, the next two are those of the step, three are g, and the last one is the step's again
  /// (packing.cuh, offset_of_value).
  KVPOLICY_DEVICE void rotate_values() {
    static_assert(HeadDim == 64 || HeadDim == 128);
    KVPOLICY_UNROLL
    for (int n = 0; n < ColumnTiles; ++n) {
      KVPOLICY_UNROLL
      for (int j = 0; j < 2; ++j) {
        float x[HeadDim / 8];
        KVPOLICY_UNROLL
        for (int i = 0; i < HeadDim / 8; ++i) x[i] = values[i / 2][n][i % 2 * 2 + j];
        add_apart<1>(x);
        add_apart<2>(x);
        add_apart<4>(x);
        add_across(x, 4);
        add_across(x, 8);
        add_across(x, 16);
        if constexpr (HeadDim == 128) add_apart<8>(x);
        scale_rotated<HeadDim>(x);
        KVPOLICY_UNROLL
        for (int i = 0; i < HeadDim / 8; ++i) values[i / 2][n][i % 2 * 2 + j] = x[i];
      }
    }
  }

  /// Sums over all rows of the warp; every lane that has the column gets the sum.
  KVPOLICY_DEVICE void gather_sums() {
    KVPOLICY_UNROLL
    for (int n = 0; n < ColumnTiles; ++n) {
      KVPOLICY_UNROLL
      for (int j = 0; j < 2; ++j) {
        KVPOLICY_UNROLL
        for (int mask = 4; mask < warp_lanes; mask *= 2) sum[n][j] += shuffle_xor(sum[n][j], mask);
      }
    }
  }

 private:
  template <int Tiles, class Rescale>
  KVPOLICY_DEVICE void move_reference(const float (&logits)[Tiles][ColumnTiles][4], Rescale rescale) {
    KVPOLICY_UNROLL
    for (int n = 0; n < ColumnTiles; ++n) {
      KVPOLICY_UNROLL
      for (int j = 0; j < 2; ++j) {
        float max = logits[0][n][j];
        KVPOLICY_UNROLL
        for (int tile = 0; tile < Tiles; ++tile) {
          max = greater(max, greater(logits[tile][n][j], logits[tile][n][j + 2]));
        }
        KVPOLICY_UNROLL
        for (int mask = 4; mask < warp_lanes; mask *= 2) max = greater(max, shuffle_xor(max, mask));
        const float next = greater(reference[n][j], max - reference_lead);
        const float factor = exp2_approximate(reference[n][j] - next);
        reference[n][j] = next;
        sum[n][j] *= factor;
        rescale(n, j, factor);
        KVPOLICY_UNROLL
        for (int step = 0; step < steps; ++step) {
          values[step][n][j] *= factor;
          values[step][n][j + 2] *= factor;
        }
      }
    }
  }
  KVPOLICY_DEVICE static float greater(float a, float b) { return a > b ? a : b; }
};

/// Weights [16 rows, columns] computed by `weigh`, as the second operand of O^T = V^T P^T.
template <Element E, int ColumnTiles>
KVPOLICY_DEVICE void weight_operands(std::uint32_t (&operands)[ColumnTiles][2],
                                     const float (&weights)[ColumnTiles][4]) {
  KVPOLICY_UNROLL
  for (int n = 0; n < ColumnTiles; ++n) {
    operands[n][0] = transpose_matrix(pack<E>(weights[n][0], weights[n][1]));
    operands[n][1] = transpose_matrix(pack<E>(weights[n][2], weights[n][3]));
  }
}

}  // namespace kvpolicy::gpu
