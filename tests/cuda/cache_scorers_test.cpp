// SPDX-License-Identifier: Apache-2.0
//
// Heads with a budget on the device under every scorer, beside their slow models: random operations, rows
// one at a time, quantised survivors, graphs; and the host's choice of rows where the arithmetic is the same.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include <kvpolicy/cache/kv_cache.hpp>

#include "cuda/support/device_cache.hpp"

using namespace kvpolicy;
using test::DeviceChunk;
using test::HeadSpec;
using test::Kind;
using test::Rank;

namespace {

using E = float16;

// Plans whose scorers stand over quantised rows, too, which no shipped policy does.
struct Backend : test::DeviceBackend<E> {
  template <class Scorer>
  static HeadSettings<E> quantized(const HeadSpec& spec) {
    using Policy = HeadBudgetCache<PerTokenStorage<E>, Scorer>;
    return test::policy_config<Policy>(spec);
  }
  static HeadPlan<E> plan_of(const ModelShape& shape, const std::vector<HeadSpec>& heads) {
    HeadPlan<E> plan{shape};
    for (std::size_t i = 0; i < heads.size(); ++i) {
      const HeadSpec& spec = heads[i];
      plan.set(i / shape.kv_heads, i % shape.kv_heads,
               spec.bits == 0 || spec.rank == Rank::snapkv ? test::settings_of<E>(spec)
               : spec.rank == Rank::tova                   ? quantized<TovaScorer>(spec)
               : spec.rank == Rank::h2o                    ? quantized<H2oScorer>(spec)
                                                           : quantized<KeyNormScorer>(spec));
    }
    return plan;
  }
};

HeadSpec budget(Rank rank, std::size_t rows, std::size_t kept, std::size_t every = 0) {
  return {.kind = Kind::budget,
          .rank = rank,
          .budget = rows,
          .window = kept,
          .compress_every = every,
          .returns_rows = true};
}
HeadSpec quantized(HeadSpec spec, std::size_t bits, std::size_t residual) {
  spec.bits = bits;
  spec.residual = residual;
  spec.flush_rows = gpu::quantized_together;
  return spec;
}
HeadSpec rotated(HeadSpec spec) {
  spec.key_hadamard = spec.value_hadamard = true;
  return spec;
}
HeadSpec largest(HeadSpec spec) {
  spec.largest = true;
  return spec;
}
HeadSpec weighed(HeadSpec spec) {
  spec.weighed = true;
  return spec;
}
HeadSpec after_first(HeadSpec spec) {
  spec.after_first = true;
  return spec;
}

void run(std::uint64_t seed, std::size_t group, const std::vector<HeadSpec>& heads, std::size_t layers,
         std::size_t max_append, std::size_t operations) {
  const test::SmallDevice device;
  const ModelShape shape{layers, group * heads.size() / layers, heads.size() / layers, 64};
  test::Logits logits;
  if (seed % 2 == 1) logits.scale = 0.2F;
  if (seed % 3 == 1) logits.softcap = 5.0F;
  if (seed % 3 == 2) {
    for (std::size_t h = 0; h < shape.q_heads; ++h)
      logits.sinks.push_back(0.1F * static_cast<float>(h) - 1.0F);
  }
  test::random_operations<E, E, Backend>(seed, shape, heads, {.max_append = max_append}, logits, operations);
}

}  // namespace

TEST_CASE("scorers on the device: random operations, forks, calls in halves") {
  run(1, 1,
      {budget(Rank::tova, 20, 0, 1), budget(Rank::tova, 1, 0, 5), budget(Rank::h2o, 10, 10, 1),
       budget(Rank::h2o, 0, 7, 1), budget(Rank::h2o, 33, 0, 4), budget(Rank::key_norm, 16, 4, 1)},
      1, 9, 60);
  run(2, 3,
      {budget(Rank::h2o, 24, 8),
       budget(Rank::key_norm, 31, 0),
       after_first(budget(Rank::tova, 20, 0, 1)),
       after_first(budget(Rank::h2o, 9, 9, 2)),
       budget(Rank::snapkv, 12, 5),
       {}},
      2, 40, 60);
  run(3, 7, {budget(Rank::h2o, 70, 3), budget(Rank::tova, 65, 0), budget(Rank::key_norm, 64, 1)}, 1, 1, 60);
}

