// SPDX-License-Identifier: Apache-2.0
//
// Compares integer products over quantised rows with sums in double, with the bound that follows from rounding a
// factor to 16 bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <initializer_list>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/row.hpp>
#include <kvpolicy/cpu/integer_rows-inl.hpp>
#include <kvpolicy/cpu/stream-inl.hpp>

#include "cpu/random_layer.hpp"
#include "support/tensors.hpp"

#if KVPOLICY_CPU_PAIR_PRODUCTS

namespace test::integer_rows {
namespace vec = kvpolicy::cpu::HWY_NAMESPACE;
using kvpolicy::Encoding;
using kvpolicy::Granularity;
using kvpolicy::RowFormat;

inline constexpr Encoding encodings[] = {Encoding::uint8, Encoding::uint6, Encoding::uint5,  Encoding::uint4,
                                         Encoding::uint3, Encoding::uint2, Encoding::uint4x2};

// The shortest rows that are multiplied as integers, in channels, and the bytes of longer ones as the products see
// them. Plain lists: the code under test has rules.
inline std::size_t fewest_channels(Encoding encoding) {
  switch (encoding) {
    case Encoding::uint8:
    case Encoding::uint4x2: return 16;
    case Encoding::uint6:
    case Encoding::uint4: return 32;
    default: return 64;
  }
}
inline std::size_t product_bytes(Encoding encoding, std::size_t head_dim) {
  switch (encoding) {
    case Encoding::uint2: return head_dim / 4;
    case Encoding::uint3:
    case Encoding::uint4: return head_dim / 2;
    default: return head_dim;
  }
}

// Rows as in a row tile; the plane owns the bytes.
struct Block {
  test::RandomPlane plane;
  std::size_t rows;
  vec::RowTileSide side;
  std::vector<std::vector<float>> decoded;

  // Takes every `stride`-th row of the plane.
  Block(Random& random, const RowFormat& format, std::size_t count, std::size_t head_dim,
        std::size_t stride = 1)
      : plane{random, format, count * stride, head_dim}, rows{count} {
    side.format = format;
    side.lower_offset = kvpolicy::PageLayout{format, head_dim, plane.plane().page_rows}.lower_offset;
    const kvpolicy::Plane& source = plane.plane();
    const kvpolicy::PageLayout layout{format, head_dim, source.page_rows};
    for (std::size_t i = 0; i < count; ++i) {
      const auto place = source.address_of(i * stride);
      const bool per_token = format.granularity == Granularity::per_token;
      const std::size_t at = (per_token ? place.row : place.row / format.group) * layout.params_per_row;
      side.codes[i] = place.page + place.row * layout.row_bytes;
      side.scales[i] = reinterpret_cast<const kvpolicy::float16*>(place.page + layout.scales_offset) + at;
      side.zeros[i] = reinterpret_cast<const kvpolicy::float16*>(place.page + layout.zeros_offset) + at;
      kvpolicy::load_row(source, i * stride, decoded.emplace_back(head_dim));
    }
  }
  // The scale of group g of row i, or of channel g.
  kvpolicy::float16& scale(std::size_t i, std::size_t g = 0) {
    return const_cast<kvpolicy::float16&>(side.scales[i][g]);
  }
  kvpolicy::float16& zero(std::size_t i, std::size_t g = 0) {
    return const_cast<kvpolicy::float16&>(side.zeros[i][g]);
  }
  // The scale and zero of one number.
  [[nodiscard]] double scale_of(std::size_t row, std::size_t channel) const {
    return static_cast<double>(static_cast<float>(side.scales[row][group_of(channel)]));
  }
  [[nodiscard]] double zero_of(std::size_t row, std::size_t channel) const {
    return static_cast<double>(static_cast<float>(side.zeros[row][group_of(channel)]));
  }

