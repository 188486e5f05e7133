// SPDX-License-Identifier: Apache-2.0
//
// What holds between two device caches, or between a cache and its plan: the cut of a prompt does
// not matter, nor how heads are launched, nor when the device gets to it; a rollback leaves no
// trace, a fork is independent, the bytes are foretold.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <vector>

#include "cuda/support/device_cache.hpp"

using namespace kvpolicy;
using test::DeviceCache;
using test::DeviceChunk;
using test::DevicePlan;
using test::HeadSpec;
using test::Kind;

namespace {

using E = float16;
constexpr double rounding = test::DeviceBackend<kvpolicy::float16>::out_error;

DevicePlan plan_of(const ModelShape& shape, const std::vector<HeadSpec>& heads) {
  return test::plan_of<float16>(shape, heads);
}

// The heads in the middle have settings of their own, the last two the same.
std::vector<HeadSpec> dense_heads() {
  return {{},
          {.kind = Kind::window, .sinks = 4, .recent = 37},
          {.kind = Kind::window, .sinks = 5, .recent = 64, .in_cache = true},
          {.kind = Kind::budget, .budget = 30, .window = 8},
          {},
          {}};
}

}  // namespace

TEST_CASE("the cut into chunks does not matter to dense heads") {
  const test::SmallDevice device;
  const ModelShape shape{1, 12, 6, 64};
  const DevicePlan plan = plan_of(shape, dense_heads());
  constexpr std::size_t tokens = 150;
  test::Random random{1};
  const DeviceChunk<> text{random, shape, tokens};
  DeviceCache whole{plan};
  text.step(whole, 0);
  const auto expected = text.results();
  const auto rows = test::dump_device(whole, false);
  for (const std::size_t max_rollback : std::initializer_list<std::size_t>{0, 200}) {
    for (const std::vector<std::size_t>& sizes :
         {std::vector<std::size_t>{1, 2, 4, 5, 8}, {64}, {65, 63, 2}, {149}}) {
      DeviceCache cut{plan, {.max_rollback = max_rollback}};
      for (std::size_t done = 0, i = 0; done < tokens; ++i) {
        const std::size_t count = std::min(sizes[i % sizes.size()], tokens - done);
        text.step_part(cut, 0, done, count);
        done += count;
      }
      CHECK(test::largest_difference(text.results(), expected) <= rounding);
      cut.commit();
      CHECK(test::dump_device(cut, false) == rows);
    }
  }
}

TEST_CASE("decode and prefill kernels agree where one takes over from the other") {
  const test::SmallDevice device;
  for (const std::size_t group : std::initializer_list<std::size_t>{1, 2, 4, 8, 16}) {
    CAPTURE(group);
    const ModelShape shape{1, group * 3, 3, 64};
    // An int4 head has the packed kernels; its rows are the same for both as long as none is
    // quantised between the calls that are compared.
    const DevicePlan plan =
        plan_of(shape, {{}, {.bits = 4, .residual = 5}, {.kind = Kind::window, .sinks = 3, .recent = 20}});
    DeviceCache cache{plan, {.max_rollback = 24}};
    test::feed_device(cache, group, {100});
    test::Random random{7};
    // Queries of one call, or one by one: 8, 9, 16 and 17 columns are as many kernels' edges.
    for (const std::size_t columns : std::initializer_list<std::size_t>{8, 9, 16, 17, 18}) {
      const std::size_t queries = std::max<std::size_t>(1, columns / group);
      const DeviceChunk<> calls{random, shape, queries};
      for (std::size_t i = 0; i < queries; ++i) calls.step_part(cache, 0, i, 1);
      const auto single = calls.results();
      cache.truncate(100);
      calls.step(cache, 0);
      CHECK(test::largest_difference(calls.results(), single) <= rounding);
      cache.truncate(100);
    }
  }
}

