// SPDX-License-Identifier: Apache-2.0
//
// Scorers that need no question (KeyDiff, KVzip), the worst case in place of the mean, and budgets that the whole model
// shares, compared with a slow model: rows in double, attention by its definition, and one list of candidates.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/policy/expected_attention_scorer.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/h2o_scorer.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/key_diff_scorer.hpp>
#include <kvpolicy/policy/kvzip_scorer.hpp>

#include "cache/dump.hpp"
#include "support/compare.hpp"
#include "support/oracle.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;

namespace {

using E = half;
using Full = FullCache<DenseStorage<E>>;
using Snap = HeadBudgetCache<DenseStorage<E>>;
using H2o = HeadBudgetCache<DenseStorage<E>, H2oScorer>;
using Zip = HeadBudgetCache<DenseStorage<E>, KvZipScorer>;
using Expected = HeadBudgetCache<DenseStorage<E>, ExpectedAttentionScorer>;
using Diff = HeadBudgetCache<DenseStorage<E>, KeyDiffScorer>;
using Plan = HeadPlan<E>;
using Cache = KvCache<E>;

// What the queries of one call pay each row of a KV head: for each row [queries x query heads].
using Paid = std::vector<std::vector<double>>;

// The rows that all heads of all layers were given, and the calls that brought them. Nothing is dropped here.
class SlowText {
 public:
  explicit SlowText(const ModelShape& shape) : shape_{shape}, rows_(shape.layers * shape.kv_heads) {}

  /// The same step of a cache and of this text; returns what each head's rows were paid.
  std::vector<Paid> step(test::Random& random, Cache& cache, std::size_t tokens,
                         const AttendOptions& options = {}) {
    std::vector<Paid> paid(rows_.size());
    for (std::size_t l = 0; l < shape_.layers; ++l) {
      test::Chunk<E> chunk{random, shape_, tokens};
      chunk.q.randomize(random, 3.0F);
      chunk.step(cache, l, options);
      for (std::size_t h = 0; h < shape_.kv_heads; ++h) {
        auto& rows = rows_[l * shape_.kv_heads + h];
        const std::size_t before = rows.size();
        for (std::size_t i = 0; i < tokens; ++i) {
          rows.push_back({static_cast<std::int64_t>(before + i), chunk.k.row_of_doubles(i, h), {}});
        }
        paid[l * shape_.kv_heads + h] = attention(rows, chunk.q, h, before, options);
      }
    }
    return paid;
  }

  [[nodiscard]] const std::vector<oracle::Row>& rows(std::size_t head) const { return rows_[head]; }

 private:
  [[nodiscard]] Paid attention(const std::vector<oracle::Row>& rows, const test::Tensor<E>& q, std::size_t h,
                               std::size_t before, const AttendOptions& options) const {
    Paid paid(rows.size());
    const std::size_t group = shape_.queries_per_kv();
    for (std::size_t i = 0; i < q.tokens(); ++i) {
      std::vector<const oracle::Row*> seen;
      for (std::size_t r = 0; r <= before + i; ++r) seen.push_back(&rows[r]);
      for (std::size_t g = 0; g < group; ++g) {
        oracle::Options own;
        own.scale = 1 / std::sqrt(static_cast<double>(shape_.head_dim));
        own.softcap = static_cast<double>(options.softcap);
        if (!options.attention_sink_bias.empty()) {
          own.sink_logit = static_cast<double>(options.attention_sink_bias[h * group + g]);
        }
        const auto shares = oracle::probabilities(q.row_of_doubles(i, h * group + g), seen, own);
        for (std::size_t r = 0; r < shares.size(); ++r) paid[r].push_back(shares[r]);
      }
    }
    return paid;
  }

