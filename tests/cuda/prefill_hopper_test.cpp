// SPDX-License-Identifier: Apache-2.0
//
// The prefill kernel for Hopper, against the same oracle as the other one (support/prefill_trial.hpp), and the layout
// of its tiles.
#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "cuda/support/elements.hpp"
#include "cuda/support/hopper_device.hpp"
#include "cuda/support/prefill_trial.hpp"

using namespace kvpolicy;
using namespace kvpolicy::gpu;
using test::OtherElement;
using test::prefill::Case;
using test::prefill::chosen;
using test::prefill::full;
using test::prefill::Head;
using test::prefill::Trial;
using test::prefill::window;

namespace {

template <Element E, int HeadDim>
void check(Case c) {
  if (!test::HopperDevice::is_there()) return;
  const test::HopperDevice device;
  CAPTURE(HeadDim);
  CAPTURE(c.group);
  CAPTURE(c.queries);
  CAPTURE(c.histories[0]);
  CAPTURE(c.splits);
  CAPTURE(c.own_rows);
  c.hopper = true;
  if constexpr (test::tests_head_dim<HeadDim>) {
    Trial<E, HeadDim> trial{c};
    trial.run();
    trial.check();
  }
}

TEST_CASE_TEMPLATE("Hopper prefill: every head_dim, tiles cut and whole", E, KVPOLICY_KERNEL_ELEMENTS) {
  for (const auto& [queries, history] : {std::pair{1, 0}, {17, 200}, {65, 127}, {129, 95}}) {
    const Case c{.group = 2, .queries = queries, .histories = {history}};
    check<E, 64>(c);
    check<E, 128>(c);
    check<E, 256>(c);
  }
}

TEST_CASE("Hopper prefill: a ring of tiles that goes round more than twice") {
  check<OtherElement, 64>({.queries = 17, .histories = {1700}});  // six tiles of 128 rows
  check<float16, 128>({.queries = 17, .histories = {1700}});
  check<OtherElement, 256>({.queries = 17, .histories = {800}});  // three of 96
}

TEST_CASE("Hopper prefill: groups share tiles of query rows that they need not divide") {
  for (const int group : {1, 3, 7, 16}) {
    check<float16, 64>({.group = group, .queries = 33, .histories = {70}});
  }
}

TEST_CASE("Hopper prefill: any number of queries after any history") {
  for (const int history : {0, 1, 127, 128, 300}) {
    for (const int queries : {1, 64, 130}) {
      check<OtherElement, 64>(
          {.queries = queries, .histories = {history}, .page_rows = history == 300 ? 128 : 64});
    }
  }
}

TEST_CASE("Hopper prefill: mixed heads of several sequences, longest first or not") {
  const Case c{.heads = {window(4, 20, 64), full(), window(0, 64, 64), full(), window(3, 1, 64)},
               .group = 3,
               .queries = 50,
               .histories = {300, 17},
               .padded = true,
               .more_heads = 4};
  check<OtherElement, 64>(c);
  check<float16, 128>(c);
  Case many{.heads = {}, .queries = 2, .histories = {70}};
  for (int h = 0; h < 131; ++h) many.heads.push_back(h % 5 == 0 ? full() : window(0, h % 7 + 1, 64));
  check<float16, 64>(many);
}

TEST_CASE("Hopper prefill: windows, own rows or appended ones") {
  for (const int history : {0, 3, 400}) {
    for (const bool own_rows : {true, false}) {
      check<float16, 64>({.heads = {window(0, 1, 192), window(5, 64, 192), window(64, 100, 256),
                                    window(5, 60, 192, true), window(130, 7, 192)},
                          .queries = 130,
                          .histories = {history},
                          .own_rows = own_rows});
    }
  }
}

TEST_CASE("Hopper prefill: sinks that seem to stand before the window") {
  for (const bool own_rows : {true, false}) {
    Head a = window(4, 30, 128), b = window(150, 20, 128);
    a.view.rotation_limit = 33;
    b.view.rotation_limit = 169;
    const Case c{
        .heads = {a, full(), b}, .group = 2, .queries = 90, .histories = {0, 50, 300}, .own_rows = own_rows};
    check<OtherElement, 64>(c);
    check<float16, 256>(c);
  }
}

TEST_CASE("Hopper prefill: chosen chunks, evicted rows, queries that see nothing") {
  for (const int rows : {8, 24, 100}) {
    std::vector<int> chunks = {0};
    for (int i = 2; i < 290 / rows; i += i % 3 + 1) chunks.push_back(i);
    Head evicted;
    evicted.view.evicted = 130;
    const Case c{
        .heads = {chosen(full(), rows, chunks, 290 / rows * rows), evicted, chosen(full(), rows, {}, 250)},
        .queries = 20,
        .histories = {300},
        .selected = true};
    check<OtherElement, 64>(c);
    check<float16, 128>(c);
  }
  for (const bool sinks : {false, true}) {
    for (const int splits : {1, 2}) {
      check<OtherElement, 64>({.heads = {chosen(full(), 16, {1, 2}, 60)},
                               .queries = 60,
                               .histories = {0},
                               .splits = splits,
                               .own_rows = false,
                               .selected = true,
                               .attention_sink_bias = sinks});
    }
  }
}

TEST_CASE("Hopper prefill: several blocks for a tile of queries") {
  for (const int splits : {2, 5, 9}) {
    const Case c{.heads = {full(), window(4, 30, 64), full()},
                 .group = 2,
                 .queries = 70,
                 .histories = {460, 0},
                 .splits = splits,
                 .padded = true,
                 .attention_sink_bias = splits == 5};
    check<OtherElement, 64>(c);
    check<float16, 256>(c);
  }
}

TEST_CASE("Hopper prefill: soft cap, sink logits, scales") {
  for (const bool sinks : {false, true}) {
    for (const float softcap : {0.0F, 5.0F, 50.0F}) {
      check<float16, 64>({.heads = {full(), window(2, 10, 64)},
                          .group = 2,
                          .queries = 70,
                          .histories = {90},
                          .attention_sink_bias = sinks,
                          .log_sum_exp = !sinks,
                          .softcap = softcap});
    }
  }
  // Logits far apart, all equal, and upside down.
  for (const float scale : {4.0F, 1e-30F, -0.2F}) {
    check<float16, 64>({.queries = 40, .histories = {290}, .scale = scale});
  }
}

TEST_CASE("Hopper prefill: trees") {
  std::uint32_t seed = 1;
  for (const int queries : {1, 130}) {
    for (const int older : {0, 70}) {
      Head turned = window(6, 4, 192);
      turned.view.rotation_limit = 9;
      const Case c{.heads = {full(), window(4, 20, 192), turned, chosen(full(), 8, {0, 5}, 90)},
                   .group = 2,
                   .queries = queries,
                   .histories = {100},
                   .splits = older == 0 ? 1 : 2,
                   .own_rows = ++seed % 2 == 0,
                   .selected = true,
                   .tree = test::some_tree(queries + older, seed, seed % 3 * 4)};
      check<OtherElement, 64>(c);
      check<float16, 128>(c);
    }
  }
}

TEST_CASE("Hopper prefill: results do not depend on who comes first") {
  if (!test::HopperDevice::is_there()) return;
  const test::HopperDevice device;
  const Case c{
      .heads = {full(), window(4, 30, 64)}, .queries = 70, .histories = {560}, .splits = 3, .hopper = true};
  std::vector<std::uint16_t> before;
  for (const std::uint64_t order : {1, 2, 3, 4}) {
    test::set_order(order);
    Trial<float16, 64> trial{c};
    trial.run();
    if (!before.empty()) CHECK(before == trial.out());
    before = trial.out();
  }
}

#if !defined(__CUDACC__)
// ---- the tiles' layout ---------------------------------------------------------------------------
// Where the canonical layout of the PTX manual has a number, for rows along the contraction (K-major): of eight rows
// and 64 numbers, [8, 64] : (64, 1), then eight rows `stride` bytes apart, 64 numbers 1,024 bytes apart; Swizzle<3,
// 4, 3>.
int canonical(int row, int channel, int stride) {
  const int plain = row / 8 * stride + channel / 64 * 1024 + row % 8 * 128 + channel % 64 * 2;
  return plain ^ ((plain >> 7 & 7) << 4);
}

template <int HeadDim>
void check_layout() {
  using Shape = HopperShape<HeadDim>;
  std::set<int> places;
  bool right = true, free_of_conflicts = true;
  const auto bank = [](int offset) { return offset / 4 % 32; };
  for (int row = 0; row < Shape::query_rows; ++row) {
    for (int chunk = 0; chunk < Shape::chunks; ++chunk) {
      const int offset = SwizzledChunk<HeadDim>{0, row, chunk}.offset;
      places.insert(offset);
      right = right && offset == canonical(row, chunk * 8, SwizzledChunk<HeadDim>::eight_rows_bytes);
    }
  }
  CHECK(right);
  CHECK(places.size() == static_cast<std::size_t>(Shape::query_bytes / 16));
  CHECK(*places.rbegin() == Shape::query_bytes - 16);

  // Eight accesses of 16 bytes that meet in one clock: the rows of a core matrix at a chunk, of keys, queries and
  // values alike; eight neighbouring lanes of a copy, which have chunks of one row.
  const auto distinct = [&](auto offset_of) {
    std::set<int> banks;
    for (int i = 0; i < 8; ++i) {
      for (int word = 0; word < 4; ++word) banks.insert(bank(offset_of(i) + word * 4));
    }
    free_of_conflicts = free_of_conflicts && banks.size() == 32;
  };
  for (int row = 0; row < Shape::key_rows; row += 8) {
    for (int chunk = 0; chunk < Shape::chunks; ++chunk) {
      distinct([&](int i) { return SwizzledChunk<HeadDim>{0, row + i, chunk}.offset; });
    }
  }
  for (int row = 0; row < Shape::key_rows; ++row) {
    for (int chunk = 0; chunk < Shape::chunks; chunk += 8) {
      distinct([&](int i) { return SwizzledChunk<HeadDim>{0, row, chunk + i}.offset; });
    }
  }
  // A warp stages its outputs a word a lane: eight rows, four words of a chunk.
  for (int chunk = 0; chunk < Shape::chunks; ++chunk) {
    std::set<int> banks;
    for (int lane = 0; lane < 32; ++lane) {
      banks.insert(bank(SwizzledChunk<HeadDim>{0, lane / 4, chunk}.offset + lane % 4 * 4));
    }
    free_of_conflicts = free_of_conflicts && banks.size() == 32;
  }
  CHECK(free_of_conflicts);
}

TEST_CASE("Hopper prefill: tiles are the manual's swizzled layout, and no access has a bank conflict") {
  check_layout<64>();
  check_layout<128>();
  check_layout<256>();
}
#endif

}  // namespace
