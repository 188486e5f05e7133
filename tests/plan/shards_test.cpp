// SPDX-License-Identifier: Apache-2.0
//
// Heads divided among ranks, compared with all divisions there are where they are few, with lower bounds elsewhere, and
// on the published patterns and scores.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/plan/low_bits.hpp>
#include <kvpolicy/plan/shards.hpp>
#include <kvpolicy/policy/chunk_retrieval_cache.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>

#include "support/compare.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;
using test::below;
using test::contains;
using test::Random;
using test::thrown;

namespace {

using Dense = DenseStorage<float>;
using Full = FullCache<Dense>::Config;
using Window = SinkRecentCache<Dense>::Config;
using Budget = HeadBudgetCache<Dense>::Config;
using Chunks = ChunkRetrievalCache<Dense>::Config;

HeadCosts random_costs(Random& random, const ModelShape& shape) {
  HeadCosts costs(shape.layers);
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    for (std::size_t head = 0; head < shape.layer(layer).kv_heads; ++head) {
      // Few different costs as well, so that equal ones meet.
      const bool coarse = below(random, 2) == 0;
      costs[layer].push_back(coarse ? static_cast<double>(below(random, 4))
                                    : std::exp(0.1 * static_cast<double>(below(random, 60))));
    }
  }
  return costs;
}

HeadPlan<float> random_plan(Random& random, const ModelShape& shape) {
  HeadPlan<float> plan{shape};
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    for (std::size_t head = 0; head < shape.layer(layer).kv_heads; ++head) {
      switch (below(random, 4)) {
        case 0: plan.set(layer, head, Window{.sinks = 4, .recent = 28}); break;
        case 1: plan.set(layer, head, Budget{.budget = 40, .scorer = {.observation_window = 8}}); break;
        case 2: plan.set(layer, head, Chunks{.chunk = 8, .budget = 32}); break;
        default: break;
      }
    }
  }
  return plan;
}

// Every head's slots belong to exactly one rank each, parts are in order, and their costs are what they should be.
void check_parts(const Shards& shards, const HeadCosts& costs, double merge_cost) {
  for (std::size_t layer = 0; layer < shards.layers(); ++layer) {
    std::vector<std::vector<std::size_t>> owners(costs[layer].size(), std::vector<std::size_t>(row_slots, 0));
    for (std::size_t rank = 0; rank < shards.ranks(); ++rank) {
      std::size_t next = 0;
      for (const HeadPart& part : shards.parts(layer, rank)) {
        REQUIRE(part.head < costs[layer].size());
        REQUIRE(part.head >= next);  // ascending, each once
        next = part.head + 1;
        REQUIRE(part.rows.begin < part.rows.end);
        REQUIRE(part.rows.end <= row_slots);
        for (std::size_t slot = part.rows.begin; slot < part.rows.end; ++slot) ++owners[part.head][slot];
        const double expected = costs[layer][part.head] *
                                    static_cast<double>(part.rows.end - part.rows.begin) /
                                    static_cast<double>(row_slots) +
                                (part.rows.is_whole() ? 0.0 : merge_cost);
        REQUIRE(part.cost == doctest::Approx(expected));
      }
    }
    for (const auto& of_head : owners) {
      REQUIRE(std::ranges::all_of(of_head, [](std::size_t count) { return count == 1; }));
    }
  }
}

// The least that the slowest rank can cost, by trying all divisions of whole heads.
double least_of_all(const std::vector<double>& costs, std::size_t ranks, std::size_t most_parts) {
  std::vector<std::size_t> rank_of(costs.size(), 0);
  double least = std::numeric_limits<double>::infinity();
  while (true) {
    std::vector<double> loads(ranks, 0.0);
    std::vector<std::size_t> parts(ranks, 0);
    for (std::size_t head = 0; head < costs.size(); ++head) {
      loads[rank_of[head]] += costs[head];
      ++parts[rank_of[head]];
    }
    if (most_parts == 0 || *std::ranges::max_element(parts) <= most_parts) {
      least = std::min(least, *std::ranges::max_element(loads));
    }
    std::size_t head = 0;
    while (head < costs.size() && ++rank_of[head] == ranks) rank_of[head++] = 0;
    if (head == costs.size()) return least;
  }
}

}  // namespace

