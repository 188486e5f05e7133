// SPDX-License-Identifier: Apache-2.0
//
// Compares with the paper's own description, in double: keys are kept as they were before their
// rotation, and for each query the rows in the cache are numbered again and rotated to those numbers.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <initializer_list>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/plan/shipped_policies.hpp>
#include <kvpolicy/streaming_llm.hpp>

#include "support/oracle.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;

namespace {

constexpr ModelShape shape{.layers = 1, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
constexpr double theta = 10000.0;

// Rotates channel i with channel i + 32, as in the Llama family.
std::vector<double> rotated(const std::vector<double>& row, std::size_t position) {
  std::vector<double> out(row.size());
  const std::size_t pairs = row.size() / 2;
  for (std::size_t i = 0; i < pairs; ++i) {
    const double angle = static_cast<double>(position) *
                         std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(row.size()));
    out[i] = row[i] * std::cos(angle) - row[i + pairs] * std::sin(angle);
    out[i + pairs] = row[i + pairs] * std::cos(angle) + row[i] * std::sin(angle);
  }
  return out;
}

using Rows = std::vector<std::vector<double>>;  // [tokens x heads] of [head_dim]

Rows draw(test::Random& random, std::size_t count) {
  Rows rows(count, std::vector<double>(64));
  for (auto& row : rows) {
    for (double& x : row) x = static_cast<double>(test::normal(random));
  }
  return rows;
}

std::vector<double> expected_row(const Rows& q, const Rows& k, const Rows& v, std::size_t token,
                                 std::size_t q_head, std::size_t sinks, std::size_t recent, bool in_cache) {
  std::vector<std::size_t> kept;
  for (std::size_t t = 0; t <= token; ++t) {
    if (t < sinks || t + recent > token) kept.push_back(t);
  }
  std::vector<oracle::Row> rows(kept.size());
  std::vector<const oracle::Row*> seen;
  for (std::size_t slot = 0; slot < kept.size(); ++slot) {
    const std::size_t at = kept[slot] * 2 + q_head / 2;
    rows[slot].key = rotated(k[at], in_cache ? slot : kept[slot]);
    rows[slot].value = v[at];
    seen.push_back(&rows[slot]);
  }
  const auto query = rotated(q[token * 4 + q_head], in_cache ? kept.size() - 1 : token);
  const auto weights = oracle::probabilities(query, seen, {.scale = 1.0 / 8.0, .sink_logit = {}});
  std::vector<double> out(64);
  for (std::size_t slot = 0; slot < kept.size(); ++slot) {
    for (std::size_t i = 0; i < 64; ++i) out[i] += weights[slot] * rows[slot].value[i];
  }
  return out;
}

test::Tensor<float> tensor(const Rows& rows, std::size_t first, std::size_t tokens, std::size_t heads,
                           bool rotate) {
  test::Tensor<float> out{tokens, heads, 64};
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t h = 0; h < heads; ++h) {
      const auto& row = rows[(first + t) * heads + h];
      const auto seen = rotate ? rotated(row, first + t) : row;
      for (std::size_t i = 0; i < 64; ++i) out.at(t, h, i) = static_cast<float>(seen[i]);
    }
  }
  return out;
}

}  // namespace

TEST_CASE("rows look as close as their positions in the cache") {
  test::Random random{3};
  for (const bool in_cache : {true, false}) {
    for (const auto chunk : std::initializer_list<std::size_t>{1, 7, 40}) {
      CAPTURE(in_cache);
      CAPTURE(chunk);
      constexpr std::size_t tokens = 40, sinks = 3, recent = 9;
      const Rows q = draw(random, tokens * 4);
      const Rows k = draw(random, tokens * 2);
      const Rows v = draw(random, tokens * 2);
      StreamingLlmConfig config{.sinks = sinks, .recent = recent};
      if (in_cache) config.rotary_in_cache = RotaryConfig{.theta = theta};
      KvCache<float> cache{streaming_llm_plan<float>(shape, config)};
      bool close = true;
      for (std::size_t first = 0; first < tokens; first += chunk) {
        const std::size_t count = std::min(chunk, tokens - first);
        auto out = tensor(q, first, count, 4, true);
        const auto queries = tensor(q, first, count, 4, true);
        const auto keys = tensor(k, first, count, 2, true);
        const auto values = tensor(v, first, count, 2, false);
        cache.step(0, queries.view(), keys.view(), values.view(), out.view());
        for (std::size_t t = 0; t < count; ++t) {
          for (std::size_t h = 0; h < 4; ++h) {
            const auto wanted = expected_row(q, k, v, first + t, h, sinks, recent, in_cache);
            for (std::size_t i = 0; i < 64; ++i) {
              const double off = std::abs(static_cast<double>(out.number(t, h, i)) - wanted[i]);
              close = close && off <= 1e-4;
            }
          }
        }
      }
      CHECK(close);
      CHECK(cache.bytes() == cache.plan().memory(tokens).total());
    }
  }
}

TEST_CASE("every head gets the same window") {
  const RotaryConfig rotary{.theta = 5e5};
  const auto plan = streaming_llm_plan<float16>(
      shape, {.sinks = 2, .recent = 30, .mask = Mask::prefill_chunk, .rotary_in_cache = rotary});
  using Policy = SinkRecentCache<DenseStorage<float16>>;
  for (std::size_t head = 0; head < 2; ++head) {
    CHECK(plan.at(0, head).get<Policy>() ==
          Policy::Config{.sinks = 2, .recent = 30, .mask = Mask::prefill_chunk, .rotary_in_cache = rotary});
  }
  CHECK_THROWS_AS((void)streaming_llm_plan<float16>(shape, {.recent = 0}), ConfigError);
  CHECK_THROWS_AS((void)streaming_llm_plan<float16>(shape, {.rotary_in_cache = RotaryConfig{.theta = -1.0}}),
                  ConfigError);
}
