// SPDX-License-Identifier: Apache-2.0
//
// Reads a saved cache from any bytes with valid checksums: the file is refused and nothing has changed, or
// the cache can be used with the numbers that it got, and reading it back after saving gives the same.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include <kvpolicy/kvpolicy.hpp>

#include "../support/small_cache.hpp"

namespace {

using namespace kvpolicy;

void read_cache(const std::string& file, const test::SmallPlan& plan) {
  test::SmallCache cache{plan, test::small_options()};
  try {
    test::load_bytes(cache, file);
  } catch (const FormatError&) {
    if (cache.tokens() != 0) std::abort();
    return;
  } catch (const CapacityError&) {
    if (cache.tokens() != 0) std::abort();
    return;
  }
  test::SmallCache again{plan, test::small_options()};
  const std::string saved = test::saved(cache);
  test::load_bytes(again, saved);
  if (test::saved(again) != saved) std::abort();
  AttendOptions selecting;
  selecting.read = Read::selected;
  test::small_step(cache, 2, selecting);
  cache.truncate(cache.commit_point());
  selecting.refresh_selection = true;
  test::small_step(cache, 3, selecting);
  try {
    cache.compress();
  } catch (const ShapeError&) {  // not all queries are in the file
  }
  test::small_step(cache, 1);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string given{reinterpret_cast<const char*>(data), size};
  for (const std::string& file : {given, test::with_checksums(given)}) {
    for (const test::SmallPlan& plan : test::small_plans()) read_cache(file, plan);
  }
  return 0;
}