TEST_CASE("rows of any stretch are spread evenly over slots, and are counted") {
  std::vector<bool> met(row_slots, false);
  for (std::size_t row = 0; row < row_slots; ++row) met[slot_of_row(row)] = true;
  CHECK(std::ranges::count(met, true) == static_cast<std::ptrdiff_t>(row_slots));
  for (const RowShare share : {RowShare{0, 512}, RowShare{512, 1024}, RowShare{100, 137},
                               RowShare{1023, 1024}, RowShare{0, 1}, RowShare{341, 682}, RowShare{}}) {
    for (const std::size_t first : {0U, 1U, 1000U, 77777U}) {
      std::size_t count = 0;
      for (std::size_t rows = 0; rows <= 3000; ++rows) {
        // The golden ratio leaves the most even gaps there are, so a few rows, however long the stretch is.
        REQUIRE(std::abs(static_cast<double>(count) - share.share() * static_cast<double>(rows)) < 6.0);
        if (first == 0) REQUIRE(share.rows_of(rows) == count);
        count += share.has(first + rows) ? 1 : 0;
      }
    }
  }
}

TEST_CASE("whole heads are divided as well as they can be, with any number allowed for a rank") {
  Random random{3};
  for (int round = 0; round < 300; ++round) {
    CAPTURE(round);
    const std::size_t heads = 1 + below(random, 7);
    const std::size_t ranks = 1 + below(random, 4);
    const ModelShape shape{1, heads, heads, 64};
    const HeadCosts costs = random_costs(random, shape);
    BalanceConfig config{.ranks = ranks, .cut_rows = false};
    if (below(random, 2) == 0) config.most_parts = (heads + ranks - 1) / ranks + below(random, 2);
    if (heads % ranks == 0 && below(random, 3) == 0) config.equal_heads = true;
    const std::size_t most = config.equal_heads ? heads / ranks : config.most_parts;
    if (config.equal_heads) config.most_parts = 0;
    const Shards shards = balance(HeadPlan<float>{shape}, costs, costs, config);
    check_parts(shards, costs, 0);
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      if (most > 0) REQUIRE(shards.parts(0, rank).size() <= most);
      if (config.equal_heads) REQUIRE(shards.parts(0, rank).size() == most);
    }
    CHECK(shards.slowest(0) == doctest::Approx(least_of_all(costs[0], ranks, most)));
    CHECK(shards.merges(0).empty());
  }
}

TEST_CASE("cut heads: the slowest rank costs what is left when nothing else can be cut") {
  Random random{5};
  std::size_t cut = 0;
  for (int round = 0; round < 400; ++round) {
    CAPTURE(round);
    const std::size_t heads = 1 + below(random, 20);
    const ModelShape shape{2, heads, heads, 64};
    const HeadPlan<float> plan = random_plan(random, shape);
    const HeadCosts costs = random_costs(random, shape);
    BalanceConfig config{
        .ranks = 1 + below(random, 9), .cut_budgets = below(random, 2) == 0, .least_gain = 0};
    const bool merges_cost = below(random, 2) == 0;
    if (merges_cost) config.merge_cost = 0.3;
    const Shards shards = balance(plan, costs, costs, config);
    check_parts(shards, costs, config.merge_cost);
    config.cut_rows = false;
    const Shards whole = balance(plan, costs, costs, config);
    for (std::size_t layer = 0; layer < 2; ++layer) {
      CHECK(shards.slowest(layer) <= whole.slowest(layer) * (1 + 1e-9));
      const double all = std::accumulate(costs[layer].begin(), costs[layer].end(), 0.0);
      double dearest_whole = 0;  // of the heads that stay whole
      double dearest = 0;
      std::vector<double> kept_whole;
      for (std::size_t head = 0; head < heads; ++head) {
        const HeadRule rule = plan.at(layer, head).rule(64);
        dearest = std::max(dearest, costs[layer][head]);
        if (rule.chunk > 0 || rule.recent > 0 || (rule.compresses && !config.cut_budgets)) {
          dearest_whole = std::max(dearest_whole, costs[layer][head]);
          kept_whole.push_back(costs[layer][head]);
        }
      }
      const double least = std::max(all / static_cast<double>(config.ranks), dearest_whole);
      CHECK(shards.slowest(layer) >= least * (1 - 1e-9));
      // With nothing to keep whole and free messages only slots are in the way.
      if (kept_whole.empty() && !merges_cost) {
        CHECK(shards.slowest(layer) <= all / static_cast<double>(config.ranks) +
                                           dearest * static_cast<double>(heads) / row_slots + 1e-9);
      }
      for (const HeadMerge& merge : shards.merges(layer)) {
        ++cut;
        CHECK(merge.ranks.size() >= 2);
        CHECK(std::ranges::is_sorted(merge.ranks));
        CHECK(std::ranges::adjacent_find(merge.ranks) == merge.ranks.end());
        const HeadRule rule = plan.at(layer, merge.head).rule(64);
        CHECK(can_cut(rule, config.cut_budgets));
      }
      HeadOrder order = shards.order(layer);
      CHECK(order.size() == heads);
      CHECK(inverse_order(order).size() == heads);  // a permutation
    }
  }
  CHECK(cut > 200);
}

