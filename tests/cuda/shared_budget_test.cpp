// SPDX-License-Identifier: Apache-2.0
//
// Heads that share a layer's budget on the device: the kernels against sorting, whole caches against the
// host's where both rank rows by the same numbers, and against what `observe` says of the rows.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/cuda/kernels/shared_budget.cuh>

#include "cuda/support/device_cache.hpp"
#include "cuda/support/host_pair.hpp"
#include "cuda/support/launch.hpp"

using namespace kvpolicy;
using test::contains;
using test::DeviceChunk;
using test::thrown;

namespace {

using E = float16;
using Rows = std::vector<int>;
using Plan = HeadPlan<E>;
using Cache = gpu::KvCache<E>;
using Pair = test::HostPair;

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

struct Competitor {
  std::vector<float> scores, votes, weighed;
  double unweighed_share = 0.0;
  int rows = 0;  // that it would keep alone
  int safe = 0;
  int kept_rows = 0;
};

// Better candidates come first: not NaN, higher score, the same for votes, lower head, lower row.
using Key = std::tuple<bool, float, bool, float, std::size_t, int>;
Key key_of(float score, float vote, std::size_t head, std::size_t row) {
  const auto number = [](float x) { return x != x ? -inf : x == 0.0F ? 0.0F : x; };
  return {score != score, -number(score), vote != vote, -number(vote), head, static_cast<int>(row)};
}

// A head's choice of `count` rows, of which a share goes by scores and the others by weighed scores.
Rows in_two_steps(const Competitor& head, std::size_t count) {
  std::vector<Key> keys;
  for (std::size_t i = 0; i < head.scores.size(); ++i) {
    keys.push_back(key_of(head.scores[i], head.votes[i], 0, i));
  }
  std::sort(keys.begin(), keys.end());
  const auto first = static_cast<std::size_t>(head.unweighed_share * static_cast<double>(count));
  Rows chosen;
  for (std::size_t i = 0; i < first; ++i) chosen.push_back(std::get<5>(keys[i]));
  std::vector<Key> others;
  for (std::size_t i = first; i < keys.size(); ++i) {
    const auto row = static_cast<std::size_t>(std::get<5>(keys[i]));
    others.push_back(key_of(head.weighed[row], head.votes[row], 0, row));
  }
  std::sort(others.begin(), others.end());
  for (std::size_t i = 0; i < count - first; ++i) chosen.push_back(std::get<5>(others[i]));
  return chosen;
}

// Said with sorted lists: safe rows go first, and then the best of all others.
std::vector<Rows> expected_rows(const std::vector<Competitor>& heads) {
  std::vector<Rows> chosen(heads.size());
  std::vector<Key> others;
  int left = 0;
  for (std::size_t h = 0; h < heads.size(); ++h) {
    std::vector<Key> own;
    for (std::size_t i = 0; i < heads[h].scores.size(); ++i) {
      own.push_back(key_of(heads[h].scores[i], heads[h].votes[i], h, i));
    }
    std::sort(own.begin(), own.end());
    const int safe = std::min(heads[h].safe, heads[h].rows);
    left += heads[h].rows - safe;
    for (std::size_t i = 0; i < own.size(); ++i) {
      if (static_cast<int>(i) < safe) {
        chosen[h].push_back(std::get<5>(own[i]));
      } else {
        others.push_back(own[i]);
      }
    }
  }
  std::sort(others.begin(), others.end());
  for (int i = 0; i < left && i < static_cast<int>(others.size()); ++i) {
    const Key& winner = others[static_cast<std::size_t>(i)];
    chosen[std::get<4>(winner)].push_back(std::get<5>(winner));
  }
  for (std::size_t h = 0; h < heads.size(); ++h) {
    if (heads[h].unweighed_share > 0.0) chosen[h] = in_two_steps(heads[h], chosen[h].size());
    std::sort(chosen[h].begin(), chosen[h].end());
    for (int i = 0; i < heads[h].kept_rows; ++i)
      chosen[h].push_back(static_cast<int>(heads[h].scores.size()) + i);
  }
  return chosen;
}

template <int Threads>
void check_kernels(const std::vector<Competitor>& heads) {
  const std::size_t kv_heads = 2 * heads.size() + 1;  // every second one shares
  std::size_t pitch = 1;
  for (const Competitor& head : heads) pitch = std::max(pitch, head.scores.size());
  std::vector<float> scores(kv_heads * pitch, inf), votes(kv_heads * pitch, inf);
  std::vector<float> weighed(kv_heads * pitch, inf);
  std::vector<gpu::HeadView> views(kv_heads);
  std::vector<gpu::CompressionSettings> how(kv_heads);
  std::vector<gpu::SharedHead> shared;
  int candidates = 0, budget = 0, kept = 0;
  for (std::size_t h = 0; h < heads.size(); ++h) {
    const std::size_t head = 2 * h + 1;
    how[head].ranking = gpu::Ranking::attention;
    how[head].weighs_values = heads[h].unweighed_share > 0.0;
    how[head].unweighed_share = heads[h].unweighed_share;
    std::copy(heads[h].weighed.begin(), heads[h].weighed.end(),
              weighed.begin() + static_cast<std::ptrdiff_t>(head * pitch));
    std::copy(heads[h].scores.begin(), heads[h].scores.end(),
              scores.begin() + static_cast<std::ptrdiff_t>(head * pitch));
    std::copy(heads[h].votes.begin(), heads[h].votes.end(),
              votes.begin() + static_cast<std::ptrdiff_t>(head * pitch));
    shared.push_back({.head = static_cast<int>(head),
                      .candidates = static_cast<int>(heads[h].scores.size()),
                      .first = candidates,
                      .safe = std::min(heads[h].safe, heads[h].rows),
                      .kept_rows = heads[h].kept_rows,
                      .kept_before = kept,
                      .unweighed_share = heads[h].unweighed_share});
    candidates += shared.back().candidates;
    budget += heads[h].rows;
    kept += heads[h].kept_rows;
  }
  budget = std::min(budget, candidates);
  std::vector<std::uint64_t> ranks(static_cast<std::size_t>(candidates), 7);
  std::vector<std::uint64_t> unweighed_ranks = ranks, weighed_ranks = ranks;
  Rows chosen(static_cast<std::size_t>(budget), -1), begins(heads.size() + 1, -1);
  Rows rows(static_cast<std::size_t>(budget + kept), -1);
  const gpu::SharedBudgetParams params{
      .heads = views.data(),
      .compressions = how.data(),
      .scores = {scores.data(), votes.data(), static_cast<long long>(pitch), weighed.data()},
      .shared = shared.data(),
      .count = static_cast<int>(heads.size()),
      .candidates = candidates,
      .budget = budget,
      .ranks = ranks.data(),
      .unweighed = unweighed_ranks.data(),
      .weighed = weighed_ranks.data(),
      .chosen = chosen.data(),
      .begins = begins.data(),
      .rows = rows.data()};
  test::launch(gpu::shared_ranks_kernel<Threads>, static_cast<int>(heads.size()), 1, Threads,
               gpu::select_shared_bytes(), params);
  test::launch(gpu::shared_select_kernel<Threads>, 1, 1, Threads, gpu::select_shared_bytes(), params);
  test::launch(gpu::share_weighed_kernel<Threads>, static_cast<int>(heads.size()), 1, Threads,
               gpu::select_shared_bytes(), params);
  const auto expected = expected_rows(heads);
  for (std::size_t h = 0; h < heads.size(); ++h) {
    CAPTURE(h);
    const auto begin = rows.begin() + begins[h] + shared[h].kept_before;
    const Rows own(begin, begin + begins[h + 1] - begins[h] + shared[h].kept_rows);
    CHECK((own == expected[h]));
  }
  CHECK(begins.back() == budget);
}

template <class Scorer>
typename HeadBudgetCache<DenseStorage<E>, Scorer>::Config sharing(std::size_t budget, double safe,
                                                                  std::size_t every = 0) {
  typename HeadBudgetCache<DenseStorage<E>, Scorer>::Config config;
  config.budget = budget;
  config.compress_every = every;
  config.adaptive_in_layer = true;
  config.safeguard = safe;
  if constexpr (requires { config.scorer.recent; }) config.scorer.recent = 4;
  if constexpr (requires { config.scorer.kernel; }) {
    config.scorer.observation_window = 4;
    config.scorer.kernel = 1;
  }
  return config;
}

// After one prompt: what survives in the heads that share, by the scores that `observe` gives the rows.
template <class Scorer>
void check_prompt(double safe, std::size_t group) {
  const test::SmallDevice device;
  constexpr std::size_t tokens = 150;
  const std::size_t asked = std::is_same_v<Scorer, H2oScorer>    ? tokens
                            : std::is_same_v<Scorer, TovaScorer> ? 1
                                                                 : 4;
  const std::size_t kept = std::is_same_v<Scorer, TovaScorer> ? 0 : 4;
  const ModelShape shape{1, 5 * group, 5, 64};
  Plan plan{shape};
  const std::vector<std::size_t> budgets{20, 0, 7, 60};
  for (std::size_t h = 0; h < 4; ++h) plan.set(0, h + (h > 1 ? 1 : 0), sharing<Scorer>(budgets[h], safe));
  const std::vector<std::size_t> heads{0, 1, 3, 4};
  Cache cache{plan, {.kept_queries = tokens}};
  test::feed_device(cache, 5, {tokens});
  std::vector<std::vector<float>> sums;
  REQUIRE(cache.observe(0, asked, sums) == asked);
  cache.compress();

  std::size_t rows = 0;
  double lowest_in = std::numeric_limits<double>::infinity(), highest_out = -lowest_in, largest = 0;
  for (std::size_t i = 0; i < heads.size(); ++i) {
    CAPTURE(i);
    const auto positions = cache.rows(0, heads[i]).positions;
    const std::set<std::int64_t> in(positions.begin(), positions.end());
    rows += positions.size();
    std::vector<double> best;
    double own_out = -std::numeric_limits<double>::infinity();
    for (std::size_t row = 0; row + kept < tokens; ++row) {
      double score = 0;
      for (std::size_t g = 0; g < group; ++g) {
        score += static_cast<double>(sums[heads[i]][g * tokens + row]) /
                 static_cast<double>(group * (asked == 4 ? 4 : 1));
      }
      largest = std::max(largest, score);
      if (in.contains(static_cast<std::int64_t>(row))) {
        best.push_back(score);
      } else {
        own_out = std::max(own_out, score);
      }
    }
    for (std::size_t row = tokens - kept; row < tokens; ++row)
      CHECK(in.contains(static_cast<std::int64_t>(row)));
    const auto sure = static_cast<std::size_t>(safe * static_cast<double>(budgets[i]));
    CHECK(best.size() >= sure);
    std::sort(best.begin(), best.end());
    if (!best.empty()) CHECK(best.front() >= own_out - 1e-5 * largest);
    if (best.size() > sure) lowest_in = std::min(lowest_in, best.front());
    highest_out = std::max(highest_out, own_out);
  }
  CHECK(rows == 87 + 4 * kept);
  CHECK(lowest_in >= highest_out - 1e-5 * largest);
  CHECK(cache.rows(0, 2).positions.size() == tokens);
}

}  // namespace

