// SPDX-License-Identifier: Apache-2.0
//
// Storages with slow memory, without a policy: windows, forks and copies of rows, compared with the same
// storage without slow memory. The library's policies keep bounded rows in fast memory; other policies may
// not.
#include <doctest/doctest.h>

#include <utility>
#include <vector>

#include <kvpolicy/policy/policy.hpp>
#include <kvpolicy/storage/residual_storage.hpp>

#include "support/compare.hpp"
#include "support/slow_memory.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;

namespace {

constexpr std::size_t head_dim = 32;

// The keys and values of the rows [first, end), as the storage shows them.
template <class Storage>
std::vector<float> shown(const Storage& storage, std::size_t first) {
  SegmentList list;
  storage.show(first, storage.end() - first, {}, list);
  std::vector<float> all, row(head_dim);
  for (const Segment& segment : list) {
    for (std::size_t i = 0; i < segment.rows; ++i) {
      for (const Plane* plane : {&segment.keys, &segment.values}) {
        load_row(*plane, i, row);
        all.insert(all.end(), row.begin(), row.end());
      }
    }
  }
  return all;
}

template <class Storage>
void check(const typename Storage::Config& config, std::size_t window, std::uint64_t seed) {
  CAPTURE(window);
  CAPTURE(seed);
  test::Random random{seed};
  test::CountingResource memory;
  test::FailingSlowMemory slow;
  const StorageContext plain{.head_dim = head_dim, .page_rows = 16};
  ResourceProvider fast_memory{&memory};
  const std::vector<PageProvider*> tiers{&fast_memory, &slow};
  PagePool pool{tiers, {.max_slab_bytes = 0}};
  const StorageContext context{.head_dim = head_dim, .page_rows = 16, .pool = &pool, .slow_tier = 1};
  {
    std::vector<std::pair<Storage, Storage>> pairs;
    pairs.push_back({Storage{config, plain}, Storage{config, context}});
    std::vector<float> numbers(2 * 80 * head_dim);
    bool was_slow = false;
    for (int i = 0; i < 60; ++i) {
      CAPTURE(i);
      auto& [fast, offloaded] = pairs[test::below(random, pairs.size())];
      for (float& number : numbers) number = test::normal(random);
      const std::size_t rows = 1 + test::below(random, i % 5 == 0 ? 80 : 9);
      const Segment chunk = rows_of(numbers.data(), numbers.data() + 80 * head_dim, rows, head_dim, 0);
      if (test::below(random, 2) == 0) offloaded.reserve(rows, window);
      fast.append(chunk, window);
      offloaded.append(chunk, window);
      offloaded.release_unused();
      REQUIRE(offloaded.begin() == fast.begin());
      REQUIRE(test::same_bits(shown(offloaded, fast.begin()), shown(fast, fast.begin())));
      CHECK(offloaded.bytes() == fast.bytes());
      was_slow = was_slow || offloaded.slow_bytes() > 0;
      std::size_t bytes = 0, slow_bytes = 0;
      for (const auto& [other, own] : pairs) {
        bytes += own.bytes();
        slow_bytes += own.slow_bytes();
      }
      const std::size_t shared = pairs.size() == 2 ? pairs[0].second.shared_bytes() : 0;
      CHECK(memory.live_bytes() + slow.live_bytes() == bytes - shared);
      CHECK(slow.live_bytes() + shared >= slow_bytes);
      if (pairs.size() == 1) CHECK(slow.live_bytes() == slow_bytes);
      CHECK(memory.faults() + slow.faults() == 0);
      if (i == 30) pairs.push_back(pairs.front());  // a fork
      if (i == 50) pairs.erase(pairs.begin());
    }
    // A window may be smaller than a full page of quantised rows.
    if (window > 64) CHECK(was_slow);
    const Storage& last = pairs.front().second;
    const std::size_t settled = Storage::settled_rows(config, context, last.end());
    if (window == unlimited_rows) {
      const std::vector<RowRun> runs{{0, 16}, {32, 8}, {48, settled - 48}};
      const RowCopies copies = last.gather(runs);
      CHECK(copies.keys.slow_bytes() + copies.values.slow_bytes() == 0);
      CHECK(copies.bytes() == Storage::bytes_of_copies(config, context, settled - 24));
      std::vector<float> row(head_dim), expected;
      const std::vector<float> all = shown(last, 0);
      std::vector<float> found;
      std::size_t index = 0;
      for (const RowRun& run : runs) {
        for (std::size_t i = run.first; i < run.first + run.rows; ++i, ++index) {
          expected.insert(expected.end(), all.begin() + static_cast<std::ptrdiff_t>(2 * i * head_dim),
                          all.begin() + static_cast<std::ptrdiff_t>(2 * (i + 1) * head_dim));
          for (const PlaneStore* side : {&copies.keys, &copies.values}) {
            load_row(side->plane(0), index, row);
            found.insert(found.end(), row.begin(), row.end());
          }
        }
      }
      CHECK(test::same_bits(found, expected));
    }
  }
  CHECK(memory.live_blocks() + slow.live_blocks() == 0);
}

}  // namespace

TEST_CASE("slow pages: a storage shows the same rows with any window") {
  using PerToken = ResidualStorage<bfloat16, Granularity::per_token>;
  using PerChannel = ResidualStorage<float, Granularity::per_channel>;
  std::uint64_t seed = 0;
  for (const std::size_t window : {unlimited_rows, std::size_t{1}, std::size_t{15}, std::size_t{16},
                                   std::size_t{33}, std::size_t{100}}) {
    check<DenseStorage<float>>({}, window, ++seed);
    check<DenseStorage<half>>({}, window, ++seed);
    check<PerToken>({.bits = 4, .residual = 21}, window, ++seed);
    check<PerToken>({.bits = 2, .residual = 24, .flush = Flush::kivi}, window, ++seed);
  }
  check<PerChannel>({.bits = 8, .key_group = 8, .residual = 19}, unlimited_rows, ++seed);
  check<PerChannel>({.bits = 4, .key_group = 8, .residual = 40, .flush = Flush::kivi}, unlimited_rows, ++seed);
}
