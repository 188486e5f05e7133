// SPDX-License-Identifier: Apache-2.0
//
// Rows weighed by what their values add to the layer's output (CriticalKV), a share of the budget that is chosen by
// attention alone, and low scores that are lifted (DefensiveKV), compared with a slow model over whatever a cache has
// been through: forks, other plans, files, earlier compressions.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/cache/saved_cache.hpp>
#include <kvpolicy/policy/h2o_scorer.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/key_norm_scorer.hpp>
#include <kvpolicy/policy/tova_scorer.hpp>

#include "cache/slow_text.hpp"
#include "support/compare.hpp"
#include "support/small_cache.hpp"

using namespace kvpolicy;
using namespace test::slow;

namespace {

using Snap = HeadBudgetCache<DenseStorage<E>>;
using H2o = HeadBudgetCache<DenseStorage<E>, H2oScorer>;
using Tova = HeadBudgetCache<DenseStorage<E>, TovaScorer>;
using Norm = HeadBudgetCache<DenseStorage<E>, KeyNormScorer>;
using Plan = HeadPlan<E>;

// A model's output projections, and the same for the library.
struct Outputs {
  Outputs(test::Random& random, const ModelShape& shape, std::size_t outputs) : given{shape} {
    for (std::size_t l = 0; l < shape.layers; ++l) {
      // Heads whose weights differ much in size, so that a wrong head's would be seen.
      weights.emplace_back(outputs, shape.q_heads, shape.head_dim, test::Layout::padded);
      weights.back().fill([&](std::size_t, std::size_t head, std::size_t) {
        return test::normal(random) * static_cast<float>(1 + 3 * head);
      });
    }
    for (std::size_t l = 0; l < shape.layers; ++l) given.set(l, std::as_const(weights[l]).view());
  }

  // The L1 norm of a value through the weights of one query head.
  [[nodiscard]] double norm(std::size_t layer, std::size_t q_head, const std::vector<double>& value) const {
    double norm = 0.0;
    for (std::size_t output = 0; output < weights[layer].tokens(); ++output) {
      const std::vector<double> row = weights[layer].row_of_doubles(output, q_head);
      double sum = 0.0;
      for (std::size_t c = 0; c < row.size(); ++c) sum += row[c] * value[c];
      norm += std::abs(sum);
    }
    return norm;
  }

  std::vector<test::Tensor<E>> weights;
  ValueOutputs given;
};

// All rows and queries that a cache of one layer was ever given, in double.
struct Text {
  std::vector<std::vector<oracle::Row>> rows;             // [kv_heads]
  std::vector<std::vector<std::vector<double>>> queries;  // [tokens][q_heads]

  void step(test::Random& random, Cache& cache, const ModelShape& shape, std::size_t tokens) {
    test::Chunk<E> chunk{random, shape, tokens};
    chunk.q.randomize(random, 3.0F);
    chunk.step(cache, 0);
    rows.resize(shape.kv_heads);
    for (std::size_t i = 0; i < tokens; ++i) {
      for (std::size_t h = 0; h < shape.kv_heads; ++h) {
        rows[h].push_back({static_cast<std::int64_t>(queries.size()), chunk.k.row_of_doubles(i, h),
                           chunk.v.row_of_doubles(i, h)});
      }
      auto& own = queries.emplace_back();
      for (std::size_t h = 0; h < shape.q_heads; ++h) own.push_back(chunk.q.row_of_doubles(i, h));
    }
  }
};

// How SnapKV's scores are made and weighed, written out.
struct SlowSnap {
  Snap::Config config;
  std::size_t group = 1;

  // What one query head's attention comes to for the rows at `held`, of which the last ones are the window's.
  [[nodiscard]] std::vector<double> votes(const Text& text, std::size_t h, std::size_t g,
                                          const std::vector<std::int64_t>& held) const {
    const std::size_t window = config.scorer.observation_window;
    std::vector<double> votes(held.size(), 0.0);
    for (std::size_t t = text.queries.size() - window; t < text.queries.size(); ++t) {
      std::vector<const oracle::Row*> seen;
      for (const std::int64_t position : held) {
        if (position <= static_cast<std::int64_t>(t)) {
          seen.push_back(&text.rows[h][static_cast<std::size_t>(position)]);
        }
      }
      oracle::Options options;
      options.scale = 1 / std::sqrt(static_cast<double>(text.rows[h][0].key.size()));
      const auto shares = oracle::probabilities(text.queries[t][h * group + g], seen, options);
      for (std::size_t r = 0; r < shares.size(); ++r) {
        if (config.scorer.votes == Votes::largest) {
          votes[r] = std::max(votes[r], shares[r]);
        } else {
          votes[r] += shares[r] / static_cast<double>(window);
        }
      }
    }
    return votes;
  }