TEST_CASE("a layer is cut only where that is worth its messages") {
  const ModelShape shape{1, 3, 3, 64};
  const HeadPlan<float> plan{shape};
  const HeadCosts costs{{10, 10, 10}};
  const auto slowest = [&](double merge_cost, double least_gain) {
    return balance(plan, costs, costs, {.ranks = 2, .merge_cost = merge_cost, .least_gain = least_gain})
        .slowest(0);
  };
  CHECK(slowest(0, 0.01) == doctest::Approx(15).epsilon(0.002));
  CHECK(slowest(2, 0.01) == doctest::Approx(17).epsilon(0.002));
  CHECK(slowest(6, 0.01) == 20);
  CHECK(slowest(2, 0.2) == 20);
}

TEST_CASE("ranks hold nearly as many bytes, and no more than they may") {
  const ModelShape shape{8, 3, 3, 64};
  const HeadPlan<float> plan{shape};
  const HeadCosts costs(8, {4, 2, 2});
  const HeadCosts bytes(8, {100, 10, 10});
  const BalanceConfig config{.ranks = 2, .cut_rows = false, .most_bytes = 500};
  const Shards shards = balance(plan, costs, bytes, config);
  for (std::size_t rank = 0; rank < 2; ++rank) {
    double held = 0;
    for (std::size_t layer = 0; layer < 8; ++layer) {
      for (const HeadPart& part : shards.parts(layer, rank)) held += bytes[layer][part.head];
    }
    CHECK(held == 480);
  }
  BalanceConfig tight = config;
  tight.most_bytes = 479;
  CHECK(contains(thrown<CapacityError>([&] { (void)balance(plan, costs, bytes, tight); }),
                 "would hold 480 bytes, at most 479 are allowed"));
}

TEST_CASE(
    "a rank's plan has its parts' settings, in layers without heads none, and shared caches where they are") {
  ModelShape shape{.layers = 4, .q_heads = 8, .kv_heads = 4, .head_dim = 64};
  shape.change(1) = {.q_heads = 8, .reads = 0};
  shape.change(2).kv_heads = 0;
  shape.change(3).window = 50;
  HeadPlan<float> plan{shape};
  plan.set(0, 2, Window{.sinks = 4, .recent = 28});
  const HeadCosts costs{{9, 9, 1, 1}, {}, {}, {5, 0, 0, 0}};
  const Shards shards = balance(plan, costs, costs, {.ranks = 3, .cut_rows = false});
  std::size_t heads = 0;
  for (std::size_t rank = 0; rank < 3; ++rank) {
    const auto own = plan_of_rank(plan, shards, rank);
    own.shape().validate();
    for (const std::size_t layer : {0U, 3U}) {
      const auto parts = shards.parts(layer, rank);
      const LayerShape layer_shape = own.shape().layer(layer);
      REQUIRE(layer_shape.kv_heads == parts.size());
      CHECK(layer_shape.q_heads == 2 * parts.size());
      for (std::size_t i = 0; i < parts.size(); ++i) CHECK(own.at(layer, i) == plan.at(layer, parts[i].head));
      heads += parts.size();
    }
    CHECK(own.shape().layer(2).kv_heads == 0);
    CHECK(own.shape().layer(1).q_heads == own.shape().layer(0).q_heads);
    CHECK(own.shape().cache_of(1) == (shards.parts(0, rank).empty() ? 1 : 0));
    const KvCache cache{own};
    CHECK(cache.tokens() == 0);
  }
  CHECK(heads == 8);
  CHECK(contains(thrown<ConfigError>([&] { (void)plan_of_rank(plan, shards, 3); }), "there is no rank 3"));
  CHECK(contains(thrown<ConfigError>([&] { (void)plan_of_rank(HeadPlan<float>{{2, 4, 4, 64}}, shards, 0); }),
                 "shards of 4 layers, the model has 2"));
}

