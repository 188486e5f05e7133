// SPDX-License-Identifier: Apache-2.0
//
// The memory that a plan predicts must equal what a cache allocates from its memory resource, byte for
// byte, for any policy, division into calls, page size and rollback; and max_context must be the
// longest text that fits.
#include <algorithm>
#include <cstddef>
#include <optional>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>

#include "limited_resource.hpp"
#include "random_plan.hpp"

using namespace kvpolicy;
using namespace kvpolicy::testing;

namespace {

/// An engine that reads nothing, because memory does not depend on the results of attention. A row's
/// score is its number, so that a compression has rows to choose from.
struct IdleEngine {
  void attend(const LayerAttention&) {}
  void observe(const LayerObservation& observation) {
    for (const std::span<float> sums : observation.sums) {
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = static_cast<float>(i * 7919 % 997);
    }
  }
  void score(const Plane&, std::span<const float>, std::span<float> out) {
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<float>(i * 7919 % 997);
  }
};
static_assert(AttentionEngine<IdleEngine>);

using Plan = HeadPlan<float16>;
using Cache = KvCache<float16, IdleEngine>;
constexpr ModelShape shape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 64};

/// Feeds tokens whose numbers do not matter.
class Feeder {
 public:
  void step(Cache& cache, std::size_t tokens) {
    const ModelShape& own = cache.plan().shape();
    const std::size_t row = own.q_heads * own.head_dim;
    if (rows_.size() < tokens * row) rows_.assign(tokens * row, float16{0.25F});
    out_.resize(std::max(out_.size(), tokens * row));
    const TensorView<const float16> q{rows_.data(), tokens, own.q_heads, own.head_dim};
    const TensorView<const float16> kv{rows_.data(), tokens, own.kv_heads, own.head_dim};
    const TensorView<float16> out{out_.data(), tokens, own.q_heads, own.head_dim};
    for (std::size_t layer = 0; layer < own.layers; ++layer)
      cache.step(layer, q, kv, kv, out, {.scores_rows = true});
  }

 private:
  std::vector<float16> rows_;
  std::vector<float16> out_;
};

CacheOptions random_options(Random& random, std::pmr::memory_resource* memory) {
  return {.max_rollback = pick(random, 0, 1) == 0 ? 0 : pick(random, 1, 40),
          .max_append = pick(random, 1, 5),
          .page_rows = std::size_t{32} << pick(random, 0, 2),
          .memory = memory};
}

std::size_t random_chunk(Random& random) {
  switch (pick(random, 0, 3)) {
    case 0: return 1;
    case 1: return pick(random, 1, 9);
    case 2: return pick(random, 10, 70);
    default: return pick(random, 70, 300);
  }
}

bool any_head(const Plan& plan, bool HeadRoles::*does) {
  bool any = false;
  plan.for_each_head([&](std::size_t, std::size_t, const HeadSettings<float16>& settings) {
    any = any || settings.roles().*does;
  });
  return any;
}

bool compresses(const Plan& plan) { return any_head(plan, &HeadRoles::compresses); }
/// Heads that accumulate attention allow no rollback.
bool accumulates(const Plan& plan) { return any_head(plan, &HeadRoles::accumulates); }
/// Heads that select also hold copies, of which a plan only knows the largest number.
bool selects(const Plan& plan) { return any_head(plan, &HeadRoles::selects); }

}  // namespace

TEST_CASE("a cache holds what its plan predicts, for every policy and any division into calls") {
  Random random{2024};
  Feeder feeder;
  for (int round = 0; round < 150; ++round) {
    CAPTURE(round);
    LimitedResource memory;
    LimitedResource slow;
    CacheOptions options = random_options(random, &memory);
    // Each policy alone in turn, then mixtures.
    const Plan plan =
        round < 48
            ? Plan{shape, random_settings<float16>(random, static_cast<std::size_t>(round) % policy_count)}
            : random_plan<Plan>(shape, random);
    if (accumulates(plan)) options.max_rollback = 0;
    if (pick(random, 0, 1) == 0 && !selects(plan)) options.slow_memory = &slow;
    {
      Cache cache{plan, options};
      std::size_t tokens = 0;
      CHECK(cache.bytes() == plan.memory(0, options).total());
      while (tokens < 700) {
        const std::size_t chunk = random_chunk(random);
        feeder.step(cache, chunk);
        tokens += chunk;
        CAPTURE(tokens);
        CAPTURE(chunk);
        REQUIRE(cache.bytes() == memory.live() + slow.live());
        REQUIRE(cache.slow_bytes() == slow.live());
        REQUIRE(plan.memory(tokens, options).total() == memory.live() + slow.live());
        REQUIRE(plan.memory(tokens, options).slow == slow.live());
      }
    }
    CHECK(memory.live() + slow.live() == 0);
  }
}

TEST_CASE("the parts of an estimate are right") {
  const Plan plan{shape, FullCache<DenseStorage<float16>>::Config{}};
  const CacheOptions options{.max_rollback = 7, .max_append = 3, .page_rows = 32};
  const MemoryEstimate estimate = plan.memory(100, options);
  const std::size_t row = 64 * sizeof(float16);
  CHECK(estimate.heads == 2 * 2 * 2 * 96 * row);  // 93 rows: 3 pages of 32, keys and values
  CHECK(estimate.tail == 2 * 2 * 2 * 10 * row);
  CHECK(estimate.queries == 0);
  CHECK(estimate.total() == estimate.heads + estimate.tail);

  HeadBudgetCache<DenseStorage<float16>>::Config budget{.budget = 20};
  budget.scorer.observation_window = 4;
  Plan mixed = plan;
  mixed.set(1, 0, budget);
  CHECK(mixed.memory(100, options).queries == (4 + 10) * 4 * row);  // one layer observes
  CHECK(mixed.memory(100, options, true).heads == (3 * 2 * 96 + 2 * 32) * row);
}

