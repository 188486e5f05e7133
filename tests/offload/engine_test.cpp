// SPDX-License-Identifier: Apache-2.0
//
// A cache whose full rows are in a file, under the engine that fetches them: its results must equal
// those of a cache in memory bit for bit, for a text several times as large as the memory, and every
// fault must be a named error.
#include <doctest/doctest.h>

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include <kvpolicy/kvpolicy.hpp>
#include <kvpolicy/offload/fetching_engine.hpp>
#include <kvpolicy/offload/file_resource.hpp>

#include "cache/dump.hpp"
#include "offload/recording_calls.hpp"
#include "support/temporary_folder.hpp"

using kvpolicy::AttendOptions;
using kvpolicy::CacheOptions;
using kvpolicy::ModelShape;
using kvpolicy::Read;
using kvpolicy::StorageError;
using kvpolicy::offload::FileResource;

namespace {

using Engine = kvpolicy::offload::FetchingEngine<kvpolicy::ScalarEngine>;
using Plan = kvpolicy::HeadPlan<kvpolicy::float16>;
using Cache = kvpolicy::KvCache<kvpolicy::float16, Engine>;
using Control = kvpolicy::KvCache<kvpolicy::float16>;
using Full = kvpolicy::FullCache<kvpolicy::DenseStorage<kvpolicy::float16>>;
using Quantized = kvpolicy::QuantizedResidualCache<kvpolicy::float16, kvpolicy::Granularity::per_channel>;
using Window = kvpolicy::SinkRecentCache<kvpolicy::DenseStorage<kvpolicy::float16>>;
using Retrieval = kvpolicy::ChunkRetrievalCache<kvpolicy::DenseStorage<kvpolicy::float16>>;
constexpr std::size_t KiB = 1024;

Plan mixed_plan(std::size_t layers) {
  Plan plan{ModelShape{.layers = layers, .q_heads = 8, .kv_heads = 4, .head_dim = 64}, Full::Config{}};
  for (std::size_t l = 0; l < layers; ++l) {
    plan.set(l, 1, Quantized::Config{.storage = {.bits = 4, .key_group = 16, .residual = 30}});
    plan.set(l, 2, Window::Config{.sinks = 4, .recent = 60});
    plan.set(l, 3, Retrieval::Config{.chunk = 8, .budget = 64});
  }
  return plan;
}

struct Sequence {
  kvpolicy::testing::TemporaryFolder folder;
  test::RecordingCalls calls;
  FileResource file;
  Cache cache;
  Control control;
  test::Random random{21};

  Sequence(const Plan& plan, CacheOptions options, std::size_t resident_bytes)
      : file{{.folder = folder.path(), .resident_bytes = resident_bytes, .slab_bytes = 256 * KiB}, calls},
        cache{plan, with(options, file), Engine{{}, file}},
        control{plan, options} {}

  static CacheOptions with(CacheOptions options, FileResource& file) {
    options.slow_memory = &file;
    return options;
  }

  // Appends a long text without attention.
  void fill(std::size_t tokens) {
    const std::size_t most = cache.options().max_append;
    for (std::size_t done = 0; done < tokens; done += most) {
      for (std::size_t l = 0; l < cache.plan().shape().layers; ++l) {
        test::Chunk<> chunk{random, cache.plan().shape(), std::min(most, tokens - done)};
        chunk.append(cache, l);
        chunk.append(control, l);
      }
    }
  }
  // Makes the same call on every layer of both caches, which must give the same bits.
  void step(std::size_t tokens, const AttendOptions& options = {}) {
    for (std::size_t l = 0; l < cache.plan().shape().layers; ++l) step_layer(l, tokens, options);
  }
  void step_layer(std::size_t layer, std::size_t tokens, const AttendOptions& options = {}) {
    test::Chunk<> chunk{random, cache.plan().shape(), tokens};
    test::Chunk<> other = chunk;
    chunk.step(cache, layer, options);
    other.step(control, layer, options);
    REQUIRE(test::same_bits(chunk.out.numbers(), other.out.numbers()));
    REQUIRE(test::same_bits(chunk.log_sum_exp, other.log_sum_exp));
  }
};

}  // namespace

