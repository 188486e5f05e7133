// SPDX-License-Identifier: Apache-2.0
//
// Matrix loads, transposition and products of kernels/simt.cuh, element by element as its comments specify.
// Products are exact (two 16-bit numbers in a float) and added in float, in ascending order of the inner
// index. A device uses its own order and rounding.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include <kvpolicy/core/dtype.hpp>

#include "memory.hpp"

namespace kvpolicy::gpu {
namespace simt {

struct MatrixRow {
  std::uint16_t number[8];
};

/// Every lane stores the row that it points to.
inline const Exchange& load_rows(Collective kind, const void* shared_row) {
  require_alignment(static_cast<const std::byte*>(shared_row), 16,
                    "load_matrix: row not at a multiple of 16");
  require_shared(shared_row, "load_matrix: row outside shared memory");
  MatrixRow row;
  std::memcpy(&row, shared_row, sizeof row);
  return meet_with(kind, row);
}

inline std::uint32_t two_numbers(std::uint16_t low, std::uint16_t high) {
  return static_cast<std::uint32_t>(low) | static_cast<std::uint32_t>(high) << 16;
}

/// All numbers of a type by their 16 bits.
template <Element E>
inline const float* numbers_of() {
  static const std::vector<float> numbers = [] {
    std::vector<float> all(0x10000);
    for (std::uint32_t bits = 0; bits < all.size(); ++bits) {
      E number;
      number.bits = static_cast<std::uint16_t>(bits);
      all[bits] = static_cast<float>(number);
    }
    return all;
  }();
  return numbers.data();
}
template <Element E>
inline float number_of(std::uint32_t bits) {
  return numbers_of<E>()[bits & 0xffffU];
}

/// Where sanitizers are off: the indices are right by construction, and the emulation of an attention kernel spends
/// most of its time there.
#define KVPOLICY_SIMT_UNCHECKED __attribute__((no_sanitize("address", "undefined")))

/// Stores one lane's factors.
template <Element E>
KVPOLICY_SIMT_UNCHECKED inline void store_factors(Exchange& e, const std::uint32_t (&a)[4], std::uint32_t b0,
                                                  std::uint32_t b1, int g, int t) {
  const float* const numbers = numbers_of<E>();
  for (int high = 0; high < 2; ++high) {
    const int shift = high * 16;
    for (int i = 0; i < 4; ++i) {
      e.a[g + i % 2 * 8][2 * t + high + i / 2 * 8] = numbers[a[i] >> shift & 0xffffU];
    }
    e.b[2 * t + high][g] = numbers[b0 >> shift & 0xffffU];
    e.b[2 * t + 8 + high][g] = numbers[b1 >> shift & 0xffffU];
  }
}

/// d += a b for the four numbers of one lane.
KVPOLICY_SIMT_UNCHECKED inline void add_products(float (&d)[4], const Exchange& all, int g, int t) {
  float sum[4] = {d[0], d[1], d[2], d[3]};
  for (int k = 0; k < 16; ++k) {
    const float b0 = all.b[k][2 * t];
    const float b1 = all.b[k][2 * t + 1];
    sum[0] += all.a[g][k] * b0;
    sum[1] += all.a[g][k] * b1;
    sum[2] += all.a[g + 8][k] * b0;
    sum[3] += all.a[g + 8][k] * b1;
  }
  for (int i = 0; i < 4; ++i) d[i] = sum[i];
}

}  // namespace simt

inline void load_matrix_x4(std::uint32_t (&r)[4], const void* shared_row) {
  const auto& rows = simt::load_rows(simt::Collective::load_matrix, shared_row);
  const int lane = simt::self->lane;
  for (int m = 0; m < 4; ++m) {
    const auto row = simt::left_by<simt::MatrixRow>(rows, m * 8 + lane / 4);
    r[m] = simt::two_numbers(row.number[lane % 4 * 2], row.number[lane % 4 * 2 + 1]);
  }
}

inline void load_matrix_x4_transposed(std::uint32_t (&r)[4], const void* shared_row) {
  const auto& rows = simt::load_rows(simt::Collective::load_matrix_transposed, shared_row);
  const int lane = simt::self->lane;
  for (int m = 0; m < 4; ++m) {
    const auto low = simt::left_by<simt::MatrixRow>(rows, m * 8 + lane % 4 * 2);
    const auto high = simt::left_by<simt::MatrixRow>(rows, m * 8 + lane % 4 * 2 + 1);
    r[m] = simt::two_numbers(low.number[lane / 4], high.number[lane / 4]);
  }
}

inline std::uint32_t transpose_matrix(std::uint32_t r) {
  const auto& all = simt::meet_with(simt::Collective::transpose_matrix, r);
  const int row = simt::self->lane / 4;
  const int column = simt::self->lane % 4 * 2;
  // The numbers (column, row) and (column + 1, row) of the input.
  const auto low = simt::left_by<std::uint32_t>(all, column * 4 + row / 2);
  const auto high = simt::left_by<std::uint32_t>(all, (column + 1) * 4 + row / 2);
  const int shift = row % 2 * 16;
  return simt::two_numbers(static_cast<std::uint16_t>(low >> shift),
                           static_cast<std::uint16_t>(high >> shift));
}

template <Element E>
inline void multiply_add(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  const int g = simt::self->lane / 4;
  const int t = simt::self->lane % 4;
  const auto& all = simt::meet(simt::Collective::multiply_add,
                               [&](simt::Exchange& e) { simt::store_factors<E>(e, a, b0, b1, g, t); });
  simt::add_products(d, all, g, t);
}

}  // namespace kvpolicy::gpu
