// SPDX-License-Identifier: Apache-2.0
//
// The same text under another plan on a device: bit for bit what a device cache holds that was fed it
// in one chunk, whatever happens next; what is refused is refused in the host's words.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <string>
#include <vector>

#include "cuda/support/device_cache.hpp"
#include "support/small_cache.hpp"

using namespace kvpolicy;
using test::DeviceCache;
using test::DeviceChunk;
using test::DevicePlan;
using test::HeadSpec;
using test::Kind;

namespace {

using Full = FullCache<DenseStorage<float16>>;
using Window = SinkRecentCache<DenseStorage<float16>>;
using Codes = QuantizedResidualCache<float16, Granularity::per_token>;
using Budget = HeadBudgetCache<DenseStorage<float16>>;
using Retrieval = ChunkRetrievalCache<DenseStorage<float16>>;

constexpr ModelShape shape{2, 16, 8, 64};

// One text for every layer, so that two caches can be given the same tokens.
struct Text {
  std::vector<DeviceChunk<>> layers;

  Text(std::uint64_t seed, std::size_t tokens) {
    test::Random random{seed};
    for (std::size_t l = 0; l < shape.layers; ++l) layers.emplace_back(random, shape, tokens);
  }
  void feed(DeviceCache& cache, std::size_t first, std::size_t count) const {
    for (std::size_t l = 0; l < shape.layers; ++l) layers[l].step_part(cache, l, first, count);
    test::succeed(cudaStreamSynchronize(nullptr));
  }
  void feed_in_pieces(DeviceCache& cache, std::uint64_t seed) const {
    test::Random random{seed};
    for (std::size_t at = 0; at < layers[0].tokens;) {
      const std::size_t count = std::min(layers[0].tokens - at, 1 + test::below(random, 60));
      feed(cache, at, count);
      at += count;
    }
  }
};

std::vector<float> go_on(DeviceCache& cache, std::uint64_t seed) {
  std::vector<float> all;
  const auto step = [&](std::size_t tokens, const AttendOptions& how) {
    const auto results = test::next_step(cache, seed++, tokens, how);
    all.insert(all.end(), results.begin(), results.end());
  };
  step(1, {});
  step(3, {.read = Read::selected});
  step(1, {.read = Read::selected, .refresh_selection = true});
  step(70, {.refresh_selection = true});
  step(2, {.read = Read::selected});
  return all;
}

void check_twins(DeviceCache& one, DeviceCache& other) {
  CHECK(test::dump_device(one, false) == test::dump_device(other, false));
  const std::size_t tokens = one.tokens();
  CHECK(test::same_bits(go_on(one, 7), go_on(other, 7)));
  CHECK(test::dump_device(one, false) == test::dump_device(other, false));
  const std::size_t back = std::max(tokens, one.commit_point());
  one.truncate(back);
  other.truncate(back);
  CHECK(test::same_bits(go_on(one, 8), go_on(other, 8)));
  one.compress();
  other.compress();
  CHECK(test::dump_device(one, false) == test::dump_device(other, false));
  CHECK(test::same_bits(go_on(one, 9), go_on(other, 9)));
}

template <class Act>
std::string refusal(Act act) {
  return test::thrown<Error>(act);
}

}  // namespace

TEST_CASE("fork_as on a device: every policy takes the rows as if it had been fed them in one chunk") {
  const test::SmallDevice device;
  for (const bool slow : {false, true}) {
    for (const std::size_t max_rollback : std::initializer_list<std::size_t>{0, 70}) {
      for (const std::size_t tokens : std::initializer_list<std::size_t>{0, 1, 131}) {
        if (slow == (max_rollback == 0) && tokens < 100) continue;
        CAPTURE(slow);
        CAPTURE(max_rollback);
        CAPTURE(tokens);
        test::TwoDeviceMemories memory;
        {
          gpu::CacheOptions options{.max_rollback = max_rollback, .memory = &memory, .latest_rows = 0};
          if (slow) options.slow_memory = &memory.slow;
          const Text text{tokens + 1, tokens};
          DeviceCache source{DevicePlan{shape}, options};
          text.feed_in_pieces(source, 3);
          const auto before = test::dump_device(source);
          const DevicePlan plan = test::mixed_device_plan(shape);
          DeviceCache forked = source.fork_as(plan);
          CHECK(forked.plan() == plan);

          DeviceCache fed{plan, options, nullptr, source.engine()};
          fed.reserve(tokens);
          if (tokens > 0) text.feed(fed, 0, tokens);
          CHECK(forked.bytes() == fed.bytes());
          check_twins(forked, fed);
          CHECK(test::dump_device(source) == before);
        }
        CHECK(memory.live_bytes() == 0);
        CHECK(memory.faults() == 0);
      }
    }
  }
}

TEST_CASE("fork_as on a device: heads that still hold everything give their rows") {
  const test::SmallDevice device;
  DevicePlan plan{shape, Budget::Config{.budget = 20}};
  for (std::size_t l = 0; l < shape.layers; ++l) {
    plan.set(l, 1, Retrieval::Config{.budget = 16});
    plan.set(l, 2, Window::Config{.sinks = 3, .recent = 97});  // as many as there are
    plan.set(l, 3, Window::Config{.sinks = 200, .recent = 1});
    plan.set(l, 4, Codes::Config{.storage = {.residual = 100}});  // none has left the residual
  }
  const Text text{1, 100};
  DeviceCache source{plan, {.max_rollback = 3}};
  text.feed_in_pieces(source, 2);
  const DevicePlan other = test::mixed_device_plan(shape);
  DeviceCache forked = source.fork_as(other);
  DeviceCache fed{other, {.max_rollback = 3}};
  text.feed(fed, 0, 100);
  check_twins(forked, fed);
}