TEST_CASE("what does not fit is refused by name") {
  const ModelShape shape{2, 4, 4, 64};
  const HeadPlan<float> plan{shape};
  const HeadCosts costs(2, {1, 1, 1, 1});
  const auto error = [&](const HeadCosts& a, const BalanceConfig& config) {
    return thrown<ConfigError>([&] { (void)balance(plan, a, costs, config); });
  };
  CHECK(error(costs, {.ranks = 4}).empty());
  CHECK(contains(error(costs, {.ranks = 0}), "ranks is 0, must be 1 to 1024"));
  CHECK(error(costs, {.ranks = 2, .most_parts = std::size_t{1} << 63}).empty());
  CHECK(contains(error(costs, {.ranks = 3, .equal_heads = true}), "4 KV heads of layer 0 on 3 ranks"));
  CHECK(contains(error(costs, {.ranks = 3, .most_parts = 1}), "3 ranks with at most 1 hold fewer"));
  CHECK(contains(error(costs, {.ranks = 2, .equal_heads = true, .most_parts = 1}), "most_parts is 1"));
  CHECK(contains(error(costs, {.merge_cost = -1}), "merge_cost is -1"));
  CHECK(contains(error(costs, {.merge_cost = std::nan("")}), "merge_cost is nan"));
  CHECK(contains(error(costs, {.least_gain = 1}), "least_gain is 1"));
  CHECK(contains(error({{1, 1, 1, 1}}, {}), "costs of 1 layers, the plan has 2"));
  CHECK(contains(error({{1, 1, 1, 1}, {1}}, {}), "costs of 1 heads in layer 1, the plan has 4"));
  CHECK(contains(error({{1, 1, 1, 1}, {1, 1, -2, 1}}, {}), "head 2 of layer 1 has costs of -2"));
  CHECK(contains(error({{1, 1, 1, 1}, {1, 1, std::nan(""), 1}}, {}), "costs of nan"));
  const HeadPlan<float> sharing{shape, Budget{.budget = 40, .adaptive_in_layer = true}};
  CHECK(contains(thrown<ConfigError>([&] { (void)balance(sharing, costs, costs, {.ranks = 2}); }),
                 "shares its budget with other heads"));
  CHECK(contains(thrown<ConfigError>([&] { (void)even_shards(plan, costs, 3); }), "not equally many"));
  const Shards shards = balance(plan, costs, costs, {.ranks = 2});
  CHECK(contains(thrown<ConfigError>([&] { (void)shards.parts(2, 0); }), "there is no layer 2"));
  CHECK(contains(thrown<ConfigError>([&] { (void)shards.parts(0, 2); }), "there is no rank 2"));
}

