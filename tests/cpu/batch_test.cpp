// SPDX-License-Identifier: Apache-2.0
//
// Batches on the CPU engine: threads share the work of all sequences, and each sequence gets the bits that it
// gets alone with as many threads.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include <kvpolicy/cpu.hpp>
#include <kvpolicy/cpu/engine.hpp>

#include "support/batch_twins.hpp"

namespace {
using namespace kvpolicy;

// Counts the loops that it runs.
struct CountingPool {
  std::size_t count;
  std::size_t* loops;
  [[nodiscard]] std::size_t threads() const { return count; }
  template <class Body>
  void operator()(std::size_t calls, const Body& body) const {
    ++*loops;
    std::vector<std::jthread> threads;
    for (std::size_t i = calls; i > 0; --i) threads.emplace_back([&body, i] { body(i - 1); });
  }
};

// Compiled here, and so small that even short texts are cut.
struct SmallParts : cpu::DefaultTuning {
  static constexpr std::size_t task_weight = 64;
};
using Engine = cpu::Engine<CountingPool, SmallParts>;

}  // namespace

TEST_CASE("random batches on the CPU engine, bit for bit as one by one with as many threads") {
  std::size_t loops = 0;
  for (const std::size_t threads : {1, 2, 3}) {
    CAPTURE(threads);
    test::BatchOfTwins<float, Engine>{threads, {2, 4, 2, 64}, Engine{CountingPool{threads, &loops}}}.run(60);
    test::BatchOfTwins<bfloat16, Engine>{10 + threads, {1, 14, 2, 64}, Engine{CountingPool{threads, &loops}}}
        .run(60);
  }
}

TEST_CASE("a step of many sequences is one parallel loop a layer") {
  const ModelShape shape{2, 4, 2, 64};
  std::size_t alone = 0, together = 0;
  const Engine one{CountingPool{2, &alone}}, all{CountingPool{2, &together}};
  using Cache = KvCache<float, Engine>;
  std::vector<Cache> caches;
  std::vector<BatchSequence<Cache>> sequences;
  std::vector<std::int32_t> indptr{0};
  test::Random random{1};
  for (int i = 0; i < 8; ++i) {
    caches.emplace_back(HeadPlan<float>{shape}, CacheOptions{}, one);
    test::feed(caches.back(), random, {200});
    indptr.push_back(i + 1);
  }
  for (Cache& cache : caches) sequences.push_back({&cache});
  test::Chunk<float> chunk{random, shape, 8};
  Batch<float, Engine> batch{all};
  alone = 0;
  for (std::size_t layer = 0; layer < 2; ++layer) {
    CHECK(
        batch.step(layer, sequences, indptr, chunk.q.view(), chunk.k.view(), chunk.v.view(), chunk.out.view())
            .empty());
  }
  CHECK(together == 2);
  CHECK(alone == 0);
}
