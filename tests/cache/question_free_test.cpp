// SPDX-License-Identifier: Apache-2.0
//
// Scorers that look at keys and at queries to come (KeyDiff, Expected Attention), and the worst case in place of the
// mean, compared with a slow model.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/policy/expected_attention_scorer.hpp>
#include <kvpolicy/policy/h2o_scorer.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/key_diff_scorer.hpp>
#include <kvpolicy/policy/kvzip_scorer.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>

#include "cache/slow_text.hpp"
#include "support/compare.hpp"

using namespace kvpolicy;
using namespace test::slow;

namespace {

using Snap = HeadBudgetCache<DenseStorage<E>>;
using H2o = HeadBudgetCache<DenseStorage<E>, H2oScorer>;
using Expected = HeadBudgetCache<DenseStorage<E>, ExpectedAttentionScorer>;
using Diff = HeadBudgetCache<DenseStorage<E>, KeyDiffScorer>;
using Plan = HeadPlan<E>;

}  // namespace

TEST_CASE("key_diff: the keys that differ most from the mean direction stay") {
  test::Random random{76};
  for (int round = 0; round < 40; ++round) {
    CAPTURE(round);
    const ModelShape shape{2, 2, 2, round % 2 == 0 ? 64U : 16U};
    Diff::Config config{.budget = test::below(random, 30), .scorer = {.recent = test::below(random, 5)}};
    config.adaptive_in_model = round % 4 == 0;
    config.safeguard = 0;
    Cache cache{Plan{shape, config}};
    SlowText text{shape};
    static_cast<void>(text.step(random, cache, 33));
    cache.compress();
    std::vector<SlowHead> heads;
    for (std::size_t head = 0; head < 4; ++head) {
      std::vector<double> mean(shape.head_dim, 0.0);
      const auto length = [](const std::vector<double>& x) {
        double squares = 0;
        for (const double number : x) squares += number * number;
        return std::sqrt(squares);
      };
      for (const oracle::Row& row : text.rows(head)) {
        for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += row.key[i] / length(row.key) / 33.0;
      }
      std::vector<double> scores;
      for (const oracle::Row& row : text.rows(head)) {
        double product = 0;
        for (std::size_t i = 0; i < mean.size(); ++i) product += row.key[i] * mean[i];
        scores.push_back(-product / length(row.key) / length(mean));
      }
      heads.push_back({scores, config.budget, config.scorer.recent, 0.0});
    }
    const auto survivors = all_held(cache);
    if (config.adaptive_in_model) {
      check_survivors(heads, survivors);
    } else {
      for (std::size_t head = 0; head < 4; ++head) check_survivors({heads[head]}, {survivors[head]});
    }
  }
  // Keys without a length differ from nothing.
  KeyDiffScorer::Anchor anchor{4};
  const std::vector<float> zeros(4, 0.0F);
  anchor.add(zeros);
  CHECK(KeyDiffScorer::score_key({}, anchor, zeros) == 0.0F);
  CHECK(KeyDiffScorer::score_key({}, anchor, std::vector<float>{1, 2, 3, 4}) == 0.0F);
}