  [[nodiscard]] std::vector<double> pooled(const std::vector<double>& votes, std::size_t candidates) const {
    const auto half = static_cast<std::ptrdiff_t>(config.scorer.kernel / 2);
    std::vector<double> pooled(candidates, 0.0);
    for (std::ptrdiff_t r = 0; r < static_cast<std::ptrdiff_t>(candidates); ++r) {
      for (std::ptrdiff_t near = r - half; near <= r + half; ++near) {
        if (near < 0 || near >= static_cast<std::ptrdiff_t>(candidates)) continue;
        double& own = pooled[static_cast<std::size_t>(r)];
        const double vote = votes[static_cast<std::size_t>(near)];
        own = config.scorer.pooling == Pooling::max ? std::max(own, vote)
                                                    : own + vote / static_cast<double>(config.scorer.kernel);
      }
    }
    return pooled;
  }

  void lift(std::vector<double>& scores) const {
    double mean = 0.0;
    for (const double score : scores) mean += score / static_cast<double>(scores.size());
    for (double& score : scores) score = std::max(score, config.scorer.prior_share * mean);
  }

  // With `outputs` times norms, without them by attention alone.
  [[nodiscard]] std::vector<double> scores(const Text& text, std::size_t h,
                                           const std::vector<std::int64_t>& held,
                                           const Outputs* outputs) const {
    const std::size_t candidates = held.size() - std::min(held.size(), config.scorer.observation_window);
    const bool by_head = outputs != nullptr && config.value_norm == ValueNorm::output_l1;
    std::vector<double> scores(candidates, 0.0);
    for (std::size_t g = 0; g < group; ++g) {
      std::vector<double> own = pooled(votes(text, h, g, held), candidates);
      if (by_head) lift(own);
      for (std::size_t r = 0; r < candidates; ++r) {
        const auto& value = text.rows[h][static_cast<std::size_t>(held[r])].value;
        if (by_head) own[r] *= outputs->norm(0, h * group + g, value);
        scores[r] = config.scorer.votes == Votes::largest ? std::max(scores[r], own[r])
                                                          : scores[r] + own[r] / static_cast<double>(group);
      }
    }
    if (!by_head) lift(scores);
    for (std::size_t r = 0; r < candidates && outputs != nullptr && !by_head; ++r) {
      double squares = 0.0;
      for (const double number : text.rows[h][static_cast<std::size_t>(held[r])].value)
        squares += number * number;
      scores[r] *= std::sqrt(squares);
    }
    return scores;
  }

  // Checks who survived of `held`; what is nearly equal may go either way.
  void check(const Text& text, std::size_t h, const std::vector<std::int64_t>& held,
             const std::set<std::int64_t>& survivors, const Outputs& outputs) const {
    const std::size_t window = config.scorer.observation_window;
    if (held.size() <= config.budget + window) {
      CHECK(survivors.size() == held.size());
      return;
    }
    const std::size_t candidates = held.size() - window;
    CHECK(survivors.size() == config.budget + window);
    for (std::size_t r = candidates; r < held.size(); ++r) CHECK(survivors.contains(held[r]));
    const std::vector<double> attention = scores(text, h, held, nullptr);
    const std::vector<double> weighed = scores(text, h, held, &outputs);
    const auto first = static_cast<std::size_t>(config.unweighed_share * static_cast<double>(config.budget));
    std::vector<double> sorted = attention;
    std::ranges::sort(sorted, std::greater{});
    // Rows that are surely of the first part, and those that may be.
    const double last_first = first == 0 ? std::numeric_limits<double>::infinity() : sorted[first - 1];
    double lowest_in = std::numeric_limits<double>::infinity();
    double highest_out = 0.0;
    double most = 0.0;
    for (std::size_t r = 0; r < candidates; ++r) {
      most = std::max(most, weighed[r]);
      const bool stays = survivors.contains(held[r]);
      if (attention[r] > last_first + 1e-5) CHECK(stays);
      if (stays && attention[r] < last_first - 1e-5) lowest_in = std::min(lowest_in, weighed[r]);
      if (!stays) highest_out = std::max(highest_out, weighed[r]);
    }
    CHECK(lowest_in >= highest_out - 2e-4 * most);
  }
};

std::vector<std::int64_t> positions(const Cache& cache, std::size_t head) {
  const auto rows = held(cache, 0, head);
  return {rows.begin(), rows.end()};
}

}  // namespace