TEST_CASE("the bytes that a head reads and holds are those of a cache") {
  Random random{7};
  const ModelShape shape{1, 8, 8, 64};
  HeadPlan<bfloat16> plan{shape};
  plan.set(0, 1, SinkRecentCache<DenseStorage<bfloat16>>::Config{.sinks = 4, .recent = 28});
  plan.set(0, 2, LowBitFormat::of_text({8, 8}, shape, 32).head<bfloat16>());
  plan.set(0, 3, LowBitFormat::of_small_floats(Codebook::fp8).head<bfloat16>());
  plan.set(0, 4, LowBitFormat::of_text({4, 2}, shape, 32).with_normal(NormalCodes::values).head<bfloat16>());
  const std::size_t tokens = 300;
  const HeadCosts read = bytes_read(plan, tokens);
  const HeadCosts held = bytes_held(plan, tokens);
  KvCache cache{plan};
  test::Tensor<bfloat16> q{tokens, 8, 64};
  test::Tensor<bfloat16> k{tokens, 8, 64};
  test::Tensor<bfloat16> v{tokens, 8, 64};
  q.randomize(random);
  k.randomize(random);
  v.randomize(random);
  test::Tensor<float> out{tokens, 8, 64};
  cache.step(0, std::as_const(q).view(), std::as_const(k).view(), std::as_const(v).view(), out.view());
  double all = 0;
  for (std::size_t head = 0; head < 8; ++head) {
    CAPTURE(head);
    double shown = 0;
    for (const Segment& segment : cache.segments(0, head, Read::all)) {
      for (const Plane* plane : {&segment.keys, &segment.values}) {
        const RowFormat& format = plane->format;
        double row = 64.0 * static_cast<double>(bits_of(format.encoding)) / 8;
        if (is_quantized(format.encoding)) {
          row += 64.0 / static_cast<double>(format.group) *
                 static_cast<double>(param_bytes_of_group(format.codebook));
        }
        shown += row * static_cast<double>(segment.rows);
      }
    }
    // A window has room for the row of the query to come. Groups of rows that leave the residual together make it a
    // few rows longer.
    if (head == 1) shown += 2 * 64 * sizeof(bfloat16);
    CHECK(read[0][head] == doctest::Approx(shown).epsilon(head == 4 ? 0.2 : 1e-9));
    all += held[0][head];
  }
  // Besides the rows a cache has its tail, which takes one row of each head.
  CHECK(all == static_cast<double>(cache.bytes() - plan.memory(tokens).tail));

  // Heads that compress and heads that choose, by hand.
  HeadPlan<bfloat16> chosen{ModelShape{1, 2, 2, 64}};
  chosen.set(
      0, 0,
      HeadBudgetCache<DenseStorage<bfloat16>>::Config{.budget = 24, .scorer = {.observation_window = 8}});
  chosen.set(0, 1, ChunkRetrievalCache<DenseStorage<bfloat16>>::Config{.chunk = 16, .budget = 64});
  const HeadCosts some = bytes_read(chosen, 300);
  CHECK(some[0][0] == (24 + 8) * 2 * 64 * 2);
  CHECK(some[0][1] == (64 + 300 % 16) * 2 * 64 * 2);
}

TEST_CASE("shards that were read from elsewhere are checked") {
  const auto error = [](std::vector<std::vector<HeadPart>> layer, std::size_t ranks = 2) {
    return thrown<ConfigError>([&] { (void)Shards{{std::move(layer)}, ranks}; });
  };
  CHECK(error({{{0}}, {{1}}}).empty());
  CHECK(error({{{0, {0, 300}}}, {{0, {300, 1024}}}}).empty());
  CHECK(contains(error({{{0}}}), "parts of 1 ranks, must have those of 2"));
  CHECK(contains(error({}, 0), "there are 0 ranks"));
  CHECK(contains(error({{{0, {5, 5}}}, {}}), "has the slots [5, 5)"));
  CHECK(contains(error({{{0, {0, 2000}}}, {}}), "has the slots [0, 2000)"));
  CHECK(contains(error({{{1}, {0}}, {}}), "heads must ascend"));
  CHECK(contains(error({{{0}}, {{0}}}), "slots of head 0 of layer 0 are in no part, or in two"));
  CHECK(contains(error({{{0, {0, 300}}}, {{0, {400, 1024}}}}), "are in no part, or in two"));
  CHECK(contains(error({{{0, {0, 300}}}, {{1}}}), "are in no part, or in two"));
  CHECK(contains(error({{{0, {1, 1024}}}, {}}), "are in no part, or in two"));
}

TEST_CASE("layers of very many heads, and of extreme costs") {
  const ModelShape shape{1, 5000, 5000, 64};
  const HeadPlan<float> plan{shape};
  const HeadCosts costs(1, std::vector<double>(5000, 1e100));
  for (const bool cut : {true, false}) {
    const Shards shards = balance(plan, costs, costs, {.ranks = 7, .cut_rows = cut});
    CHECK(shards.imbalance() < 1.01);
  }
  const HeadCosts too_much(1, std::vector<double>(5000, 1e101));
  CHECK(contains(thrown<ConfigError>([&] { (void)balance(plan, too_much, costs, {.ranks = 2}); }),
                 "must be from 0 to 1e100"));
}
