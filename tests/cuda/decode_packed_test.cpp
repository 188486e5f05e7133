// SPDX-License-Identifier: Apache-2.0
//
// Decoding over quantised rows: every way in which rows share scales, at the ends of tiles and units,
// and numbers whose scales nearly leave the range of half.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "cuda/support/decode_trial.hpp"

namespace {

using namespace test::decode;
using test::HeadCase;

template <int D>
constexpr Grids all_grids[] = {{D, D},         {32, 32},       {64, 32},       {32, D},        {D, 32},
                               {8, 16},        {16, 8},        {64, 8},        {32, 32, true}, {64, D, true},
                               {16, 32, true}, {32, 16, true}, {64, 64, true}, {16, D, true}};

template <class Body>
void for_each_head_dim(Body body) {
  body(std::integral_constant<int, 64>{});
  body(std::integral_constant<int, 128>{});
}

TEST_CASE_TEMPLATE("decode: every grouping of quantised rows, at the ends of tiles", E,
                   KVPOLICY_KERNEL_ELEMENTS) {
  unsigned seed = 1000;
  int turn = 0;
  constexpr int lengths[] = {64, 80, 81, 127, 128, 129, 144, 191, 193, 256};
  for_each_head_dim([&]<int D>(std::integral_constant<int, D>) {
    for (const Codes& codes : all_codes) {
      for (const Grids& grid : all_grids<D>) {
        for (int columns = 1; columns <= 2; ++columns) {
          // Of widths that differ each grouping has one of the two, in turn.
          if (!codes.are_alike() && columns == 1 + turn++ / 2 % 2) continue;
          const int tokens = lengths[seed % 10];
          CAPTURE(name_of(codes));
          CAPTURE(grid.key_group);
          CAPTURE(grid.value_group);
          CAPTURE(grid.per_channel);
          CAPTURE(tokens);
          const int residual = static_cast<int>(seed % 3) * 16;
          const test::DecodeLayer<E> layer(
              D, columns == 1 ? 1 + static_cast<int>(seed % 7) : 5, 1, seed % 2 == 0 ? 64 : 128,
              {quantised(tokens, codes, grid, residual), quantised(tokens + 64, codes, grid, 0)},
              {.queries = columns == 1 ? 1 : 3}, seed);
          check<D>(layer, static_cast<int>(seed % 5) + 1, grouped_lse);
          ++seed;
        }
      }
    }
  });
}

TEST_CASE_TEMPLATE("decode: rotated rows between exact ones, beside heads that are not rotated", E,
                   KVPOLICY_KERNEL_ELEMENTS) {
  unsigned seed = 1100;
  int turn = 0;  // widths that differ take two of five cases
  for_each_head_dim([&]<int D>(std::integral_constant<int, D>) {
    for (const Codes& codes : all_codes) {
      for (const Grids& grid : {Grids{D, D}, Grids{32, 16}, Grids{64, D, true}, Grids{16, 32, true}}) {
        if (!codes.are_alike() && turn++ % 5 > 1) continue;
        CAPTURE(name_of(codes));
        CAPTURE(grid.key_group);
        CAPTURE(grid.per_channel);
        HeadCase both = quantised(300, codes, grid, 20), keys = both, values = both;
        both.view.key_hadamard = both.view.value_hadamard = true;
        keys.view.key_hadamard = true;
        values.view.value_hadamard = true;
        both.view.sinks = 5;
        const bool two_tiles = seed % 2 == 0;
        const test::DecodeLayer<E> layer(D, two_tiles ? 5 : 3, 4, 64,
                                         {both, quantised(300, codes, grid, 0), keys, values},
                                         {.queries = two_tiles ? 3 : 1}, seed);
        check<D>(layer, static_cast<int>(seed % 5) + 1, grouped_lse);
        ++seed;
      }
    }
  });
}

TEST_CASE_TEMPLATE("decode: upper halves of codes, beside heads without them", E, KVPOLICY_KERNEL_ELEMENTS) {
  unsigned seed = 1400;
  for_each_head_dim([&]<int D>(std::integral_constant<int, D>) {
    for (const Codes& codes : test::codes_in_halves) {
      for (const Grids& grid :
           {Grids{D, D}, Grids{32, 32}, Grids{8, 16}, Grids{32, D, true}, Grids{16, 32, true}}) {
        CAPTURE(name_of(codes));
        CAPTURE(grid.key_group);
        CAPTURE(grid.per_channel);
        const int tokens = 64 + static_cast<int>(seed % 5) * 67;
        HeadCase rotated = quantised(tokens, codes, grid, 9);
        rotated.view.key_hadamard = rotated.view.value_hadamard = true;
        rotated.view.sinks = 3;
        const bool two_tiles = seed % 2 == 0;
        const test::DecodeLayer<E> layer(D, two_tiles ? 5 : 3, 3, 64,
                                         {quantised(tokens, codes, grid, 40), rotated,
                                          quantised(tokens, Codes{kvpolicy::Encoding::uint4}, grid, 0)},
                                         {.queries = two_tiles ? 3 : 1, .upper_half = true}, seed);
        check<D>(layer, static_cast<int>(seed % 5) + 1, grouped_lse);
        ++seed;
      }
    }
  });
}

TEST_CASE("decode: chosen chunks that begin anywhere in a group of keys") {
  unsigned seed = 1200;
  for (const Codes& codes : all_codes) {
    for (const int rows : {16, 32}) {
      for (const int group : {16, 32, 64}) {
        CAPTURE(name_of(codes));
        CAPTURE(rows);
        CAPTURE(group);
        const HeadCase head = quantised(340, codes, {group, 32, true}, 10);
        const HeadCase odd = choosing(head, rows, {1, 2, 5, 6, 7, 9}, 320);
        const HeadCase even = choosing(head, rows, {0, 1, 3, 4, 8}, 320);
        const test::DecodeLayer<OtherElement> layer(128, 4, 2, 64, {odd, even},
                                                    {.queries = 2, .selected = true}, seed);
        check<128>(layer, static_cast<int>(seed++ % 4) + 1, grouped_lse);
      }
    }
  }
}

/// The largest error of an output, relative to what rounding may cost it: weights are rounded, and a product of codes
/// and their scale, which is relative to the range of the codes' group; a logit is off by as much as a log-sum-exp may
/// be, which changes a weight; the output is rounded.
template <kvpolicy::Element E, class Result>
double relative_error(const Output& got, const Result& expected) {
  double worst = 0;
  for (std::size_t i = 0; i < got.out.size(); ++i) {
    const double bound = unit<E> * (expected.magnitude[i] + std::fabs(expected.out[i])) +
                         unit<float16> * expected.range[i] + 2 * grouped_lse * expected.spread[i];
    const double error = std::fabs(got.out[i] - expected.out[i]) / bound;
    worst = error <= worst ? worst : error;  // NaN stays
  }
  return worst;
}

TEST_CASE_TEMPLATE("decode: large and small quantised numbers", E, KVPOLICY_KERNEL_ELEMENTS) {
  unsigned seed = 1300;
  double largest = 0;
  int turn = 0;  // widths that differ take two of five cases
  struct Sizes {
    float key, value, growth, loudness;
  };
  constexpr Sizes all_sizes[] = {{1, 2e-3F, 1, 1.5F},    {1, 4000, 1, 1.5F},       {1, 1e-2F, 1.07F, 1.0F},
                                 {1, 1000, 0.96F, 1.0F}, {2000, 1, 1, 7e-4F},      {1e-2F, 1, 1, 150},
                                 {1, 1, 1, 1e-3F},       {3000, 100, 1.02F, 5e-4F}};
  for_each_head_dim([&]<int D>(std::integral_constant<int, D>) {
    for (const Codes& codes : all_codes) {
      for (const Grids& grid : {Grids{D, D}, Grids{32, 32}, Grids{32, 64, true}}) {
        for (const Sizes& sizes : all_sizes) {
          if (!codes.are_alike() && turn++ % 5 > 1) continue;
          CAPTURE(name_of(codes));
          CAPTURE(grid.key_group);
          CAPTURE(grid.per_channel);
          CAPTURE(sizes.key);
          CAPTURE(sizes.value);
          HeadCase head = quantised(200, codes, grid, 0);
          head.key_size = sizes.key;
          head.value_size = sizes.value;
          head.value_growth = sizes.growth;
          const test::DecodeLayer<E> layer(
              D, 4, 1, 64, {head}, {.queries = 2, .own_rows = false, .loudness = sizes.loudness}, seed);
          const auto expected = layer.oracle();
          const Output got = run<E, D, 1, true>(layer.params(), static_cast<int>(seed % 3) + 1);
          largest = std::max(largest, relative_error<E>(got, expected));
          CHECK(relative_error<E>(got, expected) <= 1);
          CHECK(distance(got.log_sum_exp, expected.log_sum_exp) <= grouped_lse);
          ++seed;
        }
      }
    }
  });
  MESSAGE("largest error, of the bound: ", largest);
}
}  // namespace