TEST_CASE("one launch for all heads says what separate launches say") {
  const test::SmallDevice device;
  const ModelShape shape{1, 16, 8, 64};
  const DevicePlan plan = test::mixed_device_plan(shape);
  DeviceCache joint{plan, {.max_append = 9, .launches = gpu::Launches::joint}};
  DeviceCache separate{plan, {.max_append = 9, .launches = gpu::Launches::separate}};
  std::uint64_t seed = 1;
  for (const std::size_t tokens : std::initializer_list<std::size_t>{90, 1, 9, 1, 30, 2, 1}) {
    const AttendOptions how{.softcap = seed % 2 == 0 ? 0.0F : 20.0F,
                            .read = seed % 3 == 0   ? Read::selected
                                    : seed % 3 == 1 ? Read::upper_half
                                                    : Read::all,
                            .refresh_selection = seed % 3 == 0};
    const auto one = test::next_step(joint, seed, tokens, how);
    const auto many = test::next_step(separate, seed, tokens, how);
    ++seed;
    // Rows are split among blocks in another way: equal to rounding.
    CHECK(test::largest_difference(one, many) <= rounding);
    CHECK(test::dump_device(joint) == test::dump_device(separate));  // but what is kept is kept
  }
  joint.compress();
  separate.compress();
  CHECK(test::dump_device(joint) == test::dump_device(separate));
}

TEST_CASE("rollback: bit for bit a cache of the same commit point that never saw the rows") {
  const test::SmallDevice device;
  const ModelShape shape{1, 16, 8, 64};
  for (const std::size_t dropped : std::initializer_list<std::size_t>{1, 5, 16}) {
    for (const Read read : {Read::all, Read::selected, Read::upper_half}) {
      CAPTURE(dropped);
      DeviceCache run{test::mixed_device_plan(shape), {.max_rollback = 16}};
      DeviceCache control{test::mixed_device_plan(shape), {.max_rollback = 16 - dropped}};
      for (DeviceCache* each : {&run, &control}) {
        test::feed_device(*each, 1, {100, 1, 7});
        each->commit();
        test::feed_device(*each, 2, {1}, {.refresh_selection = true});
        each->compress();
        test::feed_device(*each, 3, {3, 18});
      }
      // The dropped steps read, choose and are observed, too.
      test::feed_device(run, 4, {dropped - dropped / 2}, {.read = Read::selected, .refresh_selection = true});
      if (dropped > 1) test::feed_device(run, 5, {dropped / 2}, {.scale = 0.125F, .refresh_selection = true});
      run.truncate(130);
      REQUIRE(run.commit_point() == control.commit_point());
      CHECK(test::dump_device(run, false) == test::dump_device(control, false));
      DeviceCache a = run.fork();
      DeviceCache b = control.fork();
      CHECK(test::same_bits(test::next_step(a, 6, 3, {.read = read}),
                            test::next_step(b, 6, 3, {.read = read})));
      run.compress();
      control.compress();
      CHECK(test::dump_device(run, false) == test::dump_device(control, false));
    }
  }
}

TEST_CASE("rollback: again and again, over the same rows") {
  const test::SmallDevice device;
  const ModelShape shape{1, 8, 8, 64};
  DeviceCache run{test::mixed_device_plan(shape), {.max_rollback = 8}};
  DeviceCache control{test::mixed_device_plan(shape), {.max_rollback = 8}};
  for (DeviceCache* each : {&run, &control}) {
    test::feed_device(*each, 1, {125}, {.refresh_selection = true});
    each->commit();
    each->reserve(140);
  }
  for (std::uint64_t round = 0; round < 12; ++round) {
    test::feed_device(run, 100 + round, {static_cast<std::size_t>(1 + round % 8)}, {.read = Read::selected});
    run.truncate(125);
  }
  CHECK(test::dump_device(run) == test::dump_device(control));
  CHECK(test::same_bits(test::next_step(run, 6, 9), test::next_step(control, 6, 9)));
}

