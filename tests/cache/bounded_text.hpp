// SPDX-License-Identifier: Apache-2.0
//
// A text whose keys are in halves, whose reads with a bound are checked against attention in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/kvpolicy.hpp>

#include "cache/read_oracle.hpp"
#include "support/tensors.hpp"

namespace test {

/// How a head of a test stores its rows in halves.
struct Format {
  kvpolicy::Granularity keys = kvpolicy::Granularity::per_channel;
  std::size_t key_group = 32;
  std::size_t value_group = 0;
  bool hadamard = false;
  std::size_t residual = 16;
  std::size_t sinks = 2;
};

template <kvpolicy::Element E>
kvpolicy::HeadSettings<E> settings(const Format& format) {
  const kvpolicy::ResidualConfig storage{.bits = 8,
                               .key_group = format.key_group,
                               .value_group = format.value_group,
                               .residual = format.residual,
                               .key_hadamard = format.hadamard,
                               .value_hadamard = format.hadamard,
                               .halves = true};
  if (format.keys == kvpolicy::Granularity::per_channel) {
    return typename kvpolicy::QuantizedResidualCache<E, kvpolicy::Granularity::per_channel>::Config{.sinks = format.sinks,
                                                                                .storage = storage};
  }
  return typename kvpolicy::QuantizedResidualCache<E>::Config{.sinks = format.sinks, .storage = storage};
}

/// One layer's cache, and queries for it.
template <class Engine>
struct BoundedText {
  kvpolicy::ModelShape shape;
  kvpolicy::KvCache<float, NotingEngine<Engine>> cache;
  Random random;
  std::vector<std::vector<kvpolicy::Segment>> whole;  // what a read of all rows shows, of each head

  BoundedText(const kvpolicy::ModelShape& shape_, const kvpolicy::HeadSettings<float>& head, std::uint64_t seed)
      : shape{shape_}, cache{kvpolicy::HeadPlan<float>{shape_, head}, {.max_rollback = 4, .max_append = 4096}}, random{seed} {}

  // Keys whose channels differ in size and place, as those of models do. All but the latest rows are committed.
  void append(std::size_t tokens, float size = 1.0F) {
    if (tokens > 1) append_at_once(tokens - 1, size);
    append_at_once(1, size);
  }
  void append_at_once(std::size_t tokens, float size) {
    Tensor<float> k{tokens, shape.kv_heads, shape.head_dim};
    Tensor<float> v{tokens, shape.kv_heads, shape.value_dim == 0 ? shape.head_dim : shape.value_dim};
    k.fill([&](std::size_t, std::size_t, std::size_t c) {
      return size * ((c % 7 == 3 ? 6.0F : 1.0F) * normal(random) + (c % 5 == 0 ? 4.0F : 0.0F));
    });
    v.randomize(random);
    cache.append(0, std::as_const(k).view(), std::as_const(v).view());
  }

  struct Result {
    Tensor<float> out;
    std::vector<float> unread;
    std::vector<std::size_t> rows;
    std::vector<float> log_sum_exp;
  };
  // Attends with the queries of the latest rows.
  Result read(const Tensor<float>& q, kvpolicy::AttendOptions options) {
    const std::size_t tokens = q.tokens();
    Result result{{tokens, shape.q_heads, shape.value_dim == 0 ? shape.head_dim : shape.value_dim},
                  std::vector<float>(tokens * shape.q_heads, NAN),
                  std::vector<std::size_t>(shape.kv_heads),
                  std::vector<float>(tokens * shape.q_heads, NAN)};
    options.read = kvpolicy::Read::bounded;
    options.bound.unread = result.unread;
    options.bound.rows_read = result.rows;
    options.log_sum_exp = result.log_sum_exp;
    cache.engine().forget();
    cache.attend(0, q.view(), result.out.view(), options);
    return result;
  }
  [[nodiscard]] Tensor<float> queries(std::size_t tokens, float size) {
    Tensor<float> q{tokens, shape.q_heads, shape.head_dim};
    return q.randomize(random, size);
  }