  ModelShape shape_;
  std::vector<std::vector<oracle::Row>> rows_;  // of each head
};

double largest(const std::vector<double>& shares) {
  return shares.empty() ? 0.0 : *std::ranges::max_element(shares);
}

std::set<std::int64_t> held(const Cache& cache, std::size_t layer, std::size_t head) {
  std::set<std::int64_t> positions;
  for (const Segment& segment : cache.segments(layer, head)) {
    for (std::size_t i = 0; i < segment.rows; ++i) positions.insert(segment.position_of(i));
  }
  return positions;
}

// One head's candidates, and what it may keep.
struct SlowHead {
  std::vector<double> scores;
  std::size_t budget = 0;
  std::size_t kept = 0;  // latest rows besides
  double safe = 0;
};

// Checks that heads which compete hold the best rows of all of them, however many of each head.
void check_survivors(const std::vector<SlowHead>& heads,
                     const std::vector<std::set<std::int64_t>>& survivors) {
  constexpr double slack = 2e-4;
  std::size_t wanted = 0, chosen = 0;
  double lowest_in = std::numeric_limits<double>::infinity();
  double highest_out = -lowest_in;
  for (std::size_t h = 0; h < heads.size(); ++h) {
    const SlowHead& head = heads[h];
    const std::size_t candidates = head.scores.size() - std::min(head.scores.size(), head.kept);
    wanted += std::min(head.budget, candidates);
    std::vector<double> in;
    double own_out = -std::numeric_limits<double>::infinity();
    for (std::size_t r = 0; r < head.scores.size(); ++r) {
      const bool stays = survivors[h].contains(static_cast<std::int64_t>(r));
      if (r >= candidates) {
        CHECK(stays);
      } else if (stays) {
        in.push_back(head.scores[r]);
      } else {
        own_out = std::max(own_out, head.scores[r]);
      }
    }
    std::ranges::sort(in);
    chosen += in.size();
    const auto safe = static_cast<std::size_t>(head.safe * static_cast<double>(head.budget));
    CHECK(in.size() >= std::min(safe, candidates));
    if (!in.empty()) CHECK(in.front() >= own_out - slack);  // a head keeps its own best
    if (in.size() > safe) lowest_in = std::min(lowest_in, in.front());
    highest_out = std::max(highest_out, own_out);
  }
  CHECK(chosen == wanted);
  CHECK(lowest_in >= highest_out - slack);
}

std::vector<std::set<std::int64_t>> all_held(const Cache& cache) {
  const ModelShape& shape = cache.plan().shape();
  std::vector<std::set<std::int64_t>> all;
  for (std::size_t l = 0; l < shape.layers; ++l) {
    for (std::size_t h = 0; h < shape.kv_heads; ++h) all.push_back(held(cache, l, h));
  }
  return all;
}

// Brings the attention of scoring passes over a fork to the cache; `scores` [heads][rows] gets the largest.
void score(test::Random& random, Cache& cache, const SlowText& text, const std::vector<std::size_t>& calls,
           std::vector<std::vector<double>>& scores, const AttendOptions& options) {
  AttendOptions own = options;
  own.scores_rows = true;
  Cache pass = cache.fork();
  SlowText passed = text;
  for (const std::size_t tokens : calls) {
    const auto paid = passed.step(random, pass, tokens, own);
    for (std::size_t head = 0; head < scores.size(); ++head) {
      for (std::size_t r = 0; r < scores[head].size(); ++r) {
        scores[head][r] = std::max(scores[head][r], largest(paid[head][r]));
      }
    }
  }
  cache.take_scores(pass);
}

}  // namespace

