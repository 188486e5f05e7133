// SPDX-License-Identifier: Apache-2.0
//
// Ranks rows by how much their key differs from the others: what many keys say alike can go. Needs no query and no
// look at attention, so what it keeps does not depend on which question follows.
//
// Method: KeyDiff, arXiv:2504.15364: a row's score is the negative cosine between its key and the mean direction of all
// keys of the head. Differences: keys are those that are cached, after rotary embedding, as in the published code, and
// as they are stored where they are quantised; the mean is over the rows that the head holds when it is compressed,
// those that are always kept included, so a head that compresses every few rows keeps no sum of rows that went;
// `recent` rows can be kept besides, none by default.
#pragma once

#include <cmath>
#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/fields.hpp>
#include <kvpolicy/core/head_rule.hpp>
#include <kvpolicy/policy/row_scorer.hpp>

namespace kvpolicy {

/// An AnchoredKeyScorer.
struct KeyDiffScorer {
  /// What is kept besides the keys that differ.
  struct Config {
    std::size_t recent = 0;  ///< Latest rows that are always kept, besides the budget.
    friend bool operator==(const Config&, const Config&) = default;
    void fields(FieldVisitor& visit) { visit("recent", recent); }
    /// Adds how rows are ranked to a head's rule.
    void describe(HeadRule& rule) const { rule.ranking = Ranking::key_directions; }
  };
  static constexpr std::string_view name = "key_diff";

  static void validate(const Config& config) {
    constexpr std::size_t most = std::size_t{1} << 40;
    require(config.recent <= most, "KeyDiffScorer: recent is ", config.recent, ", must be at most 2^40");
  }
  [[nodiscard]] static std::size_t kept_rows(const Config& config) { return config.recent; }

  /// The sum of the directions of all keys. Of a key without a length there is none.
  class Anchor {
   public:
    explicit Anchor(std::size_t head_dim) : sum_(head_dim, 0.0) {}

    void add(std::span<const float> key) {
      const double length = length_of(key);
      if (length == 0.0) return;
      for (std::size_t i = 0; i < sum_.size(); ++i) sum_[i] += static_cast<double>(key[i]) / length;
    }
    /// The cosine of a key and the anchor; 0 where one of them has no length.
    [[nodiscard]] double cosine(std::span<const float> key) const {
      double product = 0.0;
      double squares = 0.0;
      for (std::size_t i = 0; i < sum_.size(); ++i) {
        product += static_cast<double>(key[i]) * sum_[i];
        squares += sum_[i] * sum_[i];
      }
      const double lengths = length_of(key) * std::sqrt(squares);
      return lengths > 0.0 ? product / lengths : 0.0;
    }

   private:
    [[nodiscard]] static double length_of(std::span<const float> key) {
      double squares = 0.0;
      for (const float number : key) squares += static_cast<double>(number) * static_cast<double>(number);
      return std::sqrt(squares);
    }

    std::vector<double> sum_;
  };

  [[nodiscard]] static float score_key(const Config&, const Anchor& anchor, std::span<const float> key) {
    return -static_cast<float>(anchor.cosine(key));
  }
};

static_assert(RowScorer<KeyDiffScorer>);

}  // namespace kvpolicy