 private:
  [[nodiscard]] std::size_t group_of(std::size_t channel) const {
    return side.format.granularity == Granularity::per_token ? channel / side.format.group : channel;
  }
};

inline std::vector<float> normals(Random& random, std::size_t count) {
  std::vector<float> numbers(count);
  for (float& number : numbers) number = test::normal(random);
  return numbers;
}

// The largest code of the format.
inline double levels_of(const RowFormat& format) {
  return static_cast<double>((1U << kvpolicy::bits_of(format.encoding)) - 1U);
}

// Compares logits of `block` with sums in double. Every number must be within the error of rounding the
// query to 16 bits (or to fewer for long heads), plus a margin for float. Returns the largest error.
inline double check_keys(const Block& block, const std::vector<float>& queries, std::size_t count,
                         std::size_t head_dim) {
  constexpr std::size_t stride = vec::StreamPass::stride;
  std::vector<float> scratch(vec::IntegerKeys::scratch_floats(count, head_dim) + 7, -7.5e8F);
  std::vector<float> logits(count * stride + 7, -7.5e8F);
  vec::IntegerKeys keys{count, head_dim, scratch.data()};
  keys.set_queries(queries.data());
  REQUIRE(keys.compute_logits(block.side, block.rows, logits.data(), stride, {}));
  const double units = std::min(32767.0, std::floor(2147483647.0 / (255.0 * static_cast<double>(head_dim))));
  double largest = 0;
  for (std::size_t q = 0; q < count; ++q) {
    for (std::size_t row = 0; row < block.rows; ++row) {
      double logit = 0;
      double size = 0;
      double most = 0;  // of the query, times the scales if they are multiplied into it
      double scales = 0;
      for (std::size_t i = 0; i < head_dim; ++i) {
        const auto x = static_cast<double>(queries[q * head_dim + i]);
        const auto key = static_cast<double>(block.decoded[row][i]);
        const bool per_token = block.side.format.granularity == Granularity::per_token;
        const double scale = std::abs(block.scale_of(row, i));
        logit += x * key;
        size += std::abs(x) * (scale * levels_of(block.side.format) + std::abs(block.zero_of(row, i)));
        most = std::max(most, std::abs(per_token ? x : x * scale));
        scales += per_token ? scale : 1.0;
      }
      const double rounding = 0.5 * most / units * scales * (0.5 * levels_of(block.side.format));
      const double error = std::abs(static_cast<double>(logits[q * stride + row]) - logit);
      REQUIRE(error <= 1.01 * rounding + 2e-6 * size + 1e-27);
      largest = std::max(largest, error);
    }
  }
  for (std::size_t i = 0; i < 7; ++i) {  // nothing was written after the memory
    REQUIRE(scratch[scratch.size() - 1 - i] == -7.5e8F);
    REQUIRE(logits[logits.size() - 1 - i] == -7.5e8F);
  }
  return largest;
}

// The sizes of several groups in a row that are multiplied as integers.
inline std::vector<std::size_t> groups_of_keys(Encoding encoding, std::size_t head_dim) {
  std::vector<std::size_t> groups;
  if (head_dim < fewest_channels(encoding)) return groups;
  for (const std::size_t group : {16U, 24U, 32U, 40U, 48U, 64U, 128U}) {
    if (group < head_dim && head_dim % group == 0 && product_bytes(encoding, head_dim) % 8 == 0) {
      groups.push_back(group);
    }
  }
  return groups;
}
inline std::vector<std::size_t> groups_of_values(Encoding encoding, std::size_t head_dim) {
  std::vector<std::size_t> groups;
  if (head_dim < fewest_channels(encoding)) return groups;
  for (const std::size_t group : {16U, 32U, 48U, 64U, 128U}) {
    if (group < head_dim && head_dim % group == 0 && product_bytes(encoding, head_dim) % 16 == 0) {
      groups.push_back(group);
    }
  }
  return groups;
}

// Compares weighted sums with double; returns the largest error.
inline double check_values(std::vector<Block>& blocks, std::size_t queries, std::size_t head_dim,
                           Random& random) {
  constexpr std::size_t stride = vec::StreamPass::stride;
  std::vector<float> scratch(vec::IntegerValues::scratch_floats(queries, head_dim) + 7, -7.5e8F);
  vec::IntegerValues values{queries, head_dim, scratch.data()};
  std::vector<float> out = normals(random, queries * head_dim);
  std::vector<double> expected{out.begin(), out.end()};
  std::vector<double> bound(out.size(), 1e-5);
  for (const Block& block : blocks) {
    std::vector<float> weights(queries * stride, -7.5e8F);
    std::vector<float> factors(queries);
    for (std::size_t q = 0; q < queries; ++q) {
      factors[q] = static_cast<float>(below(random, 5)) / 4.0F;
      for (std::size_t row = 0; row < (block.rows + vec::lanes - 1) / vec::lanes * vec::lanes; ++row) {
        weights[q * stride + row] =
            row < block.rows ? std::exp(-std::abs(2.0F * test::normal(random))) : 0.0F;
      }
      for (std::size_t i = 0; i < head_dim; ++i) {
        double most = 0;
        double all = 0;
        double& sum = expected[q * head_dim + i];
        sum *= static_cast<double>(factors[q]);
        for (std::size_t row = 0; row < block.rows; ++row) {
          const auto weight = static_cast<double>(weights[q * stride + row]);
          const double scale = std::abs(block.scale_of(row, i));
          most = std::max(most, weight * scale);
          all += weight * (scale * levels_of(block.side.format) + std::abs(block.zero_of(row, i)));
          sum += weight * static_cast<double>(block.decoded[row][i]);
        }
        double& own = bound[q * head_dim + i];
        own = own * static_cast<double>(factors[q]) + 2e-6 * all +
              1.01 * 0.5 * most / 32767.0 * 0.5 * levels_of(block.side.format) *
                  static_cast<double>(block.rows);
      }
    }
    REQUIRE(values.add(block.side, block.rows, weights.data(), stride, factors.data(), out.data(), {}));
    if (below(random, 3) == 0) values.flush(out.data());
  }
  values.flush(out.data());
  double largest = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const double error = std::abs(static_cast<double>(out[i]) - expected[i]);
    REQUIRE(error <= bound[i]);
    largest = std::max(largest, error);
  }
  for (std::size_t i = 0; i < 7; ++i) REQUIRE(scratch[scratch.size() - 1 - i] == -7.5e8F);
  return largest;
}

}  // namespace test::integer_rows

#endif
