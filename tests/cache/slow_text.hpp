// SPDX-License-Identifier: Apache-2.0
//
// A slow model of heads with budgets of several layers: rows in double, attention by its definition, and one list of
// candidates. Nothing is dropped in it, so it judges a first compression.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/cache/kv_cache.hpp>

#include "cache/dump.hpp"
#include "support/oracle.hpp"
#include "support/tensors.hpp"

namespace test::slow {

using kvpolicy::AttendOptions;
using kvpolicy::ModelShape;
using kvpolicy::Segment;
using E = kvpolicy::float16;
using Cache = kvpolicy::KvCache<E>;

// What the queries of one call pay each row of a KV head: for each row [queries x query heads].
using Paid = std::vector<std::vector<double>>;

// The rows that all heads of all layers were given, and the calls that brought them. Nothing is dropped here.
class SlowText {
 public:
  explicit SlowText(const ModelShape& shape) : shape_{shape}, rows_(shape.layers * shape.kv_heads) {}

  /// The same step of a cache and of this text; returns what each head's rows were paid.
  std::vector<Paid> step(test::Random& random, Cache& cache, std::size_t tokens,
                         const AttendOptions& options = {}) {
    std::vector<Paid> paid(rows_.size());
    for (std::size_t l = 0; l < shape_.layers; ++l) {
      test::Chunk<E> chunk{random, shape_, tokens};
      chunk.q.randomize(random, 3.0F);
      step_layer(chunk, cache, l, options, paid);
    }
    return paid;
  }
  /// A call that the caller has made, of a text of one layer.
  std::vector<Paid> step(test::Chunk<E>& chunk, Cache& cache, const AttendOptions& options = {}) {
    std::vector<Paid> paid(rows_.size());
    step_layer(chunk, cache, 0, options, paid);
    return paid;
  }

  [[nodiscard]] const std::vector<oracle::Row>& rows(std::size_t head) const { return rows_[head]; }

 private:
  void step_layer(test::Chunk<E>& chunk, Cache& cache, std::size_t l, const AttendOptions& options,
                  std::vector<Paid>& paid) {
    const std::size_t tokens = chunk.q.tokens();
    chunk.step(cache, l, options);
    {
      for (std::size_t h = 0; h < shape_.kv_heads; ++h) {
        auto& rows = rows_[l * shape_.kv_heads + h];
        const std::size_t before = rows.size();
        for (std::size_t i = 0; i < tokens; ++i) {
          rows.push_back({static_cast<std::int64_t>(before + i), chunk.k.row_of_doubles(i, h), {}});
        }
        paid[l * shape_.kv_heads + h] = attention(rows, chunk.q, h, before, options);
      }
    }
  }

  [[nodiscard]] Paid attention(const std::vector<oracle::Row>& rows, const test::Tensor<E>& q, std::size_t h,
                               std::size_t before, const AttendOptions& options) const {
    Paid paid(rows.size());
    const std::size_t group = shape_.queries_per_kv();
    for (std::size_t i = 0; i < q.tokens(); ++i) {
      std::vector<const oracle::Row*> seen;
      for (std::size_t r = 0; r <= before + i; ++r) seen.push_back(&rows[r]);
      for (std::size_t g = 0; g < group; ++g) {
        oracle::Options own;
        own.scale = 1 / std::sqrt(static_cast<double>(shape_.head_dim));
        own.softcap = static_cast<double>(options.softcap);
        if (!options.attention_sink_bias.empty()) {
          own.sink_logit = static_cast<double>(options.attention_sink_bias[h * group + g]);
        }
        const auto shares = oracle::probabilities(q.row_of_doubles(i, h * group + g), seen, own);
        for (std::size_t r = 0; r < shares.size(); ++r) paid[r].push_back(shares[r]);
      }
    }
    return paid;
  }

  ModelShape shape_;
  std::vector<std::vector<oracle::Row>> rows_;  // of each head
};

inline double largest(const std::vector<double>& shares) {
  return shares.empty() ? 0.0 : *std::ranges::max_element(shares);
}

inline std::set<std::int64_t> held(const Cache& cache, std::size_t layer, std::size_t head) {
  std::set<std::int64_t> positions;
  for (const Segment& segment : cache.segments(layer, head)) {
    for (std::size_t i = 0; i < segment.rows; ++i) positions.insert(segment.position_of(i));
  }
  return positions;
}

// One head's candidates, and what it may keep.
struct SlowHead {
  std::vector<double> scores;
  std::size_t budget = 0;
  std::size_t kept = 0;  // latest rows besides
  double safe = 0;
};

// Checks that heads which compete hold the best rows of all of them, however many of each head.
inline void check_survivors(const std::vector<SlowHead>& heads,
                            const std::vector<std::set<std::int64_t>>& survivors) {
  constexpr double slack = 2e-4;
  std::size_t wanted = 0, chosen = 0;
  double lowest_in = std::numeric_limits<double>::infinity();
  double highest_out = -lowest_in;
  for (std::size_t h = 0; h < heads.size(); ++h) {
    const SlowHead& head = heads[h];
    const std::size_t candidates = head.scores.size() - std::min(head.scores.size(), head.kept);
    wanted += std::min(head.budget, candidates);
    std::vector<double> in;
    double own_out = -std::numeric_limits<double>::infinity();
    for (std::size_t r = 0; r < head.scores.size(); ++r) {
      const bool stays = survivors[h].contains(static_cast<std::int64_t>(r));
      if (r >= candidates) {
        CHECK(stays);
      } else if (stays) {
        in.push_back(head.scores[r]);
      } else {
        own_out = std::max(own_out, head.scores[r]);
      }
    }
    std::ranges::sort(in);
    chosen += in.size();
    const auto safe = static_cast<std::size_t>(head.safe * static_cast<double>(head.budget));
    CHECK(in.size() >= std::min(safe, candidates));
    if (!in.empty()) CHECK(in.front() >= own_out - slack);  // a head keeps its own best
    if (in.size() > safe) lowest_in = std::min(lowest_in, in.front());
    highest_out = std::max(highest_out, own_out);
  }
  CHECK(chosen == wanted);
  CHECK(lowest_in >= highest_out - slack);
}

inline std::vector<std::set<std::int64_t>> all_held(const Cache& cache) {
  const ModelShape& shape = cache.plan().shape();
  std::vector<std::set<std::int64_t>> all;
  for (std::size_t l = 0; l < shape.layers; ++l) {
    for (std::size_t h = 0; h < shape.kv_heads; ++h) all.push_back(held(cache, l, h));
  }
  return all;
}

}  // namespace test::slow
