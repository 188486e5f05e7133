// SPDX-License-Identifier: Apache-2.0
//
// Scores of rows times norms of the rows' values: what a head with a budget ranks by where it weighs its rows
// (policy/head_budget_cache.hpp).
//
// Method: Expected Attention, arXiv:2510.00636 (the length of the value); CriticalKV, arXiv:2502.03805 (the L1 norm of
// what the value becomes in the output projection). What a row adds to the layer's output is at most the sum, over the
// query heads that read it, of the head's attention times the norm of the value through the head's own weights. So each
// query head's score is multiplied by its own norm, and then they come to one as the scorer's votes do. Differences:
// CriticalKV's code multiplies the mean score of a group by the mean norm, and adds 1e-4 to the score first, so that
// rows without attention are ranked by their values; here these go by the lower row.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/ranking.hpp>
#include <kvpolicy/core/row.hpp>
#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/core/value_outputs.hpp>
#include <kvpolicy/policy/row_scorer.hpp>

namespace kvpolicy {

/// Whether a head whose values have `value_dim` channels can be weighed by `output`.
/// @throws ConfigError without an output projection, ShapeError for one of values that are not a head's
inline void check_value_output(const ValueOutput* output, std::size_t value_dim) {
  require(output != nullptr,
          "HeadBudgetCache: value_norm is 'output_l1', but the cache knows no output projection of the "
          "head's layer; "
          "give it CacheOptions::value_outputs, or use 'value_l2'");
  require<ShapeError>(output->value_dim() == value_dim,
                      "HeadBudgetCache: the output projection is for values of ", output->value_dim(),
                      " channels, must be for ", value_dim);
}

/// visit(row, numbers) for the first `count` rows of a storage: their keys or their values, of so many `channels`.
template <Plane Segment::*side, class Storage, class Visit>
void for_each_row(const Storage& storage, std::size_t count, std::size_t channels, Visit visit) {
  SegmentList shown;
  storage.show(0, count, {}, shown);
  std::vector<float> loaded(channels);
  std::size_t row = 0;
  for (const Segment& segment : shown) {
    for (std::size_t i = 0; i < segment.rows; ++i, ++row) {
      load_row(segment.*side, i, loaded);
      visit(row, std::span<const float>{loaded});
    }
  }
}

/// What the first `count` values of a storage come to in the output: their L1 norms [count, query heads of the group].
template <class Storage>
[[nodiscard]] std::vector<double> output_norms(const ValueOutput& output, const Storage& storage,
                                               std::size_t count) {
  std::vector<double> norms(count * output.group());
  std::vector<float> block;
  block.reserve(ValueOutput::block_rows * output.value_dim());
  std::size_t done = 0;
  const auto finish_block = [&] {
    const std::size_t places = block.size() / output.value_dim() * output.group();
    output.norms(block, std::span{norms}.subspan(done, places));
    done += places;
    block.clear();
  };
  for_each_row<&Segment::values>(storage, count, output.value_dim(),
                                 [&](std::size_t, std::span<const float> value) {
                                   block.insert(block.end(), value.begin(), value.end());
                                   if (block.size() == ValueOutput::block_rows * value.size()) finish_block();
                                 });
  finish_block();
  return norms;
}

/// The length of a vector, added up in double in the order of the channels, as kernels do.
[[nodiscard]] inline double length_of(std::span<const float> vector) {
  double squares = 0.0;
  for (const float number : vector) squares += static_cast<double>(number) * static_cast<double>(number);
  return std::sqrt(squares);
}

/// A score times a norm. The largest score there is stays it, because its row is kept in any case.
[[nodiscard]] inline float times_norm(float score, double norm) {
  constexpr float always = std::numeric_limits<float>::max();
  if (!(score < always)) return score;
  return static_cast<float>(std::min(static_cast<double>(score) * norm, static_cast<double>(always)));
}

/// Scores of all query heads together, times the norms [rows, group] of each head, which come to one as the votes did.
[[nodiscard]] inline std::vector<float> times_norms(Votes votes, std::span<const double> norms,
                                                    std::vector<float> scores) {
  if (scores.empty()) return scores;
  const std::size_t group = norms.size() / scores.size();
  for (std::size_t row = 0; row < scores.size(); ++row) {
    double norm = 0.0;
    for (const double own : norms.subspan(row * group, group)) norm = with_vote(votes, norm, own);
    if (votes == Votes::mean) norm /= static_cast<double>(group);
    scores[row] = times_norm(scores[row], norm);
  }
  return scores;
}

/// The scores that `Scorer` gives each query head's attention, `sums` [group, rows], times that head's norms
/// [candidates, group], and then what they come to. `scores` are those of all heads together, of which the largest
/// ones stay.
template <ObservingScorer Scorer>
[[nodiscard]] std::vector<float> times_norms(const typename Scorer::Config& config,
                                             std::span<const float> sums, std::size_t group,
                                             std::size_t queries, std::span<const double> norms,
                                             std::vector<float> scores) {
  KVPOLICY_ASSERT(norms.size() == scores.size() * group);
  const Votes votes = votes_of(config);
  const std::size_t rows = sums.size() / group;
  std::vector<float> own(scores.size());
  std::vector<double> together(scores.size(), 0.0);
  for (std::size_t head = 0; head < group; ++head) {
    Scorer::score(config, sums.subspan(head * rows, rows), 1, queries, own);
    for (std::size_t row = 0; row < own.size(); ++row) {
      together[row] =
          with_vote(votes, together[row], static_cast<double>(own[row]) * norms[row * group + head]);
    }
  }
  const double heads = votes == Votes::mean ? static_cast<double>(group) : 1.0;
  for (std::size_t row = 0; row < scores.size(); ++row) {
    if (scores[row] < std::numeric_limits<float>::max())
      scores[row] = times_norm(1.0F, together[row] / heads);
  }
  return scores;
}

}  // namespace kvpolicy