TEST_CASE("fork_as on a device: heads that stay as they are share pages, packed and evicted rows too") {
  const test::SmallDevice device;
  const DevicePlan plan = test::mixed_device_plan(shape);
  const Text text{5, 180};
  DeviceCache source{plan, {.max_rollback = 4}};
  text.feed_in_pieces(source, 2);
  source.compress();
  test::feed_device(source, 3, {9}, {.read = Read::selected});
  DeviceCache same = source.fork_as(plan);
  DeviceCache fork = source.fork();
  CHECK(same.shared_bytes() > 0);
  CHECK(same.shared_bytes() == fork.shared_bytes());
  CHECK(same.bytes() == fork.bytes());
  check_twins(same, fork);
}

TEST_CASE("fork_as on a device: a pending tree comes along") {
  const test::SmallDevice device;
  TokenTree tree;
  for (const std::size_t parent : {TokenTree::text, std::size_t{0}, std::size_t{0}, TokenTree::text}) {
    tree.add(parent);
  }
  const DevicePlan plan = test::mixed_device_plan(shape);
  const Text text{5, 40};
  DeviceCache source{DevicePlan{shape}, {.max_rollback = 6}};
  DeviceCache fed{plan, {.max_rollback = 6}};
  text.feed(source, 0, 40);
  text.feed(fed, 0, 40);
  const Text nodes{3, tree.size()};
  for (DeviceCache* cache : {&source, &fed}) {
    for (std::size_t l = 0; l < shape.layers; ++l) nodes.layers[l].step(*cache, l, {.tree = &tree});
  }
  DeviceCache forked = source.fork_as(plan);
  const std::vector<std::size_t> path{0, 2};
  forked.accept(path);
  fed.accept(path);
  CHECK(test::dump_device(forked, false) == test::dump_device(fed, false));
  CHECK(test::same_bits(go_on(forked, 7), go_on(fed, 7)));
}

TEST_CASE("fork_as on a device: a compression begins where the plan's is due, once its queries are known") {
  const test::SmallDevice device;
  const DevicePlan often{
      shape, Budget::Config{.budget = 10, .compress_every = 5, .scorer = {.observation_window = 4}}};
  DevicePlan wide{shape,
                  Budget::Config{.budget = 200, .compress_every = 5, .scorer = {.observation_window = 4}}};
  const Text text{5, 60};
  DeviceCache source{wide};
  text.feed_in_pieces(source, 2);
  DeviceCache forked = source.fork_as(often);
  DeviceCache fed{often};
  text.feed(fed, 0, 60);
  CHECK(forked.rows(0, 0).positions.size() == 14);
  CHECK(test::dump_device(forked, false) == test::dump_device(fed, false));

  DeviceCache without{DevicePlan{shape}};
  text.feed_in_pieces(without, 2);
  DeviceCache later =
      without.fork_as(DevicePlan{shape, Budget::Config{.budget = 20, .scorer = {.observation_window = 8}}});
  CHECK(refusal([&] { later.compress(); }).find("of the latest 8 tokens not all queries are known, 0") !=
        std::string::npos);
}

TEST_CASE("fork_as on a device: refuses rows that are gone or quantised in the host's words") {
  const test::SmallDevice device;
  DevicePlan plan{shape};
  plan.set(0, 3, Window::Config{.sinks = 2, .recent = 20});
  plan.set(1, 5, Codes::Config{.storage = {.residual = 10}});
  plan.set(1, 7, Budget::Config{.budget = 20});
  const Text text{5, 90};
  DeviceCache source{plan, {.max_rollback = 3}};
  text.feed_in_pieces(source, 2);
  source.compress();
  KvCache<float16> host{plan, {.max_rollback = 3}};
  test::Random random{1};
  test::feed(host, random, {50, 40});
  host.compress();
  const auto before = test::dump_device(source);
  std::vector<DevicePlan> others(4, plan);
  others[0].set(0, 3, Window::Config{.sinks = 2, .recent = 19});
  others[1].set(1, 5, Full::Config{});
  others[2].set(1, 7, Budget::Config{.budget = 21});
  others[3] = DevicePlan{{2, 24, 12, 64}};
  for (const DevicePlan& other : others) {
    const std::string said = refusal([&] { (void)source.fork_as(other); });
    CHECK(!said.empty());
    CHECK(said == "gpu::" + refusal([&] { (void)host.fork_as(other); }));
    CHECK_THROWS_AS((void)source.fork_as(other), ConfigError);
  }
  CHECK(test::dump_device(source) == before);
}

#if !defined(__CUDACC__)
TEST_CASE("fork_as on a device: without memory nothing has happened") {
  const test::SmallDevice device;
  test::TwoDeviceMemories memory;
  {
    const gpu::CacheOptions options{.max_rollback = 2, .memory = &memory, .slow_memory = &memory.slow};
    const Text text{5, 90};
    DeviceCache source{DevicePlan{shape}, options};
    text.feed_in_pieces(source, 2);
    const auto before = test::dump_device(source);
    const std::size_t live = memory.live_bytes();
    std::size_t failures = 0;
    for (test::CountingDeviceMemory* one :
         std::initializer_list<test::CountingDeviceMemory*>{&memory, &memory.slow}) {
      for (std::size_t i = 0;; i += 13) {
        one->fail_after(i);
        const bool failed = !test::thrown<std::bad_alloc>([&] {
                               (void)source.fork_as(test::mixed_device_plan(shape));
                             }).empty();
        one->fail_after(test::never);
        if (!failed) break;
        ++failures;
        CHECK(memory.live_bytes() == live);
      }
    }
    CHECK(failures > 5);
    CHECK(test::dump_device(source) == before);
  }
  CHECK(memory.faults() == 0);
}
#endif
