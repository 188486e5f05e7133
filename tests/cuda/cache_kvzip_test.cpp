// SPDX-License-Identifier: Apache-2.0
//
// KVzip on a device: scoring passes over forks, whose scores go to the cache and then decide what stays, beside the
// host's cache, which gets the same calls and keeps the same rows.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/cuda/host_copy.hpp>
#include <kvpolicy/cuda/saved_cache.hpp>

#include "cuda/support/device_cache.hpp"
#include "cuda/support/host_pair.hpp"
#include "support/temporary_folder.hpp"

using namespace kvpolicy;
using test::contains;
using test::thrown;
using Pair = test::HostPair;

namespace {

using E = float16;
using Plan = HeadPlan<E>;
using Cache = gpu::KvCache<E>;
using Zip = HeadBudgetCache<DenseStorage<E>, KvZipScorer>;
using H2o = HeadBudgetCache<DenseStorage<E>, H2oScorer>;
using Snap = HeadBudgetCache<DenseStorage<E>, SnapKvScorer>;

constexpr AttendOptions scoring{.scores_rows = true};

// Reads on in a fork, as a pass that repeats the text would.
void score(Pair& pair, const std::vector<std::size_t>& calls, const AttendOptions& options = scoring) {
  Pair pass{pair};
  for (const std::size_t tokens : calls) pass.step(tokens, tokens == 3, options);
  pair.take_scores(pass);
}

// Scores of the host's copy, and of the device's brought there: equal to the rounding of two engines.
void check_scores(const Pair& pair) {
  const KvCache<E> down = gpu::to_host(pair.there);
  for (std::size_t l = 0; l < pair.shape.layers; ++l) {
    for (std::size_t h = 0; h < pair.shape.kv_heads; ++h) {
      if (!pair.here.head(l, h).roles().accumulates) continue;
      const std::span<const double> here = pair.here.head(l, h).accumulated();
      const std::span<const double> there = down.head(l, h).accumulated();
      REQUIRE(here.size() == there.size());
      std::size_t wrong = 0;
      for (std::size_t row = 0; row < here.size(); ++row) {
        const bool near = std::abs(here[row] - there[row]) <= 1e-5 * std::abs(here[row]) + 1e-9;
        wrong += near && (here[row] < 0) == (there[row] < 0) ? 0 : 1;
      }
      CHECK(wrong == 0);
      CHECK(down.head(l, h).unscored_rows(0) == pair.here.head(l, h).unscored_rows(0));
    }
  }
}

Zip::Config zip(std::size_t budget, bool in_model, std::size_t recent = 0) {
  return {.budget = budget, .adaptive_in_model = in_model, .safeguard = 0, .scorer = {.recent = recent}};
}

// Heads that wait for scoring passes, beside one that adds up every call and one that is asked.
Plan mixed_plan(bool in_model, std::size_t group) {
  Plan plan{ModelShape{2, 5 * group, 5, 64}};
  for (std::size_t l = 0; l < 2; ++l) {
    plan.set(l, 0, zip(12, in_model, 2));
    plan.set(l, 1, zip(30 * l, in_model, 2));
    plan.set(l, 2, H2o::Config{.budget = 9, .scorer = {.recent = 4}});
    plan.set(l, 3, Snap::Config{.budget = 8, .scorer = {.observation_window = 4}});
  }
  return plan;
}

}  // namespace

TEST_CASE("kvzip on a device: what a scoring pass finds decides what stays, as on the host") {
  const test::SmallDevice device;
  for (const bool in_model : {false, true}) {
    for (const std::size_t group : {std::size_t{1}, std::size_t{3}}) {
      CAPTURE(in_model);
      CAPTURE(group);
      test::CountingDeviceMemory memory;
      {
        Pair pair{mixed_plan(in_model, group), {.max_append = 9, .memory = &memory}};
        pair.step(60);
        pair.step(1);
        check_scores(pair);
        score(pair, {40, 3});
        check_scores(pair);
        pair.step(5, true);  // rows that the first pass has not seen
        check_scores(pair);
        score(pair, {3, 20});
        check_scores(pair);
        pair.compress();
        const std::size_t held = pair.rows();
        Pair question{pair};
        question.step(9);
        CHECK(question.rows() == held + 2 * 5 * 9);
        // What came since has to be scored before the next compression.
        pair.step(70);
        score(pair, {70});
        pair.compress();
        check_scores(pair);
      }
      CHECK(memory.live_bytes() == 0);
      CHECK(memory.faults() == 0);
    }
  }
}

