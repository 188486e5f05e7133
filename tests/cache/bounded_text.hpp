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
    return typename kvpolicy::QuantizedResidualCache<E, kvpolicy::Granularity::per_channel>::Config{
        .sinks = format.sinks, .storage = storage};
  }
  return typename kvpolicy::QuantizedResidualCache<E>::Config{.sinks = format.sinks, .storage = storage};
}

/// One layer's cache, and queries for it.
template <class Engine>
struct BoundedText {
  kvpolicy::ModelShape shape;
  kvpolicy::KvCache<float, NotingEngine<Engine>> cache;
  Random random;
  double tolerance = 2e-4;                     // of outputs and sums
  std::vector<std::vector<DecodedRow>> whole;  // what a read of all rows shows, of each KV head

  BoundedText(const kvpolicy::ModelShape& shape_, const kvpolicy::HeadSettings<float>& head,
              std::uint64_t seed)
      : shape{shape_},
        cache{kvpolicy::HeadPlan<float>{shape_, head}, {.max_rollback = 15, .max_append = 4096}},
        random{seed} {}

  // Keys whose channels differ in size and place, as those of models do. All but the latest rows are committed.
  void append(std::size_t tokens, float size = 1.0F) {
    if (tokens > 1) append_at_once(tokens - 1, size);
    append_at_once(1, size);
  }
  void append_at_once(std::size_t tokens, float size) {
    append_keys(tokens, [&](std::size_t, std::size_t, std::size_t c) {
      return size * ((c % 7 == 3 ? 6.0F : 1.0F) * normal(random) + (c % 5 == 0 ? 4.0F : 0.0F));
    });
  }
  template <class Fill>
  void append_keys(std::size_t tokens, Fill fill) {
    Tensor<float> k{tokens, shape.kv_heads, shape.head_dim};
    Tensor<float> v{tokens, shape.kv_heads, shape.value_dim == 0 ? shape.head_dim : shape.value_dim};
    k.fill(fill);
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

  // What a read of all rows has shown to the engine.
  void decode_whole() {
    const std::size_t value_dim = shape.value_dim == 0 ? shape.head_dim : shape.value_dim;
    whole.assign(shape.kv_heads, {});
    for (std::size_t head = 0; head < shape.kv_heads; ++head) {
      for (const kvpolicy::Segment& segment : cache.engine().shown[head]) {
        for (std::size_t i = 0; i < segment.rows; ++i) {
          whole[head].push_back({segment.position_of(i), segment.window,
                                 decoded(segment.keys, i, shape.head_dim),
                                 decoded(segment.values, i, value_dim)});
        }
      }
    }
  }
  // All rows of a KV head that a query at position t sees.
  [[nodiscard]] std::vector<SeenRow> rows(std::size_t head, const std::vector<double>& q, std::int64_t t,
                                          const kvpolicy::AttendOptions& options, double scale) const {
    std::vector<SeenRow> seen;
    for (const DecodedRow& row : whole[head]) {
      if (row.position > t || (row.window != kvpolicy::unlimited_window && row.position <= t - row.window))
        continue;
      double logit = 0;
      double size = 0;
      for (std::size_t c = 0; c < q.size(); ++c) {
        logit += q[c] * row.key[c];
        size += std::abs(q[c] * row.key[c] * scale);
      }
      logit *= scale;
      const double cap = static_cast<double>(options.softcap);
      if (cap > 0) logit = cap * std::tanh(logit / cap);
      seen.push_back({row.position, logit, size, row.value});
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
    decode_whole();
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
        double top = options.attention_sink_bias.empty()
                         ? -1e300
                         : static_cast<double>(options.attention_sink_bias[h]);
        double largest = 0;
        for (const SeenRow& row : all) {
          top = std::max(top, row.logit);
          largest = std::max(largest, row.size);
        }
        double total = options.attention_sink_bias.empty()
                           ? 0
                           : std::exp(static_cast<double>(options.attention_sink_bias[h]) - top);
        double left = 0;
        std::vector<double> out(all.front().value.size(), 0.0);
        std::vector<double> full = out;  // with all rows
        const bool sinks = !options.attention_sink_bias.empty();
        std::vector<double> least(out.size(), sinks ? 0.0 : 1e300);
        std::vector<double> most(out.size(), sinks ? 0.0 : -1e300);
        double weight_read = total;
        for (const SeenRow& row : all) {
          const double weight = std::exp(row.logit - top);
          total += weight;
          for (std::size_t c = 0; c < out.size(); ++c) {
            full[c] += weight * row.value[c];
            least[c] = std::min(least[c], row.value[c]);
            most[c] = std::max(most[c], row.value[c]);
          }
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
        if (options.bound.certainty == kvpolicy::Certainty::sure)
          CHECK_MESSAGE(truth <= said, "left ", truth, ", said ", said);
        if (options.bound.most_rows == std::numeric_limits<std::size_t>::max()) {
          CHECK_MESSAGE(said <= static_cast<double>(options.bound.epsilon) * (1 + 1e-6), "said ", said);
        }
        share.unread = std::max(share.unread, truth);
        share.mean += static_cast<double>(result.rows[h / group]) / static_cast<double>(cache.tokens(0)) /
                      static_cast<double>(shape.q_heads * q.tokens());
        if (weight_read < 1e-200) continue;  // what holds it all was left, and nothing is to compare
        double off = 0;
        for (std::size_t c = 0; c < out.size(); ++c) {
          off =
              std::max(off, std::abs(static_cast<double>(result.out.number(t, h, c)) - out[c] / weight_read));
        }
        CHECK_MESSAGE(off < tolerance * (1 + largest), "the output is off by ", off);
        // It is off from that of all rows by the unread share of the distance between two values at most.
        double beyond = -1e300;
        for (std::size_t c = 0; c < out.size(); ++c) {
          const double away = std::abs(static_cast<double>(result.out.number(t, h, c)) - full[c] / total);
          beyond = std::max(beyond, away - said * (most[c] - least[c]));
        }
        if (options.bound.certainty == kvpolicy::Certainty::sure) CHECK(beyond < tolerance * (1 + largest));
        CHECK(static_cast<double>(result.log_sum_exp[t * shape.q_heads + h]) ==
              doctest::Approx(top + std::log(weight_read)).epsilon(tolerance * (1 + largest)));
      }
    }
    return share;
  }
};

/// Checks reads of a text that a seed determines, of keys and queries of models and of the worst kind; returns how many
/// rows were bounded, each time that a query's were.
template <class Engine>
std::size_t check_random_bounds(std::uint64_t seed) {
  Random random{seed};
  Format format;
  const std::size_t head_dim = one_of<std::size_t>(random, {8, 32, 40, 64, 128});
  format.keys = below(random, 3) == 0 ? kvpolicy::Granularity::per_token : kvpolicy::Granularity::per_channel;
  const bool by_row = format.keys == kvpolicy::Granularity::per_token;
  format.key_group = by_row ? one_of<std::size_t>(random, {0, 8}) : one_of<std::size_t>(random, {16, 32, 64});
  format.hadamard = below(random, 3) == 0;
  format.residual = one_of<std::size_t>(random, {0, 1, 16});
  format.sinks = one_of<std::size_t>(random, {0, 4});
  const std::size_t kv_heads = 1 + below(random, 2);
  BoundedText<Engine> text{
      {.layers = 1, .q_heads = kv_heads * (1 + below(random, 8)), .kv_heads = kv_heads, .head_dim = head_dim},
      settings<float>(format),
      seed};
  const std::size_t tokens = 1 + below(random, 400);
  const std::size_t kind = below(random, 5);
  text.append_keys(tokens, [&](std::size_t t, std::size_t, std::size_t c) {
    switch (kind) {
      // Whole keys as far from their upper halves as can be, all to one side or to either.
      case 0:
        return t % 8 == 0   ? 0.0F
               : t % 8 == 1 ? 255.0F
                            : 16.0F * static_cast<float>(below(random, 16)) + 15.0F;
      case 1:
        return t % 8 == 0   ? 0.0F
               : t % 8 == 1 ? 255.0F
                            : 16.0F * static_cast<float>(below(random, 16)) + (c % 2 == 0 ? 15.0F : 0.0F);
      case 2: return 3.0F + 1e-4F * normal(random);     // nearly equal
      case 3: return 1000.0F + 40.0F * normal(random);  // far from zero, where half is coarse
      default: return (c % 7 == 3 ? 6.0F : 1.0F) * normal(random) + (c % 5 == 0 ? 4.0F : 0.0F);
    }
  });
  text.append_keys(1, [](auto...) { return 0.0F; });
  std::size_t rows = 0;
  for (int i = 0; i < 8; ++i) {
    // Of the latest rows, some of which have more queries than a call that streams takes.
    Tensor<float> q{i % 4 == 3 ? 1 + below(random, std::min<std::size_t>(tokens, 8)) : 1, text.shape.q_heads,
                    head_dim};
    const float size = one_of<float>(random, {0.001F, 0.05F, 0.5F, 3.0F});
    const bool signs = below(random, 2) == 0;
    q.fill([&](auto...) { return signs ? (below(random, 5) == 0 ? -size : size) : size * normal(random); });
    kvpolicy::AttendOptions options;
    const std::vector<float> sinks(text.shape.q_heads, size * normal(random));
    if (below(random, 4) == 0) options.attention_sink_bias = sinks;
    if (below(random, 4) == 0) options.scale = -0.2F;
    if (below(random, 4) == 0) options.softcap = 30.0F;
    options.bound.epsilon = one_of<float>(random, {0.5F, 0.1F, 0.01F});
    if (below(random, 4) == 0) options.bound.most_rows = below(random, 64);
    text.check(q, options);
    rows += (tokens + 1) * text.shape.q_heads;
  }
  return rows;
}

}  // namespace test
