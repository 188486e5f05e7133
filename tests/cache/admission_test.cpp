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
#include "cache/no_attention.hpp"
#include "support/memory.hpp"
#include "support/random_saved_plan.hpp"
#include "support/repeats.hpp"

using namespace kvpolicy;
using test::contains;
using test::thrown;

namespace {

// As a server does: layer by layer where that is possible.
template <class Cache>
void compress(Cache& cache) {
  if (cache.plan().at(0, 0).is_adaptive_in_model()) return cache.compress();
  for (std::size_t layer = 0; layer < cache.plan().shape().layers; ++layer) cache.compress(layer);
}

// What these texts take is all that is looked at.
using Cache = KvCache<float, test::NoAttention>;

struct Text {
  Cache cache;
  TextPromise promise;
  bool compressed = false;
};

// Texts under a plan that come, go and are forked at any time, with prefixes before their compression.
void check_growth(std::uint64_t seed, const HeadPlan<float>& plan) {
  CAPTURE(seed);
  test::Random random{seed};
  test::CountingResource memory;
  PagePool pool{&memory, {.max_slab_bytes = 0}};
  const CacheOptions options{
      .max_rollback = seed % 4 == 3 ? 6U : 0U, .page_rows = 32, .memory = &memory, .pool = &pool};
  PrefixCache<float, test::NoAttention> prefixes{options};
  std::vector<std::unique_ptr<Text>> texts;
  std::vector<std::int32_t> tokens(400);
  for (std::size_t step = 0; step < 120; ++step) {
    CAPTURE(step);
    const std::size_t what = test::below(random, 7);
    if (texts.size() < 4 && what == 0) {
      const std::size_t prompt = 1 + test::below(random, 200);
      const std::size_t end = prompt + test::below(random, 100);
      auto found = prefixes.find(plan, std::span{tokens}.first(prompt - 1));
      texts.push_back(std::make_unique<Text>(Text{found ? std::move(found->cache) : Cache{plan, options},
                                                  promise_of(plan, end, options, prompt)}));
      continue;
    }
    if (what == 1 && test::below(random, 3) == 0) {
      prefixes.evict(1 + test::below(random, 100'000));
      continue;
    }
    if (texts.empty()) continue;
    const std::size_t chosen = test::below(random, texts.size());
    Text& text = *texts[chosen];
    if (what == 2 && texts.size() < 4) {
      texts.push_back(std::make_unique<Text>(Text{text.cache.fork(), text.promise, text.compressed}));
      continue;
    }
    // What this one may take, before and after, however much of it came.
    const std::size_t before = memory.live_bytes();
    const std::size_t growth = growth_of(text.cache, text.promise);
    if (text.cache.tokens() == text.promise.tokens) {
      texts.erase(texts.begin() + static_cast<std::ptrdiff_t>(chosen));
      continue;
    }
    // To the end of its part, sometimes at once: others hold on to all that they share meanwhile.
    const std::size_t prompt = text.promise.prompt;
    const bool to_end = test::below(random, 4) == 0;
    memory.reset_peak();
    do {
      const std::size_t stop = text.cache.tokens() < prompt ? prompt : text.promise.tokens;
      const std::size_t count = std::min(stop - text.cache.tokens(), 1 + test::below(random, 90));
      test::feed(text.cache, random, {count}, {.scores_rows = true});
      REQUIRE(memory.peak_bytes() <= before + growth);
      if (text.cache.tokens() != prompt || text.compressed) continue;
      if (!to_end && test::below(random, 2) == 0) {
        prefixes.keep(text.cache, std::span{tokens}.first(prompt));
        break;
      }
      compress(text.cache);
      text.compressed = true;
      REQUIRE(memory.peak_bytes() <= before + growth);
    } while (to_end && text.cache.tokens() < text.promise.tokens);
    if (text.cache.tokens() < prompt || text.compressed) continue;
    const std::size_t now = memory.live_bytes();
    const std::size_t left = growth_of(text.cache, text.promise);
    memory.reset_peak();
    compress(text.cache);
    text.compressed = true;
    REQUIRE(memory.peak_bytes() <= now + left);
  }
  // One call more, of whatever is there.
  for (const auto& text : texts) {
    const std::vector<BatchSequence<Cache>> one{{&text->cache}};
    const std::vector<std::int32_t> indptr{0, static_cast<std::int32_t>(1 + test::below(random, 50))};
    const std::size_t before = memory.live_bytes();
    const std::size_t growth = growth_of(std::span<const BatchSequence<Cache>>{one}, std::span{indptr});
    memory.reset_peak();
    test::feed(text->cache, random, {static_cast<std::size_t>(indptr[1])});
    REQUIRE(memory.peak_bytes() <= before + growth);
  }
  texts.clear();
  prefixes.clear();
  CHECK(memory.live_bytes() == 0);
}

template <class Storage>
HeadPlan<float> plan_of_budgets(std::size_t heads, std::uint64_t seed, typename Storage::Config storage) {
  test::Random random{seed};
  typename HeadBudgetCache<Storage>::Config config;
  config.budget = test::below(random, 70);
  config.scorer = {.observation_window = 1 + test::below(random, 8), .kernel = 3};
  config.storage = storage;
  if (seed % 3 == 0) config.compress_from = test::below(random, 120);
  config.adaptive_in_layer = heads > 1;
  config.adaptive_in_model = heads > 1 && seed % 4 == 1;
  return HeadPlan<float>{ModelShape{8 / heads, heads, heads, 64}, config};
}

}  // namespace

TEST_CASE("growth is never less than what comes, with prefixes and forks that come and go") {
  for (std::uint64_t seed = 0; seed < test::repeats(12U); ++seed) {
    testing::Random random{static_cast<unsigned>(seed)};
    check_growth(seed, test::random_saved_plan<float>(ModelShape{6, 2, 2, 64}, random, seed % 4 == 3));
  }
}

TEST_CASE("growth is never less than what comes where every head has a budget") {
  using Quantized = ResidualStorage<float, Granularity::per_token>;
  for (std::uint64_t seed = 0; seed < test::repeats(12U); ++seed) {
    const std::size_t heads = 1 + seed % 2;
    check_growth(seed, plan_of_budgets<DenseStorage<float>>(heads, seed, {}));
    check_growth(seed, plan_of_budgets<Quantized>(
                           heads, seed, {.bits = std::size_t{2} << seed % 3, .residual = seed % 4 * 20}));
  }
}

TEST_CASE("a head that was compressed is promised its rows to come, not its prompt") {
  using Budget = HeadBudgetCache<DenseStorage<float>>;
  const ModelShape shape{4, 1, 1, 64};
  const HeadPlan<float> plan{shape, Budget::Config{.budget = 56, .scorer = {.observation_window = 8}}};
  const std::size_t page = 64 * 64 * sizeof(float);
  const TextPromise promise = promise_of(plan, 700, {}, 640);
  test::Random random{2};
  KvCache<float> cache{plan};
  test::feed(cache, random, {640});
  const KvCache<float> prefix = cache.fork();
  // 10 pages of keys and values in each layer are the prefix's then, and 2 have to come.
  CHECK(cache.shared_bytes() == shape.layers * 20 * page);
  CHECK(growth_of(cache, promise) >= shape.layers * 4 * page);
  CHECK(growth_of(cache, promise) <= (shape.layers * 4 + 20) * page);
  for (std::size_t layer = 0; layer < shape.layers; ++layer) cache.compress(layer);
  CHECK(growth_of(cache, promise) >= shape.layers * 2 * page);
  CHECK(growth_of(cache, promise) <= (shape.layers * 2 + 20) * page);
  // So is one call.
  const std::vector<BatchSequence<KvCache<float>>> one{{&cache}};
  const std::vector<std::int32_t> indptr{0, 1};
  const std::span<const BatchSequence<KvCache<float>>> all{one};
  CHECK(growth_of(all, std::span{indptr}) <= (shape.layers * 2 + 22) * page);
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
      thrown<OutOfMemory>([&] { require_room(all, std::span{one_each}, needed - 5); });
  CHECK(contains(message, "the calls of 3 sequences take up to"));
  CHECK(contains(message, "5 are lacking"));
  CHECK_THROWS_AS(require_room(all, std::span{one_each}.first(3), needed), ShapeError);
  const std::vector<std::int32_t> falling{0, 3, 2, 4};
  CHECK_THROWS_AS(require_room(all, std::span{falling}, needed), ShapeError);
  sequences[1].cache = nullptr;
  CHECK(contains(thrown<ConfigError>([&] { require_room(all, std::span{one_each}, needed); }),
                 "sequence 1 has no cache"));
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
