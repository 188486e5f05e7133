// SPDX-License-Identifier: Apache-2.0
//
// What the decode kernel requests of a block's next head while it merges the results of the one before: lines that it
// reads then, and where heads are short all of them. A device cannot say which it was asked for.
#if !defined(__CUDACC__)

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <set>
#include <vector>

#include "cuda/support/decode_trial.hpp"

namespace {

using namespace test::decode;
using test::CallCase;
using test::HeadCase;

/// A launch of `grid` blocks with its lines, which are right besides.
template <int D, bool Packed>
simt::Lines lines_of(const AttendParams& params, int grid) {
  simt::Lines lines;
  simt::lines = &lines;
  static_cast<void>(run<half, D, 1, Packed>(params, grid));
  simt::lines = nullptr;
  return lines;
}

bool is_part(const std::set<std::uintptr_t>& some, const std::set<std::uintptr_t>& all) {
  return std::ranges::includes(all, some);
}

/// Of `lines`, those of which neither they nor the one before is in `requested`: rows of a test begin anywhere in a
/// line.
std::size_t missing(const std::set<std::uintptr_t>& lines, const std::set<std::uintptr_t>& requested) {
  return static_cast<std::size_t>(std::ranges::count_if(lines, [&](std::uintptr_t line) {
    return !requested.contains(line) && !requested.contains(line - 1);
  }));
}

}  // namespace

TEST_CASE("decode: short heads of one block are requested whole while the head before is merged") {
  std::vector<HeadCase> heads;
  // 12 units of rows at most, one for each warp, of which the last is the call's own.
  for (const int tokens : {100, 0, 1, 15, 16, 17, 170, 0, 33}) {
    heads.push_back(full(tokens));
    heads.push_back(window(tokens, 2, 20, 64));
  }
  const test::DecodeLayer<half> layer(128, 2, 2, 64, heads, {.queries = 2}, 3);
  const simt::Lines all = lines_of<128, false>(layer.params(), 1);
  CHECK(is_part(all.requested, all.loaded));
  const simt::Lines first = lines_of<128, false>(only(layer.params(), 0), 1);
  CHECK(first.requested.empty());
  std::set<std::uintptr_t> others;
  std::ranges::set_difference(all.loaded, first.loaded, std::inserter(others, others.end()));
  CHECK(others.size() > 1000);
  CHECK(missing(others, all.requested) == 0);
}

TEST_CASE("decode: of long heads and of several blocks the first rows are requested") {
  std::vector<HeadCase> heads;
  for (const int tokens : {3000, 40, 900}) heads.push_back(full(tokens));
  const test::DecodeLayer<half> layer(64, 4, 1, 64, heads, {}, 4);
  for (const int grid : {1, 2, 5}) {
    CAPTURE(grid);
    const simt::Lines lines = lines_of<64, false>(layer.params(), grid);
    CHECK(is_part(lines.requested, lines.loaded));
    CHECK(lines.requested.size() >= 2 * 40);
    CHECK(lines.requested.size() < lines.loaded.size() / 2);
  }
}

TEST_CASE("decode: codes of a head are requested, of chosen chunks and of upper halves too") {
  constexpr int tokens = 270;
  HeadCase ring = quantised(tokens, Encoding::uint8, {128, 128}, 32);
  ring.view.sinks = 16;
  ring.view.recent = 128;
  ring.view.exact_ring = 128;
  ring.view.packed_ring = 192;
  const std::vector<HeadCase> heads{ring, quantised(tokens, Encoding::uint4, {128, 128}, 40),
                                    quantised(tokens, Encoding::uint2, {32, 32, true}, 0),
                                    quantised(tokens, test::codes_in_halves[0], {32, 32, true}, 9),
                                    choosing(quantised(tokens, Encoding::uint2, {128, 128}, 0), 16,
                                             every(2, 0, tokens / 16), tokens / 16 * 16)};
  for (const bool upper_half : {false, true}) {
    CAPTURE(upper_half);
    const CallCase call{.selected = true, .upper_half = upper_half};
    for (const HeadCase& head : heads) {
      const test::DecodeLayer<half> layer(128, 4, 1, 64, {head, head, head}, call, 5);
      const simt::Lines lines = lines_of<128, true>(layer.params(), 1);
      // Eight warps request two units each, of which some have few rows.
      CHECK(lines.requested.size() > 2 * 2 * 4);
      CHECK(is_part(lines.requested, lines.loaded));
    }
  }
}

#endif
