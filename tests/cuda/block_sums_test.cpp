// SPDX-License-Identifier: Apache-2.0
//
// Sums over a block's threads are those of a plain loop.
#include <doctest/doctest.h>

#include <kvpolicy/cuda/kernels/block_sums.cuh>

#include <cstddef>
#include <vector>

#include "cuda/support/launch.hpp"

// Not without a name: nvcc's own files name a kernel's parameters, and cannot where the file has several namespaces without one, as
// doctest's templates make them.
namespace kvpolicy::block_sums_test {

using namespace kvpolicy::gpu;

template <class T>
struct Numbers {
  const T* in;  // [rounds, threads]
  T* before;
  T* totals;
  int rounds;
};

template <class T, int Threads>
KVPOLICY_KERNEL(Threads, 1)
sum_kernel(const KVPOLICY_GRID_CONSTANT Numbers<T> p) {
  using Sums = BlockSums<T, Threads>;
  auto& memory = *reinterpret_cast<typename Sums::Memory*>(shared_memory());
  for (int round = 0; round < p.rounds; ++round) {
    const int at = round * Threads + thread_index();
    const auto sums = Sums::of(p.in[at], memory);
    p.before[at] = sums.before;
    p.totals[at] = sums.total;
    sync_block();
  }
}

template <class T, int Threads>
void check_sums() {
  CAPTURE(Threads);
  constexpr int rounds = 3;
  std::vector<T> in(static_cast<std::size_t>(rounds * Threads));
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<T>(i * i % 97 + (i % 5 == 0 ? 0 : 1));
  std::vector<T> before(in.size()), totals(in.size());
  test::launch(sum_kernel<T, Threads>, 1, 1, Threads, sizeof(typename BlockSums<T, Threads>::Memory),
               {in.data(), before.data(), totals.data(), rounds});
  for (int round = 0; round < rounds; ++round) {
    T sum{};
    for (int thread = 0; thread < Threads; ++thread) {
      const auto at = static_cast<std::size_t>(round * Threads + thread);
      CHECK(before[at] == sum);  // whole numbers: sums are exact in any order
      sum += in[at];
    }
    for (int thread = 0; thread < Threads; ++thread) {
      CHECK(totals[static_cast<std::size_t>(round * Threads + thread)] == sum);
    }
  }
}

TEST_CASE_TEMPLATE("sums of a block: before each thread, and of all", T, int, unsigned, long long, double) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    test::set_order(seed);
    check_sums<T, 32>();
    check_sums<T, 96>();
    check_sums<T, 256>();
    check_sums<T, 512>();
  }
}

}  // namespace kvpolicy::block_sums_test
