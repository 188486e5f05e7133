// SPDX-License-Identifier: Apache-2.0
//
// The decode kernel over trees of guesses: what each node sees, in every kind of head.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "cuda/support/decode_trial.hpp"

namespace {

using namespace test::decode;
using kvpolicy::TokenTree;
using test::CallCase;
using test::HeadCase;
using test::some_tree;

constexpr int grids[] = {1, 2, 7, 64};

/// The head of a text, with the nodes after it that a call finds there.
HeadCase with_nodes(HeadCase head, const CallCase& call) {
  head.tokens += static_cast<int>(call.tree.size()) - (call.own_rows ? call.queries : 0);
  return head;
}
std::vector<HeadCase> with_nodes(std::vector<HeadCase> heads, const CallCase& call) {
  for (HeadCase& head : heads) head = with_nodes(head, call);
  return heads;
}
HeadCase turned(int tokens, int sinks, int recent, int ring, bool prefill_chunk_mask = false) {
  HeadCase head = window(tokens, sinks, recent, ring, prefill_chunk_mask);
  head.view.rotation_limit = sinks + recent - 1;
  head.turns_sinks = true;
  return head;
}
/// Of every shape: stars, chains with branches, and what lies between.
TokenTree tree_of(int nodes, unsigned seed) { return some_tree(nodes, seed, seed % 3 * 4); }

TEST_CASE_TEMPLATE("decode, trees: every head_dim, group and number of queries", E,
                   KVPOLICY_KERNEL_ELEMENTS) {
  unsigned seed = 1;
  const auto go = [&]<int D>(std::integral_constant<int, D>) {
    for (const int group : {1, 2, 3, 5, 8, 16}) {
      for (const int queries : {1, 2, 3, 7, 8, 16}) {
        if (queries * group > decode_most_columns || (seed++ + D / 16) % 2 == 0) continue;
        CAPTURE(seed);
        const CallCase call{.queries = queries,
                            .own_rows = seed % 3 != 0,
                            .tree = tree_of(queries + static_cast<int>(seed % 7), seed)};
        const test::DecodeLayer<E> layer(D, group, 2, 64,
                                         with_nodes({full(150), window(150, 5, 40, 128)}, call), call, seed);
        check<D>(layer, grids[seed % 4]);
      }
    }
  };
  go(std::integral_constant<int, 64>{});
  go(std::integral_constant<int, 80>{});
  go(std::integral_constant<int, 96>{});
  go(std::integral_constant<int, 128>{});
  go(std::integral_constant<int, 256>{});
}

TEST_CASE_TEMPLATE("decode, trees: windows that a path outgrows, texts shorter than the sinks", E,
                   KVPOLICY_KERNEL_ELEMENTS) {
  unsigned seed = 200;
  for (const int text : {0, 1, 4, 15, 64, 200}) {
    for (const int nodes : {1, 5, 16, 40}) {
      for (const bool own_rows : {true, false}) {
        ++seed;
        CAPTURE(text);
        CAPTURE(nodes);
        CAPTURE(seed);
        const int queries = nodes < 8 || seed % 2 == 0 ? std::min(nodes, 8) : 5;
        const CallCase call{.queries = queries,
                            .own_rows = own_rows,
                            .attention_sink_bias = seed % 3 == 0,
                            .tree = some_tree(nodes, seed, 8)};
        const test::DecodeLayer<E> plain(64, 2, 4, 64,
                                         with_nodes({window(text, 0, 3, 64), window(text, 7, 2, 64),
                                                     window(text, 7, 5, 64, true), window(text, 60, 4, 64)},
                                                    call),
                                         call, seed);
        check<64>(plain, grids[seed % 4]);
        // Turned queries are rounded to E before they meet the sinks, which are most of what is read.
        const test::DecodeLayer<E> turning(
            64, 2, 2, 64, with_nodes({turned(text, 6, 4, 64), turned(text, 3, 30, 128, true)}, call), call,
            seed);
        check<64>(turning, grids[seed % 4], 0.5 * unit<E>, 4.0);
      }
    }
  }
}

TEST_CASE_TEMPLATE("decode, trees: after quantised rows, chosen chunks and dropped rows", E,
                   KVPOLICY_KERNEL_ELEMENTS) {
  unsigned seed = 400;
  for (const Codes& codes : all_codes) {
    for (const int text : {70, 300}) {
      ++seed;
      const CallCase call{.queries = 5,
                          .own_rows = seed % 2 == 0,
                          .selected = true,
                          .softcap = seed % 3 == 0 ? 20.0F : 0.0F,
                          .tree = tree_of(11, seed)};
      HeadCase ring = quantised(text, codes, {64, 64}, 5);
      ring.view.sinks = 4;
      ring.view.recent = 100;
      ring.view.exact_ring = 128;
      ring.view.packed_ring = 192;
      HeadCase dropped = full(text);
      dropped.view.evicted = text / 2;
      HeadCase tentative = quantised(text, codes, {32, 32, true}, 0);
      tentative.committed = ring.committed;
      const int chunks = text / 16;
      const test::DecodeLayer<E> layer(
          64, 3, 6, 64,
          with_nodes({quantised(text, codes, {64, 64}, 0), ring, dropped, tentative,
                      choosing(full(text), 16, every(2, 0, chunks), chunks * 16),
                      choosing(quantised(text, codes, {64, 64}, 0), 16, every(3, 0, chunks), chunks * 16)},
                     call),
          call, seed);
      check<64>(layer, grids[seed % 4], grouped_lse);
    }
  }
}

TEST_CASE_TEMPLATE("decode, trees: few queries at the end of many nodes", E, KVPOLICY_KERNEL_ELEMENTS) {
  unsigned seed = 600;
  for (const int nodes : {63, 64, 65, 128, 129, 300}) {
    for (const int queries : {1, 4}) {
      for (const bool own_rows : {true, false}) {
        CAPTURE(nodes);
        CAPTURE(queries);
        const CallCase call{.queries = queries, .own_rows = own_rows, .tree = some_tree(nodes, ++seed, 7)};
        const test::DecodeLayer<E> layer(128, 2, 2, 64, with_nodes({full(40), window(40, 3, 6, 320)}, call),
                                         call, seed);
        check<128>(layer, grids[seed % 4]);
      }
    }
  }
}

TEST_CASE("decode, trees: the same tree after texts of several sequences") {
  const CallCase call{.queries = 4, .tree = tree_of(9, 3)};
  std::vector<HeadCase> heads;
  for (const int text : {0, 3, 64, 500}) {
    heads.push_back(full(text));
    heads.push_back(window(text, 5, 20, 128));
  }
  const test::DecodeLayer<float16> layer(64, 4, 2, 64, with_nodes(heads, call), call, 7);
  for (const int grid : grids) check<64>(layer, grid);
}
}  // namespace
