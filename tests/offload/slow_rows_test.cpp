// SPDX-License-Identifier: Apache-2.0
//
// Storages whose full pages are moved to slow memory, alone: windows, forks and copies of rows, beside
// the same storage without it. Caches move rows of heads that keep every row; windows may move as well.
#include <doctest/doctest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include <kvpolicy/offload/slow_rows.hpp>
#include <kvpolicy/policy/policy.hpp>
#include <kvpolicy/storage/residual_storage.hpp>

#include "support/compare.hpp"
#include "support/slow_memory.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;

namespace {

constexpr std::size_t head_dim = 32;

// The numbers of the rows that a list shows, keys and values.
std::vector<float> numbers_of(const SegmentList& list) {
  std::vector<float> all, row(head_dim);
  for (const Segment& segment : list) {
    segment.for_each_run([&](const RowRun& run) {
      for (std::size_t i = run.first; i < run.first + run.rows; ++i) {
        for (const Plane* plane : {&segment.keys, &segment.values}) {
          load_row(*plane, i, row);
          all.insert(all.end(), row.begin(), row.end());
        }
      }
    });
  }
  return all;
}

template <class Storage>
SegmentList shown(const Storage& storage) {
  SegmentList list;
  const std::size_t first = storage.begin();
  storage.show(first, storage.end() - first, {.position = static_cast<std::int64_t>(first)}, list);
  return list;
}

// A storage and what moves its pages.
template <class Storage>
struct Offloaded {
  Storage storage;
  offload::SlowRows rows;

  [[nodiscard]] offload::SlowRows::Planes planes() const { return storage.final_planes(); }
  void reserve(std::size_t count, std::size_t window) {
    const std::size_t end = storage.end();
    rows.reserve(storage.final_planes(), storage.final_rows(end), storage.final_rows(end + count));
    storage.reserve(count, window);
  }
  void release_unused() {
    rows.settle(storage.final_planes(), storage.final_rows(storage.end()), storage.end());
    storage.release_unused();
  }
  [[nodiscard]] std::size_t bytes() const { return storage.bytes() + rows.bytes(planes()); }
  [[nodiscard]] std::size_t slow_bytes() const { return rows.slow_bytes(planes()); }
};

// Chooses some rows of a storage that keeps every row, and reads them.
template <class Storage>
void check_choice(const typename Storage::Config& config, Offloaded<Storage>& head,
                  const StorageContext& context, const test::FailingSlowMemory& slow) {
  const std::size_t end = head.storage.end();
  const std::size_t final = head.storage.final_rows(end);
  const std::size_t copied = final - final % context.page_rows;
  // One chunk is closed, and 8 rows after it are in full pages already.
  const std::size_t chunk = copied - 8;
  head.rows = offload::SlowRows{context.pages(), context.slow_tier, {.chunk = chunk}};
  const std::vector<RowRun> runs{{0, 16}, {32, 8}, {48, chunk - 48}};
  // What is read of each segment: the runs, and all rows that have no copies.
  SegmentList list = shown(head.storage);
  std::vector<std::vector<RowRun>> chosen(list.size());
  for (std::size_t s = 0; s < list.size(); ++s) {
    const auto begin = static_cast<std::size_t>(list[s].position);
    for (const RowRun& run : {runs[0], runs[1], RowRun{48, end - 48}}) {
      const std::size_t from = std::max(run.first, begin);
      const std::size_t to = std::min(run.first + run.rows, begin + list[s].rows);
      if (from < to) chosen[s].push_back({from - begin, to - from});
    }
    list[s].runs = chosen[s];
  }
  const std::vector<float> expected = numbers_of(list);
  head.rows.take_choice(head.planes(), runs, end, head.storage.final_rows(end), 1);
  CHECK(head.rows.bytes(head.planes()) == Storage::bytes_of_final_rows(config, context, copied - 24));
  const SegmentList before = list;
  head.rows.show(list, 0);
  CHECK(test::same_bits(numbers_of(list), expected));
  std::vector<PageProvider::Range> ranges;
  for (const Segment& segment : list) list_ranges(slow, segment, head_dim, head_dim, ranges);
  CHECK(ranges.empty());
  // Other rows than the copied ones are shown where they are.
  list = before;
  const std::vector<RowRun> other{{0, 8}, {40, 8}};
  list[0].runs = other;
  head.rows.show(list, 0);
  CHECK(list.size() == before.size());
  CHECK(list[0].runs.data() == other.data());
  const Offloaded<Storage> fork = head;
  CHECK(fork.rows.shared_bytes() == fork.rows.bytes(fork.planes()));
  head.rows.undo_choices(0);
  CHECK(head.rows.bytes(head.planes()) == 0);
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
    std::vector<std::pair<Storage, Offloaded<Storage>>> pairs;
    pairs.push_back({Storage{config, plain}, Offloaded<Storage>{Storage{config, context}, {pool, 1, {}}}});
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
      offloaded.storage.append(chunk, window);
      offloaded.release_unused();
      REQUIRE(offloaded.storage.begin() == fast.begin());
      REQUIRE(test::same_bits(numbers_of(shown(offloaded.storage)), numbers_of(shown(fast))));
      CHECK(offloaded.bytes() == fast.bytes());
      was_slow = was_slow || offloaded.slow_bytes() > 0;
      std::size_t bytes = 0, slow_bytes = 0;
      for (const auto& [other, own] : pairs) {
        bytes += own.bytes();
        slow_bytes += own.slow_bytes();
      }
      const std::size_t shared = pairs.size() == 2 ? pairs[0].second.storage.shared_bytes() : 0;
      CHECK(memory.live_bytes() + slow.live_bytes() == bytes - shared);
      CHECK(slow.live_bytes() + shared >= slow_bytes);
      if (pairs.size() == 1) CHECK(slow.live_bytes() == slow_bytes);
      CHECK(memory.faults() + slow.faults() == 0);
      if (i == 30) pairs.push_back(pairs.front());  // a fork
      if (i == 50) pairs.erase(pairs.begin());
    }
    // A window may be smaller than any full page of quantised rows.
    if (window > 64) CHECK(was_slow);
    if (window == unlimited_rows) check_choice(config, pairs.front().second, context, slow);
  }
  CHECK(memory.live_blocks() + slow.live_blocks() == 0);
}

}  // namespace

TEST_CASE("slow rows: a storage shows the same rows, whatever window it has") {
  using PerToken = ResidualStorage<bfloat16, Granularity::per_token>;
  using PerChannel = ResidualStorage<float, Granularity::per_channel>;
  std::uint64_t seed = 0;
  for (const std::size_t window : {unlimited_rows, std::size_t{1}, std::size_t{15}, std::size_t{16},
                                   std::size_t{33}, std::size_t{100}}) {
    check<DenseStorage<float>>({}, window, ++seed);
    check<DenseStorage<float16>>({}, window, ++seed);
    check<PerToken>({.bits = 4, .residual = 21}, window, ++seed);
    check<PerToken>({.bits = 2, .residual = 24, .flush = Flush::kivi}, window, ++seed);
  }
  check<PerChannel>({.bits = 8, .key_group = 8, .residual = 19}, unlimited_rows, ++seed);
  check<PerChannel>({.bits = 4, .key_group = 8, .residual = 40, .flush = Flush::kivi}, unlimited_rows,
                    ++seed);
}
