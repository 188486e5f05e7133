// SPDX-License-Identifier: Apache-2.0
//
// Kernels of warpgroups with one mistake each, as broken_kernels_test.cpp has them of warps. On a device most of these
// would be right most of the time.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <kvpolicy/cuda/kernels/simt_hopper.cuh>

#include "simt/run_kernel.hpp"

using namespace kvpolicy;
using namespace kvpolicy::gpu;
using simt::count_seeds;
using simt::run_kernel;

namespace {

constexpr int handful = 10;
constexpr int tiles = 5;
constexpr int columns = 96;  // of a tile
constexpr int a_bytes = 64 * 128;
constexpr int tile_bytes = columns * 128;

enum class Mistake : std::uint8_t {
  none,
  // that end in a fault, whatever the order of threads
  no_fence_of_copies,
  no_fence_of_registers,
  accumulator_written_after_fence,
  accumulator_written_under_way,
  no_commit,
  one_group_too_many,
  no_wait_at_end,
  barrier_not_made,
  barrier_made_twice,
  shifted_descriptor,
  shifted_rows,
  no_swizzle,
  outside,
  warps_differ,
  // that end in a fault or a wrong result under some orders
  no_wait_for_tile,
  wrong_parity,
  no_wait_for_room,
  room_given_too_early,
  arrives_before_copies,
  one_arrival_too_few,
  // that never end
  one_arrival_too_many,
  no_room_given,
  one_warp_stays_away,
};

struct Params {
  const std::uint16_t* a;  // [64, 64]
  const std::uint16_t* b;  // [tiles, columns, 64]
  float* out;              // [64, columns]
  Mistake mistake;
};

std::byte* chunk_at(int tile, int row, int chunk) {
  return shared_memory() + tile + row * 128 + (chunk ^ row % 8) * 16;
}

// One warpgroup copies tiles of b to a ring of two, one adds up their products with a.
void pipeline_kernel(const Params p) {
  struct Barriers {
    SharedBarrier full[2];
    SharedBarrier empty[2];
  };
  const Mistake mistake = p.mistake;
  auto& barriers = *reinterpret_cast<Barriers*>(shared_memory() + a_bytes + 2 * tile_bytes);
  if (thread_index() == 0) {
    for (int place = 0; place < 2; ++place) {
      const int arrivals = mistake == Mistake::one_arrival_too_few    ? 127
                           : mistake == Mistake::one_arrival_too_many ? 129
                                                                      : 128;
      if (mistake != Mistake::barrier_not_made) mbarrier_init(&barriers.full[place], arrivals);
      mbarrier_init(&barriers.empty[place], 4);
    }
    if (mistake == Mistake::barrier_made_twice) mbarrier_init(&barriers.full[1], 128);
  }
  sync_block();
  const int thread = thread_index() % 128;
  const auto copy = [&](int to, const std::uint16_t* from, int rows) {
    for (int i = thread; i < rows * 8; i += 128) cp_async_16(chunk_at(to, i / 8, i % 8), from + i * 8, true);
    cp_async_commit();
  };
  if (thread_index() >= 128) {
    for (int tile = 0; tile < tiles; ++tile) {
      const int place = tile % 2;
      if (mistake != Mistake::no_wait_for_room) mbarrier_wait(&barriers.empty[place], (tile / 2 + 1) % 2);
      copy(a_bytes + place * tile_bytes, p.b + tile * columns * 64, columns);
      if (mistake == Mistake::arrives_before_copies) {
        cp_async_wait<1>();
      } else {
        cp_async_wait<0>();
      }
      if (mistake != Mistake::no_fence_of_copies) fence_shared_for_products();
      mbarrier_arrive(&barriers.full[place]);
    }
    return;
  }
  copy(0, p.a, 64);
  cp_async_wait<0>();
  fence_shared_for_products();
  named_barrier_sync(1, 128);

  float d[columns / 8][4] = {};
  for (int tile = 0; tile < tiles; ++tile) {
    const int place = tile % 2;
    const int parity = tile / 2 % 2;
    if (mistake != Mistake::no_wait_for_tile) {
      mbarrier_wait(&barriers.full[place], mistake == Mistake::wrong_parity ? parity ^ 1 : parity);
    }
    if (mistake != Mistake::no_fence_of_registers) wgmma_fence(d);
    if (mistake == Mistake::accumulator_written_after_fence) d[1][1] += 1.0F;
    const int shift = mistake == Mistake::shifted_descriptor ? 128 : 0;
    const int rows = mistake == Mistake::shifted_rows ? 1024 + 512 : 1024;
    const int from = mistake == Mistake::outside ? a_bytes + 2 * tile_bytes : a_bytes + place * tile_bytes;
    std::uint64_t a = matrix_descriptor(0, 0, 1024);
    std::uint64_t b = matrix_descriptor(static_cast<std::uint32_t>(from + shift), 0, rows);
    if (mistake == Mistake::no_swizzle) b &= ~(std::uint64_t{1} << 62);
    if (mistake == Mistake::warps_differ && warp_index() == 2)
      b |= 1U << 16;  // columns_apart, which it does not use
    for (int step = 0; step < 4; ++step) {
      if (mistake == Mistake::one_warp_stays_away && tile == tiles - 1 && step == 3 && warp_index() == 1)
        continue;
      wgmma<bfloat16, columns, true>(d, a + 2 * step, b + 2 * step);
    }
    if (mistake != Mistake::no_commit) wgmma_commit();
    const auto give_room = [&] {
      if (mistake != Mistake::no_room_given && lane_index() == 0) mbarrier_arrive(&barriers.empty[place]);
    };
    if (mistake == Mistake::room_given_too_early) give_room();
    if (mistake == Mistake::accumulator_written_under_way) d[0][0] = 1.0F;
    if (mistake == Mistake::no_wait_at_end && tile == tiles - 1) break;
    if (mistake == Mistake::one_group_too_many) {
      wgmma_wait<1>(d);
    } else {
      wgmma_wait<0>(d);
    }
    if (mistake != Mistake::room_given_too_early) give_room();
  }
  for (int i = 0; i < columns / 2; ++i) {
    const int row = warp_index() * 16 + lane_index() / 4 + i / 2 % 2 * 8;
    p.out[row * columns + i / 4 * 8 + lane_index() % 4 * 2 + i % 2] = d[i / 4][i % 4];
  }
}

// Whether the products are right; throws what the launch throws.
bool is_right(Mistake mistake) {
  alignas(16) static std::uint16_t a[64 * 64];
  alignas(16) static std::uint16_t b[tiles * columns * 64];
  const auto number = [](int i) { return static_cast<float>(i * 37 % 15 - 7) / 4.0F; };
  for (int i = 0; i < 64 * 64; ++i) a[i] = from_float<bfloat16>(number(i));
  for (int i = 0; i < tiles * columns * 64; ++i) b[i] = from_float<bfloat16>(number(i + 5));
  std::vector<float> out(64 * columns, NAN);
  run_kernel({1, 1, 256, a_bytes + 2 * tile_bytes + 32}, Params{a, b, out.data(), mistake}, pipeline_kernel);
  bool right = true;
  for (int row = 0; row < 64; ++row) {
    for (int column = 0; column < columns; ++column) {
      float sum = 0.0F;
      for (int i = 0; i < tiles * 64; ++i) {
        sum += number(row * 64 + i % 64) * number((i / 64 * columns + column) * 64 + i % 64 + 5);
      }
      right = right && out[static_cast<std::size_t>(row * columns + column)] == sum;
    }
  }
  return right;
}
std::string fault_of(Mistake mistake) {
  try {
    return is_right(mistake) ? "" : "wrong";
  } catch (const simt::Fault& fault) {
    return fault.what();
  }
}

TEST_CASE("a pipeline of warpgroups is right in any order") {
  CHECK(count_seeds(2 * handful, [] { return is_right(Mistake::none); }) == 2 * handful);
}

TEST_CASE("mistakes that are found in every order of threads") {
  const auto check = [](Mistake mistake, const char* text) {
    CAPTURE(text);
    CHECK(count_seeds(handful, [&] {
            const std::string fault = fault_of(mistake);
            CAPTURE(fault);
            const bool found = fault.find(text) != std::string::npos;
            CHECK(found);
            return found;
          }) == handful);
  };
  check(Mistake::no_fence_of_copies, "not fenced by the thread that copied it");
  check(Mistake::no_fence_of_registers, "accumulators that wgmma_fence did not name");
  check(Mistake::accumulator_written_after_fence, "accumulators written after wgmma_fence");
  check(Mistake::accumulator_written_under_way, "accumulators were written while");
  check(Mistake::no_commit, "a product that this does not wait for");
  check(Mistake::one_group_too_many, "a product that this does not wait for");
  check(Mistake::no_wait_at_end, "returned while products of its were under way");
  check(Mistake::barrier_not_made, "before mbarrier_init");
  check(Mistake::barrier_made_twice, "a barrier is there already");
  check(Mistake::shifted_descriptor, "multiple of 1024");
  check(Mistake::shifted_rows, "multiple of 1024");
  check(Mistake::no_swizzle, "another swizzle");
  check(Mistake::outside, "outside shared memory");
  check(Mistake::warps_differ, "started another product");
  check(Mistake::one_arrival_too_many, "threads wait for others that never come");
  check(Mistake::no_room_given, "threads wait for others that never come");
  check(Mistake::one_warp_stays_away, "never started");
}

TEST_CASE("mistakes that some orders of threads show") {
  for (const Mistake mistake :
       {Mistake::no_wait_for_tile, Mistake::wrong_parity, Mistake::no_wait_for_room,
        Mistake::room_given_too_early, Mistake::arrives_before_copies, Mistake::one_arrival_too_few}) {
    CAPTURE(static_cast<int>(mistake));
    CHECK(count_seeds(handful, [=] { return fault_of(mistake).empty(); }) < handful);
  }
}

// What a warp does right after its arrival may come very late. Only so is a kernel found that gives a stage back and
// then still reads it.
TEST_CASE("some orders hold a warp after its arrival while the woken go as far as they can") {
  struct Out {
    int* seen;
  };
  const auto is_late = [] {
    int seen = 0;
    run_kernel({1, 1, 64, 64}, Out{&seen}, [](const Out p) {
      struct Shared {
        SharedBarrier given;
        SharedBarrier own;
        volatile int flag;
      };
      auto& shared = *reinterpret_cast<Shared*>(shared_memory());
      if (thread_index() == 0) {
        mbarrier_init(&shared.given, 1);
        mbarrier_init(&shared.own, 1);
        shared.flag = 0;
      }
      sync_block();
      if (thread_index() == 0) {
        mbarrier_arrive(&shared.given);
        shared.flag = 1;
      }
      if (thread_index() == 32) {
        mbarrier_wait(&shared.given, 0);
        for (int i = 0; i < 100; ++i) mbarrier_arrive(&shared.own);
        *p.seen = shared.flag;
      }
    });
    return seen == 0;
  };
  const int late = count_seeds(10 * handful, is_late);
  CHECK(late > 0);
  CHECK(late < 10 * handful);
}

// ---- registers of the first operand --------------------------------------------------------------
TEST_CASE("weights that are written while a product reads them") {
  struct One {
    int mistake;
  };
  const auto run = [](int mistake) {
    run_kernel({1, 1, 128, 16 * 1024}, One{mistake}, [](const One p) {
      for (int i = thread_index(); i < 8 * 1024; i += 128) {
        reinterpret_cast<std::uint16_t*>(shared_memory())[i] = from_float<float16>(1.0F);
      }
      fence_shared_for_products();
      sync_block();
      float d[8][4] = {};
      std::uint32_t a[2][4] = {};
      wgmma_fence(d, a);
      if (p.mistake == 1) a[1][2] = 5;
      wgmma_transposed<float16, 64, 0>(d, a[0], matrix_descriptor(0, 1024, 1024));
      wgmma_transposed<float16, 64, 0>(d, a[1], matrix_descriptor(2048, 1024, 1024));
      if (p.mistake == 2) a[0][0] = 7;
      wgmma_commit();
      wgmma_wait<0>(d, a);
    });
  };
  CHECK_NOTHROW(run(0));
  CHECK_THROWS_WITH_AS(run(1), doctest::Contains("an operand written after wgmma_fence"), simt::Fault);
  CHECK_THROWS_WITH_AS(run(2), doctest::Contains("an operand's registers were written"), simt::Fault);
}

TEST_CASE("accumulators are NaN until they have been waited for") {
  struct Out {
    int* numbers;
  };
  int numbers = 0;
  run_kernel({1, 1, 128, 16 * 1024}, Out{&numbers}, [](const Out p) {
    for (int i = thread_index(); i < 8 * 1024; i += 128) {
      reinterpret_cast<std::uint16_t*>(shared_memory())[i] = from_float<float16>(1.0F);
    }
    fence_shared_for_products();
    sync_block();
    float d[12][4] = {};
    wgmma_fence(d);
    wgmma<float16, 96, false>(d, matrix_descriptor(0, 0, 1024), matrix_descriptor(0, 0, 1024));
    wgmma_commit();
    for (const auto& four : d) {
      for (const float x : four) *p.numbers += !std::isnan(x);
    }
    wgmma_wait<0>(d);
    for (const auto& four : d) {
      for (const float x : four) *p.numbers += x == 16.0F;
    }
  });
  CHECK(numbers == 128 * 48);
}

// ---- barriers of some warps, registers ---------------------------------------------------------
TEST_CASE("named barriers and register limits that do not fit") {
  struct Kind {
    int kind;
  };
  const auto run = [](int kind) {
    run_kernel({1, 1, 384, 64}, Kind{kind}, [](const Kind p) {
      switch (p.kind) {
        case 0: named_barrier_sync(1, warp_index() == 3 ? 256 : 384); break;  // another number
        case 1: named_barrier_sync(0, 384); break;                            // sync_block's own
        case 2: named_barrier_sync(1, 100); break;
        case 3:
          if (warp_index() != 5) named_barrier_sync(1, 384);
          break;
        case 4: named_barrier_arrive(1, 416); break;  // more than there are
        case 5: raise_register_limit<232>(); break;   // nobody gives any
        case 6: lower_register_limit<240>(); break;
        default: lower_register_limit<44>();
      }
    });
  };
  for (const int kind : {0, 3, 4, 5}) {
    CAPTURE(kind);
    CHECK_THROWS_AS(run(kind), simt::Divergence);
  }
  for (const int kind : {1, 2, 6, 7}) {
    CAPTURE(kind);
    CHECK_THROWS_AS(run(kind), simt::Fault);
  }
}

}  // namespace
