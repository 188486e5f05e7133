// SPDX-License-Identifier: Apache-2.0
//
// Caches in the memory of an inference engine, for every attention engine: the layouts of vLLM and
// FlashInfer, the index of a row in them by their own formulas, and a check that such a cache gives the
// results of one with pages of its own.
#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/cache/saved_cache.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>
#include <kvpolicy/storage/engine_page_storage.hpp>

#include "cache/dump.hpp"

namespace test {

enum class EngineLayout { vllm_nhd, flashinfer_nhd, flashinfer_hnd };

/// A tensor of an engine, each of whose blocks has `heads` pages; codes of a byte are `std::uint8_t`.
template <class E>
struct EngineMemory {
  static constexpr std::size_t blocks = 150, page_rows = 16, heads = 3, head_dim = 64;

  EngineLayout kind;
  std::vector<E> tensor = std::vector<E>(2 * blocks * page_rows * heads * head_dim);

  [[nodiscard]] kvpolicy::EnginePages pages() {
    const kvpolicy::BlockShape shape{blocks, page_rows, heads, head_dim * sizeof(E)};
    const auto bytes = std::as_writable_bytes(std::span{tensor});
    switch (kind) {
      case EngineLayout::vllm_nhd: return kvpolicy::vllm_nhd(bytes, shape);
      case EngineLayout::flashinfer_nhd: return kvpolicy::flashinfer_nhd(bytes, shape);
      default: return kvpolicy::flashinfer_hnd(bytes, shape);
    }
  }
  /// Row `row` of a head in a block: its key (`side` 0) or value, by the shapes that the engines document.
  [[nodiscard]] std::span<const E> row(std::size_t block, std::size_t side, std::size_t row_,
                                       std::size_t head) const {
    std::size_t index = 0;
    switch (kind) {
      case EngineLayout::vllm_nhd: index = ((side * blocks + block) * page_rows + row_) * heads + head; break;
      case EngineLayout::flashinfer_nhd:
        index = ((block * 2 + side) * page_rows + row_) * heads + head;
        break;
      default: index = ((block * 2 + side) * heads + head) * page_rows + row_;
    }
    return std::span{tensor}.subspan(index * head_dim, head_dim);
  }
};

/// Makes random calls, forks, compressions and a file, and compares bit for bit with a cache over pages of
/// its own.
template <kvpolicy::Element E, class Engine>
void check_engine_memory(EngineLayout kind, std::uint64_t seed) {
  using namespace kvpolicy;
  CAPTURE(static_cast<int>(kind));
  Random random{seed};
  EngineMemory<E> memory{kind};
  PagePool pool{memory.pages()};
  const ModelShape shape{.layers = 2, .q_heads = 6, .kv_heads = 3, .head_dim = 64};
  const auto plan_over = [&]<class Storage>() {
    HeadPlan<E> plan{shape, typename FullCache<Storage>::Config{}};
    for (std::size_t layer = 0; layer < 2; ++layer) {
      plan.set(layer, 1, typename SinkRecentCache<Storage>::Config{.sinks = 5, .recent = 37});
      plan.set(layer, 2,
               typename HeadBudgetCache<Storage>::Config{.budget = 30, .scorer = {.observation_window = 4}});
    }
    return plan;
  };
  using Cache = KvCache<E, Engine>;
  const CacheOptions options{.max_rollback = 3, .page_rows = 16};
  CacheOptions in_place = options;
  in_place.pool = &pool;
  const HeadPlan<E> own_plan = plan_over.template operator()<EnginePageStorage<E>>();
  const HeadPlan<E> control_plan = plan_over.template operator()<DenseStorage<E>>();
  {
    Cache cache{own_plan, in_place};
    Cache control{control_plan, options};
    std::vector<std::vector<float>> keys;  // of head 0 of layer 0, as passed to the cache
    const auto call = [&](Cache& a, Cache& b, std::size_t tokens, bool remember) {
      for (std::size_t layer = 0; layer < 2; ++layer) {
        Chunk<E> chunk{random, shape, tokens};
        Chunk<E> other = chunk;
        chunk.step(a, layer);
        other.step(b, layer);
        REQUIRE(same_bits(chunk.out.numbers(), other.out.numbers()));
        REQUIRE(same_bits(chunk.log_sum_exp, other.log_sum_exp));
        for (std::size_t t = 0; remember && layer == 0 && t < tokens; ++t) {
          keys.push_back(chunk.k.row(t, 0));
        }
      }
      REQUIRE(a.bytes() == b.bytes());
    };
    std::optional<Cache> fork, control_fork;
    for (std::size_t i = 0; i < 40; ++i) {
      // At first more tokens than a window keeps, whose rows then begin in the middle of a page.
      call(cache, control, i == 0 ? 90 : 1 + below(random, i % 4 == 0 ? 30 : 3), true);
      if (i % 13 == 12) {
        cache.compress();
        control.compress();
      }
      if (i == 20) {
        fork = cache.fork();
        control_fork = control.fork();
      }
      if (i > 20) call(*fork, *control_fork, 1 + below(random, 4), false);
      if (i == 30) {
        fork.reset();
        fork = cache.fork_as(own_plan);
        control_fork = control.fork_as(control_plan);
      }
    }
    CHECK(dump(cache, false) == dump(control, false));
    CHECK(own_plan.memory(300, in_place).total() == control_plan.memory(300, options).total());
    std::ostringstream saved;
    save(cache, saved);
    std::istringstream file{saved.str()};
    fork.reset();
    Cache loaded{own_plan, in_place};
    load(loaded, file);
    CHECK(dump(loaded) == dump(cache));
    cache.commit();
    // The rows must be where the engine's own kernels look for them.
    using Full = FullCache<EnginePageStorage<E>>;
    const auto& full = cache.template policy<Full>(0, 0);
    std::size_t found = 0;
    for (std::size_t row = 0; row < full.rows(); ++row) {
      const PageId page = full.storage().pages()[row / 16];
      for (std::size_t head = 0; head < 3; ++head) {
        const PageId first = pool.engine_page(0, head, 0);
        if (page < first || static_cast<std::size_t>(page - first) >= memory.blocks) continue;
        const auto key = memory.row(static_cast<std::size_t>(page - first), 0, row % 16, head);
        std::vector<float> numbers;
        for (const E number : key) numbers.push_back(static_cast<float>(number));
        CHECK(same_bits(numbers, keys[row]));
        ++found;
      }
    }
    CHECK(found == keys.size());
  }
  CHECK(pool.live_bytes() == 0);
}

}  // namespace test