TEST_CASE("the bound of a head with a budget never falls, and the head never exceeds it") {
  Random random{4};
  const StorageContext context{.head_dim = 64, .page_rows = 16};
  const auto check = [&]<class P>(std::type_identity<P>) {
    for (int round = 0; round < 50; ++round) {
      typename P::Config config;
      randomize(config, random);
      std::size_t before = 0;
      bool falls = false, exceeds = false;
      for (std::size_t tokens = 0; tokens < 400; ++tokens) {
        const std::size_t bound = P::max_bytes(config, context, tokens);
        falls = falls || bound < before;
        exceeds = exceeds || P::bytes_compressed(config, context, tokens) > bound;
        before = bound;
      }
      CHECK((!falls && !exceeds));
    }
  };
  check(std::type_identity<HeadBudgetCache<DenseStorage<float16>>>{});
  check(std::type_identity<HeadBudgetCache<PerTokenStorage<float16>>>{});
}

TEST_CASE("a compressed cache holds what its plan predicts") {
  Random random{99};
  Feeder feeder;
  for (int round = 0; round < 80; ++round) {
    CAPTURE(round);
    LimitedResource memory;
    CacheOptions options = random_options(random, &memory);
    options.max_rollback = 0;
    Plan plan = random_plan<Plan>(shape, random);
    const std::size_t budget_policy = pick(random, 5, 6);
    plan.set(0, 0, random_settings<float16>(random, budget_policy));
    REQUIRE(compresses(plan));
    Cache cache{plan, options};
    const std::size_t tokens = pick(random, 1, 500);
    for (std::size_t fed = 0; fed < tokens;) {
      const std::size_t chunk = std::min(random_chunk(random), tokens - fed);
      feeder.step(cache, chunk);
      fed += chunk;
    }
    CAPTURE(tokens);
    cache.compress();
    CHECK(cache.bytes() == memory.live());
    CHECK(plan.memory(tokens, options, true).total() == memory.live());
  }
}

TEST_CASE("max_context: so many tokens fit at every step, and one more does not") {
  Random random{5};
  Feeder feeder;
  int limited = 0;
  for (int round = 0; round < 120; ++round) {
    CAPTURE(round);
    LimitedResource unlimited;
    CacheOptions options = random_options(random, &unlimited);
    Plan plan{shape};
    do {
      plan = round % 2 == 0 ? Plan{shape, random_settings<float16>(random, pick(random, 0, policy_count - 1))}
                            : random_plan<Plan>(shape, random);
    } while (compresses(plan));
    const bool is_slow = pick(random, 0, 1) == 0 && !selects(plan);
    if (is_slow) options.slow_memory = &unlimited;
    const std::size_t aim = pick(random, 1, 500);
    const std::size_t bytes = plan.memory(aim, options).total() + pick(random, 0, 3) * 1000;
    const std::optional<std::size_t> most = plan.max_context(bytes, options);
    if (!most) {
      CHECK(plan.memory(1, options).total() > bytes);
      continue;
    }
    CAPTURE(bytes);
    CAPTURE(*most);
    const std::size_t last = std::min<std::size_t>(*most, 900);
    limited += *most < 900;

    // A cache with exactly this memory takes that many tokens, token by token, and no more: what counts
    // is what it allocates while rows come and go, not only what it holds afterwards.
    LimitedResource memory{bytes};
    options.memory = &memory;
    if (is_slow) options.slow_memory = &memory;
    Cache cache{plan, options};
    std::size_t fed = 0;
    bool failed = false;
    while (fed < last && !failed) {
      try {
        feeder.step(cache, 1);
        ++fed;
      } catch (const std::bad_alloc&) {
        failed = true;
      }
    }
    CHECK(fed == last);
    CHECK(memory.peak() <= bytes);
    if (*most < 900 && !failed) CHECK_THROWS_AS(feeder.step(cache, 1), std::bad_alloc);
  }
  CHECK(limited > 60);
}

TEST_CASE("max_context is quick for plans with long periods") {
  QuantizedResidualCache<float16>::Config config;
  config.storage = {.bits = 4, .residual = (std::size_t{1} << 39) + 7, .flush = Flush::kivi};
  const Plan plan{shape, config};
  const auto most = plan.max_context(std::size_t{80} << 30);
  REQUIRE(most.has_value());
  CHECK(plan.memory(*most).total() <= std::size_t{80} << 30);
  CHECK(plan.memory(*most + 64).total() > std::size_t{80} << 30);
}

TEST_CASE("max_context at its limits") {
  const Plan full{shape, FullCache<DenseStorage<float16>>::Config{}};
  const std::size_t page = 2 * 2 * 2 * 64 * 64 * sizeof(float16);  // one page for every plane
  const std::size_t tail = full.memory(0).total();
  CHECK_FALSE(full.max_context(0).has_value());
  CHECK_FALSE(full.max_context(tail + page - 1).has_value());
  CHECK(full.max_context(tail + page) == 64);
  CHECK(full.max_context(tail + 10 * page - 1) == 9 * 64);
  const Plan bounded{shape, SinkRecentCache<DenseStorage<float16>>::Config{.sinks = 4, .recent = 60}};
  CHECK(bounded.max_context(tail + 4 * page) == std::size_t{1} << 40);
}