TEST_CASE("forks go their own ways, the original does not notice") {
  const test::SmallDevice device;
  const ModelShape shape{1, 8, 8, 64};
  test::CountingDeviceMemory memory;
  for (const std::size_t tokens : std::initializer_list<std::size_t>{0, 5, 64, 150}) {
    for (const std::size_t max_rollback : std::initializer_list<std::size_t>{0, 7}) {
      CAPTURE(tokens);
      const gpu::CacheOptions options{.max_rollback = max_rollback, .memory = &memory};
      auto engine = std::make_shared<gpu::Engine<E>>(shape, &memory);
      DeviceCache run{test::mixed_device_plan(shape), options, nullptr, engine};
      DeviceCache control{test::mixed_device_plan(shape), options, nullptr, engine};
      if (tokens > 0) {
        test::feed_device(run, 1, {tokens}, {.refresh_selection = true});
        test::feed_device(control, 1, {tokens}, {.refresh_selection = true});
      }
      const auto before = test::dump_device(run);
      const std::size_t live = memory.live_bytes();
      DeviceCache fork = run.fork();
      CHECK(test::dump_device(fork, false) == test::dump_device(run, false));
      CHECK(fork.shared_bytes() == run.shared_bytes());
      CHECK((run.shared_bytes() > 0) == (tokens >= 64 + max_rollback));  // a full page of the full head
      CHECK(memory.live_bytes() == live + fork.bytes() + fork.overhead_bytes() - fork.shared_bytes());
      test::feed_device(fork, 9, {1, 13, 70});
      fork.compress();
      CHECK(test::dump_device(run) == before);
      DeviceCache second = fork.fork();
      { const DeviceCache gone = std::move(fork); }
      const auto of_second = test::dump_device(second);
      CHECK(test::same_bits(test::next_step(run, 4, 20, {.read = Read::selected}),
                            test::next_step(control, 4, 20, {.read = Read::selected})));
      CHECK(test::dump_device(run) == test::dump_device(control));
      CHECK(test::dump_device(second) == of_second);
      second = std::move(run);  // what a fork shared lives on; what it had alone goes
      CHECK(second.shared_bytes() == 0);
      CHECK(test::dump_device(second) == test::dump_device(control));
      CHECK(memory.live_bytes() == engine->workspace_bytes() + second.bytes() + second.overhead_bytes() +
                                       control.bytes() + control.overhead_bytes());
    }
  }
  CHECK(memory.live_bytes() == 0);
  CHECK(memory.faults() == 0);
}

TEST_CASE("two caches on one engine do not meet") {
  const test::SmallDevice device;
  const ModelShape shape{1, 16, 8, 64};
  const DevicePlan mixed = test::mixed_device_plan(shape);
  const auto engine = std::make_shared<gpu::Engine<E>>(shape);
  DeviceCache a{mixed, {}, nullptr, engine};
  DeviceCache b{DevicePlan{shape}, {}, nullptr, engine};
  DeviceCache a_alone{mixed};
  DeviceCache b_alone{DevicePlan{shape}};
  CHECK(a.engine() == b.engine());
  CHECK(a_alone.engine() != b_alone.engine());
  for (std::uint64_t round = 0; round < 6; ++round) {
    const std::size_t tokens = round == 0 ? 66 : round;
    CHECK(test::same_bits(test::next_step(a, round, tokens), test::next_step(a_alone, round, tokens)));
    CHECK(test::same_bits(test::next_step(b, 50 + round, 2 * tokens),
                          test::next_step(b_alone, 50 + round, 2 * tokens)));
  }
  CHECK(test::dump_device(a) == test::dump_device(a_alone));
  CHECK(test::dump_device(b) == test::dump_device(b_alone));
}

