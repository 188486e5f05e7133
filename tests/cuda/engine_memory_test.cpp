// SPDX-License-Identifier: Apache-2.0
//
// A device cache whose rows lie in an inference engine's own tensor: bit for bit what it gives over pages of
// its own, what the host's gives to rounding, what the models say; and not a byte of other pages changes.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/cuda/saved_cache.hpp>

#include "cuda/support/device_cache.hpp"
#include "cuda/support/engine_tensor.hpp"
#include "cuda/support/random_device.hpp"

using namespace kvpolicy;
using test::contains;
using test::DeviceChunk;
using test::EngineLayout;
using test::EngineTensor;
using test::thrown;

namespace {

using E = float16;
using Storage = EnginePageStorage<E>;
using Full = FullCache<Storage>;
using Window = SinkRecentCache<Storage>;
using Budget = HeadBudgetCache<Storage>;
using Retrieval = ChunkRetrievalCache<Storage>;

constexpr std::size_t head_dim = EngineTensor::head_dim;

// What the heads of a test are, over an engine's pages or over the cache's own.
template <class Rows>
HeadPlan<E> plan_over(const ModelShape& shape, bool all_policies) {
  HeadPlan<E> plan{shape, typename FullCache<Rows>::Config{}};
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    plan.set(layer, 1, typename SinkRecentCache<Rows>::Config{.sinks = 5, .recent = 37});
    if (!all_policies) continue;
    plan.set(layer, 2,
             typename HeadBudgetCache<Rows>::Config{.budget = 30, .scorer = {.observation_window = 4}});
    plan.set(layer, 3, typename ChunkRetrievalCache<Rows>::Config{.chunk = 8, .budget = 32});
  }
  return plan;
}

// Random calls on a cache in an engine's tensor and on one over pages of its own.
void compare_with_own_pages(EngineLayout kind, std::size_t page_rows, bool all_policies, std::uint64_t seed) {
  CAPTURE(static_cast<int>(kind));
  CAPTURE(page_rows);
  const test::SmallDevice small;
  test::Random random{seed};
  const std::size_t kv_heads = all_policies ? 4U : 3U;
  const ModelShape shape{.layers = 2, .q_heads = 2 * kv_heads, .kv_heads = kv_heads, .head_dim = head_dim};
  EngineTensor tensor{kind, page_rows, all_policies ? 40U : 160U, kv_heads, seed};
  const gpu::CacheOptions own{.max_rollback = 6, .max_append = 3};
  gpu::CacheOptions in_place = own;
  in_place.page_rows = page_rows;
  in_place.pool = &tensor.pool();
  const auto engine_plan = plan_over<Storage>(shape, all_policies);
  const auto own_plan = plan_over<DenseStorage<E>>(shape, all_policies);
  {
    using Cache = gpu::KvCache<E>;
    Cache cache{engine_plan, in_place}, control{own_plan, own};
    std::optional<Cache> fork, control_fork;
    const AttendOptions selected{.read = all_policies ? Read::selected : Read::all};
    for (std::size_t i = 0; i < 40; ++i) {
      for (auto [a, b] : {std::pair{&cache, &control}, std::pair{fork ? &*fork : nullptr, &*control_fork}}) {
        if (a == nullptr) continue;
        const std::size_t tokens = 1 + test::below(random, i % 4 == 0 ? 40 : 4);
        for (std::size_t layer = 0; layer < 2; ++layer) {
          const DeviceChunk<E> chunk{random, shape, tokens};
          const AttendOptions options = i % 3 == 0 ? AttendOptions{} : selected;
          if (tokens > 3 || i % 2 == 0) {
            chunk.step(*a, layer, options);
            const auto results = chunk.results();
            chunk.step(*b, layer, options);
            REQUIRE(test::same_bits(results, chunk.results()));
          } else {
            chunk.append(*a, layer);
            chunk.attend(*a, layer, options);
            const auto results = chunk.results();
            chunk.append(*b, layer);
            chunk.attend(*b, layer, options);
            REQUIRE(test::same_bits(results, chunk.results()));
          }
        }
        if (test::below(random, 4) == 0) {
          const std::size_t to =
              a->tokens() -
              test::below(random, std::min<std::size_t>(7, a->tokens() - a->commit_point() + 1));
          a->truncate(to);
          b->truncate(to);
        }
      }
      if (i % 13 == 12) {
        cache.compress();
        control.compress();
      }
      if (i == 20 || i == 31) {
        fork.reset();
        control_fork.reset();
        fork = i == 20 ? cache.fork() : cache.fork_as(engine_plan);
        control_fork = i == 20 ? control.fork() : control.fork_as(own_plan);
      }
      if (page_rows == own.page_rows) REQUIRE(cache.bytes() == control.bytes());
      REQUIRE(cache.tokens() == control.tokens());
    }
    CHECK(test::dump_device(cache, false) == test::dump_device(control, false));
    CHECK(test::dump_device(*fork, false) == test::dump_device(*control_fork, false));
    CHECK(tensor.cache_bytes() > 0);
    tensor.check_others();
  }
}

}  // namespace