TEST_CASE("value outputs: whatever a cache has been through, heads keep the rows that count most") {
  test::Random random{92};
  std::size_t dropped = 0;
  for (int round = 0; round < 120; ++round) {
    CAPTURE(round);
    const std::size_t group = 1 + test::below(random, 3);
    const ModelShape shape{1, 2 * group, 2, 16};
    const Outputs outputs{random, shape, 1 + test::below(random, 20)};
    SlowSnap slow{{}, group};
    slow.config = {.budget = test::below(random, 14),
                   .weigh_values = true,
                   .value_norm = test::below(random, 4) == 0 ? ValueNorm::value_l2 : ValueNorm::output_l1,
                   .unweighed_share = test::one_of(random, std::vector{0.0, 0.3, 0.5, 1.0})};
    slow.config.scorer = {.observation_window = 1 + test::below(random, 5),
                          .pooling = test::below(random, 2) == 0 ? Pooling::max : Pooling::average,
                          .kernel = 1 + 2 * test::below(random, 3),
                          .votes = test::below(random, 2) == 0 ? Votes::largest : Votes::mean,
                          .prior_share = test::one_of(random, std::vector{0.0, 0.0, 0.5, 1.0})};
    // Lifted scores are equal, and of equal ones the library goes by votes, which this model does not.
    if (slow.config.unweighed_share > 0) slow.config.scorer.prior_share = 0;
    const Plan plan{shape, slow.config};
    const CacheOptions options{.kept_queries = 6, .page_rows = 16, .value_outputs = &outputs.given};
    // Some texts begin under another plan.
    const bool forked = test::below(random, 2) == 0;
    std::optional<Cache> cache{std::in_place, forked ? Plan{shape} : plan, options};
    Text text;
    text.step(random, *cache, shape, 6 + test::below(random, 40));
    if (forked) cache = cache->fork_as(plan);
    for (std::size_t operation = 0; operation < 8; ++operation) {
      switch (test::below(random, 5)) {
        case 0:
          text.step(random, *cache, shape, test::one_of(random, std::vector<std::size_t>{1, 15, 16, 17}));
          break;
        case 1: cache = cache->fork(); break;
        case 2: {
          Cache loaded{plan, options};
          test::load_bytes(loaded, test::saved(*cache));
          cache = std::move(loaded);
          break;
        }
        default: {
          const auto before = std::vector{positions(*cache, 0), positions(*cache, 1)};
          cache->compress();
          for (std::size_t h = 0; h < 2; ++h) {
            slow.check(text, h, before[h], held(*cache, 0, h), outputs);
            dropped += before[h].size() - held(*cache, 0, h).size();
          }
        }
      }
    }
  }
  CHECK(dropped > 1000);
}

TEST_CASE("value outputs: the accumulated attention of all query heads is weighed by all their norms") {
  test::Random random{93};
  for (int round = 0; round < 16; ++round) {
    CAPTURE(round);
    const std::size_t group = 1 + test::below(random, 3);
    const ModelShape shape{1, 2 * group, 2, 16};
    const Outputs outputs{random, shape, 11};
    const Votes votes = round % 2 == 0 ? Votes::mean : Votes::largest;
    const H2o::Config config{.budget = 9,
                             .weigh_values = true,
                             .value_norm = ValueNorm::output_l1,
                             .scorer = {.recent = 3, .votes = votes}};
    Cache cache{Plan{shape, config}, {.value_outputs = &outputs.given}};
    constexpr std::size_t rows = 37;
    test::Chunk<E> chunk{random, shape, rows};
    chunk.q.randomize(random, 3.0F);
    SlowText text{shape};
    const auto paid = text.step(chunk, cache);
    cache.compress();
    for (std::size_t h = 0; h < 2; ++h) {
      std::vector<double> scores(rows, 0.0);
      for (std::size_t r = 0; r < rows; ++r) {
        double norm = 0.0;
        for (std::size_t g = 0; g < group; ++g) {
          const double own = outputs.norm(0, h * group + g, chunk.v.row_of_doubles(r, h));
          norm = votes == Votes::largest ? std::max(norm, own) : norm + own / static_cast<double>(group);
        }
        for (const double share : paid[h][r]) {
          scores[r] = votes == Votes::largest ? std::max(scores[r], share)
                                              : scores[r] + share / static_cast<double>(group);
        }
        scores[r] *= norm / 100;  // for the slack of check_survivors
      }
      check_survivors({{scores, 9, 3, 0.0}}, {held(cache, 0, h)});
    }
  }
}

