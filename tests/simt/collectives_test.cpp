// SPDX-License-Identifier: Apache-2.0
//
// Compares thread indices, barriers, shuffles, votes and atomics of the emulation with plain loops, under
// many orders of threads.
#include <doctest/doctest.h>

#include <cstdint>
#include <numeric>
#include <set>
#include <vector>

#include "simt/run_kernel.hpp"

using namespace kvpolicy::gpu;
using simt::run_kernel;

namespace {

TEST_CASE("every thread of every block runs once and knows its indices") {
  struct Params {
    int* seen;
  };
  for (const unsigned threads : {1U, 31U, 32U, 33U, 128U, 1024U}) {
    std::vector<int> seen(3 * 2 * threads, 0);
    run_kernel({3, 2, threads, 0}, Params{seen.data()}, [](const Params p) {
      const bool right = thread_count() > thread_index() && grid_x() == 3 && grid_y() == 2 &&
                         lane_index() == thread_index() % 32 && warp_index() == thread_index() / 32;
      const int block = block_y() * grid_x() + block_x();
      if (right) ++p.seen[block * thread_count() + thread_index()];
    });
    CHECK(seen == std::vector<int>(3 * 2 * threads, 1));
  }
}

template <class T>
T numbered(int i) {
  return static_cast<T>(static_cast<T>(i) * static_cast<T>(37) + static_cast<T>(5));
}

TEST_CASE_TEMPLATE("shuffles of every distance", T, int, std::uint32_t, float, double, std::uint64_t) {
  struct Params {
    T* out;  // [3, 32 distances, 64 threads]
  };
  std::vector<T> out(3 * 32 * 64);
  run_kernel({1, 1, 64, 0}, Params{out.data()}, [](const Params p) {
    const T mine = numbered<T>(thread_index());
    for (int distance = 0; distance < 32; ++distance) {
      T* at = p.out + distance * 64 + thread_index();
      at[0] = shuffle_xor(mine, distance);
      at[32 * 64] = shuffle_up(mine, distance);
      at[2 * 32 * 64] = shuffle(mine, lane_index() * 5 + distance);
    }
  });
  for (int distance = 0; distance < 32; ++distance) {
    for (int thread = 0; thread < 64; ++thread) {
      const T* at = out.data() + distance * 64 + thread;
      const int warp = thread / 32 * 32;
      const int lane = thread % 32;
      REQUIRE(at[0] == numbered<T>(warp + (lane ^ distance)));
      REQUIRE(at[32 * 64] == numbered<T>(lane >= distance ? thread - distance : thread));
      REQUIRE(at[2 * 32 * 64] == numbered<T>(warp + (lane * 5 + distance) % 32));
    }
  }
}

TEST_CASE("votes count the lanes of the own warp") {
  struct Params {
    std::uint32_t* ballots;
    std::uint32_t votes[2];
  };
  for (const std::uint32_t votes : {0U, 1U, 0x80000000U, 0xffffffffU, 0x13579bdfU}) {
    std::vector<std::uint32_t> ballots(128);
    run_kernel({1, 1, 64, 0}, Params{ballots.data(), {votes, ~votes}}, [](const Params p) {
      const bool vote = (p.votes[warp_index()] >> lane_index() & 1U) != 0;
      p.ballots[thread_index()] = ballot(vote);
      p.ballots[64 + thread_index()] = any(vote) ? 1U : 0U;
    });
    for (std::size_t i = 0; i < 64; ++i) {
      const std::uint32_t expected = i < 32 ? votes : ~votes;
      CHECK(ballots[i] == expected);
      CHECK(ballots[64 + i] == (expected != 0 ? 1U : 0U));
    }
  }
}

TEST_CASE("a barrier orders what is before and after it") {
  struct Params {
    int* out;
    int rounds;
  };
  const int failures = simt::count_seeds(40, [] {
    std::vector<int> out(128 * 10);
    run_kernel({1, 1, 128, 128 * sizeof(int)}, Params{out.data(), 10}, [](const Params p) {
      int* const shared = reinterpret_cast<int*>(shared_memory());
      for (int round = 0; round < p.rounds; ++round) {
        shared[thread_index()] = thread_index() * 100 + round;
        sync_block();
        p.out[round * 128 + thread_index()] = shared[(thread_index() + 77) % 128];
        sync_block();
      }
    });
    bool right = true;
    for (int i = 0; i < 1280; ++i) {
      right = right && out[static_cast<std::size_t>(i)] == (i % 128 + 77) % 128 * 100 + i / 128;
    }
    return !right;
  });
  CHECK(failures == 0);
}

TEST_CASE("a barrier does not wait for threads that have returned") {
  struct Params {
    int* out;
  };
  std::vector<int> out(96, -1);
  run_kernel({1, 1, 96, 96 * sizeof(int)}, Params{out.data()}, [](const Params p) {
    if (warp_index() == 1 || thread_index() % 3 == 0) return;
    int* const shared = reinterpret_cast<int*>(shared_memory());
    shared[95 - thread_index()] = thread_index();
    sync_block();
    sync_block();
    p.out[thread_index()] = shared[95 - thread_index()];
  });
  for (int i = 0; i < 96; ++i) {
    CHECK(out[static_cast<std::size_t>(i)] == (i / 32 == 1 || i % 3 == 0 ? -1 : i));
  }
}

TEST_CASE("the last block to arrive sees what all others wrote") {
  // The pattern with which the attention kernels merge partial results.
  struct Params {
    float* partial;
    float* total;
    std::uint32_t* ticket;
  };
  std::set<int> last_blocks;
  for (int s = 1; s <= 30; ++s) {
    simt::seed(static_cast<std::uint64_t>(s));
    std::vector<float> partial(7);
    float total = 0.0F;
    std::uint32_t ticket = 0;
    run_kernel({7, 1, 64, 16}, Params{partial.data(), &total, &ticket}, [](const Params p) {
      bool* const last = reinterpret_cast<bool*>(shared_memory());
      if (thread_index() == 0) {
        p.partial[block_x()] = static_cast<float>(block_x() + 1);
        *last = arrive(p.ticket) == 6;
      }
      sync_block();
      if (!*last || thread_index() != 0) return;
      for (int i = 0; i < grid_x(); ++i) *p.total += load_shared_by_blocks(p.partial + i);
      *p.ticket = static_cast<std::uint32_t>(block_x());
    });
    CHECK(total == 28.0F);
    last_blocks.insert(static_cast<int>(ticket));
  }
  CHECK(last_blocks.size() > 3);  // so the last block is not always the same one
}

// The order in which threads of two blocks ran.
std::vector<int> order_of(std::uint64_t seed) {
  struct Params {
    std::uint32_t* next;
    int* order;
  };
  std::uint32_t next = 0;
  std::vector<int> order(2 * 64);
  simt::seed(seed);
  run_kernel({2, 1, 64, 0}, Params{&next, order.data()}, [](const Params p) {
    p.order[atomic_add(p.next, 1)] = block_x() * thread_count() + thread_index();
  });
  return order;
}

TEST_CASE("a seed gives one order, another seed another") {
  std::set<std::vector<int>> orders;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const std::vector<int> order = order_of(seed);
    CHECK(order == order_of(seed));
    orders.insert(order);
    CHECK(std::set<int>(order.begin(), order.end()).size() == 128);
  }
  CHECK(orders.size() == 20);
}

}  // namespace
