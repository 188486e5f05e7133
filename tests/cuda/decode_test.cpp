// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "cuda/support/decode_trial.hpp"

namespace {

using namespace test::decode;
using test::CallCase;
using test::HeadCase;

constexpr int histories[] = {0, 1, 15, 16, 17, 63, 64, 65, 200, 1000};
constexpr int grids[] = {1, 2, 7, 64};

TEST_CASE_TEMPLATE("decode: all rows and windows, at every length", E, KVPOLICY_KERNEL_ELEMENTS) {
  unsigned seed = 1;
  for (const int tokens : histories) {
    CAPTURE(tokens);
    const int grid = grids[seed % 4];
    const test::DecodeLayer<E> one(
        128, 4, 3, 64, {full(tokens), window(tokens, 4, 100, 192), window(tokens, 0, 33, 64, true)}, {},
        seed);
    check<128>(one, grid);
    ++seed;
    const test::DecodeLayer<E> some(64, 3, 2, 128, {full(tokens), window(tokens, 17, 64, 128)},
                                    {.queries = 4, .own_rows = tokens < 4 || seed % 2 == 0}, seed);
    check<64>(some, grid);
    ++seed;
  }
}

TEST_CASE_TEMPLATE("decode: slices that begin or end where they have no rows of a head", E,
                   KVPOLICY_KERNEL_ELEMENTS) {
  std::vector<HeadCase> heads;
  for (int tokens = 20; tokens < 200; tokens += 7) {
    heads.push_back(full(tokens));
    heads.push_back(window(tokens, 4, 40, 128));
  }
  const test::DecodeLayer<E> layer(64, 2, 2, 64, heads, {}, 90);
  const AttendParams p = layer.params();
  std::vector<long long> line{0};
  std::vector<int> last_weight;
  for (std::size_t h = 0; h < heads.size(); ++h) {
    const DeviceSegmentList list = segments_of(p.heads[h], p.states[h / 2], p.request);
    last_weight.push_back(units_of(p.heads[h], list.segment[list.count - 1]).weight);
    line.push_back(line.back() + cost_of(p.heads[h], p.states[h / 2], p.request));
  }
  int begin_within = 0;  // a head's last unit
  int end_before = 0;    // a head's first unit
  for (int grid = 2; grid < 40; ++grid) {
    const Partition partition(line.back(), grid, decode_threads<64, 1, false> / warp_lanes);
    if (partition.blocks < grid) break;
    int within = 0;
    int before = 0;
    for (int block = 1; block < grid; ++block) {
      const long long bound = partition.begin(block);
      const auto head = static_cast<std::size_t>(std::ranges::upper_bound(line, bound) - line.begin()) - 1;
      within += bound > line[head + 1] - last_weight[head] ? 1 : 0;
      before += bound > line[head] && bound <= line[head] + cost_of_head ? 1 : 0;
    }
    if (within + before == 0 || (within == 0 && end_before > 20)) continue;
    check<64>(layer, grid);
    begin_within += within;
    end_before += before;
  }
  CHECK(begin_within > 5);
  CHECK(end_before > 20);
}

TEST_CASE_TEMPLATE("decode: every head_dim, group and number of queries", E, KVPOLICY_KERNEL_ELEMENTS) {
  unsigned seed = 100;
  const auto go = [&]<int D>(std::integral_constant<int, D>) {
    for (int group = 1; group <= 16; group = group < 8 ? group + 1 : group + 4) {
      for (int queries = 1; queries <= 4 && queries * group <= 16; ++queries) {
        if ((group + queries + D / 16) % 3 != 0 && group != 8) continue;
        const test::DecodeLayer<E> layer(D, group, 2, 64, {full(150), window(150, 5, 40, 128)},
                                         {.queries = queries}, seed);
        check<D>(layer, grids[seed++ % 3]);
      }
    }
  };
  go(std::integral_constant<int, 64>{});
  go(std::integral_constant<int, 80>{});
  go(std::integral_constant<int, 96>{});
  go(std::integral_constant<int, 128>{});
  go(std::integral_constant<int, 256>{});
}

TEST_CASE_TEMPLATE("decode: quantised rows", E, KVPOLICY_KERNEL_ELEMENTS) {
  unsigned seed = 200;
  int turn = 0;  // widths that differ take some of the cases
  const auto go = [&]<int D>(std::integral_constant<int, D>) {
    const Grids all[] = {{D, D}, {32, 32}, {D, 8}, {8, D}, {32, 32, true}, {64, D, true}, {16, 64, true}};
    for (const Codes& codes : all_codes) {
      for (const Grids& grid : all) {
        const int many_tokens = grid.key_group == D && grid.value_group == D ? 1500 : 400;
        for (const int tokens : {70, 130, many_tokens}) {
          if (!codes.are_alike() && turn++ % 5 != 0) continue;
          CAPTURE(name_of(codes));
          CAPTURE(grid.key_group);
          CAPTURE(grid.per_channel);
          const int residual = static_cast<int>(seed % 3) * 50;
          const bool many = seed % 4 == 0;
          const test::DecodeLayer<E> layer(D, many ? 5 : 3, 2, tokens == many_tokens ? 128 : 64,
                                           {quantised(tokens, codes, grid, residual), full(tokens)},
                                           {.queries = many ? 3 : 1 + static_cast<int>(seed % 2)}, seed);
          check<D>(layer, grids[seed % 4], grouped_lse);
          ++seed;
        }
      }
    }
  };
  go(std::integral_constant<int, 64>{});
  go(std::integral_constant<int, 128>{});
}

TEST_CASE_TEMPLATE("decode: quantised windows, rings gone round twice", E, KVPOLICY_KERNEL_ELEMENTS) {
  unsigned seed = 300;
  for (const int tokens : {100, 400, 1000}) {
    for (const Codes& codes : all_codes) {
      HeadCase ring = quantised(tokens, codes, {64, 32}, 64);
      ring.view.sinks = 4;
      ring.view.recent = 230;
      ring.view.exact_ring = 192;
      ring.view.packed_ring = 256;
      HeadCase chunk = ring;
      chunk.view.prefill_chunk_mask = true;
      const test::DecodeLayer<E> layer(64, 4, 2, 64, {ring, chunk}, {.queries = 3}, seed);
      check<64>(layer, grids[seed++ % 4], grouped_lse);
    }
  }
}

TEST_CASE_TEMPLATE("decode: chosen chunks", E, KVPOLICY_KERNEL_ELEMENTS) {
  unsigned seed = 400;
  for (const int rows : {8, 16, 24}) {
    CAPTURE(rows);
    const int tokens = 500;
    const int chunks = 480 / rows;
    const std::vector<HeadCase> heads = {
        choosing(full(tokens), rows, every(3, 0, chunks), chunks * rows),
        choosing(full(tokens), rows, {0, chunks - 1}, chunks * rows),
        choosing(full(tokens), rows, {}, 0)};  // nothing was chosen yet: all is read
    for (const bool selected : {true, false}) {
      constexpr int other = test::other_head_dim<80>;
      const test::DecodeLayer<E> layer(other, 2, 3, 64, heads, {.queries = 3, .selected = selected}, seed);
      check<other>(layer, grids[seed++ % 4]);
    }
  }
  for (const int rows : {16, 32, 64}) {
    CAPTURE(rows);
    for (const Codes& codes : all_codes) {
      const int tokens = 700;  // of which 640 are quantised
      const int chunks = 672 / rows;
      const auto some = every(rows == 64 ? 1 : 3, 0, chunks);
      const test::DecodeLayer<E> layer(
          128, 3, 3, 128,
          {choosing(quantised(tokens, codes, {128, 128}, 50), rows, some, chunks * rows),
           choosing(quantised(tokens, codes, {32, 32}, 50), rows, {0, 2, 7}, chunks * rows),
           choosing(quantised(tokens, codes, {16, 128, true}, 50), rows, {1}, chunks * rows)},
          {.queries = static_cast<int>(seed % 2) + 1, .selected = true}, seed);
      check<128>(layer, grids[seed++ % 4], grouped_lse);
    }
  }
}

TEST_CASE("decode: the caller may append before it attends, also where chunks are chosen") {
  // Rows that not every query sees are then among the chosen ones.
  HeadCase head = choosing(full(96), 16, {0, 3, 5}, 96);
  const test::DecodeLayer<float16> layer(64, 2, 1, 64, {head},
                                         {.queries = 8, .own_rows = false, .selected = true}, 1);
  check<64>(layer, 2);
}

TEST_CASE_TEMPLATE("decode: sinks that seem to stand right before the window", E, KVPOLICY_KERNEL_ELEMENTS) {
  unsigned seed = 500;
  for (const int tokens : {0, 2, 5, 60, 1000, 3'000}) {
    HeadCase head = window(tokens, 4, 60, 128);
    head.view.rotation_limit = 63;
    head.turns_sinks = true;
    HeadCase chunk = head;
    chunk.view.prefill_chunk_mask = true;
    constexpr int other = test::other_head_dim<96>;
    for (const int queries : {1, 4}) {
      const test::DecodeLayer<E> layer(queries == 1 ? 128 : other, 4, 2, 64, {head, chunk},
                                       {.queries = queries}, seed);
      // The turned query is rounded to E before it meets the sinks.
      const double bound = 0.1 * unit<E>;
      if (queries == 1) {
        check<128>(layer, grids[seed++ % 4], bound);
      } else {
        check<other>(layer, grids[seed++ % 4], bound);
      }
    }
  }
}

TEST_CASE_TEMPLATE("decode: soft cap, sink logits", E, KVPOLICY_KERNEL_ELEMENTS) {
  unsigned seed = 600;
  for (const float softcap : {0.0F, 2.0F, 50.0F}) {
    for (const bool sinks : {false, true}) {
      const CallCase call{.queries = 2, .softcap = softcap, .attention_sink_bias = sinks};
      const test::DecodeLayer<E> layer(
          64, 5, 2, 64, {full(300), quantised(300, Encoding::uint4, {64, 64}, 10)}, call, seed);
      check<64>(layer, grids[seed++ % 4], grouped_lse);
    }
  }
}

TEST_CASE_TEMPLATE("decode: loud queries move the softmax's reference often", E, KVPOLICY_KERNEL_ELEMENTS) {
  for (unsigned seed = 700; seed < 704; ++seed) {
    const test::DecodeLayer<E> layer(128, 4, 2, 64,
                                     {full(700), quantised(700, Encoding::uint8, {128, 128}, 100)},
                                     {.queries = 2, .loudness = 40.0F}, seed);
    check<128>(layer, grids[seed % 4]);
  }
}

TEST_CASE_TEMPLATE("decode: heads of which nothing is read", E, KVPOLICY_KERNEL_ELEMENTS) {
  for (const bool sinks : {false, true}) {
    const CallCase call{.queries = 2, .own_rows = false, .attention_sink_bias = sinks};
    // All rows of the second sequence were dropped but those that no query of this call precedes.
    HeadCase dropped = full(10);
    dropped.view.evicted = 10;
    const test::DecodeLayer<E> layer(64, 4, 2, 64, {full(70), full(70), dropped, full(10)}, call, 1);
    for (const int grid : grids) check<64>(layer, grid);
    const test::DecodeLayer<E> nothing(64, 4, 1, 64, {dropped}, call, 1);
    check<64>(nothing, 3);
  }
}

/// One layer of everything, over sequences of different lengths.
template <Element E>
std::vector<HeadCase> everything(int tokens) {
  HeadCase ring = quantised(tokens, Encoding::uint8, {128, 128}, 32);
  ring.view.sinks = 16;
  ring.view.recent = 128;
  ring.view.exact_ring = 128;
  ring.view.packed_ring = 192;
  HeadCase turned = window(tokens, 4, 60, 128);
  turned.view.rotation_limit = 63;
  turned.turns_sinks = true;
  HeadCase compressed = full(tokens);
  compressed.view.evicted = tokens / 2;
  const int chunks = tokens / 16;
  return {full(tokens),
          window(tokens, 8, 64, 128),
          quantised(tokens, Encoding::uint4, {128, 128}, 40),
          quantised(tokens, Encoding::uint2, {32, 32, true}, 0),
          ring,
          turned,
          compressed,
          choosing(quantised(tokens, Encoding::uint2, {128, 128}, 0), 16, every(2, 0, chunks), chunks * 16)};
}

TEST_CASE_TEMPLATE("decode: one launch for a mixed layer, and one for each head", E,
                   KVPOLICY_KERNEL_ELEMENTS) {
  constexpr int kinds = 8;
  const CallCase call{.queries = 2, .selected = true, .attention_sink_bias = true};
  std::vector<HeadCase> heads = everything<E>(700);
  for (const HeadCase& head : everything<E>(33)) heads.push_back(head);
  for (const HeadCase& head : everything<E>(256)) heads.push_back(head);
  const test::DecodeLayer<E> layer(128, 4, kinds, 64, heads, call, 5);
  for (const int grid : {1, 5, 64}) check<128>(layer, grid, grouped_lse);

  // The same, a head at a time.
  const Output together = run<E, 128, 1, true>(layer.params(), 7);
  const std::size_t row = 4 * 128;  // numbers of one query of one head's group
  for (std::size_t h = 0; h < heads.size(); ++h) {
    const Output alone = run<E, 128, 1, true>(only(layer.params(), static_cast<int>(h)), 3);
    const std::size_t sequence = h / kinds;
    for (std::size_t query = 0; query < 2; ++query) {
      const std::size_t at = (sequence * 2 + query) * kinds + h % kinds;
      CHECK(distance(part(together.out, at * row, row), part(alone.out, query * row, row)) <=
            out_units * unit<E>);
      CHECK(distance(part(together.log_sum_exp, at * 4, 4), part(alone.log_sum_exp, query * 4, 4)) <= 1e-5);
    }
  }
}

TEST_CASE("decode: more heads than a block has threads") {
  std::vector<HeadCase> heads;
  for (int sequence = 0; sequence < 250; ++sequence) {
    heads.push_back(full(sequence % 3 == 0 ? sequence : sequence % 20));
    heads.push_back(window(heads.back().tokens, 1, 3, 64));
  }
  const test::DecodeLayer<OtherElement> layer(64, 1, 2, 64, heads, {}, 8);
  check<64>(layer, 5);
}

TEST_CASE("decode: results do not depend on the order of threads and blocks") {
  const test::DecodeLayer<OtherElement> layer(128, 4, 8, 64, everything<OtherElement>(700),
                                              {.queries = 2, .selected = true}, 6);
  test::set_order(1);
  const Output first = run<OtherElement, 128, 1, true>(layer.params(), 9);
  for (std::uint64_t seed = 2; seed < 5; ++seed) {
    test::set_order(seed);
    const Output again = run<OtherElement, 128, 1, true>(layer.params(), 9);
    CHECK(again.out == first.out);
    CHECK(again.log_sum_exp == first.log_sum_exp);
  }
}

TEST_CASE_TEMPLATE("decode: rows that no query sees may hold anything", E, KVPOLICY_KERNEL_ELEMENTS) {
  // Rows before the window, in a line and before it in the window's first quantised block; rows
  // taken back; and a chunk that was not chosen.
  test::DecodeLayer<E> layer(
      64, 4, 3, 64,
      {window(500, 4, 100, 0), window(500, 0, 64, 0, true), choosing(full(500), 16, {0, 3, 4, 30}, 496)},
      {.selected = true}, 7);
  const auto spoil = [&](std::size_t head, int begin, int end) {
    for (int row = begin; row < end; ++row) {
      for (const test::Side side : {test::Side::keys, test::Side::values}) {
        std::fill_n(layer.device(head).exact(side, row), 64, std::uint16_t{0xffff});
      }
    }
  };
  const auto expected = layer.oracle();
  spoil(0, 4, 401);
  spoil(1, 0, 436);
  spoil(2, 16, 48);
  spoil(2, 80, 480);
  const Output got = run<E, 64, 1, false>(layer.params(), 5);
  CHECK(distance(got.out, expected.out) <= out_units * unit<E>);
  CHECK(distance(got.log_sum_exp, expected.log_sum_exp) <= exact_lse);
}
}  // namespace
