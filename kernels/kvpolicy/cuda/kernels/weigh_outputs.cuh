// SPDX-License-Identifier: Apache-2.0
//
// Multiplies the scores of rows by the L1 norm of what the row's value becomes in the layer's output projection, in
// heads that ask for it (CriticalKV, arXiv:2502.03805). policy/weighed_scores.hpp defines the product: each query
// head's score meets the norm through its own part of the weights, and then they come to one as the votes do.
//
// The norms are a matrix product like that of keys and queries (held_keys.cuh): a warp holds values of 32 rows in
// registers, a block's warps read tiles of the weights from shared memory, and the absolute values of the products are
// added up along the outputs. A compression takes 2 * rows * head_dim * outputs operations for each query head, as many
// as the output projection took when the rows came. It reads each value once, and a head's weights once for each 256 of
// its rows, from the second-level cache. Values that have codes are held in two parts, as keys are, at twice the cost.
//
// Values and weights count as they are stored, in E; a value that has codes as the number that these stand for, to a
// rounding of its second part. Products with one output are added up in float by tensor cores, and those of 16 outputs
// by the lane that has them; the rest is in double. So a norm is off by about head_dim / 2^23 of what it would be if no
// two products cancelled, which is what the host's is off by.
#pragma once

#include <cfloat>
#include <cstddef>

#include <kvpolicy/cuda/kernels/compact.cuh>
#include <kvpolicy/cuda/kernels/hadamard.cuh>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/held_keys.cuh>
#include <kvpolicy/cuda/kernels/select.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>
#include <kvpolicy/cuda/kernels/weigh_values.cuh>

