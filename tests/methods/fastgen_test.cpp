// SPDX-License-Identifier: Apache-2.0
//
// Compares the choice with sets of rows that are built one row at a time, over hand-made and random
// attention; and a whole cache, which is profiled, forked and compressed, with attention in double.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <initializer_list>
#include <limits>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/fastgen.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>

#include "support/oracle.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;

namespace {

constexpr ModelShape one_head{.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 64};
// For 20 rows the choices keep: 2 sinks and 5 latest rows; the 4 most attended rows; or the 9 most
// attended rows, which include the 2 latest.
constexpr FastGenConfig small{
    .recovery = 0.9, .local_share = 0.25, .frequent_share = 0.2, .sinks = 2, .observation_window = 2};

FastGenChoice choice_of(std::vector<float> sums, const FastGenConfig& config = small) {
  sums.resize(20, 0.0F);
  AttentionProfile profile{{1, 1}, 1};
  profile.sums(0, 0) = std::move(sums);
  return fastgen_choices(one_head, profile, config)(0, 0);
}

using Sets = std::set<std::size_t>;

// The rows that each choice keeps, found by repeatedly taking the best row that is left.
Sets slow_rows(FastGenChoice choice, const std::vector<double>& mean, const FastGenConfig& config) {
  const std::size_t rows = mean.size();
  const auto part = [&](double share) {
    std::size_t n = 0;
    while (static_cast<double>(n) < share * static_cast<double>(rows)) ++n;
    return n;
  };
  Sets kept;
  for (std::size_t row = 0; row < rows; ++row) {
    const bool latest = row + part(config.local_share) >= rows;
    if (choice == FastGenChoice::full) kept.insert(row);
    if (choice == FastGenChoice::locality && (row < config.sinks || latest)) kept.insert(row);
  }
  if (choice == FastGenChoice::full || choice == FastGenChoice::locality) return kept;
  std::size_t wanted = part(config.frequent_share);
  if (choice == FastGenChoice::locality_and_frequency) wanted += part(config.local_share);
  for (std::size_t i = 1; i <= std::min(config.observation_window, rows); ++i) kept.insert(rows - i);
  while (kept.size() < std::min(wanted, rows)) {
    std::size_t best = rows;
    for (std::size_t row = 0; row < rows; ++row) {
      if (!kept.contains(row) && (best == rows || mean[row] > mean[best])) best = row;
    }
    kept.insert(best);
  }
  return kept;
}

FastGenChoice slow_choice(const std::vector<float>& sums, std::size_t group, const FastGenConfig& config) {
  const std::size_t rows = sums.size() / group;
  std::vector<double> mean(rows);
  for (std::size_t i = 0; i < sums.size(); ++i) mean[i % rows] += static_cast<double>(sums[i]);
  FastGenChoice chosen = FastGenChoice::full;
  std::size_t fewest = rows;
  for (const auto choice :
       {FastGenChoice::locality, FastGenChoice::frequency, FastGenChoice::locality_and_frequency}) {
    const Sets kept = slow_rows(choice, mean, config);
    bool enough = true;
    for (std::size_t head = 0; head < group; ++head) {
      double all = 0, found = 0;
      for (std::size_t row = 0; row < rows; ++row) {
        all += static_cast<double>(sums[head * rows + row]);
        if (kept.contains(row)) found += static_cast<double>(sums[head * rows + row]);
      }
      enough = enough && found >= config.recovery * all;
    }
    if (enough && kept.size() < fewest) {
      chosen = choice;
      fewest = kept.size();
    }
  }
  return chosen;
}

}  // namespace

TEST_CASE("the choice is the cheapest policy that keeps enough") {
  using enum FastGenChoice;
  // Four rows by rank are the cheapest; then seven by position, then nine by rank.
  CHECK(choice_of({0, 0, 0, 0, 1}) == frequency);
  CHECK(choice_of({1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1}) == locality);
  CHECK(choice_of({0, 0, 1, 1, 1, 1, 1, 1, 1}) == locality_and_frequency);
  CHECK(choice_of({0, 0, 1, 1, 1, 1, 1, 1, 1, 1}) == full);  // 7 of 8 is less than 0.9
  CHECK(choice_of(std::vector<float>(20, 1.0F)) == full);
  // Just enough, in numbers without rounding errors.
  CHECK(choice_of({0, 0, 0.5F, 0.25F, 0.125F, 0.125F},
                  {.recovery = 0.5, .frequent_share = 0.15, .observation_window = 2}) == frequency);
  FastGenConfig any = small;
  any.recovery = 0.0;
  CHECK(choice_of(std::vector<float>(20, 1.0F), any) == frequency);
  any.frequent_share = any.local_share = 1.0;
  CHECK(choice_of({1}, any) == full);
}