TEST_CASE("scorers on the device: the largest vote in place of the mean") {
  run(6, 3,
      {largest(budget(Rank::h2o, 24, 8)), largest(budget(Rank::snapkv, 31, 5)), budget(Rank::h2o, 20, 1),
       largest(budget(Rank::h2o, 9, 2, 4)), largest(budget(Rank::snapkv, 12, 6, 7)),
       largest(quantized(budget(Rank::h2o, 100, 7), 8, 10))},
      1, 40, 60);
}

TEST_CASE("scorers on the device: scores are weighed by the lengths of values") {
  run(7, 3,
      {weighed(budget(Rank::h2o, 24, 8)), weighed(budget(Rank::snapkv, 31, 5)), budget(Rank::h2o, 20, 1),
       weighed(largest(budget(Rank::h2o, 9, 2, 4))), weighed(budget(Rank::tova, 12, 0, 7)),
       weighed(quantized(budget(Rank::h2o, 100, 7), 8, 10)),
       weighed(rotated(quantized(budget(Rank::tova, 90, 0), 4, 0)))},
      1, 40, 60);
}

TEST_CASE("scorers on the device: survivors that are quantised") {
  // Whoever compresses by itself is compared with exact rows, so these wait to be told.
  run(4, 2,
      {quantized(budget(Rank::h2o, 100, 7), 8, 10), quantized(budget(Rank::key_norm, 140, 0), 4, 3),
       quantized(budget(Rank::tova, 90, 0), 4, 0), quantized(budget(Rank::h2o, 66, 0), 4, 70)},
      1, 30, 60);
  run(5, 2,
      {rotated(quantized(budget(Rank::h2o, 100, 7), 8, 10)),
       rotated(quantized(budget(Rank::key_norm, 140, 0), 4, 3)),
       rotated(quantized(budget(Rank::tova, 90, 0), 4, 0))},
      1, 30, 40);
}

TEST_CASE("scorers on the device: one row at a time, from the first token on") {
  for (const std::size_t rows :
       {std::size_t{0}, std::size_t{1}, std::size_t{2}, std::size_t{63}, std::size_t{64}}) {
    CAPTURE(rows);
    const test::SmallDevice device;
    const ModelShape shape{1, 8, 4, 64};
    test::Sequence<E, Backend> sequence{
        shape,
        {budget(Rank::tova, rows, 0, 1), budget(Rank::h2o, rows, 1, 1), budget(Rank::h2o, rows, rows, 1),
         budget(Rank::key_norm, rows, 0, 1)},
        {},
        {}};
    test::Random random{rows + 1};
    for (std::size_t token = 0; token < (rows < 60 ? 12 : 72); ++token) {
      test::Call call;
      call.apart = token % 2 == 1;
      sequence.template run<E>(random, call);
    }
    sequence.compress();
  }
}

TEST_CASE("sums are added up in a graph as without one") {
  const test::SmallDevice device;
  const test::Stream stream;
  const ModelShape shape{2, 6, 2, 64};
  const auto plan = test::plan_of<E>(
      shape, {budget(Rank::h2o, 20, 4), {}, budget(Rank::tova, 9, 0), largest(budget(Rank::h2o, 0, 3))});
  for (const bool apart : {false, true}) {
    test::CountingDeviceMemory memory;
    const gpu::CacheOptions options{.max_append = 3, .memory = &memory};
    gpu::KvCache<E> cache{plan, options, stream}, twin{plan, options, stream};
    for (auto* each : {&cache, &twin}) {
      test::feed_device(*each, 1, {70, 1}, {}, stream);
      each->reserve(300, stream);
    }
    std::vector<DeviceChunk<>> inputs;
    for (std::size_t l = 0; l < 2; ++l) inputs.emplace_back(shape, 3);
    const auto put = [&](gpu::KvCache<E>& to) {
      for (std::size_t l = 0; l < 2; ++l) {
        if (!apart) {
          inputs[l].step(to, l, {}, stream);
        } else {
          inputs[l].append(to, l, stream);
          inputs[l].attend(to, l, {}, stream);
        }
      }
    };
    const test::Graph graph{stream, [&] { put(cache); }};
    const std::size_t allocations = memory.allocations();
    test::Random random{7};
    for (int i = 0; i < 30; ++i) {
      for (DeviceChunk<>& chunk : inputs) chunk.randomize(random, stream);
      cache.replayed(1, 3, false, apart);
      graph.launch(stream);
      put(twin);
      stream.wait();
    }
    CHECK(memory.allocations() == allocations);
    CHECK(cache.commit_point() == twin.commit_point());
    CHECK(test::dump_device(cache, true, stream) == test::dump_device(twin, true, stream));
    for (auto* each : {&cache, &twin}) each->compress(stream);
    CHECK(cache.rows(0, 0, Read::all, 0, stream).positions.size() == 24);
    CHECK(test::dump_device(cache, true, stream) == test::dump_device(twin, true, stream));
  }
}

