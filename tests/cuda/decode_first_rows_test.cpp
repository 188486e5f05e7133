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
#include <utility>
#include <vector>

#include "cuda/support/decode_trial.hpp"

namespace {

using namespace test::decode;
using test::CallCase;
using test::HeadCase;

/// Watches lines for as long as it lives.
class Watch {
 public:
  Watch() { simt::lines = &lines; }
  ~Watch() { simt::lines = nullptr; }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  simt::Lines lines;
};

template <int D, bool Packed>
simt::Lines lines_of(const AttendParams& params, int grid) {
  Watch watch;
  static_cast<void>(run<float16, D, 1, Packed>(params, grid));
  return std::move(watch.lines);
}

std::set<std::uintptr_t> less(const std::set<std::uintptr_t>& all, const std::set<std::uintptr_t>& some) {
  std::set<std::uintptr_t> rest;
  std::ranges::set_difference(all, some, std::inserter(rest, rest.end()));
  return rest;
}

/// What one block loads of all heads but the first is what it requests. Each warp has a unit of a head at most.
template <int D, bool Packed>
void check_all_requested(const AttendParams& params) {
  const simt::Lines all = lines_of<D, Packed>(params, 1);
  const simt::Lines first = lines_of<D, Packed>(only(params, 0), 1);
  CHECK(first.requested.empty());
  const std::set<std::uintptr_t> others = less(all.loaded, first.loaded);
  CHECK(others.size() > 100);
  CHECK(less(others, all.requested).empty());
  CHECK(less(all.requested, all.loaded).empty());
}

}  // namespace

TEST_CASE("decode: short heads of one block are requested whole while the head before is merged") {
  std::vector<HeadCase> heads;
  // 12 units of rows at most, of which the last is the call's own.
  for (const int tokens : {100, 0, 1, 15, 16, 17, 170, 0, 33}) {
    heads.push_back(full(tokens));
    heads.push_back(window(tokens, 2, 20, 64));
  }
  const test::DecodeLayer<float16> layer(128, 2, 2, 64, heads, {.queries = 2}, 3);
  check_all_requested<128, false>(layer.params());
}

TEST_CASE("decode: exact heads are requested by the kernel for codes as well") {
  std::vector<HeadCase> heads;
  for (const int tokens : {100, 0, 1, 15, 16, 17, 90, 33}) {  // 8 units of rows at most
    heads.push_back(full(tokens));
    // These read not all of a page. Of three one has pages that begin within a line.
    for (int i = 0; i < 3; ++i) heads.push_back(window(tokens, 0, 20, 64));
  }
  const test::DecodeLayer<float16> layer(128, 2, 2, 64, heads, {.queries = 2}, 6);
  check_all_requested<128, true>(layer.params());
}

TEST_CASE("decode: of long heads and of several blocks the first rows are requested") {
  std::vector<HeadCase> heads;
  for (const int tokens : {3000, 40, 900}) heads.push_back(full(tokens));
  const test::DecodeLayer<float16> layer(64, 4, 1, 64, heads, {}, 4);
  for (const int grid : {1, 2, 5}) {
    CAPTURE(grid);
    const simt::Lines lines = lines_of<64, false>(layer.params(), grid);
    CHECK(less(lines.requested, lines.loaded).empty());
    CHECK(lines.requested.size() >= 2 * 40);
    CHECK(lines.requested.size() < lines.loaded.size() / 2);
  }
}

TEST_CASE(
    "decode: codes, scales and zeros of a head are requested, of chosen chunks and of upper halves too") {
  // Eight warps, of which each has one unit at most: every row has codes, because 64 rows get them together, and
  // nothing comes with the call.
  const auto codes = [](int tokens, Encoding encoding, const Grids& grids) {
    return quantised(tokens, Codes{encoding}, grids, 0);
  };
  const std::vector<HeadCase> heads{
      codes(6 * 32, Encoding::uint8, {128, 128}),
      codes(6 * 32, Encoding::uint8, {32, 64}),
      codes(6 * 64, Encoding::uint4, {128, 128}),
      codes(7 * 64, Encoding::uint2, {8, 16}),
      codes(6 * 64, Encoding::uint2, {64, 32, true}),
      quantised(6 * 32, test::codes_in_halves[0], {32, 32, true}, 0),
      quantised(6 * 32, test::codes_in_halves[0], {128, 128}, 0),
      choosing(codes(12 * 64, Encoding::uint2, {128, 128}), 16, every(2, 0, 48), 12 * 64)};
  for (const bool upper_half : {false, true}) {
    for (const HeadCase& head : heads) {
      CAPTURE(upper_half);
      CAPTURE(&head - heads.data());
      const CallCase call{.own_rows = false, .selected = true, .upper_half = upper_half};
      const test::DecodeLayer<float16> layer(128, 4, 1, 64, {head, head, head}, call, 5);
      check_all_requested<128, true>(layer.params());
    }
  }
}

#endif
