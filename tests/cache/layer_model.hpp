// SPDX-License-Identifier: Apache-2.0
//
// Slow models of one layer's heads, with the numbers that they were given: what a cache's rows, scores and choices
// are compared with (sequence.hpp).
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include <kvpolicy/kvpolicy.hpp>

#include "support/compare.hpp"
#include "support/oracle.hpp"
#include "support/plans.hpp"
#include "support/policy_model.hpp"
#include "support/question_free_oracle.hpp"
#include "support/tensors.hpp"

namespace test {

/// How a model computes its logits; the same for a whole sequence.
struct Logits {
  std::optional<float> scale = {};
  float softcap = 0.0F;
  std::vector<float> sinks = {};  // one for each query head
};

/// The cache's numbers are of type E.
template <kvpolicy::Element E>
struct LayerModel {
  struct Head {
    HeadModel model;
    std::vector<oracle::Row> text;   // every row, rounded to the cache's type
    std::vector<oracle::Row> nodes;  // the same for a pending tree
    // The values first read after quantisation; they must never change.
    std::map<std::int64_t, std::vector<double>> quantized_keys, quantized_values;
  };

  kvpolicy::LayerShape shape = {};
  Logits logits = {};
  std::vector<Head> heads = {};
  std::vector<std::vector<std::vector<double>>> queries = {};  // [token][query head], rounded
  std::vector<std::vector<std::vector<double>>> node_queries = {};
  std::size_t committed = 0;

  static std::vector<double> rounded(const std::vector<float>& row) {
    std::vector<double> result;
    for (const float x : row) result.push_back(static_cast<double>(static_cast<float>(E{x})));
    return result;
  }

  [[nodiscard]] oracle::Options options(std::size_t q_head) const {
    oracle::Options made;
    made.scale = logits.scale ? static_cast<double>(*logits.scale)
                              : 1.0 / std::sqrt(static_cast<double>(shape.head_dim));
    made.softcap = static_cast<double>(logits.softcap > 0 ? logits.softcap : shape.softcap);
    if (!logits.sinks.empty()) made.sink_logit = static_cast<double>(logits.sinks[q_head]);
    return made;
  }

  void commit(std::size_t tokens) {
    committed = std::max(committed, tokens);
    for (Head& head : heads) head.model.commit(committed);
  }

  /// Checks what a row that was read first after quantisation may differ by from what was written.
  void check_quantized(const Head& head, std::int64_t position, std::vector<double> now,
                       std::vector<double> then, bool is_key) const {
    const HeadSpec& spec = head.model.spec();
    const bool rotated = is_key ? spec.key_hadamard : spec.value_hadamard;
    if (rotated) {
      now = oracle::hadamard(now);
      then = oracle::hadamard(then);
    }
    bool inside = true;
    bool lossy = false;
    const std::size_t wanted = is_key ? spec.key_group : spec.value_group;
    const std::size_t bits = spec.bits_of(is_key);
    const oracle::Codebook codebook = is_key ? spec.key_codebook : spec.value_codebook;
    const std::size_t whole = is_key ? shape.head_dim : shape.value_dim;
    const std::size_t group = wanted != 0                           ? wanted
                              : codebook == oracle::Codebook::mxfp4 ? 32
                              : codebook == oracle::Codebook::nvfp4 ? 16
                                                                    : whole;
    std::vector<std::vector<double>> keys;  // those that share scales with this one
    if (is_key && spec.per_channel) {
      const auto [first, last] = head.model.key_block(position);
      for (auto p = first; p < last; ++p) {
        const auto& key = head.text[static_cast<std::size_t>(p)].key;
        keys.push_back(rotated ? oracle::hadamard(key) : key);
      }
    }
    for (std::size_t i = 0; i < now.size(); ++i) {
      std::vector<double> block;
      if (!keys.empty()) {
        for (const std::vector<double>& key : keys) block.push_back(key[i]);
      } else {
        const auto first = then.begin() + static_cast<std::ptrdiff_t>(i - i % group);
        block.assign(first, first + static_cast<std::ptrdiff_t>(group));
      }
      if (codebook == oracle::Codebook::normal) {
        double squares = 0.0;
        double lost = 0.0;
        for (std::size_t k = 0; k < group; ++k) {
          const std::size_t own = i - i % group + k;
          squares += then[own] * then[own];
          lost += (now[own] - then[own]) * (now[own] - then[own]);
        }
        inside = inside && lost <= oracle::normal_loss(bits) * squares;
      } else {
        const double bound = codebook == oracle::Codebook::even
                                 ? oracle::quantization_bound(block, bits)
                                 : oracle::codebook_bound(block, then[i], codebook, spec.head_scale) + 1e-5;
        inside = inside && std::abs(now[i] - then[i]) <= bound;
      }
      lossy = lossy || now[i] != then[i];
    }
    CHECK(inside);
    CHECK(lossy);  // random numbers are not on the grid, so a quantised row must have errors
  }

