// SPDX-License-Identifier: Apache-2.0
//
// Compares matrix loads, transposition and products of the emulation with matrices written out.
#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "simt/run_kernel.hpp"

using namespace kvpolicy;
using namespace kvpolicy::gpu;
using simt::run_kernel;

namespace {

TEST_CASE("load_matrix_x4 gives each lane its numbers of four matrices") {
  constexpr int stride = 24;  // numbers from row to row; the matrices are stored in reverse order
  struct Params {
    std::uint32_t* straight;  // [32 lanes, 4]
    std::uint32_t* transposed;
  };
  std::array<std::uint32_t, 128> straight;
  std::array<std::uint32_t, 128> transposed;
  run_kernel({1, 1, 32, 32 * stride * 2}, Params{straight.data(), transposed.data()}, [](const Params p) {
    auto* const shared = reinterpret_cast<std::uint16_t*>(shared_memory());
    const int lane = lane_index();
    const int matrix = lane / 8;
    const int row = lane % 8;
    std::uint16_t* const at = shared + ((3 - matrix) * 8 + row) * stride;
    for (int column = 0; column < 8; ++column) {
      at[column] = static_cast<std::uint16_t>(matrix * 100 + row * 10 + column);
    }
    sync_warp();
    std::uint32_t r[4];
    load_matrix_x4(r, at);
    std::memcpy(p.straight + lane * 4, r, sizeof r);
    load_matrix_x4_transposed(r, at);
    std::memcpy(p.transposed + lane * 4, r, sizeof r);
  });
  for (std::uint32_t lane = 0; lane < 32; ++lane) {
    for (std::uint32_t matrix = 0; matrix < 4; ++matrix) {
      const std::uint32_t row = lane / 4;
      const std::uint32_t column = 2 * (lane % 4);
      const std::uint32_t number = matrix * 100 + row * 10 + column;
      CHECK(straight[lane * 4 + matrix] == (number | (number + 1) << 16));
      const std::uint32_t turned = matrix * 100 + column * 10 + row;
      CHECK(transposed[lane * 4 + matrix] == (turned | (turned + 10) << 16));
    }
  }
}

TEST_CASE("transpose_matrix") {
  struct Params {
    std::uint32_t* out;
  };
  std::array<std::uint32_t, 32> out;
  run_kernel({1, 1, 32, 0}, Params{out.data()}, [](const Params p) {
    const int number = lane_index() / 4 * 10 + lane_index() % 4 * 2;
    p.out[lane_index()] = transpose_matrix(static_cast<std::uint32_t>(number | (number + 1) << 16));
  });
  for (std::uint32_t lane = 0; lane < 32; ++lane) {
    const std::uint32_t number = lane % 4 * 20 + lane / 4;
    CHECK(out[lane] == (number | (number + 10) << 16));
  }
}

// Small multiples of 1/8, whose products have exact sums in any order.
float entry(int matrix, int row, int column) {
  return static_cast<float>((matrix * 7 + row * 13 + column * 29) % 31 - 15) / 8.0F;
}

TEST_CASE_TEMPLATE("multiply_add is the product of the two matrices", E, float16, bfloat16) {
  struct Params {
    float* out;  // [16, 8]
  };
  std::array<float, 128> out;
  run_kernel({1, 1, 32, 0}, Params{out.data()}, [](const Params p) {
    const int g = lane_index() / 4;
    const int t = lane_index() % 4;
    std::uint32_t a[4];
    std::uint32_t b[2];
    float d[4];
    for (int i = 0; i < 4; ++i) {
      const int row = g + (i % 2 == 1 ? 8 : 0);
      const int column = 2 * t + (i >= 2 ? 8 : 0);
      a[i] = pack<E>(entry(0, row, column), entry(0, row, column + 1));
      d[i] = entry(2, g + (i >= 2 ? 8 : 0), 2 * t + i % 2);
    }
    for (int i = 0; i < 2; ++i) {
      const int row = 2 * t + 8 * i;
      b[i] = pack<E>(entry(1, row, g), entry(1, row + 1, g));
    }
    multiply_add<E>(d, a, b[0], b[1]);
    for (int i = 0; i < 4; ++i) {
      p.out[(g + (i >= 2 ? 8 : 0)) * 8 + 2 * t + i % 2] = d[i];
    }
  });
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      double expected = entry(2, row, column);
      for (int k = 0; k < 16; ++k) expected += double{entry(0, row, k)} * entry(1, k, column);
      CHECK(out[static_cast<std::size_t>(row * 8 + column)] == expected);
    }
  }
}

TEST_CASE("one NaN reaches exactly its row of the product") {
  struct Params {
    int* nans;
  };
  int nans = 0;
  run_kernel({1, 1, 32, 0}, Params{&nans}, [](const Params p) {
    std::uint32_t a[4] = {0, 0, 0, 0};
    if (lane_index() == 4 * 3 + 1) a[3] = 0x7e00U << 16;  // row 11, column 11
    float d[4] = {};
    multiply_add<float16>(d, a, 0, 0);
    for (int i = 0; i < 4; ++i) {
      const bool expected = lane_index() / 4 == 3 && i >= 2;
      if (std::isnan(d[i]) == expected) atomic_add(reinterpret_cast<std::uint32_t*>(p.nans), 1);
    }
  });
  CHECK(nans == 128);
}

// A product of larger matrices, computed as in kernels: rows go through shared memory, with both loads.
TEST_CASE_TEMPLATE("matrices from shared memory", E, float16, bfloat16) {
  constexpr int inner = 64;
  struct Params {
    float* out;  // [16, 8]
  };
  std::array<float, 128> out;
  run_kernel({1, 1, 32, (16 * inner + inner * 8) * 2}, Params{out.data()}, [](const Params p) {
    auto* const a = reinterpret_cast<std::uint16_t*>(shared_memory());  // [16, inner]
    auto* const b = a + 16 * inner;                                     // [inner, 8]
    for (int i = lane_index(); i < 16 * inner; i += 32) {
      a[i] = from_float<E>(entry(0, i / inner, i % inner));
    }
    for (int i = lane_index(); i < inner * 8; i += 32) b[i] = from_float<E>(entry(1, i / 8, i % 8));
    sync_warp();
    float d[4] = {};
    for (int k = 0; k < inner; k += 32) {
      const int matrix = lane_index() / 8;
      const int row = lane_index() % 8;
      std::uint32_t columns[4];
      load_matrix_x4_transposed(columns, b + (k + matrix * 8 + row) * 8);
      for (int step = 0; step < 2; ++step) {
        std::uint32_t rows[4];
        load_matrix_x4(rows, a + (matrix % 2 * 8 + row) * inner + k + step * 16 + matrix / 2 * 8);
        multiply_add<E>(d, rows, columns[2 * step], columns[2 * step + 1]);
      }
    }
    const int g = lane_index() / 4;
    const int t = lane_index() % 4;
    for (int i = 0; i < 4; ++i) p.out[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
  });
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      double expected = 0.0;
      for (int k = 0; k < inner; ++k) expected += double{entry(0, row, k)} * entry(1, k, column);
      CHECK(out[static_cast<std::size_t>(row * 8 + column)] == expected);
    }
  }
}

}  // namespace
