// SPDX-License-Identifier: Apache-2.0
//
// Products of warpgroups, barriers and registers of the emulation. Matrices lie in shared memory where the PTX
// manual's canonical layouts put them ("Asynchronous Warpgroup Level Matrix Shared Memory Layout"), which are written
// out here as it writes them: shapes and strides of modes, and a swizzle of address bits.
#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvpolicy/cuda/kernels/simt_hopper.cuh>

#include "simt/run_kernel.hpp"

using namespace kvpolicy;
using namespace kvpolicy::gpu;
using simt::run_kernel;

namespace {

// ---- the manual's layouts ---------------------------------------------------------------------
struct Mode {
  int shape;
  int stride;
};
// The offset of a coordinate that modes divide among themselves, the first one fastest.
template <std::size_t N>
int offset_of(int coordinate, const std::array<Mode, N>& modes) {
  int offset = 0;
  for (const Mode& mode : modes) {
    offset += coordinate % mode.shape * mode.stride;
    coordinate /= mode.shape;
  }
  return offset;
}
// Swizzle<3, 4, 3>: bits 7, 8, 9 of an address are added to bits 4, 5, 6 without carry.
int swizzled(int address) {
  for (int bit = 0; bit < 3; ++bit) {
    if ((address >> (7 + bit) & 1) != 0) address ^= 1 << (4 + bit);
  }
  return address;
}
constexpr int units = 8;  // T, 16-bit numbers in 16 bytes

// K-major: ((8, m), (T, 2k)) : ((8T, SBO), (1, T)), in numbers.
int k_major(int start, int mn, int k, int stride_bytes) {
  const std::array<Mode, 2> rows{{{8, 8 * units}, {64, stride_bytes / 2}}};
  const std::array<Mode, 2> columns{{{units, 1}, {8, units}}};
  return swizzled(start + 2 * (offset_of(mn, rows) + offset_of(k, columns)));
}
// MN-major: ((T, 8, m), (8, k)) : ((1, T, LBO), (8T, SBO)).
int mn_major(int start, int mn, int k, int leading_bytes, int stride_bytes) {
  const std::array<Mode, 3> rows{{{units, 1}, {8, units}, {16, leading_bytes / 2}}};
  const std::array<Mode, 2> columns{{{8, 8 * units}, {32, stride_bytes / 2}}};
  return swizzled(start + 2 * (offset_of(mn, rows) + offset_of(k, columns)));
}
// The row and the column of number i of a thread's accumulators, and of its four registers of a.
int row_of_d(int thread, int i) { return thread / 32 * 16 + thread % 32 / 4 + (i / 2 % 2 == 1 ? 8 : 0); }
int column_of_d(int thread, int i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }
int row_of_a(int thread, int i) {
  return thread / 32 * 16 + thread % 32 / 4 + ((0 <= i && i < 2) || (4 <= i && i < 6) ? 0 : 8);
}
int column_of_a(int thread, int i) { return thread % 4 * 2 + i % 2 + (i >= 4 ? 8 : 0); }

// Small multiples of 1/8, whose products have exact sums in any order.
float entry(int matrix, int row, int column) {
  return static_cast<float>((matrix * 7 + row * 13 + column * 29) % 31 - 15) / 8.0F;
}
float product(int a, int b, int row, int column) {
  float sum = 0.0F;
  for (int k = 0; k < 16; ++k) sum += entry(a, row, k) * entry(b, column, k);
  return sum;
}

struct Memory {
  float* out;  // [64, columns]
  int a;       // offsets
  int b;
  int leading;
  int stride;
  bool add;
};
template <Element E>
void put(int offset, float number) {
  *reinterpret_cast<std::uint16_t*>(shared_memory() + offset) = from_float<E>(number);
}
template <int All>
void write_out(const Memory& p, const float (&d)[All][4]) {
  for (int i = 0; i < All * 4; ++i) {
    p.out[row_of_d(thread_index(), i) * All * 8 + column_of_d(thread_index(), i)] = d[i / 4][i % 4];
  }
}

template <Element E, int Columns>
void both_shared(const Memory p) {
  const int thread = thread_index();
  for (int i = thread; i < 64 * 16; i += 128)
    put<E>(k_major(p.a, i / 16, i % 16, p.stride), entry(0, i / 16, i % 16));
  for (int i = thread; i < Columns * 16; i += 128) {
    put<E>(k_major(p.b, i / 16, i % 16, p.stride), entry(1, i / 16, i % 16));
  }
  fence_shared_for_products();
  sync_block();
  float d[Columns / 8][4];
  for (int i = 0; i < Columns / 2; ++i) {
    d[i / 4][i % 4] = entry(2, row_of_d(thread, i), column_of_d(thread, i));
  }
  const std::uint64_t a = matrix_descriptor(static_cast<std::uint32_t>(p.a), 0, p.stride);
  const std::uint64_t b = matrix_descriptor(static_cast<std::uint32_t>(p.b), 0, p.stride);
  wgmma_fence(d);
  if (p.add) {
    wgmma<E, Columns, true>(d, a, b);
  } else {
    wgmma<E, Columns, false>(d, a, b);
  }
  wgmma_commit();
  wgmma_wait<0>(d);
  write_out(p, d);
}

template <Element E, int Columns>
void check_both_shared() {
  std::vector<float> out(64 * Columns);
  for (const bool add : {true, false}) {
    // At the beginning of a swizzled row, or 16 numbers into it; eight rows packed, or apart.
    for (const int along : {0, 32, 64, 96}) {
      for (const int stride : {1024, 2048}) {
        const Memory memory{out.data(), along, 16384 + along, 0, stride, add};
        run_kernel({1, 1, 128, 16384 + 32768}, memory, both_shared<E, Columns>);
        int right = 0;
        for (int row = 0; row < 64; ++row) {
          for (int column = 0; column < Columns; ++column) {
            const float expected = product(0, 1, row, column) + (add ? entry(2, row, column) : 0.0F);
            right += out[static_cast<std::size_t>(row * Columns + column)] == expected;
          }
        }
        CHECK(right == 64 * Columns);
      }
    }
  }
}

TEST_CASE_TEMPLATE("wgmma multiplies matrices of shared memory", E, float16, bfloat16) {
  check_both_shared<E, 96>();
  check_both_shared<E, 128>();
}

// b is [16, Columns], its rows below each other; the accumulators' first columns belong to something else.
template <Element E, int Columns, int First>
void from_registers(const Memory p) {
  const int thread = thread_index();
  for (int i = thread; i < Columns * 16; i += 128) {
    put<E>(mn_major(p.b, i / 16, i % 16, p.leading, p.stride), entry(1, i / 16, i % 16));
  }
  fence_shared_for_products();
  sync_block();
  std::uint32_t a[4];
  for (int i = 0; i < 4; ++i) {
    a[i] = pack<E>(entry(0, row_of_a(thread, 2 * i), column_of_a(thread, 2 * i)),
                   entry(0, row_of_a(thread, 2 * i + 1), column_of_a(thread, 2 * i + 1)));
  }
  float d[First + Columns / 8][4];
  for (int i = 0; i < First * 4 + Columns / 2; ++i) {
    d[i / 4][i % 4] = entry(2, row_of_d(thread, i), column_of_d(thread, i));
  }
  std::uint32_t operand[1][4] = {{a[0], a[1], a[2], a[3]}};
  wgmma_fence(d, operand);
  const std::uint64_t b = matrix_descriptor(static_cast<std::uint32_t>(p.b), p.leading, p.stride);
  wgmma_transposed<E, Columns, First>(d, operand[0], b);
  wgmma_commit();
  wgmma_wait<0>(d, operand);
  write_out(p, d);
}

template <Element E, int Columns, int First>
void check_from_registers() {
  constexpr int all = First * 8 + Columns;
  std::vector<float> out(static_cast<std::size_t>(64 * all));
  for (const auto& [leading, stride] :
       {std::array{1024, 2048}, std::array{8192, 1024}, std::array{2048, 4096}}) {
    const Memory memory{out.data(), 0, 1024, leading, stride, true};
    run_kernel({1, 1, 128, 32768}, memory, from_registers<E, Columns, First>);
    int right = 0;
    for (int row = 0; row < 64; ++row) {
      for (int column = 0; column < all; ++column) {
        const float added = column < First * 8 ? 0.0F : product(0, 1, row, column - First * 8);
        right += out[static_cast<std::size_t>(row * all + column)] == entry(2, row, column) + added;
      }
    }
    CHECK(right == 64 * all);
  }
}

TEST_CASE_TEMPLATE("wgmma multiplies registers with a transposed matrix", E, float16, bfloat16) {
  check_from_registers<E, 64, 0>();
  check_from_registers<E, 128, 0>();
  check_from_registers<E, 128, 16>();
}

TEST_CASE("the fields of a descriptor") {
  CHECK(matrix_descriptor(0, 0, 0) == std::uint64_t{1} << 62);
  CHECK(matrix_descriptor(0x3fff0, 0, 0) == (std::uint64_t{1} << 62 | 0x3fff));
  CHECK(matrix_descriptor(0x40010, 1024, 2048) ==
        (std::uint64_t{1} << 62 | std::uint64_t{128} << 32 | 64 << 16 | 1));
}

// ---- barriers and registers --------------------------------------------------------------------
struct Rounds {
  int* out;  // [rounds, consumers]
  int rounds;
};
// A ring of two places; 64 threads write a round's number, 96 read it.
void ring_kernel(const Rounds p) {
  struct Ring {
    SharedBarrier full[2];
    SharedBarrier empty[2];
    int number[2][64];
  };
  auto& ring = *reinterpret_cast<Ring*>(shared_memory());
  if (thread_index() == 0) {
    for (int place = 0; place < 2; ++place) {
      mbarrier_init(&ring.full[place], 64);
      mbarrier_init(&ring.empty[place], 3);
    }
  }
  sync_block();
  for (int round = 0; round < p.rounds; ++round) {
    const int place = round % 2;
    const int parity = round / 2 % 2;
    if (thread_index() < 64) {
      mbarrier_wait(&ring.empty[place], parity ^ 1);
      ring.number[place][thread_index()] = round * 100 + thread_index();
      mbarrier_arrive(&ring.full[place]);
    } else {
      mbarrier_wait(&ring.full[place], parity);
      p.out[round * 96 + thread_index() - 64] = ring.number[place][thread_index() % 64];
      sync_warp();
      if (lane_index() == 0) mbarrier_arrive(&ring.empty[place]);
    }
  }
}

TEST_CASE("barriers in shared memory carry a ring round and round") {
  constexpr int rounds = 9;
  std::vector<int> out(rounds * 96);
  CHECK(simt::count_seeds(20, [&] {
          run_kernel({2, 1, 160, 2 * 2 * 8 + 2 * 64 * 4}, Rounds{out.data(), rounds}, ring_kernel);
          bool right = true;
          for (int i = 0; i < rounds * 96; ++i) {
            right = right && out[static_cast<std::size_t>(i)] == i / 96 * 100 + (i % 96 + 64) % 64;
          }
          return right;
        }) == 20);
}

TEST_CASE("named barriers let two halves of a block take turns") {
  struct Turns {
    int* order;  // [2 rounds, 2 halves]
    int rounds;
  };
  constexpr int rounds = 7;
  CHECK(simt::count_seeds(20, [&] {
          std::vector<int> order(2 * rounds, -1);
          run_kernel({1, 1, 128, 16}, Turns{order.data(), rounds}, [](const Turns p) {
            const int half = thread_index() / 64;
            auto* const next = reinterpret_cast<int*>(shared_memory());
            if (thread_index() == 0) *next = 0;
            sync_block();
            if (half == 1) named_barrier_arrive(1, 128);
            for (int round = 0; round < p.rounds; ++round) {
              named_barrier_sync(1 + half, 128);
              if (thread_index() % 64 == 0) p.order[(*next)++] = half;
              named_barrier_sync(3 + half, 64);
              if (half == 0 || round + 1 < p.rounds) named_barrier_arrive(2 - half, 128);
            }
          });
          bool right = true;
          for (std::size_t i = 0; i < order.size(); ++i) right = right && order[i] == static_cast<int>(i % 2);
          return right;
        }) == 20);
}

TEST_CASE("warpgroups hand each other registers") {
  struct Nothing {};
  run_kernel({3, 1, 384, 0}, Nothing{}, [](const Nothing) {
    if (thread_index() < 256) {
      raise_register_limit<232>();
    } else {
      lower_register_limit<40>();
    }
  });
}

}  // namespace
