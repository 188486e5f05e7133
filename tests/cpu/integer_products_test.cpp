// SPDX-License-Identifier: Apache-2.0
//
// Quantised rows as integer products: compares the parts with plain loops, and logits and sums of
// values with sums in double, with the bound that follows from rounding a factor to 16 bits.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/row.hpp>
#include <kvpolicy/cpu/integer_rows-inl.hpp>
#include <kvpolicy/cpu/stream-inl.hpp>

#include "cpu/integer_rows_check.hpp"

#if KVPOLICY_CPU_PAIR_PRODUCTS  // otherwise rows are decoded to float, which engine_test covers

namespace {
namespace hn = hwy::HWY_NAMESPACE;
using namespace test::integer_rows;
using test::below;
using test::Random;

template <class D>
void check_pair_products(D d, Random& random) {
  constexpr std::size_t width = hn::MaxLanes(D{});
  for (int round = 0; round < 200; ++round) {
    std::int16_t a[2 * width];
    std::int16_t b[2 * width];
    std::int32_t sums[width];
    std::int32_t expected[width];
    for (std::size_t i = 0; i < 2 * width; ++i) {
      // Any 8-bit code, and any factor, with the extreme ones often.
      a[i] = static_cast<std::int16_t>(round % 2 == 0 ? 255 : below(random, 256));
      b[i] = static_cast<std::int16_t>(round % 5 == 0   ? 32767
                                       : round % 5 == 1 ? -32768
                                                        : static_cast<int>(random() & 0xffff) - 32768);
    }
    for (std::size_t i = 0; i < width; ++i) {
      sums[i] = static_cast<std::int32_t>(static_cast<int>(below(random, 2'000'000'000)) - 1'000'000'000);
      expected[i] = sums[i] + a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
    }
    const hn::Repartition<std::int16_t, D> shorts;
    const auto x = hn::BitCast(d, hn::LoadU(shorts, a));
    const auto y = hn::BitCast(d, hn::LoadU(shorts, b));
    const auto sum = hn::LoadU(d, sums);
    std::int32_t fast[width];
    std::int32_t plain[width];
    hn::StoreU(vec::add_pair_products(d, sum, x, y), d, fast);
    hn::StoreU(vec::add_pair_products_portable(d, sum, x, y), d, plain);
    for (std::size_t i = 0; i < width; ++i) {
      REQUIRE(fast[i] == expected[i]);
      REQUIRE(plain[i] == expected[i]);
    }
  }
}

TEST_CASE("pair products of every width, and their plain version") {
  Random random{1};
  check_pair_products(hn::CappedTag<std::int32_t, 4>{}, random);
  check_pair_products(hn::CappedTag<std::int32_t, 8>{}, random);
  check_pair_products(hn::ScalableTag<std::int32_t>{}, random);
  MESSAGE("pair products by instructions: ", vec::has_pair_products);
}

#if KVPOLICY_CPU_PAIR_PRODUCTS

template <std::size_t Bits>
void check_code_pairs(Random& random) {
  using Pairs = vec::CodePairs<Bits>;
  constexpr std::size_t width = 4 * vec::lanes;  // bytes
  std::vector<std::byte> row(width);
  for (std::byte& byte : row) byte = static_cast<std::byte>(random() & 0xff);
  const auto packed = hn::BitCast(vec::ints, hn::LoadU(hn::Repartition<std::uint8_t, vec::Ints>{},
                                                       reinterpret_cast<const std::uint8_t*>(row.data())));
  const std::size_t head_dim = width * 8 / Bits;
  vec::unroll<Pairs::pairs>([&](auto pair) {
    std::int16_t codes[2 * vec::lanes];
    hn::StoreU(hn::BitCast(hn::Repartition<std::int16_t, vec::Ints>{},
                           Pairs::template take<pair>(vec::ints, packed)),
               hn::Repartition<std::int16_t, vec::Ints>{}, codes);
    for (std::size_t i = 0; i < 2 * vec::lanes; ++i) {
      const std::size_t byte = i / 2 * 4 + i % 2 * 2 + Pairs::byte(pair);
      const Encoding encoding = Bits == 8 ? Encoding::uint8 : Bits == 4 ? Encoding::uint4 : Encoding::uint2;
      const auto expected =
          kvpolicy::load_code(encoding, row.data(), nullptr, Pairs::part(pair) * width + byte, head_dim);
      REQUIRE(codes[i] == static_cast<std::int16_t>(expected));
    }
  });
}

TEST_CASE("codes are extracted from packed bytes in pairs") {
  Random random{2};
  check_code_pairs<8>(random);
  check_code_pairs<4>(random);
  check_code_pairs<2>(random);
}

TEST_CASE("both parts of codes are joined, for every length of a row") {
  Random random{11};
  for (const auto& widths :
       {std::pair{Encoding::uint3, Encoding::uint4}, std::pair{Encoding::uint5, Encoding::uint8},
        std::pair{Encoding::uint6, Encoding::uint8}, std::pair{Encoding::uint4x2, Encoding::uint8}}) {
    const Encoding encoding = widths.first;  // a lambda below cannot capture a structured binding
    const Encoding wider = widths.second;
    for (std::size_t head_dim = fewest_channels(encoding); head_dim <= 1160; head_dim += 8) {
      CAPTURE(name_of(encoding));
      CAPTURE(head_dim);
      const Block block{random, {encoding, Granularity::per_token, head_dim}, 1 + below(random, 3), head_dim};
      std::vector<float> scratch(vec::JoinedCodes::scratch_floats(head_dim) + 7, -7.5e8F);
      vec::JoinedCodes joined{head_dim, scratch.data()};
      REQUIRE(vec::JoinedCodes::takes(encoding, head_dim));
      const std::byte* const* rows = joined.of(block.side, block.rows);
      for (std::size_t row = 0; row < block.rows; ++row) {
        for (std::size_t i = 0; i < head_dim; ++i) {
          const std::byte* codes = block.side.codes[row];
          REQUIRE(kvpolicy::load_code(wider, rows[row], nullptr, i, head_dim) ==
                  kvpolicy::load_code(encoding, codes, codes + block.side.lower_offset, i, head_dim));
        }
      }
      for (std::size_t i = 0; i < 7; ++i) REQUIRE(scratch[scratch.size() - 1 - i] == -7.5e8F);
    }
    REQUIRE_FALSE(vec::JoinedCodes::takes(encoding, fewest_channels(encoding) - 8));
  }
}

TEST_CASE("columns of rows") {
  Random random{3};
  std::vector<std::vector<std::byte>> rows(vec::lanes, std::vector<std::byte>(48));
  std::vector<const std::byte*> pointers;
  for (auto& row : rows) {
    for (std::byte& byte : row) byte = static_cast<std::byte>(random() & 0xff);
    pointers.push_back(row.data());
  }
  vec::IntVector columns[4];
  vec::load_columns(pointers.data(), 20, columns);
  for (std::size_t k = 0; k < 4; ++k) {
    std::int32_t words[vec::lanes];
    hn::StoreU(columns[k], vec::ints, words);
    for (std::size_t i = 0; i < vec::lanes; ++i) {
      REQUIRE(std::memcmp(&words[i], rows[i].data() + 20 + 4 * k, 4) == 0);
    }
  }
}

TEST_CASE("logits of quantised keys for any bits, head_dim, group and number of rows") {
  Random random{4};
  double largest = 0;
  for (const Encoding encoding : encodings) {
    for (std::size_t head_dim = 16; head_dim <= 320; head_dim += head_dim < 128 ? 16 : 64) {
      if (head_dim < fewest_channels(encoding)) continue;
      for (const std::size_t queries : std::initializer_list<std::size_t>{1, 2, 3, 4, 5, 7, 8, 12}) {
        CAPTURE(name_of(encoding));
        CAPTURE(head_dim);
        CAPTURE(queries);
        const std::size_t rows = 1 + below(random, vec::max_tile_rows);
        const auto numbers = normals(random, queries * head_dim);
        const Block token{
            random, {encoding, Granularity::per_token, head_dim}, rows, head_dim, 1 + below(random, 2)};
        largest = std::max(largest, check_keys(token, numbers, queries, head_dim));
        const std::size_t group = std::size_t{8} << below(random, 2);
        const Block channel{random, {encoding, Granularity::per_channel, group}, rows, head_dim};
        largest = std::max(largest, check_keys(channel, numbers, queries, head_dim));
        for (const std::size_t own : groups_of_keys(encoding, head_dim)) {
          CAPTURE(own);
          const Block groups{random,
                             {encoding, Granularity::per_token, own},
                             1 + below(random, 64),
                             head_dim,
                             1 + below(random, 2)};
          largest = std::max(largest, check_keys(groups, numbers, queries, head_dim));
        }
      }
    }
  }
  // Queries and keys of standard deviation 1 and about 1.3 give logits of deviation 10 to 25 (without 1
  // / sqrt(d)).
  CHECK(largest <= 5e-3);
  MESSAGE("largest error of a logit ", largest);
}

TEST_CASE("queries of extreme sizes") {
  Random random{5};
  for (const Encoding encoding : encodings) {
    const std::size_t head_dim = 128;
    for (const RowFormat& format :
         {RowFormat{encoding, Granularity::per_token, head_dim},
          RowFormat{encoding, Granularity::per_token, 32}, RowFormat{encoding, Granularity::per_token, 64},
          RowFormat{encoding, Granularity::per_channel, 16}}) {
      Block block{random, format, 37, head_dim};
      for (const float size : {0.0F, 1e-38F, 1e-30F, 1e-20F, 1e20F, 1e30F}) {
        CAPTURE(size);
        auto queries = normals(random, 3 * head_dim);
        for (float& number : queries) number *= size;
        queries[head_dim + 3] = size * 1000.0F;  // one channel is far larger than the others
        check_keys(block, queries, 3, head_dim);
      }
      // Numbers of one sign and the largest codes give the largest sums.
      std::vector<float> ones(3 * head_dim, 1.0F);
      std::fill_n(ones.begin(), head_dim, -1.0F);
      for (std::size_t row = 0; row < block.rows; ++row) {
        std::fill_n(const_cast<std::byte*>(block.side.codes[row]), head_dim * kvpolicy::bits_of(encoding) / 8,
                    std::byte{0xff});
        kvpolicy::load_row(block.plane.plane(), row, block.decoded[row]);
      }
      check_keys(block, ones, 3, head_dim);
    }
  }
}

TEST_CASE("sums of quantised values for any bits, head_dim and number of rows, with alternating formats") {
  Random random{6};
  double largest = 0;
  for (std::size_t head_dim = 16; head_dim <= 320; head_dim += head_dim < 128 ? 16 : 64) {
    for (const std::size_t queries : std::initializer_list<std::size_t>{1, 2, 3, 4, 5, 7, 8, 12}) {
      CAPTURE(head_dim);
      CAPTURE(queries);
      std::vector<Block> blocks;
      while (blocks.size() < 4) {
        const Encoding encoding = encodings[below(random, std::size(encodings))];
        if (head_dim < fewest_channels(encoding)) continue;
        std::vector<std::size_t> groups = groups_of_values(encoding, head_dim);
        groups.push_back(head_dim);
        blocks.emplace_back(random, RowFormat{encoding, Granularity::per_token, test::one_of(random, groups)},
                            1 + below(random, vec::max_tile_rows), head_dim, 1 + below(random, 2));
      }
      largest = std::max(largest, check_values(blocks, queries, head_dim, random));
    }
  }
  CHECK(largest <= 7e-4);  // sums of some tens
  MESSAGE("largest error of a sum ", largest);
}

TEST_CASE("scales that are zero, negative, subnormal or very different") {
  Random random{7};
  for (const Encoding encoding : encodings) {
    const RowFormat format{encoding, Granularity::per_token, 128};
    for (const float scale : {0.0F, -0.02F, 6e-8F, 200.0F}) {
      CAPTURE(scale);
      std::vector<Block> blocks;
      blocks.emplace_back(random, format, 21UL, 128UL);
      for (std::size_t row = 0; row < 21; row += scale == 0.0F ? 1 : 3) {
        blocks[0].scale(row) = kvpolicy::float16{scale};
        kvpolicy::load_row(blocks[0].plane.plane(), row, blocks[0].decoded[row]);
      }
      check_values(blocks, 4, 128, random);
      check_keys(blocks[0], normals(random, 4 * 128), 4, 128);
      blocks.clear();
      blocks.emplace_back(random, RowFormat{encoding, Granularity::per_token, 32}, 21UL, 128UL);
      for (std::size_t row = 0; row < 21; row += scale == 0.0F ? 1 : 3) {
        blocks[0].scale(row, row % 4) = kvpolicy::float16{scale};
        kvpolicy::load_row(blocks[0].plane.plane(), row, blocks[0].decoded[row]);
      }
      check_values(blocks, 4, 128, random);
      check_keys(blocks[0], normals(random, 4 * 128), 4, 128);
    }
  }
}

TEST_CASE("numbers that are not finite, and formats that do not fit, are refused") {
  Random random{8};
  constexpr std::size_t stride = vec::StreamPass::stride;
  constexpr float inf = std::numeric_limits<float>::infinity();
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> scratch(30000);
  std::vector<float> logits(4 * stride);
  const auto keys_take = [&](const Block& block, const std::vector<float>& queries) {
    vec::IntegerKeys keys{4, 64, scratch.data()};
    keys.set_queries(queries.data());
    return keys.compute_logits(block.side, block.rows, logits.data(), stride, {});
  };
  const auto values_take = [&](const Block& block, float weight) {
    vec::IntegerValues values{4, 64, scratch.data()};
    std::vector<float> weights(4 * stride, 0.0F);
    weights[2 * stride + 5] = weight;
    std::vector<float> factors(4, 1.0F);
    std::vector<float> out(4 * 64);
    return values.add(block.side, block.rows, weights.data(), stride, factors.data(), out.data(), {});
  };
  const auto queries = normals(random, 4 * 64);
  for (const Encoding encoding : encodings) {
    const RowFormat token{encoding, Granularity::per_token, 64};
    const RowFormat channel{encoding, Granularity::per_channel, 16};
    for (const float number : {inf, -inf, nan}) {
      Block block{random, token, 30, 64};
      REQUIRE(keys_take(block, queries));
      REQUIRE(values_take(block, 0.5F));
      REQUIRE_FALSE(values_take(block, number));
      auto bad = queries;
      bad[2 * 64 + 9] = number;
      REQUIRE_FALSE(keys_take(block, bad));
      block.scale(29) = kvpolicy::float16{number};
      REQUIRE_FALSE(keys_take(block, queries));
      REQUIRE_FALSE(values_take(block, 0.5F));
      Block other{random, token, 30, 64};
      other.zero(0) = kvpolicy::float16{number};
      REQUIRE_FALSE(keys_take(other, queries));
      REQUIRE_FALSE(values_take(other, 0.5F));
      Block shared{random, channel, 30, 64};
      REQUIRE(keys_take(shared, queries));
      REQUIRE_FALSE(keys_take(shared, bad));
      shared.scale(20) = kvpolicy::float16{number};
      REQUIRE_FALSE(keys_take(shared, queries));
      Block shifted{random, channel, 30, 64};
      shifted.zero(20) = kvpolicy::float16{number};
      REQUIRE_FALSE(keys_take(shifted, queries));
    }
    for (const float number : {inf, -inf, nan}) {
      Block groups{random, {encoding, Granularity::per_token, 32}, 30, 64};
      REQUIRE(keys_take(groups, queries));
      REQUIRE(values_take(groups, 0.5F));
      REQUIRE_FALSE(values_take(groups, number));
      groups.scale(29, 1) = kvpolicy::float16{number};
      REQUIRE_FALSE(keys_take(groups, queries));
      REQUIRE_FALSE(values_take(groups, 0.5F));
      Block shifted{random, {encoding, Granularity::per_token, 32}, 30, 64};
      shifted.zero(17, 1) = kvpolicy::float16{number};
      REQUIRE_FALSE(keys_take(shifted, queries));
      REQUIRE_FALSE(values_take(shifted, 0.5F));
    }
    const Block small{random, {encoding, Granularity::per_token, 8}, 30, 64};
    REQUIRE_FALSE(keys_take(small, queries));
    REQUIRE_FALSE(values_take(small, 0.5F));
    const Block channel_values{random, channel, 30, 64};
    REQUIRE_FALSE(values_take(channel_values, 0.5F));
    const Block few{random, {encoding, Granularity::per_channel, 4}, 30, 64};
    REQUIRE_FALSE(keys_take(few, queries));
  }
}

#endif  // KVPOLICY_CPU_PAIR_PRODUCTS

}  // namespace

#endif
