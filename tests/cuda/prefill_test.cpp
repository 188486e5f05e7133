// SPDX-License-Identifier: Apache-2.0
//
// The prefill kernel; what is compared with what stands in support/prefill_trial.hpp.
#include <doctest/doctest.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "cuda/support/codes.hpp"
#include "cuda/support/elements.hpp"
#include "cuda/support/prefill_trial.hpp"

using namespace kvpolicy;
using namespace kvpolicy::gpu;
using test::all_codes;
using test::Codes;
using test::OtherElement;
using test::prefill::Case;
using test::prefill::chosen;
using test::prefill::full;
using test::prefill::Head;
using test::prefill::Trial;
using test::prefill::window;

namespace {

template <Element E, int HeadDim>
void check(const Case& c) {
  CAPTURE(HeadDim);
  CAPTURE(c.group);
  CAPTURE(c.queries);
  CAPTURE(c.histories[0]);
  CAPTURE(c.splits);
  CAPTURE(c.own_rows);
  if constexpr (test::tests_head_dim<HeadDim>) {
    Trial<E, HeadDim> trial{c};
    trial.run();
    trial.check();
  }
}

Head packed(const Codes& codes, int residual, int key_group, int value_group, bool per_channel = false) {
  Head head;
  codes.describe(head.view);
  head.view.residual = residual;
  head.view.key_group = key_group;
  head.view.value_group = value_group;
  head.view.key_per_channel = per_channel;
  return head;
}
TEST_CASE("prefill: every head_dim, tiles cut and whole") {
  for (const int queries : {1, 5, 65}) {
    const Case c{.group = 2, .queries = queries, .histories = {200}};
    check<OtherElement, 64>(c);
    check<float16, 80>(c);
    check<OtherElement, 96>(c);
    check<float16, 128>(c);
    check<OtherElement, 256>(c);
  }
}

TEST_CASE("prefill: groups share tiles of query rows that they need not divide") {
  for (const int group : {1, 2, 3, 4, 7, 8, 16}) {
    check<float16, 64>({.group = group, .queries = 33, .histories = {70}});
  }
}

TEST_CASE("prefill: any number of queries after any history") {
  for (const int history : {0, 1, 63, 64, 65, 200}) {
    for (const int queries : {1, 63, 64, 65, 130}) {
      check<OtherElement, 64>({.queries = queries, .histories = {history}});
    }
  }
}

TEST_CASE("prefill: mixed heads of several sequences, longest first or not") {
  const Case c{.heads = {window(4, 20, 64), full(), window(0, 64, 64), full(), window(3, 1, 64)},
               .group = 3,
               .queries = 50,
               .histories = {300, 17},
               .padded = true,
               .more_heads = 4};
  check<OtherElement, 64>(c);
  check<float16, 128>(c);
}

TEST_CASE("prefill: more heads than threads") {
  Case c{.heads = {}, .queries = 2, .histories = {70}};
  for (int h = 0; h < 131; ++h) c.heads.push_back(h % 5 == 0 ? full() : window(0, h % 7 + 1, 64));
  check<float16, 64>(c);
}

TEST_CASE("prefill: windows") {
  for (const int history : {0, 3, 64, 150, 300}) {
    for (const int queries : {1, 64, 130}) {
      check<float16, 64>({.heads = {window(0, 1, 64), window(5, 64, 64), window(64, 100, 128),
                                    window(5, 60, 64, true), window(130, 7, 64)},
                          .queries = queries,
                          .histories = {history}});
    }
  }
}

TEST_CASE("prefill: rows that were appended before the call") {
  for (const int queries : {1, 40, 65}) {
    check<OtherElement, 64>({.heads = {full(), window(5, 64, 192), window(70, 10, 128, true)},
                             .group = 2,
                             .queries = queries,
                             .histories = {0, 200},
                             .own_rows = false});
  }
}

TEST_CASE("prefill: sinks that seem to stand before the window") {
  for (const bool own_rows : {true, false}) {
    Head a = window(4, 30, 128), b = window(70, 20, 128);
    a.view.rotation_limit = 33;
    b.view.rotation_limit = 89;
    check<OtherElement, 64>({.heads = {a, full(), b},
                             .group = 2,
                             .queries = 60,
                             .histories = {0, 50, 300},
                             .own_rows = own_rows});
    check<float16, 80>({.heads = {a}, .queries = 60, .histories = {100}, .own_rows = own_rows});
  }
}

TEST_CASE("prefill: chosen chunks of exact rows") {
  for (const int rows : {8, 16, 24, 100}) {
    std::vector<int> chunks = {0};
    for (int i = 2; i < 290 / rows; i += i % 3 + 1) chunks.push_back(i);
    const Case c{
        .heads = {chosen(full(), rows, chunks, 290 / rows * rows), full(), chosen(full(), rows, {}, 250)},
        .queries = 20,
        .histories = {300},
        .selected = true};
    check<OtherElement, 64>(c);
    check<float16, 256>(c);
  }
  // Chosen among rows that some of the queries must not see yet.
  check<float16, 64>({.heads = {chosen(full(), 8, {0, 1, 4, 5, 6}, 56)},
                      .queries = 50,
                      .histories = {20},
                      .own_rows = false,
                      .selected = true});
}

TEST_CASE("prefill: evicted rows") {
  Head head;
  head.view.evicted = 130;
  check<float16, 64>({.heads = {head, full()}, .queries = 40, .histories = {250}});
}

TEST_CASE_TEMPLATE("prefill: quantised rows", E, KVPOLICY_KERNEL_ELEMENTS) {
  for (const Codes& codes : all_codes) {
    CAPTURE(name_of(codes));
    const Case c{.heads = {packed(codes, 40, 64, 64), packed(codes, 0, 32, 16),
                           packed(codes, 64, 16, 8, true), packed(codes, 1, 64, 32, true)},
                 .queries = 40,
                 .histories = {200},
                 .tentative = 3};
    check<E, 64>(c);
    check<E, 128>({.heads = {packed(codes, 40, 128, 128), packed(codes, 0, 32, 128, true)},
                   .group = 2,
                   .queries = 33,
                   .histories = {300, 64},
                   .page_rows = 128});
  }
}

TEST_CASE_TEMPLATE("prefill: rotated rows between exact ones, beside heads that are not rotated", E,
                   KVPOLICY_KERNEL_ELEMENTS) {
  const auto rotated = [](Head head, bool keys, bool values) {
    head.view.key_hadamard = keys;
    head.view.value_hadamard = values;
    return head;
  };
  for (const Codes& codes : all_codes) {
    CAPTURE(name_of(codes));
    Head sinks = rotated(packed(codes, 20, 64, 64), true, true);
    sinks.view.sinks = 5;
    Head ring = rotated(packed(codes, 10, 64, 64), true, true);  // its sinks are turned to a later position
    ring.view.sinks = 4, ring.view.recent = 150, ring.view.packed_ring = 256, ring.view.exact_ring = 192;
    ring.view.rotation_limit = 153;
    const Case c{
        .heads = {sinks, packed(codes, 0, 32, 16), rotated(packed(codes, 64, 16, 8, true), true, true),
                  rotated(packed(codes, 1, 64, 32, true), true, false),
                  rotated(packed(codes, 1, 32, 64), false, true), ring},
        .queries = 40,
        .histories = {300},
        .tentative = 3};
    for (const int splits : {1, 3}) {
      Case one = c;
      one.splits = splits;
      check<E, 64>(one);
    }
    check<E, 128>({.heads = {rotated(packed(codes, 40, 128, 128), true, true),
                             rotated(packed(codes, 0, 32, 128, true), true, true)},
                   .group = 2,
                   .queries = 33,
                   .histories = {300, 64},
                   .page_rows = 128});
    check<E, 128>({.heads = {chosen(rotated(packed(codes, 70, 128, 32), true, true), 16, {0, 3, 4, 9}, 256)},
                   .group = 2,
                   .queries = 12,
                   .histories = {300},
                   .selected = true});
  }
}

TEST_CASE("prefill: quantised windows and chunks") {
  for (const Codes& codes : all_codes) {
    Head a = packed(codes, 10, 64, 64), b = packed(codes, 64, 32, 64, true);
    a.view.sinks = 5, a.view.recent = 150, a.view.packed_ring = 256, a.view.exact_ring = 192;
    b.view.recent = 100, b.view.packed_ring = 192, b.view.exact_ring = 192;
    b.view.prefill_chunk_mask = true;
    check<float16, 64>({.heads = {a, b, full()}, .queries = 70, .histories = {700, 90, 0}});

    for (const int rows : {8, 16, 64}) {
      std::vector<int> chunks;
      for (int i = 0; i < 256 / rows; i += i % 3 + 1) chunks.push_back(i);
      check<OtherElement, 128>({.heads = {chosen(packed(codes, 70, 128, 32), rows, chunks, 256)},
                                .group = 2,
                                .queries = 12,
                                .histories = {300},
                                .selected = true});
    }
  }
}

TEST_CASE_TEMPLATE("prefill: upper halves of codes, beside heads without them", E, KVPOLICY_KERNEL_ELEMENTS) {
  int histories = 70;
  for (const Codes& codes : test::codes_in_halves) {
    CAPTURE(name_of(codes));
    for (const bool upper_half : {true, false}) {
      for (const bool per_channel : {false, true}) {
        Head rotated = packed(codes, 20, 32, 32, per_channel);
        rotated.view.key_hadamard = rotated.view.value_hadamard = true;
        histories += 37;
        check<E, 64>({.heads = {packed(codes, 10, 32, 16, per_channel), rotated,
                                packed(Codes{kvpolicy::Encoding::uint8}, 10, 32, 64)},
                      .queries = 19,
                      .histories = {histories},
                      .upper_half = upper_half});
      }
    }
  }
}

TEST_CASE("prefill: several blocks for a tile of queries") {
  for (const int splits : {1, 2, 5, 9}) {
    const Case c{.heads = {full(), window(4, 30, 64), full()},
                 .group = 2,
                 .queries = 70,
                 .histories = {260, 0},
                 .splits = splits,
                 .padded = true,
                 .attention_sink_bias = splits == 5};
    check<OtherElement, 64>(c);
    check<float16, 256>(c);
  }
}

TEST_CASE("prefill: results do not depend on who comes first") {
  const Case c{.heads = {full(), window(4, 30, 64)}, .queries = 70, .histories = {260}, .splits = 3};
  std::vector<std::uint16_t> before;
  for (const std::uint64_t order : {1, 2, 3}) {
    test::set_order(order);
    Trial<float16, 64> trial{c};
    trial.run();
    if (!before.empty()) CHECK(before == trial.out());
    before = trial.out();
  }
}

TEST_CASE("prefill: soft cap, sink logits, scales") {
  for (const bool sinks : {false, true}) {
    for (const float softcap : {0.0F, 5.0F, 50.0F}) {
      check<float16, 64>({.heads = {full(), window(2, 10, 64)},
                          .group = 2,
                          .queries = 40,
                          .histories = {90},
                          .attention_sink_bias = sinks,
                          .log_sum_exp = !sinks,
                          .softcap = softcap});
    }
  }
  // Logits far apart, all equal, and upside down.
  for (const float scale : {4.0F, 1e-30F, -0.2F}) {
    check<float16, 64>({.queries = 40, .histories = {90}, .scale = scale});
  }
}

TEST_CASE("prefill: queries that see nothing") {
  // Chunks alone, and those after the first queries.
  Head head = chosen(full(), 16, {1, 2}, 60);
  for (const bool sinks : {false, true}) {
    for (const int splits : {1, 2}) {
      check<OtherElement, 64>({.heads = {head},
                               .queries = 60,
                               .histories = {0},
                               .splits = splits,
                               .own_rows = false,
                               .selected = true,
                               .attention_sink_bias = sinks});
    }
  }
}

TEST_CASE("prefill, trees: every head_dim, alone and at the end of older nodes") {
  std::uint32_t seed = 1;
  for (const int queries : {1, 30, 65}) {
    for (const int older : {0, 7, 64, 70}) {
      if ((queries + older) % 3 == 0) continue;
      const Case c{.heads = {full(), window(4, 20, 192)},
                   .group = 2,
                   .queries = queries,
                   .histories = {100},
                   .own_rows = ++seed % 2 == 0,
                   .tree = test::some_tree(queries + older, seed, seed % 3 * 4)};
      CAPTURE(older);
      check<OtherElement, 64>(c);
      check<float16, 80>(c);
      check<OtherElement, 96>(c);
      check<float16, 128>(c);
      check<OtherElement, 256>(c);
    }
  }
}

TEST_CASE_TEMPLATE("prefill, trees: windows that a path outgrows, texts shorter than the sinks", E,
                   KVPOLICY_KERNEL_ELEMENTS) {
  std::uint32_t seed = 100;
  for (const int history : {0, 3, 64, 150}) {
    for (const int queries : {20, 130}) {
      for (const bool own_rows : {true, false}) {
        if (queries == 130 && own_rows == (history % 2 == 0)) continue;
        Head turned = window(6, 4, 192), by_chunk = window(3, 30, 192, true);
        turned.view.rotation_limit = 9;
        by_chunk.view.rotation_limit = 32;
        check<E, 64>({.heads = {window(0, 3, 192), window(7, 2, 192), window(5, 6, 192, true), turned,
                                by_chunk, window(60, 4, 192)},
                      .queries = queries,
                      .histories = {history},
                      .own_rows = own_rows,
                      .attention_sink_bias = seed % 2 == 0,
                      .tree = test::some_tree(queries + 10, ++seed, 9)});
      }
    }
  }
}

TEST_CASE("prefill, trees: after quantised rows, chosen chunks and dropped rows, split or not") {
  std::uint32_t seed = 200;
  for (const Codes& codes : all_codes) {
    for (const int splits : {1, 3}) {
      Head ring = packed(codes, 5, 64, 64), dropped = full();
      ring.view.sinks = 4, ring.view.recent = 100, ring.view.exact_ring = 256, ring.view.packed_ring = 192;
      dropped.view.evicted = 130;
      check<float16, 64>({.heads = {packed(codes, 0, 64, 64), packed(codes, 9, 32, 16, true), ring, dropped,
                                    chosen(packed(codes, 0, 64, 64), 16, {0, 2, 3, 9}, 256),
                                    chosen(full(), 8, {0, 5, 20}, 250)},
                          .group = 2,
                          .queries = 40,
                          .histories = {300, 260},
                          .splits = splits,
                          .tentative = 6,
                          .own_rows = ++seed % 2 == 0,
                          .selected = true,
                          .softcap = splits == 1 ? 0.0F : 20.0F,
                          .tree = test::some_tree(60, seed, 6)});
    }
  }
}

}  // namespace