  // Adds the attention of a call's queries, the first at position `before`, to the rows of heads that add it
  // up.
  template <class In>
  void add_up(const Tensor<In>& q, const std::vector<Rows>& rows, std::size_t before) {
    const std::size_t group = shape.queries_per_kv();
    for (std::size_t h = 0; h < shape.kv_heads; ++h) {
      HeadModel& model = heads[h].model;
      if (!model.spec().adds_up()) continue;
      for (std::size_t i = 0; i < q.tokens() * group; ++i) {
        const std::size_t token = i / group, q_head = h * group + i % group;
        std::vector<const oracle::Row*> visible;
        for (const auto& [p, row] : rows[h]) {
          if (p <= static_cast<std::int64_t>(before + token)) visible.push_back(&row);
        }
        const auto shares = oracle::probabilities(q.row_of_doubles(token, q_head), visible, options(q_head));
        for (std::size_t r = 0; r < shares.size(); ++r) {
          model.pay(visible[r]->position, shares[r], group);
        }
      }
    }
  }

  // The kept rows, if none is quantised.
  static Rows text_rows(const Head& head) {
    Rows rows;
    for (const std::int64_t p : head.model.kept()) rows[p] = head.text[static_cast<std::size_t>(p)];
    return rows;
  }

  /// The scores of a head's whole chunks, by the last of the queries.
  template <class In>
  [[nodiscard]] std::vector<double> chunk_scores(std::size_t h, const Tensor<In>& q) const {
    const Head& head = heads[h];
    const HeadSpec& spec = head.model.spec();
    std::vector<double> scores;
    for (std::int64_t chunk = 0; chunk < head.model.full_chunks(); ++chunk) {
      std::vector<double> mean(shape.head_dim, 0.0), min = mean, max = mean;
      for (std::size_t i = 0; i < spec.chunk; ++i) {
        const auto& key = head.text[static_cast<std::size_t>(chunk) * spec.chunk + i].key;
        for (std::size_t c = 0; c < key.size(); ++c) {
          mean[c] += key[c] / static_cast<double>(spec.chunk);
          min[c] = i == 0 ? key[c] : std::min(min[c], key[c]);
          max[c] = i == 0 ? key[c] : std::max(max[c], key[c]);
        }
      }
      double score = 0;
      for (std::size_t g = 0; g < shape.queries_per_kv(); ++g) {
        const auto query = q.row_of_doubles(q.tokens() - 1, h * shape.queries_per_kv() + g);
        for (std::size_t c = 0; c < query.size(); ++c) {
          score += spec.min_max ? std::max(query[c] * min[c], query[c] * max[c]) : query[c] * mean[c];
        }
      }
      scores.push_back(score);
    }
    return scores;
  }