#if !defined(__CUDACC__)
TEST_CASE("late devices and several streams: the same, if streams wait for each other") {
  const test::SmallDevice device;
  const ModelShape shape{1, 8, 8, 64};
  const DevicePlan plan = test::mixed_device_plan(shape);
  test::CountingDeviceMemory memory;
  const gpu::CacheOptions options{.max_rollback = 4, .max_append = 4, .memory = &memory};
  test::Random random{1};
  constexpr std::size_t steps = 12;
  std::vector<DeviceChunk<>> chunks;
  for (std::size_t i = 0; i < steps; ++i) chunks.emplace_back(random, shape, i == 0 ? 60 : 1 + i % 4 * 5);
  // All of it without looking at a result in between: the streams have everything before them.
  const auto run = [&](bool late) {
    gpu::simt::device().late = late;
    const test::Stream streams[3];
    std::vector<std::vector<float>> all;
    {
      DeviceCache cache{plan, options, streams[0]};
      std::vector<DeviceCache> forks;
      std::size_t at = 0;
      const auto go_on = [&] {  // with another stream
        streams[(at + 1) % 3].wait_for(streams[at % 3]);
        return cudaStream_t{streams[++at % 3]};
      };
      for (std::size_t i = 0; i < steps; ++i) {
        const AttendOptions how{.read = i % 2 == 0 ? Read::all : Read::selected,
                                .refresh_selection = i % 3 == 0};
        chunks[i].step(cache, 0, how, go_on());
        if (i == 3) cache.truncate(cache.tokens() - 2, go_on());
        if (i == 5) cache.reserve(cache.tokens() + 700, go_on());
        if (i == 7) cache.compress(go_on());
        if (i == 8) forks.push_back(cache.fork(go_on()));
      }
      chunks[1].step(forks[0], 0, {}, go_on());
      const cudaStream_t last = go_on();
      all.push_back(test::dump_device(cache, true, last).numbers);
      all.push_back(test::dump_device(forks[0], true, last).numbers);
      for (const DeviceChunk<>& chunk : chunks) all.push_back(chunk.results(last));
    }
    // The last stream frees it all. Whoever waits for the others only must not have freed anything
    // under it before.
    for (const test::Stream& stream : streams) stream.wait();
    gpu::simt::device().late = false;
    return all;
  };
  const auto at_once = run(false);
  const auto late = run(true);
  REQUIRE(at_once.size() == late.size());
  for (std::size_t i = 0; i < at_once.size(); ++i) CHECK(test::same_bits(at_once[i], late[i]));
  CHECK(memory.live_bytes() == 0);

  // Another stream takes over a cache that grows: what the first one asked for is still in use.
  {
    gpu::simt::device().late = true;
    const test::Stream first, second;
    DeviceCache cache{plan, options, first};
    chunks[0].step(cache, 0, {}, first);
    second.wait_for(first);
    chunks[1].step(cache, 0, {}, second);
    chunks[2].step(cache, 0, {}, second);
    cache.reserve(3000, second);  // tables move
    cache.compress(second);       // rows move
    first.wait();                 // frees what was given back on it, with `second` still to come
    chunks[3].step(cache, 0, {}, second);
    second.wait();
    gpu::simt::device().late = false;
    DeviceCache control{plan, options};
    for (int i : {0, 1, 2}) chunks[static_cast<std::size_t>(i)].step(control, 0);
    control.reserve(3000);
    control.compress();
    chunks[3].step(control, 0);
    CHECK(test::dump_device(cache, true, second) == test::dump_device(control));
  }
  CHECK(memory.live_bytes() == 0);
}
#endif

TEST_CASE("numbers that no scale can hold are counted") {
  const test::SmallDevice device;
  const ModelShape shape{1, 2, 2, 64};
  DevicePlan plan{shape};
  plan.set(0, 1,
           QuantizedResidualCache<E, Granularity::per_token>::Config{.storage = {.bits = 4, .residual = 3}});
  gpu::KvCache cache{plan};
  test::Random random{1};
  const DeviceChunk<> chunk{random, shape, 70};
  auto keys = chunk.k.download();
  const auto set = [&](std::size_t token, std::size_t head, std::size_t channel, float number) {
    keys[(token * 2 + head) * 64 + channel] = E{number};
  };
  set(3, 0, 1, std::numeric_limits<float>::infinity());  // of the dense head: nobody's business
  set(3, 1, 1, std::numeric_limits<float>::infinity());
  set(63, 1, 5, std::numeric_limits<float>::quiet_NaN());
  set(64, 1, 5, -std::numeric_limits<float>::infinity());  // not quantised yet
  chunk.k.upload(keys);
  CHECK(cache.clamped_numbers() == 0);
  chunk.step(cache, 0);
  CHECK(cache.clamped_numbers() == 2);
  const auto rows = cache.rows(0, 1);
  REQUIRE(rows.quantized[63]);
  REQUIRE(!rows.quantized[64]);
  CHECK(
      std::all_of(rows.keys.begin(), rows.keys.begin() + 64 * 64, [](float x) { return std::isfinite(x); }));
  const DeviceChunk<> more{random, shape, 64};
  more.step(cache, 0);
  CHECK(cache.clamped_numbers() == 3);
}

