// SPDX-License-Identifier: Apache-2.0
//
// Integer products over rows with several groups: every size of group, and rows around the ends of vectors and row
// tiles.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <vector>

#include <doctest/doctest.h>

#include "cpu/integer_rows_check.hpp"

#if KVPOLICY_CPU_PAIR_PRODUCTS  // otherwise rows are decoded to float, which engine_test covers

namespace {
using namespace test::integer_rows;
using test::below;
using test::Random;

TEST_CASE("every group of a row, at every number of rows around the ends of vectors and tiles") {
  Random random{9};
  for (const std::size_t head_dim : {64U, 80U, 96U, 128U, 256U}) {
    for (const Encoding encoding : encodings) {
      for (const std::size_t group : groups_of_keys(encoding, head_dim)) {
        const RowFormat format{encoding, Granularity::per_token, group};
        for (const std::size_t rows : {1U, 7U, 8U, 9U, 15U, 16U, 17U, 31U, 33U, 63U, 64U}) {
          CAPTURE(head_dim);
          CAPTURE(name_of(encoding));
          CAPTURE(group);
          CAPTURE(rows);
          std::vector<Block> blocks;
          blocks.emplace_back(random, format, rows, head_dim, 1 + below(random, 2));
          const std::size_t queries = 1 + below(random, 9);
          check_keys(blocks[0], normals(random, queries * head_dim), queries, head_dim);
          const auto sums = groups_of_values(encoding, head_dim);
          if (std::ranges::find(sums, group) != sums.end()) check_values(blocks, queries, head_dim, random);
        }
      }
    }
  }
}

TEST_CASE("other groups and other queries are noticed between row tiles") {
  Random random{10};
  constexpr std::size_t stride = vec::StreamPass::stride;
  std::vector<float> scratch(vec::IntegerKeys::scratch_floats(3, 128));
  vec::IntegerKeys keys{3, 128, scratch.data()};
  for (int round = 0; round < 20; ++round) {
    const auto queries = normals(random, 3 * 128);
    keys.set_queries(queries.data());
    for (const std::size_t group : {32U, 64U, 128U, 16U, 32U}) {
      const RowFormat format{encodings[below(random, std::size(encodings))], Granularity::per_token, group};
      const Block block{random, format, 1 + below(random, 64), 128};
      std::vector<float> logits(3 * stride);
      REQUIRE(keys.compute_logits(block.side, block.rows, logits.data(), stride, {}));
      for (std::size_t q = 0; q < 3; ++q) {
        for (std::size_t row = 0; row < block.rows; ++row) {
          double logit = 0;
          for (std::size_t i = 0; i < 128; ++i) {
            logit += static_cast<double>(queries[q * 128 + i]) * static_cast<double>(block.decoded[row][i]);
          }
          REQUIRE(std::abs(static_cast<double>(logits[q * stride + row]) - logit) <= 5e-3);
        }
      }
    }
  }
}

}  // namespace

#endif