TEST_CASE("the kernels that let heads compete, against sorting") {
  test::Random random{1};
  const std::vector<float> odd{not_a_number, -inf, inf, 0.0F, -0.0F, 3.0F, 3.0F, -3.0F, 1e-42F};
  for (int round = 0; round < 60; ++round) {
    CAPTURE(round);
    std::vector<Competitor> heads(1 + test::below(random, 5));
    for (Competitor& head : heads) {
      const std::size_t rows = test::one_of(random, std::vector<std::size_t>{0, 1, 2, 31, 64, 257, 1025});
      for (std::size_t i = 0; i < rows; ++i) {
        head.scores.push_back(round % 3 == 0   ? test::normal(random)
                              : round % 3 == 1 ? static_cast<float>(test::below(random, 3))
                                               : test::one_of(random, odd));
        head.votes.push_back(round % 2 == 0 ? 0.5F : test::one_of(random, odd));
        head.weighed.push_back(round % 4 == 1 ? test::one_of(random, odd) : test::normal(random));
      }
      if (round % 5 > 1) head.unweighed_share = test::one_of(random, std::vector{0.0, 0.001, 0.5, 1.0});
      head.rows = static_cast<int>(test::below(random, rows + 1));
      head.safe = static_cast<int>(test::below(random, rows + 3));
      head.kept_rows = static_cast<int>(test::below(random, 9));
    }
    check_kernels<256>(heads);
    if (round % 6 == 0) check_kernels<gpu::select_threads>(heads);
  }
}

