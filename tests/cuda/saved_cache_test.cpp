// SPDX-License-Identifier: Apache-2.0
//
// A file that was saved on a device opens on a device and on the host, and one of the host's on a device:
// with the same rows, bit for bit, and what goes on goes on as it would have.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <initializer_list>
#include <sstream>
#include <string>
#include <vector>

#include <kvpolicy/cuda/saved_cache.hpp>
#include <kvpolicy/kvpolicy.hpp>

#include "cuda/support/device_cache.hpp"
#include "support/small_cache.hpp"
#include "support/temporary_folder.hpp"

using namespace kvpolicy;
using ::test::DeviceCache;
using ::test::DevicePlan;
using ::test::HeadSpec;
using ::test::Kind;

namespace {

constexpr ModelShape shape{2, 16, 8, 64};

template <class Cache>
std::string saved_bytes(const Cache& cache, std::string_view tag = {}) {
  std::ostringstream out;
  save(cache, out, tag);
  return out.str();
}
template <class Cache>
void load_bytes(Cache& cache, const std::string& bytes, std::string_view tag = {}) {
  std::istringstream in{bytes};
  load(cache, in, tag);
}

// Rows that wait for their attend, that are chosen, dropped, quantised and taken back.
template <class Cache>
void live(Cache& cache, std::size_t max_rollback) {
  const auto feed = [&](std::uint64_t seed, const std::vector<std::size_t>& chunks,
                        const AttendOptions& how = {}) { ::test::feed_device(cache, seed, chunks, how); };
  feed(1, {150, 1, 1});
  feed(2, {1}, {.scale = 0.25F, .refresh_selection = true});
  cache.compress();
  feed(3, {2, 30}, {.scale = 0.25F, .softcap = 20.0F, .read = Read::selected});
  feed(4, {1, 1}, {.read = Read::selected, .refresh_selection = true});
  feed(5, {5});
  if (max_rollback > 0) cache.truncate(cache.tokens() - 1);
}

std::vector<float> go_on(DeviceCache& cache, std::size_t max_rollback) {
  std::vector<float> all;
  const auto step = [&](std::uint64_t seed, std::size_t tokens, const AttendOptions& how) {
    const auto results = ::test::next_step(cache, seed, tokens, how);
    all.insert(all.end(), results.begin(), results.end());
  };
  step(11, 1, {.read = Read::selected});
  if (max_rollback > 2) cache.truncate(cache.tokens() - 3);
  step(12, 2, {.read = Read::selected});
  step(13, 90, {.refresh_selection = true});
  cache.compress();
  step(14, 1, {});
  return all;
}

// Of one head of either cache, by position.
struct HeadRows {
  std::vector<std::int64_t> positions;
  std::vector<float> numbers;   // keys, then values, row by row
  std::vector<bool> quantized;  // the key
};
HeadRows rows_of(const DeviceCache& cache, std::size_t l, std::size_t h, Read read = Read::all) {
  const auto cached = cache.rows(l, h, read);
  HeadRows rows{cached.positions, {}, cached.quantized};
  for (std::size_t i = 0; i < cached.positions.size(); ++i) {
    for (const auto* side : {&cached.keys, &cached.values}) {
      const auto first = side->begin() + static_cast<std::ptrdiff_t>(i * shape.head_dim);
      rows.numbers.insert(rows.numbers.end(), first, first + shape.head_dim);
    }
  }
  return rows;
}
HeadRows rows_of(const KvCache<float16>& cache, std::size_t l, std::size_t h, Read read = Read::all) {
  HeadRows rows;
  std::vector<float> row(shape.head_dim);
  for (const Segment& segment : cache.segments(l, h, read)) {
    segment.for_each_run([&](const RowRun& run) {
      for (std::size_t i = run.first; i < run.first + run.rows; ++i) {
        rows.positions.push_back(segment.position_of(i));
        rows.quantized.push_back(is_quantized(segment.keys.format.encoding));
        for (const Plane* plane : {&segment.keys, &segment.values}) {
          load_row(*plane, i, row);
          rows.numbers.insert(rows.numbers.end(), row.begin(), row.end());
        }
      }
    });
  }
  return rows;
}

// The same rows, bit for bit, quantised or not.
void check_rows(const DeviceCache& device, const KvCache<float16>& host) {
  CHECK(device.tokens() == host.tokens());
  CHECK(device.commit_point() == host.commit_point());
  for (std::size_t l = 0; l < shape.layers; ++l) {
    for (std::size_t h = 0; h < shape.kv_heads; ++h) {
      for (const Read read : {Read::all, Read::selected}) {
        CAPTURE(l);
        CAPTURE(h);
        const HeadRows one = rows_of(device, l, h, read);
        const HeadRows other = rows_of(host, l, h, read);
        REQUIRE(one.positions == other.positions);
        CHECK(one.quantized == other.quantized);
        CHECK(::test::same_bits(one.numbers, other.numbers));
      }
    }
  }
}

// Whether the rows of `then` that were quantised are the same in `now`, where they are still there. With
// KIVI's flush values are quantised later than keys.
bool keeps_quantized_rows(const HeadRows& then, const HeadRows& now, bool keys_alone) {
  bool same = true;
  for (std::size_t i = 0; i < then.positions.size(); ++i) {
    const auto found = std::ranges::lower_bound(now.positions, then.positions[i]);
    if (!then.quantized[i] || found == now.positions.end() || *found != then.positions[i]) continue;
    const auto at = static_cast<std::size_t>(found - now.positions.begin());
    const std::size_t numbers = shape.head_dim * (keys_alone ? 1 : 2);
    for (std::size_t c = 0; c < numbers; ++c) {
      same = same && then.numbers[2 * shape.head_dim * i + c] == now.numbers[2 * shape.head_dim * at + c];
    }
  }
  return same;
}

// A tensor's numbers without the guards around them.
template <class To, class From>
std::vector<To> flat(const ::test::Tensor<From>& tensor) {
  std::vector<To> all;
  for (std::size_t token = 0; token < tensor.tokens(); ++token) {
    for (std::size_t head = 0; head < tensor.view().heads; ++head) {
      for (const float number : tensor.row(token, head)) all.push_back(To{number});
    }
  }
  return all;
}

}  // namespace

