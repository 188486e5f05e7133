// SPDX-License-Identifier: Apache-2.0
//
// What rows are worth before any question is known, in double and as the papers define it: by how their keys differ
// (KeyDiff), and by the attention that queries to come can be expected to pay (Expected Attention), with the whole
// covariance matrix. Shares no header with the library.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

namespace oracle {

using Numbers = std::vector<double>;

inline double dot(const Numbers& a, const Numbers& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// The negative cosine of each key and the sum of all keys' directions; 0 where one of them has no length.
inline Numbers key_differences(const std::vector<Numbers>& keys) {
  Numbers sum(keys.empty() ? 0 : keys[0].size(), 0.0);
  for (const Numbers& key : keys) {
    const double length = std::sqrt(dot(key, key));
    for (std::size_t c = 0; c < key.size() && length > 0; ++c) sum[c] += key[c] / length;
  }
  Numbers scores;
  for (const Numbers& key : keys) {
    const double lengths = std::sqrt(dot(key, key)) * std::sqrt(dot(sum, sum));
    scores.push_back(lengths > 0 ? -dot(key, sum) / lengths : 0.0);
  }
  return scores;
}

/// A row that is rotated by so many positions, channel i together with channel i + half a row.
inline Numbers at_position(const Numbers& row, double positions, double theta) {
  Numbers result(row.size());
  const std::size_t pairs = row.size() / 2;
  for (std::size_t i = 0; i < pairs; ++i) {
    const double frequency = std::pow(theta, -static_cast<double>(i) / static_cast<double>(pairs));
    // A library that keeps frequencies as floats is off by a multiple of the position.
    const double angle = positions * static_cast<double>(static_cast<float>(frequency));
    result[i] = row[i] * std::cos(angle) - row[i + pairs] * std::sin(angle);
    result[i + pairs] = row[i + pairs] * std::cos(angle) + row[i] * std::sin(angle);
  }
  return result;
}

/// The probability that each key gets, by the mean and the covariance of the latest `queries` (of a text of `tokens`,
/// rotated to their positions) at the next `future` positions.
inline Numbers expected_shares(const std::vector<Numbers>& queries, const std::vector<Numbers>& keys,
                               double tokens, std::size_t future, double theta, double scale) {
  const std::size_t dim = queries[0].size();
  const auto count = static_cast<double>(queries.size());
  const auto mean_rotation = [&](const Numbers& row) {
    Numbers sum(dim, 0.0);
    for (std::size_t ahead = 0; ahead < future; ++ahead) {
      const Numbers one = at_position(row, tokens + static_cast<double>(ahead), theta);
      for (std::size_t i = 0; i < dim; ++i) sum[i] += one[i] / static_cast<double>(future);
    }
    return sum;
  };
  std::vector<Numbers> draws;
  Numbers mean(dim, 0.0);
  for (std::size_t i = 0; i < queries.size(); ++i) {
    draws.push_back(at_position(queries[i], count - tokens - static_cast<double>(i), theta));
    for (std::size_t j = 0; j < dim; ++j) mean[j] += draws.back()[j] / count;
  }
  std::vector<Numbers> covariance(dim, Numbers(dim, 0.0));
  for (Numbers& draw : draws) {
    for (std::size_t j = 0; j < dim; ++j) draw[j] -= mean[j];
    const Numbers turned = mean_rotation(draw);
    for (std::size_t a = 0; a < dim; ++a) {
      for (std::size_t b = 0; b < dim; ++b) covariance[a][b] += turned[a] * turned[b] / count;
    }
  }
  const Numbers turned_mean = mean_rotation(mean);
  Numbers shares;
  double highest = -std::numeric_limits<double>::infinity();
  for (const Numbers& key : keys) {
    double quadratic = 0;
    for (std::size_t a = 0; a < dim; ++a) quadratic += key[a] * dot(covariance[a], key);
    shares.push_back(scale * dot(turned_mean, key) + 0.5 * scale * scale * quadratic);
    highest = std::max(highest, shares.back());
  }
  double total = 0;
  for (double& share : shares) total += share = std::exp(share - highest);
  for (double& share : shares) share /= total;
  return shares;
}

}  // namespace oracle