TEST_CASE("heads that share keep the host's rows exactly, where both rank them by the same numbers") {
  for (const double safe : {0.0, 0.2, 1.0}) {
    for (const std::size_t every : {std::size_t{0}, std::size_t{1}, std::size_t{6}}) {
      CAPTURE(safe);
      CAPTURE(every);
      const test::SmallDevice device;
      test::CountingDeviceMemory memory;
      {
        const ModelShape shape{2, 7, 7, 64};
        Plan plan{shape};
        for (std::size_t l = 0; l < 2; ++l) {
          const std::vector<std::size_t> budgets{20, 0, 7, 20, 60};
          for (std::size_t h = 0; h < 5; ++h) plan.set(l, h, sharing<KeyNormScorer>(budgets[h], safe, every));
          auto alone = sharing<KeyNormScorer>(11, 0.2, every);
          alone.adaptive_in_layer = false;
          plan.set(l, 6, alone);
        }
        Pair pair{plan, {.max_append = 9, .memory = &memory}};
        pair.step(40, false);
        pair.compress();
        for (const std::size_t tokens : {1, 1, 2, 5, 1, 12, 1, 1, 20}) {
          pair.step(tokens, tokens == 5);
          if (tokens > 1) pair.compress();
        }
        Pair other{pair};
        other.step(130, false);
        other.compress();
        other.compress();  // nothing more to drop
        pair.step(3, true);
        std::size_t rows = 0;
        for (std::size_t h = 0; h < 5; ++h) rows += other.there.rows(1, h).positions.size();
        CHECK(rows == 107 + 5 * 4);
        // A fork shares the engine and pages.
        CHECK(memory.live_bytes() <= pair.there.bytes() + pair.there.overhead_bytes() + other.there.bytes() +
                                         other.there.overhead_bytes() +
                                         pair.there.engine()->workspace_bytes());
      }
      CHECK(memory.live_bytes() == 0);
      CHECK(memory.faults() == 0);
    }
  }
}