TEST_CASE("offload: a text several times as large as the memory gives the bits of one in memory") {
  // 6 layers of 1500 tokens take more than 4 MB in the file; 1.25 MB may be in memory.
  Sequence s{mixed_plan(6), {.max_rollback = 3, .max_append = 250}, 1280 * KiB};
  s.fill(1500);
  s.step(2, {.refresh_selection = true});
  for (int i = 0; i < 3; ++i) {
    s.step(1, {.read = i == 2 ? Read::selected : Read::all});
    CHECK(s.file.resident_bytes() <= 1280 * KiB);
    if (!test::is_in_memory(s.folder.path())) {
      CHECK(test::bytes_in_memory(s.calls.mapping, s.file.file_bytes()) <= 1280 * KiB);
    }
  }
  CHECK(s.cache.slow_bytes() >= 4000 * KiB);
  CHECK(s.cache.slow_bytes() == s.file.live_bytes());
  CHECK(s.cache.bytes() - s.cache.slow_bytes() < s.control.bytes() / 2);
  CHECK(test::dump(s.cache, false) == test::dump(s.control, false));
  s.cache.truncate(s.cache.tokens() - 2);
  s.control.truncate(s.control.tokens() - 2);
  s.step(2, {.read = Read::selected, .refresh_selection = true});
  CHECK(test::dump(s.cache, false) == test::dump(s.control, false));
}

TEST_CASE("offload: selected reads touch no page of the file") {
  Plan plan{ModelShape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 64},
            Retrieval::Config{.chunk = 8, .budget = 128}};
  plan.set(0, 1,
           kvpolicy::ChunkRetrievalCache<kvpolicy::PerChannelStorage<kvpolicy::float16>>::Config{
               .chunk = 16, .budget = 64, .storage = {.bits = 4, .key_group = 16, .residual = 20}});
  Sequence s{plan, {.max_rollback = 8, .max_append = 100}, 0};
  s.fill(900);
  s.step(4, {.refresh_selection = true});
  s.step(1, {.read = Read::selected});
  s.calls.counts.clear();
  // From here on, an access to a page of the file ends the program.
  REQUIRE(::mprotect(s.calls.mapping, s.file.file_bytes(), PROT_NONE) == 0);
  for (int i = 0; i < 100; ++i) s.step(1, {.read = Read::selected});
  s.cache.truncate(s.cache.tokens() - 5);
  s.control.truncate(s.control.tokens() - 5);
  s.step(3, {.read = Read::selected});
  CHECK(s.calls.counts["populate"] == 0);
  REQUIRE(::mprotect(s.calls.mapping, s.file.file_bytes(), PROT_READ | PROT_WRITE) == 0);
  s.step(1);
  CHECK(s.calls.counts["populate"] > 0);
  s.step(1, {.read = Read::selected, .refresh_selection = true});
  CHECK(test::dump(s.cache, false) == test::dump(s.control, false));
}

TEST_CASE("offload: the next layer's rows are read ahead while a layer is attended") {
  Plan plan{ModelShape{.layers = 4, .q_heads = 2, .kv_heads = 2, .head_dim = 64}, Full::Config{}};
  // A layer takes 512 KiB, so two of four fit.
  Sequence s{plan, {.max_append = 64}, 1024 * KiB};
  s.fill(1024);
  s.step(1);
  s.step(1);
  const auto pages_of = [&](std::size_t layer) {
    std::set<std::size_t> pages;
    for (std::size_t head = 0; head < 2; ++head) {
      for (const auto& segment : s.cache.segments(layer, head)) {
        for (std::size_t row = 0; row < segment.rows; row += 64) {
          const std::byte* page = segment.keys.address_of(row).page;
          if (s.file.holds(page)) pages.insert(static_cast<std::size_t>(page - s.calls.mapping));
        }
      }
    }
    return pages;
  };
  for (std::size_t layer = 0; layer < 4; ++layer) {
    const auto own = pages_of(layer), next = pages_of((layer + 1) % 4);
    REQUIRE(own.size() == 2 * 16);
    s.calls.ahead.clear();
    s.step_layer(layer, 1);
    // Rows that were read ahead are not fetched again, and the next layer's rows are read ahead.
    const auto asked = [&](const std::set<std::size_t>& pages) {
      return std::ranges::count_if(pages, [&](std::size_t page) {
        return std::ranges::any_of(s.calls.ahead,
                                   [&](const auto& part) { return part.first <= page && page < part.last; });
      });
    };
    CHECK(asked(next) > 24);
    CHECK(asked(own) < 8);
    CHECK(s.file.resident_bytes() <= 1024 * KiB);
  }
}

