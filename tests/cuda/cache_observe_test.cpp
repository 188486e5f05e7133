// SPDX-License-Identifier: Apache-2.0
//
// How the latest queries attend to what a device cache shows: against probabilities in double over the rows
// that the cache brings to the host. Every kind of head, before and after compressions.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/cache/kv_cache.hpp>

#include "cuda/support/device_cache.hpp"
#include "support/oracle.hpp"

using namespace kvpolicy;
using test::contains;
using test::DeviceChunk;
using test::HeadSpec;
using test::Kind;
using test::thrown;

namespace {

using E = float16;
using Sums = std::vector<std::vector<float>>;

// A device cache of one layer that remembers its queries.
struct Observed {
  ModelShape shape;
  std::vector<HeadSpec> heads;
  test::DeviceCache cache;
  std::optional<float> scale = {};
  float softcap = 0.0F;
  std::vector<float> sinks = {};
  std::vector<std::vector<std::vector<double>>> queries = {};  // [token][query head]
  test::Random random{5};
  double worst = 0;

  Observed(std::vector<HeadSpec> specs, std::size_t group, const gpu::CacheOptions& options)
      : shape{1, group * specs.size(), specs.size(), 64},
        heads{std::move(specs)},
        cache{test::plan_of<E>(shape, heads), options} {}

  void remember(const DeviceChunk<>& chunk) {
    const std::vector<E> numbers = chunk.q.download();
    for (std::size_t token = 0; token < chunk.tokens; ++token) {
      auto& of_token = queries.emplace_back();
      for (std::size_t head = 0; head < shape.q_heads; ++head) {
        auto& query = of_token.emplace_back();
        for (std::size_t i = 0; i < 64; ++i) {
          query.push_back(
              static_cast<double>(static_cast<float>(numbers[(token * shape.q_heads + head) * 64 + i])));
        }
      }
    }
  }
  void step(std::size_t tokens, bool apart = false) {
    const DeviceChunk<> chunk{random, shape, tokens};
    const test::DeviceArray<float> bias{sinks.size()};
    if (!sinks.empty()) bias.upload(sinks);
    const AttendOptions how{
        .scale = scale, .softcap = softcap, .attention_sink_bias = {bias.data(), bias.size()}};
    if (apart) chunk.append(cache, 0);
    apart ? chunk.attend(cache, 0, how) : chunk.step(cache, 0, how);
    remember(chunk);
    test::succeed(cudaStreamSynchronize(nullptr));
  }
  void truncate(std::size_t tokens) {
    cache.truncate(tokens);
    queries.resize(tokens);
  }

  // What `count` queries pay the rows of a head, for one query head.
  [[nodiscard]] std::vector<double> expected(std::size_t kv_head, std::size_t member,
                                             std::size_t count) const {
    const HeadSpec& spec = heads[kv_head];
    const gpu::CachedRows shown = cache.rows(0, kv_head);
    std::vector<oracle::Row> rows;
    for (std::size_t i = 0; i < shown.positions.size(); ++i) {
      const auto first = shown.keys.begin() + static_cast<std::ptrdiff_t>(i * 64);
      rows.push_back({shown.positions[i], {first, first + 64}, {}});
    }
    const std::size_t q_head = kv_head * (shape.q_heads / shape.kv_heads) + member;
    oracle::Options how{.scale = static_cast<double>(scale.value_or(0.125F)),
                        .softcap = static_cast<double>(softcap),
                        .sink_logit = {}};
    if (!sinks.empty()) how.sink_logit = static_cast<double>(sinks[q_head]);
    std::vector<double> sums(rows.size(), 0.0);
    for (std::size_t token = queries.size() - count; token < queries.size(); ++token) {
      const auto t = static_cast<std::int64_t>(token);
      const auto latest = static_cast<std::int64_t>(spec.sinks + spec.recent) - 1;
      std::vector<oracle::Row> seen;
      std::vector<std::size_t> numbers;
      for (std::size_t i = 0; i < rows.size(); ++i) {
        const std::int64_t p = rows[i].position;
        const bool sink = p < static_cast<std::int64_t>(spec.sinks);
        if (p > t) continue;
        if (spec.kind == Kind::window && !spec.prefill_chunk_mask && !sink &&
            p <= t - static_cast<std::int64_t>(spec.recent))
          continue;
        numbers.push_back(i);
        seen.push_back(rows[i]);
        if (spec.in_cache && sink && t > latest) {
          seen.back().key = oracle::turn(rows[i].key, static_cast<double>(t - latest), test::rotary_theta);
        }
      }
      std::vector<const oracle::Row*> places;
      for (const oracle::Row& row : seen) places.push_back(&row);
      const auto shares = oracle::probabilities(queries[token][q_head], places, how);
      for (std::size_t i = 0; i < shares.size(); ++i) sums[numbers[i]] += shares[i];
    }
    return sums;
  }