namespace {

// As tests/cache/sequence.hpp drives it, against models of the policies.
template <EngineLayout Kind, std::size_t PageRows>
struct EngineDeviceMemory : test::CountingDeviceMemory {
  EngineTensor tensor{Kind, PageRows, PageRows == 16 ? 600U : 150U, 7, PageRows};
  PagePool& pool = tensor.pool();

  [[nodiscard]] std::size_t live_bytes() const {
    return CountingDeviceMemory::live_bytes() + tensor.cache_bytes();
  }
};

template <EngineLayout Kind, std::size_t PageRows>
struct EngineDeviceBackend : test::DeviceBackend<E> {
  using Memory = EngineDeviceMemory<Kind, PageRows>;

  static HeadPlan<E> plan_of(const ModelShape& shape, const std::vector<test::HeadSpec>& heads) {
    HeadPlan<E> plan{shape};
    std::size_t i = 0;
    for (std::size_t l = 0; l < shape.layers; ++l) {
      for (std::size_t h = 0; h < shape.kv_heads; ++h) {
        const test::HeadSpec& spec = heads[i++];
        switch (spec.kind) {
          case test::Kind::window: plan.set(l, h, test::policy_config<Window>(spec)); break;
          case test::Kind::budget: plan.set(l, h, test::policy_config<Budget>(spec)); break;
          case test::Kind::retrieval: plan.set(l, h, test::policy_config<Retrieval>(spec)); break;
          default: plan.set(l, h, test::policy_config<Full>(spec));
        }
      }
    }
    return plan;
  }
  // By a file, or by a fork, in other pages.
  static void replace(test::Random& random, typename test::DeviceBackend<E>::Cache& cache) {
    using Cache = typename test::DeviceBackend<E>::Cache;
    if (PageRows >= 64 || test::below(random, 2) == 0) {
      cache = Cache{cache.fork_as(cache.plan())};
      return;
    }
    std::stringstream file;
    save(cache, file);
    load(cache, file);
  }
};

template <EngineLayout Kind, std::size_t PageRows>
void random_sequences(std::uint64_t seed) {
  const test::SmallDevice small;
  std::vector<test::HeadSpec> heads;
  for (const test::HeadSpec& head : test::device_heads()) {
    const bool snap = head.kind == test::Kind::budget && head.rank == test::Rank::snapkv;
    const bool mean = head.kind == test::Kind::retrieval && !head.min_max;
    const bool simple = head.kind == test::Kind::window || head.kind == test::Kind::full;
    if (head.bits == 0 && (simple || (PageRows >= 64 && (snap || mean)))) heads.push_back(head);
  }
  for (const std::size_t max_rollback : std::vector<std::size_t>{0, 5, 70}) {
    CAPTURE(max_rollback);
    gpu::CacheOptions options;
    options.max_rollback = max_rollback;
    options.max_append = 1 + max_rollback / 2;
    options.page_rows = PageRows;
    std::vector<test::HeadSpec> chosen;
    for (std::size_t i = 0; chosen.size() < 5; ++i) {
      const test::HeadSpec& head = heads[(i + seed) % heads.size()];
      if (max_rollback == 0 || !head.cannot_return()) chosen.push_back(head);
    }
    const ModelShape shape{1, 10, 5, head_dim};
    test::random_operations<E, E, EngineDeviceBackend<Kind, PageRows>>(++seed, shape, chosen, options, {},
                                                                       40);
  }
}

}  // namespace