  /// By what a head's rows are ranked, and by how much its scores may be off if those of a probability are by `error`.
  struct Ranking {
    std::vector<double> scores, votes;
    double slack = 0.0;
  };
  /// Of the rows `before` a compression.
  [[nodiscard]] Ranking ranking(std::size_t h, const Rows& before, double error) const {
    const HeadModel& model = heads[h].model;
    std::vector<double> scores, votes;
    double slack = error;
    if (model.spec().rank == oracle::Rank::h2o) {
      scores = model.paid();
      // The error of a probability is relative.
      for (const double score : scores) slack = std::max(slack, 5 * error * score);
    } else if (model.spec().rank == oracle::Rank::key_norm) {
      for (const auto& [p, row] : before) {
        double squares = 0;
        for (const double x : row.key) squares += x * x;
        scores.push_back(-std::sqrt(squares));
      }
      scores.resize(before.size() - model.spec().window);
    } else if (model.spec().rank == oracle::Rank::key_diff || model.spec().rank == oracle::Rank::expected) {
      std::vector<std::vector<double>> keys;
      for (const auto& [p, row] : before) keys.push_back(row.key);
      scores =
          model.spec().rank == oracle::Rank::key_diff ? oracle::key_differences(keys) : expected(h, keys);
      for (const double score : scores) slack = std::max(slack, error * std::abs(score));
      scores.resize(before.size() - model.spec().window);
    } else {
      const auto attention = attention_of_latest(h, before);
      scores = model.scores(attention);
      votes = model.votes(attention);
    }
    if (model.spec().weighed) {
      auto row = before.begin();
      double longest = 1.0;
      for (std::size_t i = 0; i < scores.size(); ++i, ++row) {
        double squares = 0;
        for (const double x : row->second.value) squares += x * x;
        longest = std::max(longest, std::sqrt(squares));
        scores[i] *= std::sqrt(squares);
      }
      slack *= longest;
    }
    votes.resize(scores.size(), 0.0);
    return {scores, votes, slack};
  }

 private:
  // The attention of each of the latest queries that a head's scorer uses to each of its rows: [query
  // head][query][row].
  [[nodiscard]] std::vector<std::vector<std::vector<double>>> attention_of_latest(std::size_t h,
                                                                                  const Rows& before) const {
    const std::size_t tokens = queries.size();
    std::vector<std::vector<std::vector<double>>> attention;
    for (std::size_t g = 0; g < shape.queries_per_kv(); ++g) {
      auto& of_head = attention.emplace_back();
      const std::size_t q_head = h * shape.queries_per_kv() + g;
      for (std::size_t t = tokens - std::min(tokens, heads[h].model.spec().asked()); t < tokens; ++t) {
        std::vector<const oracle::Row*> visible;
        for (const auto& [p, row] : before) {
          if (p <= static_cast<std::int64_t>(t)) visible.push_back(&row);
        }
        of_head.push_back(oracle::probabilities(queries[t][q_head], visible, options(q_head)));
        of_head.back().resize(before.size(), 0.0);
      }
    }
    return attention;
  }

  // The attention that queries to come are expected to pay, the mean over the query heads.
  [[nodiscard]] std::vector<double> expected(std::size_t h,
                                             const std::vector<std::vector<double>>& keys) const {
    const std::size_t group = shape.queries_per_kv();
    const std::size_t tokens = queries.size();
    const HeadSpec& spec = heads[h].model.spec();
    std::vector<double> scores(keys.size(), 0.0);
    for (std::size_t q_head = h * group; q_head < (h + 1) * group; ++q_head) {
      std::vector<std::vector<double>> latest;
      for (std::size_t t = tokens - std::min(tokens, spec.asked()); t < tokens; ++t) {
        latest.push_back(queries[t][q_head]);
      }
      const auto shares = oracle::expected_shares(latest, keys, static_cast<double>(tokens), spec.future,
                                                  rotary_theta, options(q_head).scale);
      for (std::size_t i = 0; i < shares.size(); ++i) scores[i] += shares[i] / static_cast<double>(group);
    }
    return scores;
  }
};

}  // namespace test