TEST_CASE("value outputs: TOVA, and heads that compete, are weighed as well") {
  test::Random random{94};
  const ModelShape shape{1, 2, 2, 16};
  const Outputs outputs{random, shape, 5};
  for (const bool competes : {false, true}) {
    const Tova::Config config{.budget = 6,
                              .adaptive_in_layer = competes,
                              .weigh_values = true,
                              .value_norm = ValueNorm::output_l1,
                              .safeguard = 0.0};
    Cache cache{Plan{shape, config}, {.value_outputs = &outputs.given}};
    SlowText text{shape};
    std::vector<SlowHead> heads(2, {std::vector<double>(30, 0.0), 6, 0, 0.0});
    std::vector<Paid> paid;
    std::vector<std::vector<std::vector<double>>> values(2);
    for (const std::size_t tokens : {29U, 1U}) {
      test::Chunk<E> chunk{random, shape, tokens};
      chunk.q.randomize(random, 3.0F);
      paid = text.step(chunk, cache);
      for (std::size_t h = 0; h < 2; ++h) {
        for (std::size_t i = 0; i < tokens; ++i) values[h].push_back(chunk.v.row_of_doubles(i, h));
      }
    }
    for (std::size_t h = 0; h < 2; ++h) {
      for (std::size_t r = 0; r < 30; ++r)
        heads[h].scores[r] = paid[h][r][0] * outputs.norm(0, h, values[h][r]);
    }
    cache.compress();
    if (competes) {
      check_survivors(heads, all_held(cache));
    } else {
      for (std::size_t h = 0; h < 2; ++h) check_survivors({heads[h]}, {held(cache, 0, h)});
    }
  }
}

TEST_CASE(
    "value outputs: heads that compete divide the budget by attention, then each chooses in two steps") {
  test::Random random{96};
  std::size_t clear = 0;
  for (int round = 0; round < 40; ++round) {
    CAPTURE(round);
    const ModelShape shape{1, 3, 3, 16};
    const Outputs outputs{random, shape, 7};
    const bool in_model = round % 2 == 0;
    Tova::Config config{.adaptive_in_layer = !in_model,
                        .adaptive_in_model = in_model,
                        .weigh_values = true,
                        .value_norm = ValueNorm::output_l1,
                        .unweighed_share = test::one_of(random, std::vector{0.25, 0.5, 1.0}),
                        .safeguard = 0.0};
    Plan plan{shape, config};
    std::size_t left = 0;
    for (std::size_t h = 0; h < 3; ++h) {
      config.budget = test::below(random, 12);
      left += config.budget;
      plan.set(0, h, config);
    }
    Cache cache{plan, {.value_outputs = &outputs.given}};
    SlowText text{shape};
    constexpr std::size_t rows = 29;
    std::vector<Paid> paid;
    std::vector<std::vector<std::vector<double>>> values(3);
    for (const std::size_t tokens : {rows - 1, std::size_t{1}}) {
      test::Chunk<E> chunk{random, shape, tokens};
      chunk.q.randomize(random, 3.0F);
      paid = text.step(chunk, cache);
      for (std::size_t h = 0; h < 3; ++h) {
        for (std::size_t i = 0; i < tokens; ++i) values[h].push_back(chunk.v.row_of_doubles(i, h));
      }
    }
    cache.compress();
    // All rows of all heads, those with most attention first.
    struct Candidate {
      std::size_t head, row;
      double attention, weighed;
    };
    std::vector<Candidate> all;
    for (std::size_t h = 0; h < 3; ++h) {
      for (std::size_t r = 0; r < rows; ++r) {
        all.push_back({h, r, paid[h][r][0], paid[h][r][0] * outputs.norm(0, h, values[h][r])});
      }
    }
    bool close = false;  // whether rounding may decide
    const auto choose = [&](std::vector<Candidate>& from, std::size_t count, double Candidate::*by) {
      std::ranges::sort(from, std::greater{}, by);
      if (count > 0 && count < from.size() && from[count - 1].*by < from[count].*by * (1 + 1e-4))
        close = true;
      std::vector<Candidate> best(from.begin(), from.begin() + static_cast<std::ptrdiff_t>(count));
      from.erase(from.begin(), from.begin() + static_cast<std::ptrdiff_t>(count));
      return best;
    };
    std::vector<std::size_t> counts(3, 0);
    std::vector<Candidate> pool = all;
    for (const Candidate& one : choose(pool, left, &Candidate::attention)) ++counts[one.head];
    std::vector<std::set<std::int64_t>> expected(3);
    for (std::size_t h = 0; h < 3; ++h) {
      std::vector<Candidate> own;
      std::ranges::copy_if(all, std::back_inserter(own), [&](const Candidate& one) { return one.head == h; });
      const auto first = static_cast<std::size_t>(config.unweighed_share * static_cast<double>(counts[h]));
      for (const Candidate& one : choose(own, first, &Candidate::attention)) {
        expected[h].insert(static_cast<std::int64_t>(one.row));
      }
      for (const Candidate& one : choose(own, counts[h] - first, &Candidate::weighed)) {
        expected[h].insert(static_cast<std::int64_t>(one.row));
      }
    }
    if (close) continue;
    ++clear;
    CHECK(all_held(cache) == expected);
  }
  CHECK(clear >= 30);
}

