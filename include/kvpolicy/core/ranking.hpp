// SPDX-License-Identifier: Apache-2.0
//
// What ranks the rows of a head with a budget, as every backend can compute it. A scorer states its ranking in
// its head's rule (`describe`), and a device cache goes by that: a scorer of your own runs there without a
// kernel of its own, unless it ranks rows by a function of their keys (policy/row_scorer.hpp).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include <kvpolicy/core/host_device.hpp>
#include <kvpolicy/core/rotary.hpp>

namespace kvpolicy {

/// What a scorer looks at to rank the rows of its head.
enum class Ranking : std::uint8_t {
  none,         ///< the head drops no rows, or the host alone can rank them
  attention,    ///< the attention of the latest `observation_window` queries, pooled over neighbouring rows
  expected,     ///< the attention of queries to come that these queries let expect (ExpectedQueries)
  accumulated,  ///< the attention of all queries since the row came, or of those in scoring passes
  keys,         ///< a function of the row's key, which the scorer's name says
  /// the negative cosine of the row's key and the mean direction of all keys of the head (policy/key_diff_scorer.hpp)
  key_directions,
};

/// Where the queries to come may be whose attention is expected (core/expected_queries.hpp).
struct ExpectedQueries {
  RotaryConfig rotary = {};
  std::size_t future = 512;  ///< positions from the text's end on

  friend bool operator==(const ExpectedQueries&, const ExpectedQueries&) = default;
};

/// What the attention that several queries and query heads pay a row comes to.
enum class Votes : std::uint8_t {
  mean,    ///< a row that most of them look at stays
  largest  ///< the worst case (DefensiveKV, arXiv:2510.13334): so does a row that one of them looks at
};

/// The names of the enumerators in files.
[[nodiscard]] constexpr std::array<std::string_view, 2> names_of(Votes) { return {"mean", "largest"}; }

/// What the votes of a row come to with one vote more: their sum, of which who knows their number makes a mean, or the
/// largest.
template <class T>
[[nodiscard]] KVPOLICY_HOST_DEVICE constexpr T with_vote(Votes votes, T so_far, T vote) {
  if (votes == Votes::mean) return so_far + vote;
  return vote > so_far ? vote : so_far;
}

/// What scores are multiplied by where they are weighed by values.
enum class ValueNorm : std::uint8_t {
  value_l2,  ///< the length of the value (Expected Attention, arXiv:2510.00636)
  /// the L1 norm of what the value becomes in the layer's output projection (CriticalKV, arXiv:2502.03805;
  /// core/value_outputs.hpp)
  output_l1
};

/// The names of the enumerators in files.
[[nodiscard]] constexpr std::array<std::string_view, 2> names_of(ValueNorm) {
  return {"value_l2", "output_l1"};
}

/// The settings of a scorer that a function of a key needs besides the key.
struct KeyNumbers {
  float number[4] = {};

  friend bool operator==(const KeyNumbers&, const KeyNumbers&) = default;
};

}  // namespace kvpolicy