TEST_CASE("every query head of a group must keep enough") {
  const ModelShape shape{.layers = 1, .q_heads = 2, .kv_heads = 1, .head_dim = 64};
  AttentionProfile profile{{1, 1}, 1};
  std::vector<float> sums(40);
  for (const auto row : std::initializer_list<std::size_t>{3, 7}) sums[row] = 1.0F;
  for (const auto row : std::initializer_list<std::size_t>{4, 5, 6, 8, 9}) sums[20 + row] = 0.01F;
  profile.sums(0, 0) = sums;
  // Together, rows 3 and 7 have 97.6 % of the attention, but nothing of the second head's.
  CHECK(fastgen_choices(shape, profile, small)(0, 0) == FastGenChoice::locality_and_frequency);
}

TEST_CASE("random attention and any settings") {
  std::mt19937 random{8};
  std::set<FastGenChoice> met;
  for (int round = 0; round < 600; ++round) {
    const std::size_t group = 1 + random() % 3;
    const std::size_t rows = 1 + random() % 40;
    const ModelShape shape{.layers = 1, .q_heads = group, .kv_heads = 1, .head_dim = 64};
    AttentionProfile profile{{1, 1}, 1 + random() % 5};
    std::vector<float> sums(group * rows);
    const bool near = random() % 2 == 0;
    for (std::size_t i = 0; i < sums.size(); ++i) {
      const float peak = random() % 8 == 0 || (near && i % rows + 4 >= rows) ? 1000.0F : 1.0F;
      sums[i] = peak * static_cast<float>(random() % 50);
    }
    profile.sums(0, 0) = sums;
    const auto share = [&] { return static_cast<double>(1 + random() % 16) / 16; };
    const FastGenConfig config{.recovery = share(),
                               .local_share = share(),
                               .frequent_share = share(),
                               .sinks = random() % 5,
                               .observation_window = 1 + random() % 6};
    const FastGenChoice choice = fastgen_choices(shape, profile, config)(0, 0);
    CHECK(choice == slow_choice(sums, group, config));
    met.insert(choice);
  }
  CHECK(met.size() == 4);
}

TEST_CASE("a cache is profiled, forked under the plan and compressed to the predicted rows") {
  constexpr ModelShape shape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
  constexpr std::size_t tokens = 120, queries = 8;
  const FastGenConfig config{.recovery = 0.8, .local_share = 0.2, .frequent_share = 0.1, .sinks = 4};
  using Whole = KvCache<float>;
  Whole whole{HeadPlan<float>{shape}, {.kept_queries = queries}};
  test::Random random{9};
  AttentionProfile slow{{2, 2}, queries};
  for (std::size_t layer = 0; layer < 2; ++layer) {
    test::Tensor<float> q{tokens, 4, 64}, k{tokens, 2, 64}, v{tokens, 2, 64}, out{tokens, 4, 64};
    q.randomize(random);
    k.randomize(random);
    v.randomize(random);
    if (layer == 0) {
      // Head 0 attends to row 30, head 1 to its nearest rows.
      q.fill([&](std::size_t t, std::size_t h, std::size_t i) {
        return h < 2 ? (i == 0 ? 4.0F : 0.0F) : i == 1 ? 4.0F : 0.01F * static_cast<float>(t);
      });
      k.fill([&](std::size_t t, std::size_t h, std::size_t i) {
        if (h == 0) return i == 0 && t == 30 ? 20.0F : 0.0F;
        return i == 1 ? 0.5F * static_cast<float>(t) : 0.0F;
      });
    }
    whole.step(layer, std::as_const(q).view(), std::as_const(k).view(), std::as_const(v).view(), out.view());
    for (std::size_t head = 0; head < 4; ++head) {
      std::vector<oracle::Row> rows(tokens);
      for (std::size_t t = 0; t < tokens; ++t) rows[t].key = k.row_of_doubles(t, head / 2);
      std::vector<double> sums(tokens);
      for (std::size_t t = tokens - queries; t < tokens; ++t) {
        std::vector<const oracle::Row*> seen;
        for (std::size_t row = 0; row <= t; ++row) seen.push_back(&rows[row]);
        const auto share =
            oracle::probabilities(q.row_of_doubles(t, head), seen, {.scale = 1.0 / 8, .sink_logit = {}});
        for (std::size_t row = 0; row <= t; ++row) sums[row] += share[row];
      }
      for (const double sum : sums) {
        slow.sums(layer, head / 2).push_back(static_cast<float>(sum));
      }
    }
  }
  const AttentionProfile profile = profile_attention(whole, 100);  // more queries than it has kept
  CHECK(profile.queries == queries);
  for (std::size_t i = 0; i < 4; ++i) {
    REQUIRE(profile.sums.values()[i].size() == slow.sums.values()[i].size());
    bool close = true;
    for (std::size_t n = 0; n < profile.sums.values()[i].size(); ++n) {
      close = close && std::abs(profile.sums.values()[i][n] - slow.sums.values()[i][n]) <= 1e-4F;
    }
    CHECK(close);
  }
  const FastGenChoices choices = fastgen_choices(shape, profile, config);
  CHECK(choices(0, 0) == FastGenChoice::frequency);
  CHECK(choices(0, 1) == FastGenChoice::frequency);  // 12 of the latest are enough, too
  CHECK(choices(1, 0) == FastGenChoice::full);
  for (const double local : {0.05, 0.2}) {
    FastGenConfig other = config;
    other.local_share = local;
    const auto plan = fastgen_plan<float>(shape, profile, other);
    auto cache = whole.fork_as(plan);
    cache.compress();
    CHECK(cache.bytes() == plan.memory(tokens, cache.options(), true).total());
    const FastGenChoices chosen = fastgen_choices(shape, profile, other);
    for (std::size_t head = 0; head < 4; ++head) {
      const auto& sums = profile.sums.values()[head];
      std::vector<double> mean(tokens);
      for (std::size_t i = 0; i < sums.size(); ++i) mean[i % tokens] += static_cast<double>(sums[i]);
      Sets kept;
      for (const Segment& segment : cache.segments(head / 2, head % 2)) {
        segment.for_each_run([&](const RowRun& run) {
          for (std::size_t i = run.first; i < run.first + run.rows; ++i) {
            kept.insert(static_cast<std::size_t>(segment.position_of(i)));
          }
        });
      }
      // The window of the next query has moved by one row.
      Sets expected = slow_rows(chosen.values()[head], mean, other);
      if (chosen.values()[head] == FastGenChoice::locality) {
        expected.erase(tokens - other.recent(tokens));
      }
      CHECK(kept == expected);
    }
  }
  Whole forgetful{HeadPlan<float>{shape}};
  CHECK_THROWS_AS((void)profile_attention(forgetful, 8), ConfigError);
}

