// SPDX-License-Identifier: Apache-2.0
//
// What slow memory costs and saves: which bytes lie where, what a read touches, what a graph may hold.
#include <doctest/doctest.h>

#include <cstddef>
#include <initializer_list>
#include <string>
#include <vector>

#include "cuda/support/slow_twins.hpp"

using namespace kvpolicy;
using test::contains;
using test::DeviceCache;
using test::DeviceChunk;
using test::DevicePlan;
using test::Kind;
using test::SlowTwins;
using test::thrown;

namespace {

constexpr AttendOptions selecting{.read = Read::selected};
constexpr AttendOptions choosing_after{.refresh_selection = true};

// Keeps every row exactly, as FullCache does, and calls the first ones sinks.
class WithSinks {
 public:
  using E = float16;
  using element_type = E;
  struct Config {
    using policy_type = WithSinks;
    std::size_t sinks = 4;
    friend bool operator==(const Config&, const Config&) = default;
  };
  WithSinks(const Config&, const StorageContext& context) : rows_{{}, context} {}
  static HeadRule rule(const Config& config, std::size_t /*head_dim*/) { return {.sinks = config.sinks}; }

  void reserve(std::size_t rows) { rows_.reserve(rows); }
  void release_unused() noexcept { rows_.release_unused(); }
  void commit(const Segment& rows) noexcept { rows_.append(rows); }
  void segments(const ReadRequest&, SegmentList& out) const { rows_.show(0, rows_.end(), {}, out); }
  std::size_t rows() const { return rows_.end(); }
  std::size_t bytes() const { return rows_.bytes(); }
  std::size_t shared_bytes() const { return rows_.shared_bytes(); }

 private:
  DenseStorage<E> rows_;
};

}  // namespace

TEST_CASE("bytes lie where they should, and are known before") {
  const test::SmallDevice device;
  const ModelShape shape{2, 11, 11, 64};
  test::TwoDeviceMemories memory;
  gpu::CacheOptions options;
  options.max_rollback = 20;
  options.latest_rows = 100;
  options.memory = &memory;
  options.slow_memory = &memory.slow;
  const DevicePlan plan = test::plan_with(shape, test::slow_heads());
  const auto check = [&](const DeviceCache& cache, std::size_t tokens) {
    CHECK(cache.bytes() == gpu::memory_of(plan, tokens, options).total());
    CHECK(cache.slow_bytes() == gpu::memory_of(plan, tokens, options).slow);
    CHECK(memory.slow.live_bytes() == cache.slow_bytes());
    CHECK(memory.live_bytes() == cache.bytes() + cache.overhead_bytes() + cache.engine()->workspace_bytes());
  };
  DeviceCache cache{plan, options};
  check(cache, 0);
  for (const std::size_t tokens : std::initializer_list<std::size_t>{1, 64, 65, 700, 5000}) {
    cache.reserve(tokens);
    check(cache, tokens);
  }
  // All but 2 of 11 heads are slow: of the 5000 rows of a dense one only the latest and the chosen
  // are on the device, and a summary for each chunk.
  constexpr std::size_t row_bytes = 2 * 64 * 2;
  const std::size_t dense = 79 * 64 * row_bytes;
  CHECK(cache.slow_bytes() >= 2 * 3 * dense);
  options.slow_memory = nullptr;
  const std::size_t near = gpu::memory_of(plan, 5000, options).total();
  CHECK(gpu::memory_of(plan, 5000, options).slow == 0);
  CHECK(cache.bytes() - cache.slow_bytes() < near - cache.slow_bytes() + 2 * 9 * 8 * 64 * row_bytes);
  // Two buffers for the rows of a layer.
  CHECK(cache.engine()->staging_bytes() > cache.slow_bytes());
  CHECK(cache.engine()->staging_bytes() < cache.slow_bytes() + cache.slow_bytes() / 8);

  // With max_tokens no room for more chosen rows than there can be rows.
  options.slow_memory = &memory.slow;
  const ModelShape one{1, 1, 1, 64};
  const DevicePlan wide = test::plan_with(one, {{.kind = Kind::retrieval, .budget = 1 << 16, .chunk = 8}});
  options.max_tokens = 640;
  CHECK(gpu::memory_of(wide, 0, options).total() == (2 + 1 + 10) * 64 * row_bytes);
}