TEST_CASE("kvzip on a device: passes of many queries, weights of values, logits of their own") {
  const test::SmallDevice device;
  Zip::Config config = zip(20, true);
  config.weigh_values = true;
  Pair pair{Plan{ModelShape{1, 4, 2, 64}, config}};
  pair.step(130);
  AttendOptions options = scoring;
  options.scale = 0.3F;
  options.softcap = 4.0F;
  score(pair, {150, 1}, options);  // more queries than one launch observes
  check_scores(pair);
  pair.compress();
  CHECK(pair.rows() == 40);
}

TEST_CASE("kvzip on a device: survivors that are quantised") {
  const test::SmallDevice device;
  using Codes = HeadBudgetCache<PerTokenStorage<E>, KvZipScorer>;
  Codes::Config config{.budget = 128, .storage = {.bits = 8, .residual = 0}};
  Pair pair{Plan{ModelShape{1, 2, 2, 64}, config}};
  pair.step(192);
  score(pair, {50});
  pair.compress();
  pair.step(64);
  score(pair, {50});
  pair.compress();
}

TEST_CASE("kvzip on a device: rows that no pass has seen cannot be ranked, and nothing changes") {
  const test::SmallDevice device;
  const ModelShape shape{2, 2, 2, 64};
  Plan plan{shape};
  plan.set(1, 1, Zip::Config{.budget = 4, .scorer = {.recent = 2}});
  plan.set(0, 0, H2o::Config{.budget = 3, .scorer = {.recent = 1}});
  Cache cache{plan, {.max_append = 4}};
  test::feed_device(cache, 1, {20});
  const auto before = test::dump_device(cache);
  CHECK(contains(thrown<ShapeError>([&] { cache.compress(); }),
                 "gpu::KvCache::compress: 18 of 20 rows of KV head 1 of layer 1 were in no scoring pass"));
  CHECK(contains(thrown<ShapeError>([&] { cache.compress(std::size_t{1}); }), "18 of 20 rows"));
  CHECK(test::dump_device(cache) == before);
  Cache tail = cache.fork();
  test::Random random{4};
  const test::DeviceChunk<> more{random, shape, 3};
  for (std::size_t l = 0; l < 2; ++l) more.append(tail, l);
  const auto with_tail = test::dump_device(tail);
  CHECK(contains(thrown<ShapeError>([&] { tail.compress(); }), "21 of 23 rows of KV head 1 of layer 1"));
  CHECK(test::dump_device(tail) == with_tail);

  // Calls that are not a scoring pass leave it at that.
  Cache reads = cache.fork();
  test::feed_device(reads, 2, {5});
  cache.take_scores(reads);
  CHECK(contains(thrown<ShapeError>([&] { cache.compress(); }), "18 of 20 rows"));
  Cache pass = cache.fork();
  test::feed_device(pass, 3, {1}, scoring);
  cache.take_scores(pass);
  cache.compress();
  CHECK(cache.rows(1, 1).positions.size() == 6);
  CHECK(cache.rows(0, 0).positions.size() == 4);
  CHECK(cache.rows(0, 1).positions.size() == 20);

  // A text shorter than the capacity needs no scores.
  Cache small{Plan{shape, Zip::Config{.budget = 30}}};
  test::feed_device(small, 1, {20});
  small.compress();
  CHECK(small.rows(0, 0).positions.size() == 20);
}