namespace kvpolicy::gpu {

struct WeighOutputsParams {
  WeighValuesParams rows;
  int group = 1;
  const float* of_query_heads =
      nullptr;  ///< [kv_heads * group, pitch]; of heads that add up attention not read
  /// [1, outputs, kv_heads * group, head_dim] of E; rows are aligned to 16 bytes.
  Tensor weights = {};
  int outputs = 0;
};

inline constexpr int weigh_outputs_threads = 256;
inline constexpr int outputs_at_once = 64;  ///< outputs of a tile of weights in shared memory

template <int HeadDim>
inline constexpr int output_tile_bytes = outputs_at_once * HeadDim * 2;
template <int HeadDim>
constexpr std::size_t weigh_outputs_shared_bytes() {
  constexpr int block_rows = weigh_outputs_threads / warp_lanes * 2 * tile_rows;
  // Of two tiles one is read while the other comes. After them a number for each row.
  return 2 * output_tile_bytes<HeadDim> + block_rows * sizeof(double);
}

/// Begins to copy a query head's weights of the outputs from `first` on to shared memory, in the order of
/// QueryOperands; beyond the last output they are zeros. Called by all threads.
template <int HeadDim>
KVPOLICY_DEVICE void request_outputs(const WeighOutputsParams& p, int q_head, int first, std::byte* tile) {
  using Operands = QueryOperands<HeadDim, 1>;
  constexpr int vectors = HeadDim / 8;
  KVPOLICY_NO_UNROLL
  for (int i = thread_index(); i < outputs_at_once * vectors; i += weigh_outputs_threads) {
    const int output = i / vectors;
    const int channel = i % vectors * 8;
    const bool valid = first + output < p.outputs;
    std::byte* operands = tile + output / tile_columns * Operands::bytes;
    cp_async_16(Operands::place(operands, output % tile_columns, channel),
                p.weights.row(0, valid ? first + output : 0, q_head) + channel, valid);
  }
}

/// Loads values of the rows from `first` on, all of them exact; rows from `end` on are replaced by the one before.
template <Element E, int HeadDim>
KVPOLICY_DEVICE void load_exact_values(HeldKeys<E, HeadDim>& values, const HeadView& head, int page_rows,
                                       int first, int end) {
  const auto row_at = [&](int row) {
    return reinterpret_cast<const std::byte*>(
        exact_row<HeadDim>(head, page_rows, smaller(row, end - 1), false));
  };
  KVPOLICY_UNROLL
  for (int part = 0; part < values.parts; ++part) {
    const int row = first + part * tile_rows + lane_index() / 4;
    values.part[part].load(row_at(row), row_at(row + 8));
  }
}

/// Loads values of 16 rows in two parts: rounded to E, and the rounding errors. Called by all lanes.
template <Element E, int HeadDim>
KVPOLICY_DEVICE void load_split_values(HeldKeys<E, HeadDim>& values, const HeadView& head, int page_rows,
                                       int first, int end, int packed_end) {
  static_assert(HeldKeys<E, HeadDim>::parts == 2 && HeadDim % 32 == 0);
  KVPOLICY_UNROLL
  for (int side = 0; side < 2; ++side) {
    const int row = smaller(first + side * 8 + lane_index() / 4, end - 1);
    const bool packed = row < packed_end;
    float x[HeadDim / 4] = {};
    KVPOLICY_UNROLL
    for (int block = 0; block < HeadDim / 32; ++block) {
      const int channel = block * 32 + lane_index() % 4 * 8;
      if (packed) PackedVector<HeadDim>{head, page_rows, row, channel, false}.load(x + block * 8);
    }
    if (head.value_hadamard) rotate_quarters<HeadDim>(x);
    KVPOLICY_UNROLL
    for (int block = 0; block < HeadDim / 32; ++block) {
      Words4 numbers = {};
      Words4 errors = {};
      if (packed) {
        KVPOLICY_UNROLL
        for (int i = 0; i < 4; ++i) {
          const float low = x[block * 8 + 2 * i];
          const float high = x[block * 8 + 2 * i + 1];
          const std::uint32_t kept = pack<E>(low, high);
          numbers.word[i] = kept;
          errors.word[i] = pack<E>(low - to_float<E>(static_cast<std::uint16_t>(kept)),
                                   high - to_float<E>(static_cast<std::uint16_t>(kept >> 16)));
        }
      } else {
        const auto* exact = reinterpret_cast<const Words4*>(exact_row<HeadDim>(head, page_rows, row, false));
        numbers = exact[block * 4 + lane_index() % 4];
      }
      values.part[0].block[block][side] = numbers;
      values.part[1].block[block][side] = errors;
    }
  }
}

/// Weighs the rows from `first` on that a warp has: 16 in two parts, or as many as HeldKeys has. `first` may be beyond
/// the last candidate. Called by all threads of the block.
template <Element E, int HeadDim, bool Split>
KVPOLICY_DEVICE void weigh_rows(const WeighOutputsParams& p, const CompressionSettings& how,
                                const HeadView& head, int first, int candidates, int packed_end) {
  using Values = HeldKeys<E, HeadDim>;
  using Operands = QueryOperands<HeadDim, 1>;
  constexpr int parts = Split ? 1 : Values::parts;
  const int chunks = quotient_up(p.outputs, outputs_at_once);
  const long long pitch = p.rows.pitch;
  Values values;
  if constexpr (Split) {
    load_split_values<E, HeadDim>(values, head, p.rows.page_rows, first, candidates, packed_end);
  } else {
    load_exact_values<E, HeadDim>(values, head, p.rows.page_rows, first, candidates);
  }
  const auto row_of = [&](int part, int side) {
    return first + part * tile_rows + side * 8 + lane_index() / 4;
  };
  // What the query heads of a row come to, in shared memory, because registers are few. One lane of four has a row.
  auto* together = reinterpret_cast<double*>(shared_memory() + 2 * output_tile_bytes<HeadDim>) +
                   warp_index() * 2 * tile_rows + lane_index() / 4;
  const bool has_rows = lane_index() % 4 == 0;
  KVPOLICY_NO_UNROLL
  for (int member = 0; member < p.group; ++member) {
    const int q_head = block_y() * p.group + member;
    double norms[parts][2] = {};
    request_outputs<HeadDim>(p, q_head, 0, shared_memory());
    cp_async_commit();
    KVPOLICY_NO_UNROLL
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const std::byte* tile = shared_memory() + chunk % 2 * output_tile_bytes<HeadDim>;
      if (chunk + 1 < chunks) {
        request_outputs<HeadDim>(p, q_head, (chunk + 1) * outputs_at_once,
                                 shared_memory() + (chunk + 1) % 2 * output_tile_bytes<HeadDim>);
      }
      cp_async_commit();
      cp_async_wait<1>();
      sync_block();
      float sums[parts][2] = {};
      KVPOLICY_NO_UNROLL
      for (int eight = 0; eight < outputs_at_once / tile_columns; ++eight) {
        float products[Values::parts][4];
        values.template multiply<Split>(tile + eight * Operands::bytes, products);
        KVPOLICY_UNROLL
        for (int part = 0; part < parts; ++part) {
          KVPOLICY_UNROLL
          for (int i = 0; i < 4; ++i) {
            sums[part][i / 2] += float_of_bits(bits_of_float(products[part][i]) & 0x7fffffffU);
          }
        }
      }
      KVPOLICY_UNROLL
      for (int part = 0; part < parts; ++part) {
        KVPOLICY_UNROLL
        for (int side = 0; side < 2; ++side) norms[part][side] += static_cast<double>(sums[part][side]);
      }
      sync_block();  // the tile may be overwritten
    }
    KVPOLICY_UNROLL
    for (int part = 0; part < parts; ++part) {
      KVPOLICY_UNROLL
      for (int side = 0; side < 2; ++side) {
        double norm = norms[part][side];
        norm += shuffle_xor(norm, 1);
        norm += shuffle_xor(norm, 2);
        const int row = row_of(part, side);
        if (!has_rows || row >= candidates) continue;
        if (how.ranking != Ranking::accumulated) {
          norm *= static_cast<double>(p.of_query_heads[q_head * pitch + row]);
        }
        double& all = together[part * tile_rows + side * 8];
        all = with_vote(how.votes, member == 0 ? 0.0 : all, norm);
      }
    }
  }
  float* weighed = p.rows.weighed + block_y() * pitch;
  KVPOLICY_UNROLL
  for (int part = 0; part < parts; ++part) {
    KVPOLICY_UNROLL
    for (int side = 0; side < 2; ++side) {
      const int row = row_of(part, side);
      if (!has_rows || row >= candidates) continue;
      const float score = score_of_row(p.rows, how, row);
      const double all = together[part * tile_rows + side * 8] / (how.votes == Votes::mean ? p.group : 1);
      // Sums are of all query heads together, and so are their norms.
      const bool by_head = how.ranking != Ranking::accumulated && score < FLT_MAX;
      weighed[row] = score_times_norm(by_head ? 1.0F : score, all);
    }
  }
}