TEST_CASE("heads whose first rows stay exact have their codes in slow memory") {
  const test::SmallDevice device;
  // What int4, int8, int2 and int3 mean (io/low_bits.hpp), and a number of sinks that fills no page.
  const std::vector<test::HeadSpec> heads{
      {.sinks = 4, .bits = 4, .key_group = 64, .value_group = 64, .residual = 128, .per_channel = true},
      {.sinks = 4, .bits = 8, .key_group = 64, .value_group = 64, .residual = 128},
      {.sinks = 4, .bits = 2, .key_group = 32, .value_group = 32, .residual = 128, .per_channel = true},
      {.sinks = 4, .bits = 3, .key_group = 64, .value_group = 64, .residual = 128, .per_channel = true},
      {.sinks = 35, .bits = 4, .key_bits = 8, .residual = 20}};
  for (const test::HeadSpec& head : heads) {
    CAPTURE(head.bits);
    CAPTURE(head.sinks);
    gpu::CacheOptions options;
    options.latest_rows = 0;
    const ModelShape shape{3, 2, 2, 64};  // of three layers one is always on its way
    const DevicePlan plan = test::plan_with(shape, {head});
    const test::Stream stream;
    SlowTwins twins{plan, options, stream};
    test::Random random{head.sinks + head.bits};
    constexpr std::size_t tokens = 1100;
    REQUIRE(twins.step(random, tokens, {}));
    CHECK(twins.step(random, 1, {}));
    // Blocks of 64 rows besides the sinks and the residual, of a key and a value each.
    const std::size_t packed = (tokens + 1 - head.sinks - head.residual) / 64 * 64;
    const std::size_t codes = 6 * packed * 64 * (head.bits_of(true) + head.bits_of(false)) / 8;
    CHECK(twins.slow().slow_bytes() >= codes);
    CHECK(twins.slow().slow_bytes() < 2 * codes);
    CHECK(twins.memory().slow.live_bytes() == twins.slow().slow_bytes());
    CHECK(twins.near().slow_bytes() == 0);
    // They are read from there: a read of numbers that are none says so.
    twins.check_rows();
    twins.scribble();
    CHECK(!twins.step(random, 1, {}));

    options.slow_memory = &twins.memory().slow;
    const MemoryEstimate foreseen = gpu::memory_of(plan, 1 << 16, options);
    CHECK(foreseen.slow >=
          std::size_t{6} * ((1 << 16) - 256) * 64 * (head.bits_of(true) + head.bits_of(false)) / 8);
    options.slow_memory = nullptr;
    const std::size_t near = gpu::memory_of(plan, 1 << 16, options).total();
    CHECK(foreseen.total() - foreseen.slow < near / 8);
  }
}

TEST_CASE("a policy of one's own that keeps every row exactly may speak of sinks") {
  const test::SmallDevice device;
  const test::Stream stream;
  constexpr ModelShape shape{3, 2, 2, 64};
  SlowTwins twins{DevicePlan{shape, WithSinks::Config{.sinks = 5}}, {.latest_rows = 0}, stream};
  test::Random random{2};
  REQUIRE(twins.step(random, 300, {}));
  CHECK(twins.step(random, 1, {}));
  CHECK(twins.slow().slow_bytes() >= std::size_t{6} * 301 * 2 * 64 * 2);
  twins.check_rows();
  twins.scribble();
  CHECK(!twins.step(random, 1, {}));
}

