// SPDX-License-Identifier: Apache-2.0
//
// Damaged files: every byte and every length, with checksums that fit and with others. Run it with
// sanitizers, because a read out of bounds must not happen.
#include <doctest/doctest.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <new>
#include <sstream>
#include <string>

#include "cache/dump.hpp"
#include "support/memory.hpp"
#include "support/small_cache.hpp"
#include "support/source_dir.hpp"

using kvpolicy::FormatError;
using test::SmallCache;

namespace {

SmallCache empty_cache(const test::SmallPlan& plan) { return SmallCache{plan, test::small_options()}; }

// Uses a cache in every way after its file was accepted.
void use(SmallCache& cache) {
  for (const auto read : {kvpolicy::Read::selected, kvpolicy::Read::all}) {
    kvpolicy::AttendOptions options;
    options.read = read;
    (void)test::small_step(cache, 2, options);
  }
  cache.truncate(cache.commit_point());
  try {
    cache.compress();
  } catch (const kvpolicy::ShapeError&) {  // not all queries are known
  }
  kvpolicy::AttendOptions options;
  options.read = kvpolicy::Read::selected;
  options.refresh_selection = true;
  (void)test::small_step(cache, 7, options);
}

// Whether the file was refused; if so, the cache must be unchanged.
bool is_refused(SmallCache& cache, const std::string& file) {
  const std::size_t tokens = cache.tokens();
  try {
    test::load_bytes(cache, file);
    return false;
  } catch (const FormatError&) {
  } catch (const kvpolicy::CapacityError&) {
  }
  CHECK(cache.tokens() == tokens);
  return true;
}

}  // namespace

TEST_CASE("a file that is cut off anywhere is refused") {
  for (const test::SmallPlan& plan : test::small_plans()) {
    const std::string file = test::saved(test::small_cache(plan));
    INFO(file.size());
    CHECK(file.size() < 30000);
    auto cache = empty_cache(plan);
    std::size_t refused = 0;
    for (std::size_t size = 0; size < file.size(); ++size) {
      refused += is_refused(cache, file.substr(0, size)) ? 1 : 0;
    }
    CHECK(refused == file.size());
    CHECK(!is_refused(cache, file));
  }
}

TEST_CASE("a flipped byte anywhere is noticed") {
  for (const test::SmallPlan& plan : test::small_plans()) {
    std::string file = test::saved(test::small_cache(plan), "");
    auto cache = empty_cache(plan);
    std::size_t refused = 0;
    for (std::size_t at = 0; at < file.size(); ++at) {
      const char before = file[at];
      file[at] = static_cast<char>(before ^ (1 << at % 8));
      refused += is_refused(cache, file) ? 1 : 0;
      file[at] = before;
    }
    CHECK(refused == file.size());
  }
}

TEST_CASE("a byte that was changed on purpose is refused or does no harm") {
  for (const test::SmallPlan& plan : test::small_plans()) {
    std::string file = test::saved(test::small_cache(plan));
    std::size_t believed = 0;
    for (const int change : {0x01, 0xff}) {
      for (std::size_t at = 0; at < file.size(); ++at) {
        // Among the rows a sample of bytes is enough.
        if (at > 1200 && at % 19 != static_cast<std::size_t>(change) % 19) continue;
        const char before = file[at];
        file[at] = static_cast<char>(before ^ change);
        auto cache = empty_cache(plan);
        if (!is_refused(cache, test::with_checksums(file))) {
          ++believed;
          use(cache);
        }
        file[at] = before;
      }
    }
    CHECK(believed > 500);  // some numbers, such as those of rows, may have any value
  }
}

TEST_CASE("a false size allocates no memory") {
  // The length of the first text and the number of rows of the heads are among the first bytes.
  for (const test::SmallPlan& plan : test::small_plans()) {
    const std::string file = test::saved(test::small_cache(plan));
    for (std::size_t at = 32; at + 8 <= file.size(); at += at < 2000 ? 1 : 97) {
      std::string forged = file;
      for (std::size_t i = 0; i < 6; ++i) forged[at + i] = '\x7f';
      auto cache = empty_cache(plan);
      try {
        test::load_bytes(cache, test::with_checksums(forged));
      } catch (const kvpolicy::Error&) {
      }  // and not std::bad_alloc
    }
  }
}

TEST_CASE("any exception during loading leaves the cache unchanged") {
  for (const test::SmallPlan& plan : test::small_plans()) {
    const std::string file = test::saved(test::small_cache(plan));
    test::CountingResource memory;
    auto options = test::small_options();
    options.memory = &memory;
    {
      SmallCache cache{plan, options};
      test::small_step(cache, 30);
      const auto before = test::dump(cache);
      const std::size_t live = memory.live_bytes();
      for (std::size_t size = 0; size < file.size(); size += 101) {
        CHECK(is_refused(cache, file.substr(0, size)));
        CHECK(memory.live_bytes() == live);
      }
      std::size_t failures = 0;
      for (std::size_t successes = 0;; ++successes) {
        memory.fail_after(successes);
        try {
          test::load_bytes(cache, file);
          break;
        } catch (const std::bad_alloc&) {
          ++failures;
        }
        CHECK(memory.live_bytes() == live);
        CHECK(test::dump(cache) == before);
      }
      memory.fail_after(test::never);
      CHECK(failures > 10);
      CHECK(test::dump(cache) == test::dump(test::small_cache(plan)));
      CHECK(memory.live_bytes() == cache.bytes());
    }
    CHECK(memory.live_bytes() == 0);
    CHECK(memory.faults() == 0);
  }
}

TEST_CASE("a file of version 1 loads and is written again unchanged") {
  const std::string path = kvpolicy::testing::source_dir() + "/tests/state/version_1.kvcache";
  std::ifstream in{path, std::ios::binary};
  REQUIRE(in.good());
  const std::string file{std::istreambuf_iterator<char>{in}, {}};
  auto cache = empty_cache(test::small_plan());
  kvpolicy::load(cache, std::filesystem::path{path}, "version 1");
  CHECK(cache.tokens() == 11);
  CHECK(cache.commit_point() == 9);
  CHECK(test::saved(cache, "version 1") == file);
  // The first head keeps every row exactly.
  std::vector<float> row(64);
  std::size_t token = 0;
  for (const kvpolicy::Segment& rows : cache.segments(0, 0)) {
    for (std::size_t i = 0; i < rows.rows; ++i, ++token) {
      kvpolicy::load_row(rows.keys, i, row);
      bool same = true;
      for (std::size_t c = 0; c < 64; ++c) {
        same = same && row[c] == test::small_number(3 * (token * 9 * 64 + c) + 1);
      }
      CHECK(same);
    }
  }
  CHECK(token == 11);
}
