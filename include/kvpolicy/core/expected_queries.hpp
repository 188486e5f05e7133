// SPDX-License-Identifier: Apache-2.0
//
// The attention that queries to come can be expected to pay to some rows, by what the latest queries were: Expected
// Attention, arXiv:2510.00636 (policy/expected_attention_scorer.hpp).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/ranking.hpp>
#include <kvpolicy/core/rotary.hpp>
#include <kvpolicy/core/row.hpp>
#include <kvpolicy/core/segment.hpp>

namespace kvpolicy {

/// The mean of the rotations to the positions to come, which also shortens each pair of channels.
class MeanRotation {
 public:
  /// `end`: the first position to come.
  /// @throws ConfigError as inverse_frequencies, std::bad_alloc
  MeanRotation(const ExpectedQueries& expected, std::size_t head_dim, std::int64_t end)
      : frequencies_{inverse_frequencies(expected.rotary, head_dim)},
        cosines_(head_dim / 2, 0.0),
        sines_(head_dim / 2, 0.0) {
    for (std::size_t ahead = 0; ahead < expected.future; ++ahead) {
      for (std::size_t pair = 0; pair < frequencies_.size(); ++pair) {
        const double angle = static_cast<double>(end + static_cast<std::int64_t>(ahead)) *
                             static_cast<double>(frequencies_[pair]);
        cosines_[pair] += std::cos(angle) / static_cast<double>(expected.future);
        sines_[pair] += std::sin(angle) / static_cast<double>(expected.future);
      }
    }
  }

  [[nodiscard]] std::span<const float> frequencies() const { return frequencies_; }
  /// Pair number `pair` of a row: (low, high).
  [[nodiscard]] std::pair<double, double> rotated(std::size_t pair, double low, double high) const {
    return {low * cosines_[pair] - high * sines_[pair], high * cosines_[pair] + low * sines_[pair]};
  }

 private:
  std::vector<float> frequencies_;
  std::vector<double> cosines_, sines_;
};

namespace detail {

/// What is expected of the queries of one query head: the logit of a key that they may meet.
class ExpectedHead {
 public:
  /// `queries` [count, head_dim] are rotated; the first has text position `first`, and the text ends after the last.
  /// count is at least 1.
  ExpectedHead(const MeanRotation& rotation, std::span<const float> queries, std::size_t head_dim,
               std::int64_t first, double scale)
      : head_dim_{head_dim}, count_{queries.size() / head_dim}, scale_{scale} {
    std::vector<float> draws(queries.begin(), queries.end());
    std::vector<double> mean(head_dim, 0.0);
    for (std::size_t i = 0; i < count_; ++i) {
      const auto draw = std::span{draws}.subspan(i * head_dim, head_dim);
      rotate(draw, rotation.frequencies(), -(first + static_cast<std::int64_t>(i)));
      for (std::size_t j = 0; j < head_dim; ++j) {
        mean[j] += static_cast<double>(draw[j]) / static_cast<double>(count_);
      }
    }
    // Column 0 is the mean, the others are the draws less the mean: [head_dim, count + 1].
    columns_.resize(head_dim * (count_ + 1));
    const std::size_t pairs = head_dim / 2;
    const auto put = [&](std::size_t column, auto number) {
      for (std::size_t pair = 0; pair < pairs; ++pair) {
        const auto [low, high] = rotation.rotated(pair, number(pair), number(pair + pairs));
        columns_[pair * (count_ + 1) + column] = static_cast<float>(low);
        columns_[(pair + pairs) * (count_ + 1) + column] = static_cast<float>(high);
      }
    };
    put(0, [&](std::size_t j) { return mean[j]; });
    for (std::size_t i = 0; i < count_; ++i) {
      put(i + 1, [&](std::size_t j) { return static_cast<double>(draws[i * head_dim + j]) - mean[j]; });
    }
    products_.resize(count_ + 1);
  }

  /// The logarithm of the expectation of exp(scale * query . key), which is that of a normal distribution.
  [[nodiscard]] double logit(std::span<const float> key) {
    std::ranges::fill(products_, 0.0F);
    for (std::size_t j = 0; j < head_dim_; ++j) {
      const float* column = columns_.data() + j * (count_ + 1);
      for (std::size_t i = 0; i <= count_; ++i) products_[i] += column[i] * key[j];
    }
    double squares = 0.0;
    for (std::size_t i = 1; i <= count_; ++i) {
      squares += static_cast<double>(products_[i]) * static_cast<double>(products_[i]);
    }
    return scale_ * static_cast<double>(products_[0]) +
           0.5 * scale_ * scale_ * squares / static_cast<double>(count_);
  }

 private:
  std::size_t head_dim_;
  std::size_t count_;
  double scale_;
  std::vector<float> columns_;
  std::vector<float> products_;
};

}  // namespace detail

/// Fills `sums` [group, rows] with the probability that a query to come is expected to pay each row that the segments
/// show, for each query head. Logits are those of scale * query . key: no soft cap, no sink's logit. `queries` [count,
/// group, head_dim] are the latest of the text, the first of which has position `first`.
/// @throws std::bad_alloc
inline void expect_attention(const MeanRotation& rotation, std::span<const float> queries, std::size_t group,
                             std::size_t head_dim, std::int64_t first, double scale,
                             std::span<const Segment> segments, std::span<float> sums) {
  const std::size_t count = queries.size() / (group * head_dim);
  const std::size_t rows = sums.size() / group;
  std::vector<float> own(count * head_dim);
  std::vector<float> key(head_dim);
  std::vector<double> logits(rows);
  for (std::size_t g = 0; g < group; ++g) {
    for (std::size_t i = 0; i < count; ++i) {
      const auto row = queries.subspan((i * group + g) * head_dim, head_dim);
      std::ranges::copy(row, own.begin() + static_cast<std::ptrdiff_t>(i * head_dim));
    }
    detail::ExpectedHead head{rotation, own, head_dim, first, scale};
    std::size_t ordinal = 0;
    double most = -std::numeric_limits<double>::infinity();
    for (const Segment& segment : segments) {
      segment.for_each_run([&](const RowRun& run) {
        for (std::size_t i = run.first; i < run.first + run.rows; ++i, ++ordinal) {
          load_row(segment.keys, i, key);
          logits[ordinal] = head.logit(key);
          most = std::max(most, logits[ordinal]);
        }
      });
    }
    double total = 0.0;
    for (const double logit : logits) total += std::exp(logit - most);
    for (std::size_t i = 0; i < rows; ++i) {
      sums[g * rows + i] = static_cast<float>(std::exp(logits[i] - most) / total);
    }
  }
}

}  // namespace kvpolicy