TEST_CASE("chunks after sinks are refused in slow memory") {
  test::CountingDeviceMemory memory;
  HeadRule rule{.sinks = 4,
                .key_encoding = Encoding::uint4,
                .value_encoding = Encoding::uint4,
                .key_group = 64,
                .value_group = 64,
                .chunk = 16,
                .chosen_rows = 32};
  CHECK_NOTHROW(gpu::check_pages(rule, {}, 128));
  const gpu::CacheOptions options{.slow_memory = &memory};
  CHECK(contains(thrown<ConfigError>([&] { gpu::check_pages(rule, options, 128); }), "has 4 sinks"));
  rule.sinks = 0;
  CHECK_NOTHROW(gpu::check_pages(rule, options, 128));
}

TEST_CASE("a text that grows row by row seldom asks for staging") {
  const test::SmallDevice device;
  test::TwoDeviceMemories memory;
  DeviceCache cache{test::plan_with({1, 1, 1, 64}, {{}}), {.memory = &memory, .slow_memory = &memory.slow}};
  std::size_t changes = 0;
  std::size_t before = 0;
  for (std::size_t tokens = 64; tokens <= 64 * 100; tokens += 64) {
    cache.reserve(tokens);
    changes += cache.engine()->staging_bytes() != before ? 1 : 0;
    before = cache.engine()->staging_bytes();
  }
  CHECK(changes <= 20);
}

#if !defined(__CUDACC__)  // there a copy may wait for the host that spoils its source

TEST_CASE("a selected read touches nothing slow") {
  const test::SmallDevice device;
  const test::Stream stream;
  for (const std::size_t max_rollback : std::initializer_list<std::size_t>{0, 9}) {
    gpu::CacheOptions options;
    options.max_rollback = max_rollback;
    options.latest_rows = 128;
    const ModelShape shape{2, 10, 5, 64};
    SlowTwins twins{test::plan_with(shape, test::selecting_heads()), options, stream};
    test::Random random{3};
    REQUIRE(twins.step(random, 200, {}));
    REQUIRE(twins.step(random, 1, choosing_after));
    REQUIRE(twins.step(random, 1, selecting));  // gathers
    // From here on whatever is read from there is no number. Chunks that were exact when they were
    // chosen are packed on the way.
    bool equal = true;
    for (const std::size_t tokens : std::initializer_list<std::size_t>{1, 3, 1, 40, 1, 24, 30, 1}) {
      twins.scribble();
      equal = twins.step(random, tokens, selecting) && equal;
    }
    CHECK(equal);
  }
}

TEST_CASE("what is staged already is not copied again") {
  const test::SmallDevice device;
  const test::Stream stream;
  for (const std::size_t layers : std::initializer_list<std::size_t>{1, 2, 3}) {
    CAPTURE(layers);
    SlowTwins twins{test::plan_with({layers, 3, 3, 64}, test::slow_heads()), {.latest_rows = 0}, stream};
    test::Random random{layers};
    twins.both([&](DeviceCache& cache) { cache.reserve(600, stream); });
    REQUIRE(twins.step(random, 270, {}));
    REQUIRE(twins.step(random, 1, {}));
    REQUIRE(twins.step(random, 1, {}));
    twins.scribble();
    // Of three layers one is always on its way.
    CHECK(twins.step(random, 1, {}) == (layers <= 2));
  }
}

TEST_CASE("the next layer's rows are on their way before it is called") {
  const test::SmallDevice device;
  const test::Stream stream;
  SlowTwins twins{test::plan_with({3, 2, 2, 64}, test::slow_heads()), {.latest_rows = 0}, stream};
  test::Random random{5};
  REQUIRE(twins.step(random, 270, {}));
  test::Random same = random;
  const DeviceChunk<> chunk{random, {3, 2, 2, 64}, 1, stream};
  const DeviceChunk<> other{same, {3, 2, 2, 64}, 1, stream};
  // Layer by layer: all of slow memory is spoilt after the call of layer 0, and layer 1 does not
  // notice; layer 2, whose rows only come during the call of layer 1, does.
  for (const std::size_t l : std::initializer_list<std::size_t>{0, 1, 2}) {
    chunk.step(twins.near(), l, {}, stream);
    other.step(twins.slow(), l, {}, stream);
    CHECK(test::same_bits(chunk.results(stream), other.results(stream)) == (l < 2));
    if (l == 0) twins.scribble();
  }
}