TEST_CASE("value outputs: what does not fit is refused by name") {
  test::Random random{95};
  const ModelShape shape{2, 2, 1, 16};
  const Outputs outputs{random, shape, 3};
  const Snap::Config by_output{.budget = 4, .weigh_values = true, .value_norm = ValueNorm::output_l1};
  const Plan plan{shape, by_output};
  // The weights do not come with a plan, but with the cache.
  const char* missing = "the cache knows no output projection of the head's layer";
  CHECK(test::contains(test::thrown<ConfigError>([&] { Cache{plan}; }), missing));
  ValueOutputs of_one_layer{shape};
  of_one_layer.set(0, std::as_const(outputs.weights[0]).view());
  CHECK(test::contains(test::thrown<ConfigError>([&] { Cache{plan, {.value_outputs = &of_one_layer}}; }),
                       missing));
  Plan half = plan;
  half.set(1, 0, Snap::Config{.budget = 4});
  CHECK(test::thrown<ConfigError>([&] { Cache{half, {.value_outputs = &of_one_layer}}; }).empty());
  const Outputs wider{random, {2, 4, 1, 16}, 3};
  CHECK(test::contains(test::thrown<ShapeError>([&] { Cache{plan, {.value_outputs = &wider.given}}; }),
                       "are for 4 query and 1 KV heads"));
  const Cache whole{Plan{shape}};
  CHECK(test::contains(test::thrown<ConfigError>([&] { static_cast<void>(whole.fork_as(plan)); }), missing));
  const ValueOutput other{ConstTensor{TensorView<const E>{std::as_const(outputs.weights[0]).view()}}};
  CHECK(test::contains(test::thrown<ShapeError>([&] {
                         static_cast<void>(Snap{by_output, {.head_dim = 32, .value_output = &other}});
                       }),
                       "is for values of 16 channels, must be for 32"));

  const auto refusal = [&](const auto& config) {
    return test::thrown<ConfigError>([&] { Plan{shape, config}; });
  };
  CHECK(test::contains(refusal(Snap::Config{.value_norm = ValueNorm::output_l1}),
                       "value_norm is 'output_l1', must be 'value_l2' unless weigh_values is true"));
  CHECK(test::contains(refusal(Norm::Config{.weigh_values = true, .value_norm = ValueNorm::output_l1}),
                       "the scorer goes by keys"));
  CHECK(test::contains(refusal(Snap::Config{.unweighed_share = 0.5}),
                       "unweighed_share is 0.5, must be 0 unless weigh_values is true"));
  for (const double share : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()}) {
    CHECK(test::contains(refusal(Snap::Config{.weigh_values = true, .unweighed_share = share}),
                         "must be 0 to 1"));
    CHECK(test::contains(refusal(Snap::Config{.scorer = {.prior_share = share}}),
                         "SnapKvScorer: prior_share is "));
  }
}