TEST_CASE("kvzip: the rows that some query of a scoring pass looks at most stay, over the whole model") {
  test::Random random{71};
  for (int round = 0; round < 30; ++round) {
    CAPTURE(round);
    const std::size_t group = 1 + test::below(random, 3);
    const ModelShape shape{1 + test::below(random, 3), 2 * group, 2, 64};
    const bool in_model = round % 3 != 0;
    const double safe = round % 2 == 0 ? 0.0 : 0.3;
    Zip::Config config{.budget = 12, .safeguard = safe, .scorer = {.recent = test::below(random, 4)}};
    config.adaptive_in_model = in_model;
    config.adaptive_in_layer = round % 6 == 3;
    Plan plan{shape, config};
    for (std::size_t l = 0; l < shape.layers; ++l) {
      for (std::size_t h = 0; h < 2; ++h) {
        config.budget = test::below(random, 40);  // some more than there are rows
        plan.set(l, h, config);
      }
    }
    Cache cache{plan};
    SlowText text{shape};
    const std::vector<float> sink(shape.q_heads, 0.5F);
    AttendOptions options;
    if (round % 4 == 1) options.softcap = 3.0F;
    if (round % 4 == 2) options.attention_sink_bias = sink;
    for (const std::size_t tokens : {17U, 1U, 12U})
      static_cast<void>(text.step(random, cache, tokens, options));
    const std::size_t rows = 30;
    std::vector<std::vector<double>> scores(2 * shape.layers, std::vector<double>(rows, 0.0));
    // Two passes over forks of their own; the larger score counts.
    score(random, cache, text, {9, 2}, scores, options);
    score(random, cache, text, {5}, scores, options);
    cache.compress();
    const auto survivors = all_held(cache);
    std::vector<SlowHead> heads;
    for (std::size_t head = 0; head < scores.size(); ++head) {
      const auto& own = plan.at(head / 2, head % 2).get<Zip>();
      heads.push_back(
          {scores[head], own.budget, own.scorer.recent, own.adaptive_in_layer || in_model ? safe : 0.0});
      CHECK(cache.head(head / 2, head % 2).unscored_rows() == 0);
    }
    if (in_model) {
      check_survivors(heads, survivors);
    } else {
      const std::size_t together = config.adaptive_in_layer ? 2 : 1;
      for (std::size_t first = 0; first < heads.size(); first += together) {
        check_survivors({heads.begin() + static_cast<std::ptrdiff_t>(first),
                         heads.begin() + static_cast<std::ptrdiff_t>(first + together)},
                        {survivors.begin() + static_cast<std::ptrdiff_t>(first),
                         survivors.begin() + static_cast<std::ptrdiff_t>(first + together)});
      }
    }
  }
}

TEST_CASE("kvzip: a cache compressed once answers through forks that hold the same rows") {
  test::Random random{72};
  const ModelShape shape{2, 4, 2, 64};
  Cache cache{Plan{shape, Zip::Config{.budget = 10, .adaptive_in_model = true, .safeguard = 0}}};
  SlowText text{shape};
  static_cast<void>(text.step(random, cache, 50));
  std::vector<std::vector<double>> scores(4, std::vector<double>(50, 0.0));
  score(random, cache, text, {50}, scores, {});
  cache.compress();
  const auto rows = all_held(cache);
  const auto before = test::dump(cache);
  for (int question = 0; question < 10; ++question) {
    Cache fork = cache.fork();
    test::feed(fork, random, {1 + test::below(random, 9), 1, 1});
    const auto own = all_held(fork);
    for (std::size_t head = 0; head < rows.size(); ++head) {
      CHECK(std::ranges::includes(own[head], rows[head]));
    }
  }
  CHECK(test::dump(cache) == before);
}

TEST_CASE("kvzip: rows that no pass has seen cannot be ranked, and nothing changes") {
  test::Random random{73};
  const ModelShape shape{2, 2, 2, 64};
  Plan plan{shape};
  plan.set(1, 1, Zip::Config{.budget = 4, .scorer = {.recent = 2}});
  plan.set(0, 0, H2o::Config{.budget = 3, .scorer = {.recent = 1}});
  Cache cache{plan};
  test::feed(cache, random, {20});
  const auto before = test::dump(cache);
  const std::string message = test::thrown<ShapeError>([&] { cache.compress(); });
  CHECK(test::contains(message,
                       "KvCache::compress: 18 of 20 rows of KV head 1 of layer 1 were in no scoring pass"));
  CHECK(test::dump(cache) == before);

  // Calls that are not a scoring pass leave it at that.
  Cache reads = cache.fork();
  test::feed(reads, random, {5});
  cache.take_scores(reads);
  CHECK(cache.head(1, 1).unscored_rows() == 18);
  Cache pass = cache.fork();
  test::feed(pass, random, {1}, {.scores_rows = true});
  cache.take_scores(pass);
  CHECK(cache.head(1, 1).unscored_rows() == 0);
  cache.compress();
  CHECK(cache.head(1, 1).rows() == 6);
  CHECK(cache.head(0, 0).rows() == 4);
  CHECK(cache.head(0, 1).rows() == 20);

  // A text shorter than the capacity needs no scores.
  Cache small{Plan{shape, Zip::Config{.budget = 30}}};
  test::feed(small, random, {20});
  small.compress();
  CHECK(small.head(0, 0).rows() == 20);
}

