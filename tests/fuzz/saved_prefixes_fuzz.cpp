// SPDX-License-Identifier: Apache-2.0
//
// Reads prefixes from any bytes with valid checksums: the file is refused and there is no prefix, or texts can
// go on from each of them, and what is saved then is read again.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/kvpolicy.hpp>

#include "../support/small_prefixes.hpp"

namespace {

using namespace kvpolicy;

void read_prefixes(const std::string& file, const test::SmallPlan& plan) {
  test::SmallPrefixes prefixes{test::small_options()};
  try {
    test::load_prefixes(prefixes, file, plan);
  } catch (const FormatError&) {
    if (prefixes.statistics().prefixes != 0) std::abort();
    return;
  } catch (const CapacityError&) {
    if (prefixes.statistics().prefixes != 0) std::abort();
    return;
  }
  const std::size_t count = prefixes.statistics().prefixes;
  test::SmallPrefixes again{test::small_options()};
  test::load_prefixes(again, test::saved_prefixes(prefixes, plan), plan);
  if (again.statistics().prefixes != count) std::abort();
  std::vector<test::SmallCache> texts;
  for (const std::size_t tokens : {16U, 34U, 40U}) {
    auto found = prefixes.find(plan, test::small_tokens(tokens));
    if (!found) continue;
    test::small_step(found->cache, 2);
    found->cache.truncate(found->cache.commit_point());
    try {
      found->cache.compress();
    } catch (const ShapeError&) {  // not all queries are in the file
    }
    test::small_step(found->cache, 20);
    texts.push_back(std::move(found->cache));
  }
  prefixes.clear();
  for (test::SmallCache& text : texts) test::small_step(text, 1);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string given{reinterpret_cast<const char*>(data), size};
  for (const std::string& file : {given, test::with_checksums(given)}) {
    for (const test::SmallPlan& plan : test::small_plans()) read_prefixes(file, plan);
  }
  return 0;
}