TEST_CASE("each choice is a policy") {
  using Window = SinkRecentCache<DenseStorage<float16>>;
  using Budget = HeadBudgetCache<DenseStorage<float16>>;
  const ModelShape shape{.layers = 2, .q_heads = 2, .kv_heads = 2, .head_dim = 64};
  AttentionProfile profile{{2, 2}, 1};
  for (auto& sums : profile.sums.values()) sums.resize(20);
  profile.sums(0, 0)[18] = profile.sums(0, 0)[1] = 1.0F;  // by rank
  for (const auto row : std::initializer_list<std::size_t>{0, 1, 15, 16, 17, 18, 19})
    profile.sums(0, 1)[row] = 1.0F;
  for (const auto row : std::initializer_list<std::size_t>{2, 3, 4, 5, 6, 7}) profile.sums(1, 0)[row] = 1.0F;
  for (float& sum : profile.sums(1, 1)) sum = 1.0F;
  FastGenConfig config = small;
  config.compress_every = 16;
  const auto plan = fastgen_plan<float16>(shape, profile, config);
  const SnapKvScorer::Config scorer{.observation_window = 2, .pooling = Pooling::max, .kernel = 1};
  CHECK(plan.at(0, 0).get<Budget>() == Budget::Config{.budget = 2, .compress_every = 16, .scorer = scorer});
  CHECK(plan.at(0, 1).get<Window>() == Window::Config{.sinks = 2, .recent = 5});
  CHECK(plan.at(1, 0).get<Budget>() == Budget::Config{.budget = 7, .compress_every = 16, .scorer = scorer});
  CHECK(plan.has<FullCache<DenseStorage<float16>>>(1, 1));
}

TEST_CASE("settings and profiles that do not work are refused") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  AttentionProfile profile{{1, 1}, 1};
  profile.sums(0, 0).assign(20, 1.0F);
  const auto refused = [&](const FastGenConfig& config) {
    CHECK_THROWS_AS((void)fastgen_choices(one_head, profile, config), ConfigError);
  };
  refused({.recovery = nan});
  refused({.recovery = 1.1});
  refused({.local_share = 0.0});
  refused({.local_share = nan});
  refused({.frequent_share = -1.0});
  refused({.observation_window = 0});
  const auto refused_profile = [&](auto change) {
    AttentionProfile broken = profile;
    change(broken);
    CHECK_THROWS_AS((void)fastgen_plan<float>(one_head, broken), ConfigError);
  };
  refused_profile([](AttentionProfile& p) { p.queries = 0; });
  refused_profile([](AttentionProfile& p) { p.sums(0, 0).clear(); });
  refused_profile([](AttentionProfile& p) { p.sums(0, 0)[3] = -1.0F; });
  refused_profile([](AttentionProfile& p) { p.sums(0, 0)[3] = std::numeric_limits<float>::quiet_NaN(); });
  refused_profile([](AttentionProfile& p) { p.sums = {2, 1, std::vector<float>(20, 1.0F)}; });
}