TEST_CASE("a plan's bytes are known before the cache is made") {
  const test::SmallDevice device;
  test::CountingDeviceMemory memory;
  test::Random random{3};
  const std::vector<HeadSpec> all = test::device_heads();
  for (int i = 0; i < 24; ++i) {
    CAPTURE(i);
    const ModelShape shape{1 + test::below(random, 3), 6, 3, 64};
    std::vector<HeadSpec> heads;
    while (heads.size() < shape.kv_head_count()) heads.push_back(test::one_of(random, all));
    gpu::CacheOptions options;
    options.page_rows = test::one_of(random, std::vector<std::size_t>{64, 128, 512});
    const bool rolls_back =
        std::none_of(heads.begin(), heads.end(), [](const HeadSpec& h) { return h.cannot_return(); });
    options.max_rollback = rolls_back ? test::below(random, 100) : 0;
    options.max_append = 1 + test::below(random, 60);
    options.memory = &memory;
    const DevicePlan plan = plan_of(shape, heads);
    DeviceCache cache{plan, options};
    CHECK(cache.bytes() == gpu::memory_of(plan, 0, options).total());
    for (std::size_t tokens = 1; tokens < 3000; tokens += 1 + test::below(random, 700)) {
      cache.reserve(tokens);
      CHECK(cache.reserved() == tokens);
      CHECK(cache.bytes() == gpu::memory_of(plan, tokens, options).total());
      CHECK(memory.live_bytes() ==
            cache.bytes() + cache.overhead_bytes() + cache.engine()->workspace_bytes());
    }
    const MemoryEstimate estimate = gpu::memory_of(plan, 1000, options);
    CHECK(estimate.tail == 0);
    CHECK((estimate.queries > 0) ==
          std::any_of(heads.begin(), heads.end(), [](const HeadSpec& h) { return h.asked() > 0; }));
  }
  // Steps make room by whole pages, and no further than max_tokens.
  const ModelShape shape{1, 8, 8, 64};
  gpu::CacheOptions options{.max_tokens = 150, .memory = &memory};
  const DevicePlan plan = test::mixed_device_plan(shape);
  DeviceCache cache{plan, options};
  for (const std::size_t tokens : std::initializer_list<std::size_t>{5, 70, 75}) {
    test::feed_device(cache, 1, {tokens});
    CHECK(cache.reserved() == std::min<std::size_t>((cache.tokens() + 63) / 64 * 64, 150));
    CHECK(cache.bytes() == gpu::memory_of(plan, cache.reserved(), options).total());
  }
  CHECK(!test::thrown<ConfigError>([&] {
           static_cast<void>(gpu::memory_of(plan, 1, {.page_rows = 16}));
         }).empty());
}