TEST_CASE("expected_attention: by the covariance of the latest queries, written out as a matrix") {
  test::Random random{79};
  for (int round = 0; round < 24; ++round) {
    CAPTURE(round);
    constexpr std::size_t dim = 16;
    const std::size_t group = 1 + test::below(random, 3);
    const ModelShape shape{1, 2 * group, 2, dim};
    Expected::Config config{.budget = 9, .weigh_values = round % 2 == 0};
    config.scorer = {.observation_window = 1 + test::below(random, 12),
                     .future = 1 + test::below(random, 30),
                     .sinks = test::below(random, 3),
                     .recent = test::below(random, 4),
                     .rotary = {.theta = 100.0}};
    Cache cache{Plan{shape, config}};
    const AttendOptions options{.scale = round % 3 == 0 ? std::optional{0.4F} : std::nullopt};
    std::vector<std::vector<std::vector<double>>> queries(2 * group), keys(2), values(2);  // [head][token]
    for (const std::size_t tokens : {25U, 1U, 10U}) {
      test::Chunk<E> chunk{random, shape, tokens};
      chunk.q.randomize(random, 2.0F);
      chunk.step(cache, 0, options);
      for (std::size_t i = 0; i < tokens; ++i) {
        for (std::size_t h = 0; h < 2 * group; ++h) queries[h].push_back(chunk.q.row_of_doubles(i, h));
        for (std::size_t h = 0; h < 2; ++h) {
          keys[h].push_back(chunk.k.row_of_doubles(i, h));
          values[h].push_back(chunk.v.row_of_doubles(i, h));
        }
      }
    }
    cache.compress();
    constexpr std::size_t rows = 36;
    using Matrix = std::vector<std::vector<double>>;
    // Column j of the mean rotation is what becomes of unit vector j.
    Matrix rotation(dim, std::vector<double>(dim, 0.0));
    for (std::size_t j = 0; j < dim; ++j) {
      std::vector<double> unit(dim, 0.0);
      unit[j] = 1;
      for (std::size_t ahead = 0; ahead < config.scorer.future; ++ahead) {
        const auto turned = oracle::turn(unit, static_cast<double>(rows + ahead), 100.0);
        for (std::size_t i = 0; i < dim; ++i) {
          rotation[i][j] += turned[i] / static_cast<double>(config.scorer.future);
        }
      }
    }
    const double scale = options.scale ? static_cast<double>(*options.scale) : 0.25;
    const std::size_t window = config.scorer.observation_window;
    for (std::size_t h = 0; h < 2; ++h) {
      std::vector<double> scores(rows, 0.0);
      for (std::size_t g = 0; g < group; ++g) {
        Matrix draws;
        for (std::size_t p = rows - window; p < rows; ++p) {
          draws.push_back(oracle::turn(queries[h * group + g][p], -static_cast<double>(p), 100.0));
        }
        std::vector<double> mean(dim, 0.0);
        Matrix covariance(dim, std::vector<double>(dim, 0.0));
        for (const auto& draw : draws) {
          for (std::size_t i = 0; i < dim; ++i) mean[i] += draw[i] / static_cast<double>(window);
        }
        for (const auto& draw : draws) {
          for (std::size_t i = 0; i < dim; ++i) {
            for (std::size_t j = 0; j < dim; ++j) {
              covariance[i][j] += (draw[i] - mean[i]) * (draw[j] - mean[j]) / static_cast<double>(window);
            }
          }
        }
        std::vector<double> weights;
        for (const auto& key : keys[h]) {
          std::vector<double> back(dim, 0.0);  // the rotation's transpose times the key
          for (std::size_t i = 0; i < dim; ++i) {
            for (std::size_t j = 0; j < dim; ++j) back[j] += rotation[i][j] * key[i];
          }
          double first = 0, second = 0;
          for (std::size_t i = 0; i < dim; ++i) {
            first += back[i] * mean[i];
            for (std::size_t j = 0; j < dim; ++j) second += back[i] * covariance[i][j] * back[j];
          }
          weights.push_back(std::exp(scale * first + scale * scale / 2 * second));
        }
        double total = 0;
        for (const double weight : weights) total += weight;
        for (std::size_t r = 0; r < rows; ++r) scores[r] += weights[r] / total / static_cast<double>(group);
      }
      for (std::size_t r = 0; r < rows && config.weigh_values; ++r) {
        double squares = 0;
        for (const double number : values[h][r]) squares += number * number;
        scores[r] *= std::sqrt(squares);
      }
      for (std::size_t r = 0; r < config.scorer.sinks; ++r) scores[r] = 1e9;
      check_survivors({{scores, 9, config.scorer.recent, 0.0}}, {held(cache, 0, h)});
    }
  }
  const ModelShape shape{1, 2, 2, 64};
  CHECK(test::contains(
      test::thrown<ConfigError>([&] { Plan{shape, Expected::Config{.scorer = {.observation_window = 0}}}; }),
      "observation_window is 0"));
  CHECK(test::contains(
      test::thrown<ConfigError>([&] { Plan{shape, Expected::Config{.scorer = {.future = 0}}}; }),
      "future is 0"));
  CHECK(test::contains(test::thrown<ConfigError>([&] { Plan{shape, Diff::Config{.weigh_values = true}}; }),
                       "the scorer goes by keys"));
  // Rows that came without their queries leave nothing to expect.
  CHECK(test::contains(test::thrown<ConfigError>([&] { Plan{shape, Expected::Config{.budget = 3}}; }),
                       "budget is 3, must be at least the 4 first rows"));
  Cache cache{Plan{shape, Expected::Config{.budget = 5}}};
  test::Chunk<E> chunk{random, shape, 1};
  for (int i = 0; i < 8; ++i) chunk.append(cache, 0);
  CHECK(test::contains(test::thrown<ShapeError>([&] { cache.compress(); }), "not all queries are known"));
}