  // All rows of a KV head that a query at position t sees, in double.
  [[nodiscard]] std::vector<SeenRow> rows(std::size_t head, const std::vector<double>& q, std::int64_t t,
                                                const kvpolicy::AttendOptions& options, double scale) const {
    std::vector<SeenRow> seen;
    for (const kvpolicy::Segment& segment : whole[head]) {
      for (std::size_t i = 0; i < segment.rows; ++i) {
        const std::int64_t p = segment.position_of(i);
        if (p > t || (segment.window != kvpolicy::unlimited_window && p <= t - segment.window)) continue;
        const std::vector<double> key = decoded(segment.keys, i, q.size());
        double logit = 0;
        for (std::size_t c = 0; c < q.size(); ++c) logit += q[c] * key[c];
        logit *= scale;
        const double cap = static_cast<double>(options.softcap);
        if (cap > 0) logit = cap * std::tanh(logit / cap);
        seen.push_back({p, logit, decoded(segment.values, i, shape.value_dim == 0 ? shape.head_dim : shape.value_dim)});
      }
    }
    return seen;
  }

  struct Share {
    double mean = 0;  // rows read, of all
    double unread = 0;
  };
  // Checks a read against attention in double, and returns how much was read.
  Share check(const Tensor<float>& q, const kvpolicy::AttendOptions& options) {
    Tensor<float> all_out{q.tokens(), shape.q_heads, shape.value_dim == 0 ? shape.head_dim : shape.value_dim};
    cache.attend(0, q.view(), all_out.view());
    whole = cache.engine().shown;
    const Result result = read(q, options);
    CHECK_FALSE(cache.engine().repeated);
    const auto& noted = cache.engine().noted;
    const std::size_t group = shape.q_heads / shape.kv_heads;
    Share share;
    for (std::size_t t = 0; t < q.tokens(); ++t) {
      const auto position = static_cast<std::int64_t>(cache.tokens(0) - q.tokens() + t);
      for (std::size_t h = 0; h < shape.q_heads; ++h) {
        const std::vector<double> query = q.row_of_doubles(t, h);
        const double scale = options.scale ? static_cast<double>(*options.scale)
                                           : 1.0 / std::sqrt(static_cast<double>(shape.head_dim));
        const auto all = rows(h / group, query, position, options, scale);
        double top = options.attention_sink_bias.empty() ? -1e300 : static_cast<double>(options.attention_sink_bias[h]);
        for (const SeenRow& row : all) top = std::max(top, row.logit);
        double total = options.attention_sink_bias.empty() ? 0 : std::exp(static_cast<double>(options.attention_sink_bias[h]) - top);
        double left = 0;
        std::vector<double> out(all.front().value.size(), 0.0);
        double weight_read = total;
        for (const SeenRow& row : all) {
          const double weight = std::exp(row.logit - top);
          total += weight;
          if (noted[h / group].contains(row.position)) {
            weight_read += weight;
            for (std::size_t c = 0; c < out.size(); ++c) out[c] += weight * row.value[c];
          } else {
            left += weight;
          }
        }
        const double said = static_cast<double>(result.unread[t * shape.q_heads + h]);
        const double truth = left / total;
        CHECK(said >= 0.0);
        if (options.bound.certainty == kvpolicy::Certainty::sure) CHECK_MESSAGE(truth <= said, "left ", truth, ", said ", said);
        if (options.bound.most_rows == std::numeric_limits<std::size_t>::max()) {
          CHECK_MESSAGE(said <= static_cast<double>(options.bound.epsilon) * (1 + 1e-6), "said ", said);
        }
        for (std::size_t c = 0; c < out.size(); ++c) {
          const double expected = out[c] / weight_read;
          CHECK(static_cast<double>(result.out.number(t, h, c)) == doctest::Approx(expected).epsilon(2e-4));
        }
        CHECK(static_cast<double>(result.log_sum_exp[t * shape.q_heads + h]) == doctest::Approx(top + std::log(weight_read)).epsilon(1e-4));
        share.unread = std::max(share.unread, truth);
        share.mean += static_cast<double>(result.rows[h / group]) / static_cast<double>(cache.tokens(0)) /
                      static_cast<double>(shape.q_heads * q.tokens());
      }
    }
    return share;
  }
};

}  // namespace test