TEST_CASE("captured steps with slow memory: selected reads, whatever the text grows to") {
  const test::SmallDevice device;
  const test::Stream stream;
  gpu::CacheOptions options;
  options.max_rollback = 5;
  options.latest_rows = 70;
  const ModelShape shape{2, 5, 5, 64};
  SlowTwins twins{test::plan_with(shape, test::selecting_heads()), options, stream};
  test::Random random{7};
  REQUIRE(twins.step(random, 150, choosing_after));
  twins.both([&](DeviceCache& cache) {
    cache.compress(stream);
    cache.reserve(500, stream);
  });
  std::vector<DeviceChunk<>> inputs;
  std::vector<DeviceChunk<>> others;
  for (std::size_t l = 0; l < shape.layers; ++l) {
    inputs.emplace_back(shape, 2);
    others.emplace_back(shape, 2);
  }
  const auto captured = [&](const AttendOptions& how) {
    return test::Graph{stream, [&] {
                         for (std::size_t l = 0; l < shape.layers; ++l)
                           inputs[l].step(twins.slow(), l, how, stream);
                       }};
  };
  const AttendOptions refreshing{.read = Read::selected, .refresh_selection = true};
  const test::Graph plain = captured(selecting);
  const test::Graph refresh = captured(refreshing);
  bool equal = true;
  for (int i = 0; i < 40; ++i) {
    const bool refreshes = i % 11 == 7;
    for (std::size_t l = 0; l < shape.layers; ++l) {
      test::Random same = random;
      inputs[l].randomize(random, stream);
      others[l].randomize(same, stream);
    }
    twins.slow().replayed(1, 2, refreshes);
    (refreshes ? refresh : plain).launch(stream);
    for (std::size_t l = 0; l < shape.layers; ++l) {
      others[l].step(twins.near(), l, refreshes ? refreshing : selecting, stream);
      equal = equal && test::same_bits(inputs[l].results(stream), others[l].results(stream));
    }
    if (i % 9 == 5) {
      const std::size_t back = twins.near().tokens() - 3;
      twins.both([&](DeviceCache& cache) { cache.truncate(back, stream); });
    }
    if (i % 20 == 13) equal = twins.step(random, 1, {}) && equal;  // all rows, between the graphs
  }
  CHECK(equal);
  twins.check_rows();
}

TEST_CASE("what needs staging is refused in a graph") {
  const test::SmallDevice device;
  const test::Stream stream;
  test::TwoDeviceMemories memory;
  const ModelShape shape{1, 2, 2, 64};
  const auto refused = [&](const std::vector<test::HeadSpec>& heads, const AttendOptions& how) {
    DeviceCache cache{
        test::plan_with(shape, heads), {.memory = &memory, .slow_memory = &memory.slow}, stream};
    test::feed_device(cache, 1, {70}, choosing_after, stream);
    cache.reserve(100, stream);
    const DeviceChunk<> chunk{shape, 1};
    std::string what;
    const test::Graph graph{stream,
                            [&] { what = thrown<CaptureError>([&] { chunk.step(cache, 0, how, stream); }); }};
    return what;
  };
  const test::HeadSpec retrieval{.kind = Kind::retrieval, .budget = 32, .chunk = 8};
  CHECK(contains(refused({retrieval}, {}), "slow memory"));
  CHECK(contains(refused({retrieval, {}}, selecting), "slow memory"));
  CHECK(refused({retrieval}, selecting).empty());
  CHECK(refused({retrieval, {.kind = Kind::window, .sinks = 2, .recent = 9}}, selecting).empty());
}

#endif

TEST_CASE("options of slow memory that do not work") {
  gpu::CacheOptions options;
  options.latest_rows = (std::size_t{1} << 20) + 1;
  CHECK(contains(thrown<ConfigError>([&] { options.validate(); }), "latest_rows"));
  options.latest_rows = 0;
  CHECK_NOTHROW(options.validate());
}