TEST_CASE("a device cache in a file: it goes on as it would have, and opens on the host") {
  const ::test::SmallDevice small;
  for (const bool slow : {false, true}) {
    for (const std::size_t max_rollback : std::initializer_list<std::size_t>{0, 9}) {
      CAPTURE(slow);
      CAPTURE(max_rollback);
      ::test::TwoDeviceMemories memory;
      {
        gpu::CacheOptions options{
            .max_rollback = max_rollback, .max_append = 4, .memory = &memory, .latest_rows = 0};
        if (slow) options.slow_memory = &memory.slow;
        const DevicePlan plan = ::test::mixed_device_plan(shape);
        DeviceCache cache{plan, options};
        live(cache, max_rollback);
        const auto before = ::test::dump_device(cache);
        const std::string bytes = saved_bytes(cache, "tag");
        CHECK(::test::dump_device(cache) == before);

        CacheOptions host_options;
        host_options.max_rollback = max_rollback;
        host_options.max_append = 4;
        KvCache<float16> host{plan, host_options};
        load_bytes(host, bytes, "tag");
        check_rows(cache, host);
        CHECK(saved_bytes(host, "tag") == bytes);

        DeviceCache loaded{plan, options, nullptr, cache.engine()};
        load_bytes(loaded, bytes, "tag");
        CHECK(::test::dump_device(loaded, false) == ::test::dump_device(cache, false));
        CHECK(saved_bytes(loaded, "tag") == bytes);
        CHECK(::test::same_bits(go_on(loaded, max_rollback), go_on(cache, max_rollback)));
        CHECK(::test::dump_device(loaded, false) == ::test::dump_device(cache, false));
      }
      CHECK(memory.live_bytes() == 0);
      CHECK(memory.faults() == 0);
    }
  }
}