TEST_CASE("rows keep their text positions through compressions") {
  const test::SmallDevice device;
  const ModelShape shape{1, 4, 2, 64};
  for (const std::size_t bits : std::initializer_list<std::size_t>{0, 8}) {
    CAPTURE(bits);
    const DevicePlan plan = plan_of(shape, {{.kind = Kind::budget, .budget = 70, .window = 8, .bits = bits},
                                            {.kind = Kind::budget, .budget = 0, .window = 5, .kernel = 1}});
    DeviceCache cache{plan, {.max_rollback = 3}};
    std::vector<std::vector<float>> keys;  // of head 0, of each token
    test::Random random{2};
    const auto feed = [&](std::size_t tokens) {
      const DeviceChunk<> chunk{random, shape, tokens};
      chunk.step(cache, 0);
      const auto numbers = chunk.k.download();
      for (std::size_t t = 0; t < tokens; ++t) {
        std::vector<float>& row = keys.emplace_back();
        for (std::size_t c = 0; c < 64; ++c) row.push_back(static_cast<float>(numbers[t * 2 * 64 + c]));
      }
    };
    // Each row is the text's at the position it claims, ascending, the latest all there.
    const auto check_rows = [&](std::size_t count, std::size_t latest) {
      const auto rows = cache.rows(0, 0);
      REQUIRE(rows.positions.size() == count);
      double error = 0;
      bool ascending = true;
      for (std::size_t i = 0; i < count; ++i) {
        const auto position = static_cast<std::size_t>(rows.positions[i]);
        ascending = ascending && (i == 0 || rows.positions[i] > rows.positions[i - 1]);
        const auto first = rows.keys.begin() + static_cast<std::ptrdiff_t>(i * 64);
        const double one = test::largest_difference(std::vector<float>(first, first + 64), keys.at(position));
        error = one <= error ? error : one;
        if (i + latest >= count) CHECK(position == keys.size() - (count - i));
      }
      CHECK(ascending);
      CHECK(error <= (bits == 0 ? 0.0 : 0.02));
      return rows.positions;
    };
    feed(200);
    check_rows(200, 200);
    cache.compress();
    const auto once = check_rows(78, 8);
    CHECK(once[0] < 192);
    feed(61);
    const auto then = check_rows(139, 69);
    CHECK(std::equal(once.begin(), once.end(), then.begin()));
    cache.truncate(cache.tokens() - 3);
    keys.resize(keys.size() - 3);
    feed(5);
    cache.compress();
    const auto twice = check_rows(78, 8);
    // Of those that had survived before, and of the rows since.
    for (const auto position : twice) {
      CHECK((position >= 200 || std::find(once.begin(), once.end(), position) != once.end()));
    }
    CHECK(cache.rows(0, 1).positions == std::vector<std::int64_t>{258, 259, 260, 261, 262});
    const DeviceCache fork = cache.fork();
    CHECK(fork.rows(0, 0).positions == twice);
  }
}

TEST_CASE("a text of fewer tokens than compress_from stays whole") {
  const test::SmallDevice device;
  const ModelShape shape{1, 4, 4, 64};
  const DevicePlan plan = plan_of(
      shape, {{.kind = Kind::budget, .budget = 9, .window = 4, .compress_from = 75},
              {.kind = Kind::budget, .budget = 90, .window = 4, .compress_from = 75},
              {.kind = Kind::budget, .budget = 20, .window = 5, .compress_from = 75, .bits = 4},
              {.kind = Kind::budget, .budget = 6, .window = 2, .compress_every = 20, .compress_from = 75}});
  DeviceCache cache{plan};
  test::Random random{3};
  const auto feed = [&](std::size_t tokens) { DeviceChunk<>{random, shape, tokens}.step(cache, 0); };
  using Rows = std::vector<std::size_t>;
  const auto rows = [&] {
    Rows counts;
    for (std::size_t head = 0; head < 4; ++head) {
      const auto positions = cache.rows(0, head).positions;
      CHECK(std::is_sorted(positions.begin(), positions.end()));
      counts.push_back(positions.size());
    }
    return counts;
  };
  feed(70);
  CHECK(rows() == Rows(4, 70));
  cache.compress();
  CHECK(rows() == Rows(4, 70));
  feed(4);
  cache.compress();
  CHECK(rows() == Rows(4, 74));
  feed(1);
  CHECK(rows() == Rows{75, 75, 75, 8});
  cache.compress();
  CHECK(rows() == Rows{13, 75, 25, 8});
  feed(25);
  cache.compress();
  CHECK(rows() == Rows{13, 94, 25, 8});
}
