// SPDX-License-Identifier: Apache-2.0
//
// The definition of attention: softmax over a list of rows, in double, with plain loops. It shares no header
// with the library that it judges.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace oracle {

struct Row {
  std::int64_t position = 0;
  std::vector<double> key;
  std::vector<double> value;
};

struct Options {
  double scale = 1.0;
  double softcap = 0.0;              // 0: none
  std::optional<double> sink_logit;  // for this query head
};

struct Result {
  std::vector<double> out;  // zeros if there were no rows
  double log_sum_exp = -std::numeric_limits<double>::infinity();
};

inline double logit(const std::vector<double>& query, const std::vector<double>& key,
                    const Options& options) {
  double sum = 0;
  for (std::size_t i = 0; i < query.size(); ++i) sum += query[i] * key[i];
  sum *= options.scale;
  return options.softcap > 0 ? options.softcap * std::tanh(sum / options.softcap) : sum;
}

/// Each row's share of the attention of one query; with a sink logit they sum to less than 1.
inline std::vector<double> probabilities(const std::vector<double>& query,
                                         const std::vector<const Row*>& rows, const Options& options,
                                         double* log_sum_exp = nullptr) {
  std::vector<double> weights;
  double highest = options.sink_logit.value_or(-std::numeric_limits<double>::infinity());
  for (const Row* row : rows) {
    weights.push_back(logit(query, row->key, options));
    if (weights.back() > highest) highest = weights.back();
  }
  double sum = options.sink_logit ? std::exp(*options.sink_logit - highest) : 0.0;
  for (double& weight : weights) sum += weight = std::exp(weight - highest);
  for (double& weight : weights) weight /= sum;
  if (log_sum_exp != nullptr) {
    *log_sum_exp = rows.empty() && !options.sink_logit ? -std::numeric_limits<double>::infinity()
                                                       : highest + std::log(sum);
  }
  return weights;
}

inline Result attend(const std::vector<double>& query, const std::vector<const Row*>& rows,
                     const Options& options, std::size_t value_dim = 0) {
  // Without rows only the caller knows the length of a value.
  Result result{std::vector<double>(value_dim == 0 ? query.size() : value_dim, 0.0)};
  const auto shares = probabilities(query, rows, options, &result.log_sum_exp);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    for (std::size_t i = 0; i < result.out.size(); ++i) result.out[i] += shares[r] * rows[r]->value[i];
  }
  return result;
}

/// A key or query at position 0 rotated to `position`, with pairs (i, i + n / 2) and plain frequencies.
inline std::vector<double> turn(std::vector<double> row, double positions, double theta) {
  const std::size_t pairs = row.size() / 2;
  for (std::size_t i = 0; i < pairs; ++i) {
    const double angle =
        positions * std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(row.size()));
    const double a = row[i];
    const double b = row[i + pairs];
    row[i] = a * std::cos(angle) - b * std::sin(angle);
    row[i + pairs] = a * std::sin(angle) + b * std::cos(angle);
  }
  return row;
}

}  // namespace oracle