TEST_CASE("a file of the host's opens on a device with the same rows") {
  const ::test::SmallDevice small;
  for (const std::size_t max_rollback : std::initializer_list<std::size_t>{0, 9}) {
    for (const std::size_t tokens : std::initializer_list<std::size_t>{0, 1, 64, 197}) {
      CAPTURE(max_rollback);
      CAPTURE(tokens);
      const DevicePlan plan = ::test::mixed_device_plan(shape);
      CacheOptions options;
      options.max_rollback = max_rollback;
      KvCache<float16> host{plan, options};
      ::test::Random random{tokens};
      ::test::feed(host, random, {tokens / 2, tokens - tokens / 2, 1}, {.scale = 0.25F});
      if (tokens > 100) {
        host.compress();
        ::test::feed(host, random, {7, 1}, {.read = Read::selected});
        ::test::feed(host, random, {2}, {.read = Read::selected, .refresh_selection = true});
      }
      const std::string bytes = saved_bytes(host);
      DeviceCache device{plan, {.max_rollback = max_rollback}};
      load_bytes(device, bytes);
      check_rows(device, host);
      // What follows is near, on the device and back on the host.
      KvCache<float16> back{plan, options};
      load_bytes(back, saved_bytes(device));
      check_rows(device, back);
      ::test::Random next{5};
      const ::test::Chunk<float16> one{next, shape, 1};
      ::test::Tensor<float> out{1, shape.q_heads, shape.head_dim};
      host.step(0, one.q.view(), one.k.view(), one.v.view(), out.view());
      const ::test::DeviceChunk<> other{shape, 1};
      other.q.upload(flat<float16>(one.q));
      other.k.upload(flat<float16>(one.k));
      other.v.upload(flat<float16>(one.v));
      other.step(device, 0);
      const std::vector<float> expected = flat<float>(out);
      std::vector<float> said = other.results();
      said.resize(expected.size());
      CHECK(::test::largest_difference(said, expected) <= ::test::DeviceBackend<float16>::out_error);
    }
  }
}

TEST_CASE("a file of the host's is the device's own, byte for byte") {
  const ::test::SmallDevice small;
  constexpr ModelShape wide{1, 40, 20, 64};
  const DevicePlan plan = ::test::plan_of<float16>(
      wide, std::vector<HeadSpec>{
                {},
                {.kind = Kind::window, .sinks = 4, .recent = 37},
                {.kind = Kind::window, .sinks = 300, .recent = 1, .prefill_chunk_mask = true},
                {.kind = Kind::retrieval, .budget = 32, .chunk = 8},
                {.kind = Kind::retrieval, .budget = 15, .chunk = 5, .min_max = true},
                {.kind = Kind::budget, .budget = 30, .window = 8},
                {.kind = Kind::budget, .budget = 500, .window = 8},
                {.kind = Kind::budget, .budget = 0, .window = 5, .kernel = 5, .average = true},
                {.bits = 4, .residual = 20},
                {.bits = 8, .key_group = 32, .value_group = 16},
                {.bits = 2, .key_group = 16, .value_group = 32, .residual = 13, .per_channel = true},
                {.bits = 4, .key_group = 16, .residual = 32, .per_channel = true, .kivi = true},
                {.bits = 8, .residual = 24, .kivi = true},
                {.bits = 3,
                 .key_group = 64,
                 .residual = 20,
                 .per_channel = true,
                 .key_hadamard = true,
                 .value_hadamard = true},
                {.bits = 5, .key_group = 16, .residual = 32, .per_channel = true, .kivi = true},
                {.bits = 6, .value_bits = 3, .value_group = 32, .residual = 9},
                {.bits = 8, .key_group = 16, .residual = 20, .per_channel = true, .halves = true},
                {.bits = 4, .value_bits = 8, .value_group = 32, .residual = 9, .halves = true},
                {.bits = 8, .residual = 24, .halves = true, .kivi = true},
                {.kind = Kind::window, .sinks = 3, .recent = 140, .bits = 8, .residual = 9},
                {.kind = Kind::window,
                 .sinks = 2,
                 .recent = 70,
                 .bits = 4,
                 .value_group = 32,
                 .residual = 16,
                 .kivi = true},
                {.kind = Kind::retrieval, .budget = 64, .chunk = 16, .bits = 4, .residual = 16},
                {.sinks = 4, .bits = 8, .residual = 24, .key_hadamard = true, .value_hadamard = true},
                {.bits = 4,
                 .key_group = 32,
                 .residual = 20,
                 .per_channel = true,
                 .key_hadamard = true,
                 .value_hadamard = true},
                {.bits = 4,
                 .key_group = 16,
                 .residual = 32,
                 .per_channel = true,
                 .key_hadamard = true,
                 .value_hadamard = true,
                 .kivi = true},
                {.kind = Kind::window,
                 .sinks = 3,
                 .recent = 140,
                 .bits = 4,
                 .residual = 9,
                 .key_hadamard = true,
                 .value_hadamard = true}});
  for (const std::size_t tokens : std::initializer_list<std::size_t>{1, 60, 128, 193, 212}) {
    for (const bool slow : {false, true}) {
      CAPTURE(tokens);
      CAPTURE(slow);
      ::test::TwoDeviceMemories memory;
      CacheOptions options;
      options.max_rollback = 5;
      KvCache<float16> host{plan, options};
      ::test::Random random{3};
      ::test::feed(host, random, {tokens}, {.softcap = 5.0F});
      ::test::feed(host, random, {1, 3}, {.read = Read::selected, .refresh_selection = true});
      gpu::CacheOptions device_options{.max_rollback = 5, .memory = &memory, .latest_rows = 0};
      if (slow) device_options.slow_memory = &memory.slow;
      DeviceCache device{plan, device_options};
      load_bytes(device, saved_bytes(host));
      CHECK(saved_bytes(device) == saved_bytes(host));
      DeviceCache fork = device.fork();
      CHECK(saved_bytes(fork) == saved_bytes(host));

      // Rows that the host has quantised are what they were once their block was packed.
      const ::test::DeviceChunk<> more{random, wide, 150};
      for (DeviceCache* each : {&device, &fork}) {
        more.step(*each, 0);
        ::test::succeed(cudaStreamSynchronize(nullptr));
        for (std::size_t h = 0; h < wide.kv_heads; ++h) {
          CAPTURE(h);
          CHECK(keeps_quantized_rows(rows_of(host, 0, h), rows_of(*each, 0, h),
                                     plan.at(0, h).rule(64).kivi_flush));
        }
      }
    }
  }
}

