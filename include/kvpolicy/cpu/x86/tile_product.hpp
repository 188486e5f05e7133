// SPDX-License-Identifier: Apache-2.0
//
// A product of matrices of bfloat16 pairs in tile registers. It computes four tiles of the result at a
// time, so that every loaded tile is used in two products.
#pragma once

#include <cstddef>
#include <cstdint>

#include <kvpolicy/cpu/highway.hpp>
#include <kvpolicy/cpu/x86/pair_matrices.hpp>

namespace kvpolicy::cpu::x86 {

/// Rows, pairs and columns of a tile. The sizes of a product must be multiples of it.
inline constexpr std::size_t tile_size = 16;

// This is scalar code, but it is called between vector code, so it is compiled for the same instruction
// set: switching to SSE costs time. Each target has its own functions here, because `Meanwhile` is a type
// of its namespace.
KVPOLICY_CPU_BEGIN_TARGET

/// Computes M x N tiles (1 or 2 each) of a product.
template <int M, int N, class Tiles, class Meanwhile>
void tile_block(Tiles& tiles, const PairMatrices& matrices, const ProductTarget& target,
                Meanwhile& meanwhile) {
  const std::size_t a_stride = matrices.a_row * sizeof(std::uint32_t);
  const std::size_t b_stride = matrices.b_row * sizeof(std::uint32_t);
  const std::size_t c_stride = target.c_row * sizeof(float);
  float* c = target.c;
  float* c_below = c + tile_size * target.c_row;
  if (target.onto) {
    tiles.template load<0>(c, c_stride);
    if constexpr (N > 1) tiles.template load<1>(c + tile_size, c_stride);
    if constexpr (M > 1) tiles.template load<2>(c_below, c_stride);
    if constexpr (M > 1 && N > 1) tiles.template load<3>(c_below + tile_size, c_stride);
  } else {
    tiles.template zero<0>();
    if constexpr (N > 1) tiles.template zero<1>();
    if constexpr (M > 1) tiles.template zero<2>();
    if constexpr (M > 1 && N > 1) tiles.template zero<3>();
  }
  for (std::size_t term = 0; term < matrices.terms.count; ++term) {
    const ProductTerm& own = matrices.terms.terms[term];
    for (std::size_t pair = 0; pair < matrices.pairs; pair += tile_size) {
      for (std::size_t i = 0; i < tile_size; i += Meanwhile::stretch) meanwhile();
      const std::uint32_t* a = matrices.a + own.a + pair;
      const std::uint32_t* b = matrices.b + own.b + pair * matrices.b_row;
      tiles.template load<4>(a, a_stride);
      tiles.template load<6>(b, b_stride);
      tiles.template add_product<0, 4, 6>();
      if constexpr (N > 1) {
        tiles.template load<7>(b + tile_size, b_stride);
        tiles.template add_product<1, 4, 7>();
      }
      if constexpr (M > 1) {
        tiles.template load<5>(a + tile_size * matrices.a_row, a_stride);
        tiles.template add_product<2, 5, 6>();
        if constexpr (N > 1) tiles.template add_product<3, 5, 7>();
      }
    }
  }
  tiles.template store<0>(c, c_stride);
  if constexpr (N > 1) tiles.template store<1>(c + tile_size, c_stride);
  if constexpr (M > 1) tiles.template store<2>(c_below, c_stride);
  if constexpr (M > 1 && N > 1) tiles.template store<3>(c_below + tile_size, c_stride);
}

/// Computes a product with `rows` rows, a multiple of tile_size, and one or two tiles of columns. Its
/// a_step must be 1. It calls meanwhile() every Meanwhile::stretch pairs.
template <class Tiles, class Meanwhile>
void tile_product(Tiles& tiles, PairMatrices matrices, ProductTarget target, std::size_t rows,
                  std::size_t width, Meanwhile& meanwhile) {
  const bool two = width > tile_size;
  for (std::size_t row = 0; row < rows; row += 2 * tile_size) {
    if (rows - row > tile_size) {
      two ? tile_block<2, 2>(tiles, matrices, target, meanwhile)
          : tile_block<2, 1>(tiles, matrices, target, meanwhile);
    } else {
      two ? tile_block<1, 2>(tiles, matrices, target, meanwhile)
          : tile_block<1, 1>(tiles, matrices, target, meanwhile);
    }
    matrices.a += 2 * tile_size * matrices.a_row;
    target.c += 2 * tile_size * target.c_row;
  }
}

KVPOLICY_CPU_END_TARGET
}  // namespace kvpolicy::cpu::x86