TEST_CASE("votes: the largest in place of the mean, for SnapKV and for H2O") {
  test::Random random{77};
  for (int round = 0; round < 20; ++round) {
    CAPTURE(round);
    const std::size_t group = 1 + test::below(random, 3);
    const ModelShape shape{1, group * 2, 2, 64};
    const std::size_t window = 1 + test::below(random, 6);
    Plan plan{shape};
    plan.set(0, 0,
             Snap::Config{.budget = 8,
                          .scorer = {.observation_window = window, .kernel = 1, .votes = Votes::largest}});
    plan.set(0, 1, H2o::Config{.budget = 8, .scorer = {.recent = 3, .votes = Votes::largest}});
    Cache cache{plan};
    SlowText text{shape};
    std::vector<double> by_latest(40, 0.0), by_all(40, 0.0);
    for (const std::size_t tokens : {40U - window, window}) {
      const auto paid = text.step(random, cache, tokens);
      for (std::size_t r = 0; r < paid[1].size(); ++r) by_all[r] = std::max(by_all[r], largest(paid[1][r]));
      for (std::size_t r = 0; r < paid[0].size(); ++r) by_latest[r] = largest(paid[0][r]);
    }
    cache.compress();
    check_survivors({{by_latest, 8, window, 0.0}}, {held(cache, 0, 0)});
    check_survivors({{by_all, 8, 3, 0.0}}, {held(cache, 0, 1)});
  }
}

TEST_CASE("votes and values: the largest vote is pooled, and scores of any kind are weighed") {
  test::Random random{81};
  for (int round = 0; round < 16; ++round) {
    CAPTURE(round);
    const ModelShape shape{1, 4, 2, 64};
    const Votes votes = round % 2 == 0 ? Votes::largest : Votes::mean;
    const bool weighed = round % 4 < 2;
    Snap::Config snap{.budget = 8, .weigh_values = weighed};
    snap.scorer = {.observation_window = 4, .kernel = 3, .votes = votes};
    H2o::Config h2o{.budget = 8, .weigh_values = weighed};
    h2o.scorer = {.recent = 3, .votes = votes};
    Plan plan{shape, snap};
    plan.set(0, 1, h2o);
    Cache cache{plan};
    SlowText text{shape};
    std::vector<std::vector<double>> values(2);
    Paid latest, all(40);
    for (const std::size_t tokens : {36U, 4U}) {
      std::vector<Paid> paid(2);
      test::Chunk<E> chunk{random, shape, tokens};
      chunk.q.randomize(random, 3.0F);
      paid = text.step(chunk, cache);
      for (std::size_t h = 0; h < 2; ++h) {
        for (std::size_t i = 0; i < tokens; ++i) {
          double squares = 0;
          for (const double number : chunk.v.row_of_doubles(i, h)) squares += number * number;
          values[h].push_back(std::sqrt(squares));
        }
      }
      latest = paid[0];
      for (std::size_t r = 0; r < paid[1].size(); ++r) {
        all[r].insert(all[r].end(), paid[1][r].begin(), paid[1][r].end());
      }
    }
    cache.compress();
    // Votes come query after query, and the two query heads of a KV head in turn.
    const auto of_head = [](const std::vector<double>& shares, std::size_t g, Votes how) {
      double result = 0;
      for (std::size_t i = g; i < shares.size(); i += 2) {
        result = how == Votes::largest ? std::max(result, shares[i]) : result + shares[i];
      }
      return result;
    };
    std::vector<double> by_latest(40, 0.0), by_all(40, 0.0);
    for (std::size_t g = 0; g < 2; ++g) {
      for (std::size_t r = 0; r < 36; ++r) {
        double pooled = 0;  // rows of the observation window are not pooled
        for (std::size_t near = r == 0 ? 0 : r - 1; near <= std::min<std::size_t>(r + 1, 35); ++near) {
          pooled = std::max(pooled, of_head(latest[near], g, votes));
        }
        by_latest[r] = votes == Votes::largest ? std::max(by_latest[r], pooled) : by_latest[r] + pooled / 8;
      }
      for (std::size_t r = 0; r < 40; ++r) {
        const double own = of_head(all[r], g, votes);
        by_all[r] = votes == Votes::largest ? std::max(by_all[r], own) : by_all[r] + own / 2;
      }
    }
    for (std::size_t r = 0; r < 40 && weighed; ++r) {
      by_latest[r] *= values[0][r];
      by_all[r] *= values[1][r];
    }
    check_survivors({{by_latest, 8, 4, 0.0}}, {held(cache, 0, 0)});
    check_survivors({{by_all, 8, 3, 0.0}}, {held(cache, 0, 1)});
  }
  // A policy by itself knows how many channels a value has as well.
  H2o alone{H2o::Config{.budget = 1, .weigh_values = true, .scorer = {.recent = 0}}, {.head_dim = 16}};
  std::vector<E> keys(2 * 16, E{1.0F}), rows(2 * 16, E{1.0F});
  for (std::size_t i = 16; i < 32; ++i) rows[i] = E{2.0F};
  alone.reserve(2);
  alone.commit(rows_of(keys.data(), rows.data(), 2, 16, 0));
  alone.accumulate(std::vector<float>{1.0F, 0.9F}, 1);
  alone.prepare_compress({}, 1, 0);
  alone.finish_compress();
  SegmentList list;
  alone.segments({}, list);
  CHECK(list.front().position_of(0) == 1);
}
