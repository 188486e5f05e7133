// SPDX-License-Identifier: Apache-2.0
//
// KIVI's flush on a device: keys are quantised when the host quantises them, to the same numbers, however the
// text comes; values follow in blocks of 64.
#include <doctest/doctest.h>

#include <cstddef>
#include <initializer_list>
#include <tuple>
#include <vector>

#include <kvpolicy/kivi.hpp>

#include "cuda/support/device_cache.hpp"
#include "cuda/support/random_device.hpp"

using kvpolicy::ModelShape;
using test::DeviceCache;
using test::DeviceChunk;

namespace {

// Every kind of head that has the flush, under several rollbacks and page sizes.
template <kvpolicy::Element E, class Backend>
void random_flushes(std::uint64_t seed) {
  std::vector<test::HeadSpec> heads;
  for (const test::HeadSpec& head : test::device_heads()) {
    if (head.kivi) heads.push_back(head);
  }
  const ModelShape shape{1, 2 * heads.size(), heads.size(), 64};
  for (const auto& [rollback, append, page_rows] : {std::tuple{0, 1, 64}, {5, 9, 64}, {70, 70, 128}}) {
    kvpolicy::gpu::CacheOptions options;
    options.max_rollback = static_cast<std::size_t>(rollback);
    options.max_append = static_cast<std::size_t>(append);
    options.page_rows = static_cast<std::size_t>(page_rows);
    options.latest_rows = 0;
    test::random_operations<E, E, Backend>(++seed, shape, heads, options, {}, 40);
  }
}

// The same step on both; keys are random numbers times `scale`.
void step_both(test::Random& random, DeviceCache& cache, kvpolicy::KvCache<kvpolicy::float16>& host,
               std::size_t tokens, float scale = 1.0F) {
  const ModelShape& shape = cache.plan().shape();
  const DeviceChunk<> chunk{random, shape, tokens};
  if (scale != 1.0F) {
    auto keys = chunk.k.download();
    for (kvpolicy::float16& number : keys) number = kvpolicy::float16{scale * static_cast<float>(number)};
    chunk.k.upload(keys);
  }
  chunk.step(cache, 0);
  const auto q = chunk.q.download(), k = chunk.k.download(), v = chunk.v.download();
  std::vector<float> out(tokens * shape.q_heads * shape.head_dim);
  const auto rows = [&](const std::vector<kvpolicy::float16>& numbers, std::size_t heads) {
    return kvpolicy::TensorView{numbers.data(), tokens, heads, shape.head_dim};
  };
  host.step(0, rows(q, shape.q_heads), rows(k, shape.kv_heads), rows(v, shape.kv_heads),
            kvpolicy::TensorView{out.data(), tokens, shape.q_heads, shape.head_dim});
}

// How many keys of a head are exact on the device, once it is checked that both hold the same keys, bit for bit.
// `returned`: keys may be exact there that the host has quantised.
std::size_t exact_keys(const DeviceCache& cache, const kvpolicy::KvCache<kvpolicy::float16>& host,
                       std::size_t head, bool returned = false) {
  const std::size_t dim = cache.plan().shape().head_dim;
  const auto cached = cache.rows(0, head);
  std::size_t row = 0;
  std::size_t exact = 0;
  bool same = true;
  std::vector<float> key(dim);
  for (const kvpolicy::Segment& segment : host.segments(0, head)) {
    for (std::size_t i = 0; i < segment.rows; ++i, ++row) {
      const bool quantized = kvpolicy::is_quantized(segment.keys.format.encoding);
      kvpolicy::load_row(segment.keys, i, key);
      const auto first = cached.keys.begin() + static_cast<std::ptrdiff_t>(row * dim);
      same = same && cached.positions[row] == segment.position_of(i);
      exact += cached.quantized[row] ? 0 : 1;
      if (returned && quantized && !cached.quantized[row]) continue;
      same = same && cached.quantized[row] == quantized &&
             test::same_bits(key, std::vector<float>(first, first + static_cast<std::ptrdiff_t>(dim)));
    }
  }
  CHECK(row == cached.positions.size());
  CHECK(same);
  return exact;
}

}  // namespace

TEST_CASE("KIVI on a device: the keys that are quantised are the host's, bit for bit") {
  const test::SmallDevice device;
  const ModelShape shape{1, 4, 2, 64};
  for (const std::size_t residual : std::initializer_list<std::size_t>{32, 128}) {
    for (const std::size_t bits : std::initializer_list<std::size_t>{2, 3, 5, 6, 8}) {
      CAPTURE(residual);
      CAPTURE(bits);
      const auto plan = kvpolicy::kivi_plan<kvpolicy::float16>(shape, {.bits = bits, .residual = residual});
      DeviceCache cache{plan};
      kvpolicy::KvCache<kvpolicy::float16> host{plan};
      test::Random random{residual + bits};
      for (const std::size_t tokens :
           std::initializer_list<std::size_t>{1, 31, 95, 1, 1, 64, 130, 7, 53, 1}) {
        step_both(random, cache, host, tokens);
        for (std::size_t head = 0; head < shape.kv_heads; ++head) {
          CHECK(exact_keys(cache, host, head) == host.tokens() % residual);
        }
      }
    }
  }
}