TEST_CASE("random operations in an engine's tensor on the device: every policy does what its model says") {
  const std::uint64_t seed = test::more_seeds(6);
  random_sequences<EngineLayout::vllm_nhd, 16>(seed);
  random_sequences<EngineLayout::flashinfer_nhd, 32>(seed + 10);
  random_sequences<EngineLayout::flashinfer_hnd, 64>(seed + 20);
  random_sequences<EngineLayout::vllm_nhd, 64>(seed + 30);
}

TEST_CASE("a device cache in an engine's tensor gives what one over its own pages gives, bit for bit") {
  std::uint64_t seed = 40;
  for (const EngineLayout kind : test::engine_layouts) {
    for (const std::size_t page_rows : std::vector<std::size_t>{16, 64}) {
      compare_with_own_pages(kind, page_rows, false, ++seed);
    }
    compare_with_own_pages(kind, 64, true, ++seed);
  }
}

TEST_CASE(
    "a device cache in an engine's tensor gives what the host's does, and its rows lie where the engine "
    "looks") {
  const test::SmallDevice small;
  test::Random random{50};
  const ModelShape shape{.layers = 1, .q_heads = 6, .kv_heads = 3, .head_dim = head_dim};
  const HeadPlan<E> plan = plan_over<Storage>(shape, false);
  for (const EngineLayout kind : test::engine_layouts) {
    EngineTensor tensor{kind, 16, test::EngineMemory<E>::blocks, 3, 51};
    test::EngineMemory<E> host_memory{kind};
    PagePool host_pool{host_memory.pages()};
    gpu::KvCache<E> cache{plan, {.max_rollback = 3, .page_rows = 16, .pool = &tensor.pool()}};
    kvpolicy::KvCache<E> host{plan, {.max_rollback = 3, .page_rows = 16, .pool = &host_pool}};
    std::vector<E> keys, values;  // of head 0, which keeps every row
    for (const std::size_t tokens : std::vector<std::size_t>{90, 1, 1, 17, 3, 1}) {
      const DeviceChunk<E> chunk{random, shape, tokens};
      chunk.step(cache, 0);
      const std::vector<E> q = chunk.q.download(), k = chunk.k.download(), v = chunk.v.download();
      std::vector<float> out(q.size());
      host.step(0, TensorView<const E>{q.data(), tokens, 6, head_dim},
                TensorView<const E>{k.data(), tokens, 3, head_dim},
                TensorView<const E>{v.data(), tokens, 3, head_dim},
                TensorView<float>{out.data(), tokens, 6, head_dim});
      std::vector<float> results = chunk.results();
      results.resize(out.size());  // without log-sum-exps
      CHECK(test::largest_difference(results, out) <= 4e-3);
      for (std::size_t t = 0; t < tokens; ++t) {
        const auto row = static_cast<std::ptrdiff_t>(t * 3 * head_dim);
        keys.insert(keys.end(), k.begin() + row, k.begin() + row + head_dim);
        values.insert(values.end(), v.begin() + row, v.begin() + row + head_dim);
      }
    }
    const std::vector<std::uint16_t> numbers = tensor.numbers();
    std::size_t found = 0;
    for (std::size_t row = 0; row < cache.tokens(); ++row) {
      const PageId page = cache.page_ids(0, 0)[row / 16];
      for (std::size_t head = 0; head < 3; ++head) {
        const PageId first = tensor.pool().engine_page(0, head, 0);
        if (page < first || static_cast<std::size_t>(page - first) >= test::EngineMemory<E>::blocks) continue;
        for (const std::size_t side : {0U, 1U}) {
          const std::size_t at = tensor.index(static_cast<std::size_t>(page - first), side, row % 16, head);
          for (std::size_t c = 0; c < head_dim; ++c) {
            found += numbers[at + c] == (side == 0 ? keys : values)[row * head_dim + c].bits ? 1U : 0U;
          }
        }
      }
    }
    CHECK(found == 2 * keys.size());
    // To the host and back, in other pages.
    std::optional<gpu::KvCache<E>> back;
    {
      test::EngineMemory<E> other{kind};
      PagePool pool{other.pages()};
      CHECK(contains(thrown<ConfigError>([&] { static_cast<void>(gpu::to_host(cache)); }),
                     "must be an engine's"));
      const auto copy = gpu::to_host(cache, nullptr, &pool);
      back = gpu::to_device(copy, cache.options());
    }
    CHECK(test::dump_device(*back, false) == test::dump_device(cache, false));
    CHECK(test::same_bits(test::next_step(*back, 9, 5), test::next_step(cache, 9, 5)));
  }
}