// Every call to the system fails once, in every call of the cache.
TEST_CASE("offload: any fault is a StorageError, and the cache continues") {
  struct Case {
    const char* what;
    std::size_t tokens;
    AttendOptions options;
  };
  std::size_t faults = 0;
  for (const Case& one : {Case{"a long step", 50, {}}, Case{"a step that fills pages", 14, {}},
                          Case{"a selected read", 1, {.read = Read::selected, .refresh_selection = true}},
                          Case{"a refresh after the call", 9, {.refresh_selection = true}}}) {
    CAPTURE(one.what);
    for (std::size_t n = 0;; n += n < 6 ? 1 : 4) {
      CAPTURE(n);
      REQUIRE(n < 200);
      Sequence s{mixed_plan(1), {.max_rollback = 2, .max_append = 20, .page_rows = 16}, 256 * KiB};
      s.fill(84);
      s.step(2, {.refresh_selection = true});
      const auto before = test::dump(s.cache);
      test::Chunk<> chunk{s.random, s.cache.plan().shape(), one.tokens};
      test::Chunk<> other = chunk;
      s.calls.fail_after(n, n % 2 == 0 ? EIO : ENOSPC);
      bool failed = false;
      try {
        chunk.step(s.cache, 0, one.options);
      } catch (const StorageError&) {
        failed = true;
      }
      s.calls.recover();
      const bool untouched = s.calls.failures == 0;
      if (failed) {
        ++faults;
        CHECK(test::dump(s.cache) == before);
        chunk.step(s.cache, 0, one.options);
      }
      other.step(s.control, 0, one.options);
      CHECK(test::same_bits(chunk.out.numbers(), other.out.numbers()));
      s.step(3);
      s.step(1, {.read = Read::selected, .refresh_selection = true});
      s.step(20, {.read = Read::selected});
      CHECK(test::dump(s.cache, false) == test::dump(s.control, false));
      CHECK(s.cache.slow_bytes() == s.file.live_bytes());
      if (untouched) break;
    }
  }
  CHECK(faults >= 12);
}

TEST_CASE("offload: a full disk stops a text, and its rows can still be used") {
  Plan plan{ModelShape{.layers = 2, .q_heads = 2, .kv_heads = 2, .head_dim = 64}, Full::Config{}};
  Sequence s{plan, {.max_rollback = 4}, 0};
  s.step(100);
  s.calls.errors["allocate"] = ENOSPC;
  std::size_t steps = 0;
  try {
    for (; steps < 100; ++steps) s.step(16);
  } catch (const StorageError& error) {
    CHECK(test::contains(error.what(), "No space left on device"));
  }
  CHECK(steps < 100);
  // A step may have passed some layers only, so all layers return to the same length.
  const std::size_t tokens = s.cache.tokens();
  const std::size_t behind = std::max(s.cache.tokens(0), s.cache.tokens(1)) - tokens;
  CHECK(behind <= 16);
  if (behind == 0) {
    s.cache.truncate(tokens - 4);
    s.control.truncate(tokens - 4);
    s.step(4);
    CHECK(test::dump(s.cache, false) == test::dump(s.control, false));
  }
  s.calls.errors.clear();
  test::Chunk<> chunk{s.random, plan.shape(), 16};
  chunk.step(s.cache, s.cache.tokens(0) == tokens ? 0 : 1);
}

TEST_CASE("offload: forks in threads share one file") {
  kvpolicy::testing::TemporaryFolder folder;
  FileResource file{{.folder = folder.path(), .resident_bytes = 256 * KiB}};
  const Plan plan = mixed_plan(2);
  const CacheOptions options{.max_rollback = 2, .slow_memory = &file};
  {
    Cache cache{plan, options, Engine{{}, file}};
    Control control{plan, {.max_rollback = 2}};
    test::Random random{5}, control_random{5};
    test::feed(cache, random, {150});
    test::feed(control, control_random, {150});
    std::vector<Cache> forks;
    for (std::size_t i = 0; i < 3; ++i) forks.push_back(cache.fork());
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < 3; ++i) {
      threads.emplace_back([&forks, i] {
        test::Random own{i};
        test::feed(forks[i], own, {60, 1, 70, 1, 1});
        test::feed(forks[i], own, {1, 1}, {.read = Read::selected, .refresh_selection = true});
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (std::size_t i = 0; i < 3; ++i) {
      Control expected = control.fork();
      test::Random own{i};
      test::feed(expected, own, {60, 1, 70, 1, 1});
      test::feed(expected, own, {1, 1}, {.read = Read::selected, .refresh_selection = true});
      CHECK(test::dump(forks[i], false) == test::dump(expected, false));
    }
  }
  CHECK(file.live_bytes() == 0);
}