TEST_CASE(
    "KIVI with a budget on a device: survivors and later keys are quantised as on the host, bit for bit") {
  const test::SmallDevice small;
  const ModelShape shape{1, 4, 2, 64};
  using Budget = kvpolicy::HeadBudgetCache<kvpolicy::PerTokenStorage<kvpolicy::float16>>;
  for (const std::size_t residual : std::initializer_list<std::size_t>{10, 64, 150}) {
    CAPTURE(residual);
    const kvpolicy::HeadPlan<kvpolicy::float16> plan{
        shape, Budget::Config{.budget = 93,
                              .storage = {.bits = 4, .residual = residual, .flush = kvpolicy::Flush::kivi}}};
    DeviceCache cache{plan};
    kvpolicy::KvCache<kvpolicy::float16> host{plan};
    test::Random random{residual};
    step_both(random, cache, host, 300);
    cache.compress();
    host.compress();
    std::size_t rows = 101;  // the budget and the window of the scorer
    for (const std::size_t tokens : std::initializer_list<std::size_t>{1, 20, 70, 1, 130}) {
      step_both(random, cache, host, tokens);
      rows += tokens;
      for (std::size_t head = 0; head < shape.kv_heads; ++head) {
        CHECK(exact_keys(cache, host, head) == rows % residual);
      }
    }
    cache.compress();  // keys that have codes keep them
    host.compress();
    for (std::size_t head = 0; head < shape.kv_heads; ++head) {
      CHECK(exact_keys(cache, host, head, true) == 101 % residual);
    }
  }
}

TEST_CASE(
    "KIVI with a budget on a device: a key keeps its codes where a compression packs it before its block was "
    "full") {
  const test::SmallDevice small;
  const ModelShape shape{1, 1, 1, 64};
  // The first compression keeps all rows. The second one drops the oldest ones, whose keys are the longest.
  using Budget =
      kvpolicy::HeadBudgetCache<kvpolicy::PerTokenStorage<kvpolicy::float16>, kvpolicy::KeyNormScorer>;
  const kvpolicy::HeadPlan<kvpolicy::float16> plan{
      shape,
      Budget::Config{.budget = 200, .storage = {.bits = 4, .residual = 130, .flush = kvpolicy::Flush::kivi}}};
  DeviceCache cache{plan};
  kvpolicy::KvCache<kvpolicy::float16> host{plan};
  test::Random random{3};
  step_both(random, cache, host, 150, 8.0F);
  cache.compress();
  host.compress();
  step_both(random, cache, host, 200);
  // Codes: 260 keys, of which 192 are packed. Of the 200 survivors 64 are packed, the last of them from row 213.
  CHECK(exact_keys(cache, host, 0) == 350 % 130);
  cache.compress();
  host.compress();
  CHECK(cache.rows(0, 0).positions.front() == 150);
  CHECK(exact_keys(cache, host, 0, true) == 200 % 130);
}

TEST_CASE("KIVI on a device: a captured step flushes when it is time, and the bytes are foretold") {
  const test::SmallDevice small;
  const ModelShape shape{1, 4, 2, 64};
  const auto plan = kvpolicy::kivi_plan<kvpolicy::float16>(shape, {.bits = 4, .residual = 64});
  const test::Stream stream;
  DeviceCache captured{plan, {}, stream};
  DeviceCache twin{plan, {}, stream};
  for (DeviceCache* cache : {&captured, &twin}) {
    cache->reserve(300, stream);
    CHECK(cache->bytes() == kvpolicy::gpu::memory_of(plan, 300).total());
    test::feed_device(*cache, 1, {50}, {}, stream);
  }
  test::Random random{2};
  const DeviceChunk<> chunk{random, shape, 1, stream};
  const test::Graph graph{stream, [&] { chunk.step(captured, 0, {}, stream); }};
  bool same = true;
  for (std::size_t i = 0; i < 200; ++i) {
    chunk.randomize(random, stream);
    captured.replayed();
    graph.launch(stream);
    const auto said = chunk.results(stream);
    chunk.step(twin, 0, {}, stream);
    same = same && test::same_bits(said, chunk.results(stream));
  }
  CHECK(same);
  CHECK(test::dump_device(captured, true, stream) == test::dump_device(twin, true, stream));
}

TEST_CASE("KIVI on a device: random operations") {
  random_flushes<kvpolicy::float16, test::DeviceBackend<kvpolicy::float16>>(test::more_seeds(1));
  random_flushes<kvpolicy::float16, test::SlowDeviceBackend<kvpolicy::float16>>(test::more_seeds(2));
  random_flushes<test::OtherElement, test::DeviceBackend<test::OtherElement>>(test::more_seeds(3));
}