  void check(std::size_t asked, std::size_t known) {
    CAPTURE(asked);
    CAPTURE(queries.size());
    Sums sums;
    REQUIRE(cache.observe(0, asked, sums) == known);
    REQUIRE(sums.size() == shape.kv_heads);
    const std::size_t group = shape.q_heads / shape.kv_heads;
    for (std::size_t h = 0; h < shape.kv_heads; ++h) {
      CAPTURE(h);
      double error = 0;
      const std::size_t rows = cache.rows(0, h).positions.size();
      REQUIRE(sums[h].size() == group * rows);
      for (std::size_t g = 0; g < group; ++g) {
        const auto wanted = expected(h, g, known);
        for (std::size_t i = 0; i < rows; ++i) {
          const double off = std::abs(static_cast<double>(sums[h][g * rows + i]) - wanted[i]);
          error = off <= error ? error : off;
        }
      }
      // Rotated queries are rounded to half, 2^-11 of a logit's size, and so are the keys of a block that is
      // not full yet, which KIVI's flush has quantised. Anything else is rounded only in float.
      const double one = heads[h].in_cache ? 4e-3 : heads[h].kivi ? 5e-4 : 1e-5;
      CHECK(error <= one * std::max(1.0, static_cast<double>(known) / 8));
      if (one == 1e-5) worst = std::max(worst, error);
    }
  }
};

std::vector<HeadSpec> some_heads(std::size_t first, std::size_t last) {
  std::vector<HeadSpec> heads;
  for (const HeadSpec& head : test::device_heads()) {
    if (!head.cannot_return()) heads.push_back(head);
  }
  last = std::min(last, heads.size());
  return {heads.begin() + static_cast<std::ptrdiff_t>(first),
          heads.begin() + static_cast<std::ptrdiff_t>(last)};
}

}  // namespace

TEST_CASE("the device observes what every kind of head shows, by any number of queries") {
  const test::SmallDevice device;
  double worst = 0;
  for (const std::size_t first : {std::size_t{0}, std::size_t{6}, std::size_t{12}, std::size_t{18}}) {
    CAPTURE(first);
    const std::size_t group = 1 + first / 6;
    Observed one{
        some_heads(first, first + 6), group, {.max_rollback = 5, .max_append = 9, .kept_queries = 130}};
    if (first == 6) one.scale = 0.2F, one.softcap = 5.0F;
    if (first == 12) {
      for (std::size_t h = 0; h < one.shape.q_heads; ++h)
        one.sinks.push_back(0.3F * static_cast<float>(h) - 1.0F);
    }
    one.check(3, 0);  // nothing came yet
    one.step(1);
    one.check(3, 1);
    one.step(62);
    one.check(64, 63);
    one.step(2);
    for (const std::size_t asked : {0, 1, 2, 7, 8, 9, 64, 65}) one.check(asked, asked);
    one.step(75);
    for (const std::size_t asked : {1, 63, 64, 65, 128, 129, 130}) one.check(asked, asked);
    one.check(std::numeric_limits<std::size_t>::max(), 130);
    one.step(3, true);
    one.check(5, 5);
    one.truncate(one.queries.size() - 4);
    one.check(9, 9);
    one.cache.commit();
    one.check(9, 9);
    // Queries older than a compression see what is left of the rows that they could see.
    one.cache.compress();
    for (const std::size_t asked : {1, 8, 31, 130}) one.check(asked, std::min<std::size_t>(asked, 130));
    one.step(1);
    one.check(20, 20);
    one.step(70);
    one.cache.compress();
    one.check(100, 100);
    worst = std::max(worst, one.worst);
  }
  MESSAGE("error: " << worst);
}

TEST_CASE("the device observes rows in slow memory, and forks alike") {
  const test::SmallDevice device;
  test::TwoDeviceMemories memory;
  {
    Observed one{some_heads(0, 5),
                 2,
                 {.kept_queries = 70, .memory = &memory, .slow_memory = &memory.slow, .latest_rows = 0}};
    one.step(300);
    one.step(1);
    one.check(70, 70);
    const auto fork = one.cache.fork();
    Sums sums, of_fork;
    CHECK(one.cache.observe(0, 66, sums) == 66);
    CHECK(fork.observe(0, 66, of_fork) == 66);
    CHECK(sums == of_fork);
  }
  CHECK(memory.live_bytes() == 0);
}

