// SPDX-License-Identifier: Apache-2.0
//
// An engine that lets a text in only if all that it may take is free never runs out, whatever shares pages with it.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <new>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/cache/admission.hpp>
#include <kvpolicy/cache/prefix_cache.hpp>
#include <kvpolicy/memory/limited_memory.hpp>

#include "cache/dump.hpp"
#include "support/random_saved_plan.hpp"

using namespace kvpolicy;
using test::contains;
using test::thrown;

namespace {

struct Text {
  KvCache<float> cache;
  std::size_t peak;
  std::size_t prompt;
  std::size_t end;
  bool compressed = false;
};

}  // namespace

TEST_CASE("growth is never less than what comes, with prefixes and forks that come and go") {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    CAPTURE(seed);
    const ModelShape shape{6, 2, 2, 64};
    testing::Random plans{static_cast<unsigned>(seed)};
    test::Random random{seed};
    LimitedMemory memory{std::size_t{1} << 34};
    PagePool pool{&memory, {.max_slab_bytes = 0}};
    const CacheOptions options{.page_rows = 32, .memory = &memory, .pool = &pool};
    PrefixCache<float> prefixes{options};
    const auto plan = test::random_saved_plan<float>(shape, plans, false);
    std::vector<std::unique_ptr<Text>> texts;
    std::vector<std::int32_t> tokens(400);
    for (std::size_t step = 0; step < 120; ++step) {
      CAPTURE(step);
      const std::size_t what = test::below(random, 6);
      if (texts.size() < 4 && what == 0) {
        const std::size_t prompt = 1 + test::below(random, 200);
        const std::size_t end = prompt + test::below(random, 100);
        auto found = prefixes.find(plan, std::span{tokens}.first(prompt));
        texts.push_back(
            std::make_unique<Text>(Text{found ? std::move(found->cache) : KvCache<float>{plan, options},
                                        plan.peak_memory(end, options, prompt), prompt, end}));
        continue;
      }
      if (what == 1 && test::below(random, 3) == 0) {
        prefixes.evict(1 + test::below(random, 100'000));
        continue;
      }
      if (texts.empty()) continue;
      const std::size_t chosen = test::below(random, texts.size());
      Text& text = *texts[chosen];
      // What this one may take, before and after, however much of it came.
      const std::size_t before = memory.live_bytes();
      const std::size_t growth = growth_of(text.cache, text.peak);
      if (text.cache.tokens() == text.end) {
        texts.erase(texts.begin() + static_cast<std::ptrdiff_t>(chosen));
        continue;
      }
      const std::size_t stop = text.cache.tokens() < text.prompt ? text.prompt : text.end;
      const std::size_t count = std::min(stop - text.cache.tokens(), 1 + test::below(random, 90));
      test::feed(text.cache, random, {count});
      REQUIRE(memory.live_bytes() <= before + growth);
      if (text.cache.tokens() == text.prompt && !text.compressed) {
        if (test::below(random, 2) == 0) prefixes.keep(text.cache, std::span{tokens}.first(text.prompt));
        const std::size_t now = memory.live_bytes();
        const std::size_t left = growth_of(text.cache, text.peak);
        for (std::size_t layer = 0; layer < shape.layers; ++layer) text.cache.compress(layer);
        text.compressed = true;
        REQUIRE(memory.live_bytes() <= now + left);
      }
    }
    texts.clear();
    prefixes.clear();
    CHECK(memory.live_bytes() == 0);
  }
}

TEST_CASE("a call that may not fit says what it lacks, and changes nothing") {
  const ModelShape shape{2, 2, 2, 64};
  const HeadPlan<float> plan{shape};
  std::vector<KvCache<float>> caches;
  test::Random random{1};
  for (const std::size_t tokens : {10U, 64U, 100U}) {
    caches.emplace_back(plan);
    test::feed(caches.back(), random, {tokens});
  }
  std::vector<BatchSequence<KvCache<float>>> sequences;
  for (auto& cache : caches) sequences.push_back({&cache});
  const std::span<const BatchSequence<KvCache<float>>> all{sequences};
  const std::vector<std::int32_t> one_each{0, 1, 2, 3};
  // Only the second begins pages: of keys and values, in 2 heads of 2 layers. Another layer is for safety.
  const std::size_t page = 64 * 64 * sizeof(float);
  const std::size_t needed = growth_of(all, std::span{one_each});
  CHECK(needed >= 8 * page);
  CHECK(needed <= 8 * page + 3 * 2 * 4 * page);
  require_room(all, std::span{one_each}, needed);
  const std::string message =
      thrown<CapacityError>([&] { require_room(all, std::span{one_each}, needed - 5); });
  CHECK(contains(message, "the calls of 3 sequences take up to"));
  CHECK(contains(message, "5 are lacking"));
  CHECK_THROWS_AS(require_room(all, std::span{one_each}.first(3), needed), ShapeError);
  const std::vector<std::int32_t> falling{0, 3, 2, 4};
  CHECK_THROWS_AS(require_room(all, std::span{falling}, needed), ShapeError);
}

TEST_CASE("limited memory gives no more than its limit") {
  LimitedMemory memory{10'000};
  CHECK(memory.free_bytes() == 10'000);
  void* half = memory.allocate(5'000);
  CHECK(memory.live_bytes() == 5'000);
  CHECK_THROWS_AS(static_cast<void>(memory.allocate(5'001)), std::bad_alloc);
  void* rest = memory.allocate(5'000);
  CHECK(memory.free_bytes() == 0);
  memory.deallocate(half, 5'000);
  memory.deallocate(rest, 5'000);
  CHECK(memory.live_bytes() == 0);
  CHECK(memory.peak_bytes() == 10'000);
  CHECK_THROWS_AS((LimitedMemory{1, nullptr}), ConfigError);

  // A failure of the resource behind it is not counted.
  struct Failing final : std::pmr::memory_resource {
    void* do_allocate(std::size_t, std::size_t) override { throw std::bad_alloc{}; }
    void do_deallocate(void*, std::size_t, std::size_t) override {}
    [[nodiscard]] bool do_is_equal(const memory_resource& other) const noexcept override {
      return this == &other;
    }
  } failing;
  LimitedMemory over{100, &failing};
  CHECK_THROWS_AS(static_cast<void>(over.allocate(50)), std::bad_alloc);
  CHECK(over.live_bytes() == 0);
}