TEST_CASE("take_scores on a device: only of a fork that has read more since, and not in a graph") {
  const test::SmallDevice device;
  const ModelShape shape{1, 2, 2, 64};
  const Plan plan{shape, Zip::Config{.budget = 4}};
  Cache cache{plan};
  test::feed_device(cache, 1, {10});
  const auto refusal = [&](const Cache& scored) { return thrown<Error>([&] { cache.take_scores(scored); }); };
  Cache other{Plan{shape, Zip::Config{.budget = 5}}};
  test::feed_device(other, 1, {12}, scoring);
  CHECK(contains(refusal(other), "gpu::KvCache::take_scores: the scores are of a cache under another plan"));
  Cache shorter{plan};
  test::feed_device(shorter, 1, {9}, scoring);
  CHECK(contains(refusal(shorter),
                 "KV head 0 of layer 0 holds 10 rows of 10 tokens, in the scored cache 9 of 9"));
  Cache dropped = cache.fork();
  test::feed_device(dropped, 1, {3}, scoring);
  dropped.compress();
  CHECK(contains(refusal(dropped), "it must be a fork that has only read more since"));
  Cache good = cache.fork();
  test::feed_device(good, 1, {3}, scoring);

  const test::DeviceChunk<> chunk{shape, 1};
  good.reserve(20);
  const test::Stream stream;
  test::succeed(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CHECK(
      contains(thrown<CaptureError>([&] { cache.take_scores(good, stream); }), "take_scores cannot be part"));
  CHECK(contains(thrown<CaptureError>([&] { chunk.step(good, 0, scoring, stream); }),
                 "heads that wait for scoring passes"));
  cudaGraph_t graph = nullptr;
  test::succeed(cudaStreamEndCapture(stream, &graph));
  test::succeed(cudaGraphDestroy(graph));

  CHECK(refusal(good).empty());
  cache.compress();
  CHECK(cache.rows(0, 0).positions.size() == 4);
}

TEST_CASE("take_scores on a device: a pass on another stream with an engine of its own") {
  const test::SmallDevice device;
  const test::LateStreams late{true, 5};
  const test::Stream one, two, three;
  const ModelShape shape{2, 2, 2, 64};
  const Plan plan{shape, zip(6, true)};
  Cache cache{plan, {}, one};
  Cache twin{plan, {}, one, cache.engine()};
  test::feed_device(cache, 1, {50}, {}, one);
  test::feed_device(twin, 1, {50}, {}, one);
  {
    Cache pass = cache.fork(one, std::make_shared<gpu::Engine<E>>(shape, gpu::default_memory(), one));
    test::feed_device(pass, 2, {30}, scoring, two);
    cache.take_scores(pass, three);
  }
  cache.compress(one);
  Cache pass = twin.fork(one);
  test::feed_device(pass, 2, {30}, scoring, one);
  twin.take_scores(pass, one);
  twin.compress(one);
  CHECK(test::dump_device(cache, true, one) == test::dump_device(twin, true, one));
}

TEST_CASE("kvzip on a device: scores go along to another budget, to a file and to the host and back") {
  const test::SmallDevice device;
  const ModelShape shape{2, 4, 2, 64};
  Pair pair{Plan{shape, Zip::Config{.budget = 1000, .scorer = {.recent = 1}}}};
  pair.step(40);
  const Plan target{shape, zip(7, true, 1)};
  Cache unscored = pair.there.fork_as(target);
  CHECK(contains(thrown<ShapeError>([&] { unscored.compress(); }), "39 of 40 rows"));
  score(pair, {20});
  Cache scored = pair.there.fork_as(target);
  KvCache<E> on_host = pair.here.fork_as(target);
  on_host.compress();
  const Cache partly = [&] {
    Cache more = scored.fork();
    test::feed_device(more, 9, {3});
    return more;
  }();
  const auto rows_of = [&](const KvCache<E>& cache, std::size_t l, std::size_t h) {
    std::vector<std::int64_t> positions;
    for (const Segment& rows : cache.segments(l, h)) {
      for (std::size_t i = 0; i < rows.rows; ++i) positions.push_back(rows.position_of(i));
    }
    return positions;
  };

  const testing::TemporaryFolder folder;
  const std::filesystem::path file = folder.path() / "scored.kvc";
  gpu::save(scored, file);
  Cache loaded{target};
  gpu::load(loaded, file);
  KvCache<E> down = gpu::to_host(scored);
  Cache up = gpu::to_device(down);
  down.compress();
  for (Cache* each : {&scored, &loaded, &up}) {
    each->compress();
    for (std::size_t l = 0; l < 2; ++l) {
      for (std::size_t h = 0; h < 2; ++h) {
        CHECK(each->rows(l, h).positions == rows_of(on_host, l, h));
        CHECK(rows_of(down, l, h) == rows_of(on_host, l, h));
      }
    }
  }
  // Rows that came after the pass are unscored wherever the cache goes; one is always kept.
  Cache there = gpu::to_device(gpu::to_host(partly));
  CHECK(contains(thrown<ShapeError>([&] { there.compress(); }), "2 of 43 rows"));
  // Sums that mean something else do not go along.
  CHECK(contains(
      thrown<ConfigError>([&] { static_cast<void>(scored.fork_as(Plan{shape, H2o::Config{.budget = 7}})); }),
      "holds"));
  CHECK(contains(thrown<ConfigError>(
                     [&] { static_cast<void>(pair.there.fork_as(Plan{shape, H2o::Config{.budget = 7}})); }),
                 "has not added up the attention"));
}