TEST_CASE("a saved device cache: what is refused is refused as on the host, with the cache as it was") {
  const ::test::SmallDevice small;
  const DevicePlan plan = ::test::mixed_device_plan(shape);
  DeviceCache cache{plan, {.max_rollback = 8}};
  ::test::feed_device(cache, 1, {40, 1});
  const std::string bytes = saved_bytes(cache, "one");
  const auto before = ::test::dump_device(cache);
  const auto refused = [&](const std::string& text, std::string_view tag, DeviceCache& own,
                           KvCache<float16>& host) {
    const std::string said = ::test::thrown<Error>([&] { load_bytes(own, text, tag); });
    CHECK(!said.empty());
    CHECK(said == ::test::thrown<Error>([&] { load_bytes(host, text, tag); }));
  };
  CacheOptions host_options;
  host_options.max_rollback = 8;
  KvCache<float16> host{plan, host_options};
  refused(bytes, "other", cache, host);
  for (std::size_t cut = 0; cut < bytes.size(); cut += bytes.size() / 7)
    refused(bytes.substr(0, cut), "one", cache, host);
  for (std::size_t at = 3; at < bytes.size(); at += bytes.size() / 11) {
    std::string broken = bytes;
    broken[at] = static_cast<char>(broken[at] ^ 16);
    refused(broken, "one", cache, host);
  }
  DevicePlan changed = plan;
  changed.set(0, 0, SinkRecentCache<DenseStorage<float16>>::Config{});
  DeviceCache another{changed, {.max_rollback = 8}};
  KvCache<float16> another_host{changed, host_options};
  refused(bytes, "one", another, another_host);
  DeviceCache narrow{plan};
  KvCache<float16> narrow_host{plan};
  refused(bytes, "one", narrow, narrow_host);
  DeviceCache brief{plan, {.max_rollback = 8, .max_tokens = 40}};
  host_options.max_tokens = 40;
  KvCache<float16> brief_host{plan, host_options};
  refused(bytes, "one", brief, brief_host);
  CHECK(::test::dump_device(cache) == before);

  // Inside a step, and with a tree.
  const ::test::DeviceChunk<> chunk{shape, 1};
  chunk.step(cache, 0);
  CHECK(::test::contains(::test::thrown<RollbackError>([&] { (void)saved_bytes(cache); }),
                         "layer 0 holds 42 tokens, another one 41"));
  cache.truncate(41);
  TokenTree tree;
  tree.add(TokenTree::text);
  for (std::size_t l = 0; l < shape.layers; ++l) chunk.step(cache, l, {.tree = &tree});
  CHECK(::test::contains(::test::thrown<RollbackError>([&] { (void)saved_bytes(cache); }),
                         "save: a tree of 1"));
  cache.truncate(41);
  CHECK_THROWS_AS((void)saved_bytes(cache, std::string(max_tag_bytes + 1, 'x')), ConfigError);

  const kvpolicy::testing::TemporaryFolder folder;
  const std::filesystem::path path = folder.path() / "cache";
  save(cache, path, "tag");
  DeviceCache loaded{plan, {.max_rollback = 8}};
  load(loaded, path, "tag");
  CHECK(::test::dump_device(loaded, false) == ::test::dump_device(cache, false));
  CHECK_THROWS_AS(load(loaded, folder.path() / "none", "tag"), StorageError);
}