TEST_CASE("key norms rank rows on the device exactly as on the host, equal keys by their place") {
  const test::SmallDevice device;
  const ModelShape shape{1, 4, 4, 64};
  std::vector<HeadSpec> heads;
  for (const std::size_t rows : {1, 63, 64, 150}) heads.push_back(budget(Rank::key_norm, rows, rows % 5));
  const auto plan = test::plan_of<E>(shape, heads);
  gpu::KvCache<E> there{plan};
  KvCache<E> here{plan};
  constexpr std::size_t tokens = 391;
  const DeviceChunk<> chunk{shape, tokens};
  std::vector<E> numbers(tokens * 4 * 64);
  test::Random random{3};
  for (std::size_t row = 0; row < tokens * 4; ++row) {
    // Few different lengths, of the same numbers in other orders: sums of squares that tie.
    const std::size_t kind = test::below(random, 6), turned = test::below(random, 64);
    for (std::size_t i = 0; i < 64; ++i) {
      const auto at = static_cast<float>((i + turned) % 64);
      numbers[row * 64 + i] = E{0.01F * at * static_cast<float>(kind) - 0.3F};
    }
  }
  const std::vector<E> queries(tokens * 4 * 64, E{0.5F});
  chunk.q.upload(queries);
  chunk.k.upload(numbers);
  chunk.v.upload(numbers);
  chunk.step(there, 0);
  std::vector<float> out(queries.size());
  const auto view = [](const std::vector<E>& of) { return TensorView<const E>{of.data(), tokens, 4, 64}; };
  here.step(0, view(queries), view(numbers), view(numbers), TensorView<float>{out.data(), tokens, 4, 64});
  there.compress();
  here.compress();
  for (std::size_t h = 0; h < 4; ++h) {
    std::vector<std::int64_t> on_host;
    SegmentList list;
    here.head(0, h).show({}, list);
    for (const Segment& segment : list) {
      for (std::size_t i = 0; i < segment.rows; ++i) on_host.push_back(segment.position_of(i));
    }
    CHECK(there.rows(0, h).positions == on_host);
  }
}

TEST_CASE("fork_as on a device: sums are taken over by heads that add up the same votes") {
  const test::SmallDevice device;
  using H2o = HeadBudgetCache<DenseStorage<E>, H2oScorer>;
  const ModelShape shape{1, 2, 1, 64};
  const H2o::Config mean{.budget = 9, .scorer = {.recent = 2}};
  H2o::Config worst_case = mean;
  worst_case.scorer.votes = Votes::largest;
  gpu::KvCache<E> cache{HeadPlan<E>{shape, worst_case}};
  test::feed_device(cache, 3, {40});
  CHECK(test::contains(
      test::thrown<ConfigError>([&] { static_cast<void>(cache.fork_as(HeadPlan<E>{shape, mean})); }),
      "has not added up the attention that its rows got as the new one does"));
  worst_case.budget = 20;
  auto other = cache.fork_as(HeadPlan<E>{shape, worst_case});
  worst_case.budget = 9;
  other.compress();
  cache.compress();
  const auto few = cache.rows(0, 0).positions, more = other.rows(0, 0).positions;
  CHECK(more.size() == 22);
  CHECK(std::includes(more.begin(), more.end(), few.begin(), few.end()));
}