TEST_CASE("take_scores: only of a fork that has read more since") {
  test::Random random{74};
  const ModelShape shape{1, 2, 2, 64};
  const Plan plan{shape, Zip::Config{.budget = 4}};
  Cache cache{plan};
  test::feed(cache, random, {10});
  const auto refusal = [&](const Cache& scored) {
    return test::thrown<Error>([&] { cache.take_scores(scored); });
  };
  Cache other{Plan{shape, Zip::Config{.budget = 5}}};
  test::feed(other, random, {12}, {.scores_rows = true});
  CHECK(test::contains(refusal(other), "take_scores: the scores are of a cache under another plan"));
  Cache shorter{plan};
  test::feed(shorter, random, {9}, {.scores_rows = true});
  CHECK(test::contains(refusal(shorter),
                       "KV head 0 of layer 0 holds 10 rows of 10 tokens, in the scored cache 9 of 9"));
  Cache dropped = cache.fork();
  test::feed(dropped, random, {3}, {.scores_rows = true});
  dropped.compress();
  CHECK(test::contains(refusal(dropped), "it must be a fork that has only read more since"));
  CHECK(cache.head(0, 0).unscored_rows() == 10);
  Cache good = cache.fork();
  test::feed(good, random, {3}, {.scores_rows = true});
  CHECK(refusal(good).empty());
  CHECK(cache.head(0, 0).unscored_rows() == 0);
}

TEST_CASE("fork_as: scores go along with the rows to another budget") {
  test::Random random{75};
  const ModelShape shape{2, 4, 2, 64};
  Cache cache{Plan{shape, Zip::Config{.budget = 1000}}};
  test::feed(cache, random, {40});
  const Plan target{shape, Zip::Config{.budget = 7, .adaptive_in_model = true, .safeguard = 0}};
  Cache unscored = cache.fork_as(target);
  CHECK(unscored.head(0, 0).unscored_rows() == 40);
  Cache pass = cache.fork();
  test::feed(pass, random, {20}, {.scores_rows = true});
  cache.take_scores(pass);
  Cache scored = cache.fork_as(target);
  scored.compress();
  CHECK(scored.head(0, 0).rows() + scored.head(0, 1).rows() + scored.head(1, 0).rows() +
            scored.head(1, 1).rows() ==
        28);
  // Sums that mean something else do not.
  CHECK(test::contains(test::thrown<ConfigError>(
                           [&] { static_cast<void>(cache.fork_as(Plan{shape, H2o::Config{.budget = 7}})); }),
                       "has not added up the attention"));
}

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
  Cache cache{Plan{shape, Expected::Config{.budget = 3}}};
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

TEST_CASE("adaptive_in_model: what a plan and a call cannot have is refused by name") {
  const ModelShape shape{2, 2, 2, 64};
  Snap::Config shared{.budget = 9, .adaptive_in_model = true};
  Plan plan{shape, shared};
  CHECK(test::thrown<Error>([&] { Cache{plan}; }).empty());
  Cache cache{plan};
  test::Random random{78};
  test::feed(cache, random, {30});
  CHECK(test::contains(test::thrown<ConfigError>([&] { cache.compress(0); }),
                       "heads of layer 0 share their budgets"));
  cache.compress();
  std::size_t rows = 0;
  for (std::size_t head = 0; head < 4; ++head) rows += cache.head(head / 2, head % 2).rows();
  CHECK(rows == 4 * (9 + 8));
  plan.set(1, 0, Snap::Config{.budget = 9, .adaptive_in_model = true, .safeguard = 0.5});
  CHECK(test::contains(test::thrown<ConfigError>([&] { Cache{plan}; }),
                       "KV head 0 of layer 1 shares the model's budget"));
  // Heads that share in their layer are no part of it.
  plan.set(1, 0, Snap::Config{.budget = 9, .adaptive_in_layer = true});
  CHECK(test::thrown<ConfigError>([&] { Cache{plan}; }).empty());
  CHECK(test::contains(test::thrown<ConfigError>([&] {
                         Plan{shape,
                              Snap::Config{.budget = 9, .compress_every = 3, .adaptive_in_model = true}};
                       }),
                       "compress_every is 3, must be 0 with adaptive_in_model"));
  CHECK(test::contains(
      test::thrown<ConfigError>([&] { Plan{shape, Zip::Config{.budget = 9, .compress_every = 3}}; }),
      "must be 0 under a scorer that needs a scoring pass"));
}
