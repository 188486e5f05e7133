// SPDX-License-Identifier: Apache-2.0
//
// A needle in a long text: one row of many random ones that a query looks for, and that has half of its attention. Sums that
// are kept in too few bits lose the other half, a row each time less than rounding, and with it what the needle's share is.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include "cuda/support/device_cache.hpp"
#include "cuda/support/elements.hpp"
#include "support/oracle.hpp"

namespace kvpolicy::needle_test {
namespace {

#if defined(__CUDACC__)
constexpr std::size_t length = std::size_t{128} << 10;
#else
constexpr std::size_t length = 1500;
#endif
constexpr std::size_t head_dim = 64;

// A head of each format that rows are kept in.
std::vector<test::HeadSpec> formats() {
  return {{},
          {.bits = 8, .residual = 128},
          {.bits = 4, .residual = 128},
          {.bits = 2, .residual = 128},
          {.bits = 4, .key_group = 32, .residual = 128, .per_channel = true, .kivi = true},
          {.bits = 2, .key_group = 32, .residual = 128, .per_channel = true, .kivi = true}};
}

// Of each head's queries the first look for a needle at these shares of the text; one looks for none.
constexpr double depths[] = {0.1, 0.5, 0.97};
constexpr std::size_t queries = std::size(depths) + 1;

template <class E>
std::vector<double> numbers_of(const std::vector<E>& all, std::size_t row) {
  std::vector<double> found;
  for (std::size_t c = 0; c < head_dim; ++c)
    found.push_back(static_cast<double>(static_cast<float>(all[row * head_dim + c])));
  return found;
}

template <class E>
void find_needles() {
  const std::vector<test::HeadSpec> heads = formats();
  const ModelShape shape{1, heads.size() * queries, heads.size(), head_dim};
  constexpr std::size_t part = 1024;
  const test::SmallDevice small;
  gpu::CacheOptions options;
  options.max_append = part;
  gpu::KvCache<E> cache{test::plan_of<E>(shape, heads), options};
  test::Random random{11};
  const test::DeviceChunk<E> asked{random, shape, 1};
  const std::vector<E> q = asked.q.download();

  // The exponent that gives one row as much as all others: those have logits of variance 1.
  const double wanted = std::log(static_cast<double>(length)) + 0.5;
  std::vector<E> needles;  // the values of each head's, depth after depth
  for (std::size_t first = 0; first < length; first += part) {
    const std::size_t count = std::min(part, length - first);
    const test::DeviceChunk<E> chunk{random, shape, count};
    std::vector<E> keys = chunk.k.download();
    const std::vector<E> values = chunk.v.download();
    for (std::size_t i = 0; i < std::size(depths); ++i) {
      const auto at = static_cast<std::size_t>(depths[i] * static_cast<double>(length));
      if (at < first || at >= first + count) continue;
      for (std::size_t head = 0; head < heads.size(); ++head) {
        const std::vector<double> query = numbers_of(q, head * queries + i);
        double squares = 0;
        for (const double x : query) squares += x * x;
        const std::size_t row = (at - first) * heads.size() + head;
        for (std::size_t c = 0; c < head_dim; ++c) {
          keys[row * head_dim + c] = E{static_cast<float>(query[c] * wanted * std::sqrt(head_dim) / squares)};
          needles.push_back(values[row * head_dim + c]);
        }
      }
    }
    chunk.k.upload(keys);
    chunk.append(cache, 0);
  }
  asked.attend(cache, 0);
  const std::vector<E> out = asked.out.download();
  const std::vector<float> log_sum_exp = asked.log_sum_exp.download();

  for (std::size_t head = 0; head < heads.size(); ++head) {
    const auto kept = cache.rows(0, head);
    REQUIRE(kept.positions.size() == length);
    std::vector<oracle::Row> rows;
    std::vector<const oracle::Row*> all;
    rows.reserve(length);
    for (std::size_t row = 0; row < length; ++row) {
      rows.push_back({kept.positions[row], numbers_of(kept.keys, row), numbers_of(kept.values, row)});
      all.push_back(&rows.back());
    }
    for (std::size_t i = 0; i < queries; ++i) {
      CAPTURE(head);
      CAPTURE(i);
      const std::size_t query = head * queries + i;
      const oracle::Options scaled{.scale = 1 / std::sqrt(static_cast<double>(head_dim)), .sink_logit = {}};
      const oracle::Result want = oracle::attend(numbers_of(q, query), all, scaled);
      const std::vector<double> found = numbers_of(out, query);
      CHECK(test::largest_difference(found, want.out) <= test::DeviceBackend<E>::out_error);
      CHECK(std::abs(static_cast<double>(log_sum_exp[query]) - want.log_sum_exp) <= 2e-3);
      if (i == std::size(depths)) continue;
      // What was found is the needle's value as it was before it was stored, by about half.
      const std::vector<double> needle = numbers_of(needles, i * heads.size() + head);
      double along = 0;
      double squares = 0;
      for (std::size_t c = 0; c < head_dim; ++c) {
        along += found[c] * needle[c];
        squares += needle[c] * needle[c];
      }
      CHECK(along / squares > (heads[head].bits == 2 ? 0.1 : 0.35));
      CHECK(along / squares < (heads[head].bits == 2 ? 0.9 : 0.65));
    }
  }
}

TEST_CASE("a needle is found by its value, in rows of each format") {
  find_needles<float16>();
#ifndef KVPOLICY_TEST_FEW_KERNELS
  find_needles<bfloat16>();
#endif
}

}  // namespace
}  // namespace kvpolicy::needle_test