TEST_CASE("heads that share, on device and host: random calls, forks, compressions") {
  const test::SmallDevice device;
  for (const std::uint64_t seed : {1U, 2U}) {
    CAPTURE(seed);
    test::CountingDeviceMemory memory;
    test::Random random{seed};
    {
      const ModelShape shape{1, 8, 4, 64};
      Plan plan{shape};
      for (std::size_t h = 0; h < 3; ++h) {
        auto own = sharing<KeyNormScorer>(test::below(random, 70), seed == 1 ? 0.3 : 0.0, seed == 1 ? 0 : 7);
        own.after_first_compress = seed == 2;
        own.compress_from = 50;
        plan.set(0, h, own);
      }
      test::check_random_calls(plan, {.max_append = 9, .memory = &memory}, random, 70);
    }
    CHECK(memory.live_bytes() == 0);
  }
}

TEST_CASE("heads that share by attention keep what the queries look at most") {
  for (const double safe : {0.0, 0.5, 1.0}) {
    for (const std::size_t group : {std::size_t{1}, std::size_t{3}}) {
      check_prompt<SnapKvScorer>(safe, group);
      check_prompt<TovaScorer>(safe, group);
      check_prompt<H2oScorer>(safe, group);
    }
  }
}

TEST_CASE("quantised heads that share: what is held becomes quantised though nobody drops a row") {
  const test::SmallDevice device;
  using Policy = HeadBudgetCache<PerTokenStorage<E>>;
  Policy::Config config{.budget = 300, .adaptive_in_layer = true, .scorer = {.observation_window = 4}};
  config.storage.bits = 4;
  config.storage.residual = 8;
  const ModelShape shape{1, 4, 2, 64};
  Plan plan{shape, config};
  config.budget = 100;
  plan.set(0, 1, config);
  Cache cache{plan};
  test::feed_device(cache, 1, {100});
  cache.compress();
  for (std::size_t h = 0; h < 2; ++h) {
    const auto rows = cache.rows(0, h);
    CHECK(rows.positions.size() == 100);
    CHECK(std::count(rows.quantized.begin(), rows.quantized.end(), true) == 64);
  }
  test::feed_device(cache, 2, {150});
  cache.compress();  // the second head is 146 rows above its own capacity
  CHECK(cache.rows(0, 0).positions.size() + cache.rows(0, 1).positions.size() == 250 + 104);
}

TEST_CASE("a competition that finds no memory drops nothing") {
  const test::SmallDevice device;
  test::CountingDeviceMemory memory;
  const ModelShape shape{2, 4, 2, 64};
  Cache cache{Plan{shape, sharing<SnapKvScorer>(10, 0.2)}, {.memory = &memory}};
  test::feed_device(cache, 1, {90});
  CHECK(test::compress_without_memory(cache, memory) > 4);
  CHECK(cache.rows(1, 0).positions.size() + cache.rows(1, 1).positions.size() == 28);
}

TEST_CASE("heads that share but are not ranked alike are refused as on the host") {
  const ModelShape shape{1, 2, 2, 64};
  Plan plan{shape, sharing<SnapKvScorer>(9, 0.2)};
  plan.set(0, 1, sharing<SnapKvScorer>(5, 0.2));
  CHECK(thrown<ConfigError>([&] { const Cache cache{plan}; }).empty());
  plan.set(0, 1, sharing<SnapKvScorer>(9, 0.5));
  const std::string on_device = thrown<ConfigError>([&] { const Cache cache{plan}; });
  CHECK(contains(on_device, "KV head 1 of layer 0 shares"));
  CHECK(on_device == "gpu::" + thrown<ConfigError>([&] { const KvCache<E> cache{plan}; }));
}