TEST_CASE("the device refuses to observe what the host refuses, in the same words") {
  const test::SmallDevice device;
  const ModelShape shape{1, 2, 2, 64};
  Sums sums;
  // What both say once two rows came without their queries.
  const auto refusals = [&](const HeadSpec& head, std::size_t asked) {
    const auto plan = test::plan_of<E>(shape, {{}, head});
    gpu::KvCache<E> there{plan, {.max_rollback = 8, .max_append = 8, .kept_queries = 4}};
    KvCache<E> here{plan, {.max_rollback = 8, .max_append = 8, .kept_queries = 4}};
    test::Random random{1};
    test::feed_device(there, 1, {20});
    test::feed(here, random, {20});
    const DeviceChunk<> rows{random, shape, 2};
    rows.append(there, 0);
    test::succeed(cudaStreamSynchronize(nullptr));
    test::Chunk<E>{random, shape, 2}.append(here, 0);
    return std::pair{thrown<ShapeError>([&] { static_cast<void>(there.observe(0, asked, sums)); }),
                     thrown<ShapeError>([&] { static_cast<void>(here.observe(0, asked, sums)); })};
  };
  const HeadSpec budget{.kind = Kind::budget, .budget = 4, .window = 3};
  const auto no_query = refusals({}, 0);
  CHECK((no_query.first.empty() && no_query.second.empty()));
  const auto kept = refusals({}, 2);
  CHECK(contains(kept.first, "of the latest 2 tokens not all queries are known, 4 up to token 20 of 22"));
  CHECK(kept.first == "gpu::" + kept.second);
  const auto needed = refusals(budget, 0);
  CHECK(contains(needed.first, "observe: of the latest 3 tokens not all queries are known"));
  CHECK(needed.first == "gpu::" + needed.second);

  const auto plan = test::plan_of<E>(shape, {{}, budget});
  gpu::KvCache<E> cache{plan, {.max_rollback = 8, .kept_queries = 4}};
  test::feed_device(cache, 1, {20});
  CHECK(contains(thrown<ShapeError>([&] { static_cast<void>(cache.observe(1, 1, sums)); }),
                 "there is no layer 1"));
  const std::vector<std::size_t> parents{TokenTree::text, TokenTree::text};
  const TokenTree tree{parents};
  test::Random random{2};
  const DeviceChunk<> nodes{random, shape, 2};
  nodes.step(cache, 0, {.tree = &tree});
  CHECK(!thrown<RollbackError>([&] { static_cast<void>(cache.observe(0, 1, sums)); }).empty());
  cache.truncate(20);
  const test::Stream stream;
  test::succeed(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CHECK(contains(thrown<CaptureError>([&] { static_cast<void>(cache.observe(0, 1, sums, stream)); }),
                 "observe"));
  cudaGraph_t graph = nullptr;
  test::succeed(cudaStreamEndCapture(stream, &graph));
  test::succeed(cudaGraphDestroy(graph));
  CHECK(cache.observe(0, 1, sums) == 1);
  gpu::KvCache<E> other = std::move(cache);
  // NOLINTNEXTLINE(bugprone-use-after-move)
  CHECK(contains(thrown<ConfigError>([&] { static_cast<void>(cache.observe(0, 1, sums)); }), "moved from"));
  CHECK(contains(
      thrown<ConfigError>([&] { (gpu::CacheOptions{.kept_queries = std::size_t{1} << 21}).validate(); }),
      "kept_queries is 2097152"));
}

TEST_CASE("queries that are kept for observing are counted") {
  const test::SmallDevice device;
  test::CountingDeviceMemory memory;
  const ModelShape shape{2, 4, 2, 64};
  const auto plan = test::plan_of<E>(shape, std::vector<HeadSpec>(4));
  const gpu::CacheOptions options{.kept_queries = 7, .memory = &memory};
  gpu::KvCache<E> cache{plan, options};
  test::feed_device(cache, 1, {30});
  CHECK(cache.bytes() == gpu::memory_of(plan, cache.reserved(), options).total());
  Sums sums;
  CHECK(cache.observe(1, 9, sums) == 7);
  CHECK(memory.live_bytes() == cache.bytes() + cache.overhead_bytes() + cache.engine()->workspace_bytes());
}
