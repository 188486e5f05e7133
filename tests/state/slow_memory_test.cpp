// SPDX-License-Identifier: Apache-2.0
//
// Saving and loading caches whose full pages are in slow memory.
#include <doctest/doctest.h>

#include <cstddef>
#include <string>

#include "cache/dump.hpp"
#include "support/slow_memory.hpp"
#include "support/small_cache.hpp"

namespace {

// A cache after a text of 61 tokens with a selection, with any memory.
test::SmallCache long_cache(const kvpolicy::CacheOptions& options) {
  test::SmallCache cache{test::small_plan(), options};
  test::small_step(cache, 50);
  kvpolicy::AttendOptions selecting;
  selecting.read = kvpolicy::Read::selected;
  selecting.refresh_selection = true;
  test::small_step(cache, 1, selecting);
  test::small_step(cache, 10);
  return cache;
}

}  // namespace

TEST_CASE("rows in slow memory are fetched before they are saved, and the file is the same") {
  test::CountingResource memory;
  test::FailingSlowMemory slow;
  auto options = test::small_options();
  options.memory = &memory;
  const std::string file = test::saved(long_cache(options));
  options.slow_memory = &slow;
  {
    const auto cache = long_cache(options);
    REQUIRE(cache.slow_bytes() > 0);
    (void)slow.take_fetched_bytes();
    CHECK(test::saved(cache) == file);
    CHECK(slow.take_fetched_bytes() == cache.slow_bytes());
    slow.fail_after(0);
    CHECK(test::thrown<kvpolicy::StorageError>([&] { (void)test::saved(cache); }) ==
          "FailingSlowMemory: told to fail");
    slow.fail_after(test::never);
    CHECK(test::saved(cache) == file);
  }
  CHECK(memory.live_bytes() == 0);
  CHECK(slow.live_bytes() == 0);
}

TEST_CASE("loading moves full pages to slow memory, or fails there and changes nothing") {
  test::CountingResource memory;
  test::FailingSlowMemory slow;
  auto options = test::small_options();
  options.memory = &memory;
  const std::string file = test::saved(long_cache(options));
  options.slow_memory = &slow;
  {
    auto twin = long_cache(options);
    twin.commit();  // everything that can leave fast memory has left it
    test::SmallCache cache{test::small_plan(), options};
    test::small_step(cache, 3);
    const auto before = test::dump(cache);
    const std::size_t live = memory.live_bytes();
    const std::size_t slow_live = slow.live_bytes();
    std::size_t failures = 0;
    for (std::size_t successes = 0;; ++successes) {
      slow.fail_after(successes);
      try {
        test::load_bytes(cache, file);
        break;
      } catch (const kvpolicy::StorageError&) {
        ++failures;
      }
      CHECK(test::dump(cache) == before);
      CHECK(memory.live_bytes() == live);
      CHECK(slow.live_bytes() == slow_live);
    }
    slow.fail_after(test::never);
    CHECK(failures > 10);
    cache.commit();
    CHECK(cache.bytes() == twin.bytes());
    CHECK(cache.slow_bytes() == twin.slow_bytes());
    CHECK(cache.slow_bytes() > 0);
    CHECK(test::dump(cache) == test::dump(twin));
    kvpolicy::AttendOptions selecting;
    selecting.read = kvpolicy::Read::selected;
    for (int i = 0; i < 20; ++i) {
      CHECK(test::same_bits(test::small_step(cache, 1, selecting), test::small_step(twin, 1, selecting)));
    }
    CHECK(test::dump(cache) == test::dump(twin));
  }
  CHECK(memory.live_bytes() == 0);
  CHECK(slow.live_bytes() == 0);
  CHECK(slow.faults() == 0);
}