/// Grid: any number of blocks, then kv_heads.
template <Element E, int HeadDim>
KVPOLICY_KERNEL(weigh_outputs_threads, 2)
weigh_outputs_kernel(const KVPOLICY_GRID_CONSTANT WeighOutputsParams p) {
  using Values = HeldKeys<E, HeadDim>;
  const CompressionSettings how = p.rows.compressions[block_y()];
  if (!how.weighs_outputs()) return;
  const HeadView& head = p.rows.heads[block_y()];
  const int candidates = how.rule().candidates(p.rows.state->tokens - head.evicted);
  const int packed_end = head.packed_end(p.rows.state->committed);
  constexpr int block_rows = weigh_outputs_threads / warp_lanes * Values::rows;
  for (int begin = block_x() * block_rows; begin < candidates; begin += grid_x() * block_rows) {
    const int first = begin + warp_index() * Values::rows;
    if constexpr (can_quantize<HeadDim>) {
      if (begin < packed_end) {
        KVPOLICY_NO_UNROLL
        for (int tile = 0; tile < Values::rows; tile += tile_rows) {
          weigh_rows<E, HeadDim, true>(p, how, head, first + tile, candidates, packed_end);
        }
        continue;
      }
    }
    weigh_rows<E, HeadDim, false>(p, how, head, first, candidates, packed_end);
  }
}

}  // namespace kvpolicy::gpu
