// SPDX-License-Identifier: Apache-2.0
//
// Ranks rows by the length of their key: short keys stay, since they are what queries attend to.
// Needs no query and no look at attention.
//
// Method: "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
// arXiv:2406.11430. Differences: norms are those of the keys as they are cached, which rotary
// embeddings do not change but quantisation does; which layers are compressed (the published code
// leaves out the first two) is the plan's to say; `recent` rows can be kept besides, none by default.
#pragma once

#include <cmath>
#include <cstddef>
#include <span>
#include <string_view>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/fields.hpp>
#include <kvpolicy/policy/row_scorer.hpp>

namespace kvpolicy {

/// A KeyScorer.
struct KeyNormScorer {
  /// What is kept besides the short keys.
  struct Config {
    std::size_t recent = 0;  ///< Latest rows that are always kept, besides the budget.
    friend bool operator==(const Config&, const Config&) = default;
    void fields(FieldVisitor& visit) { visit("recent", recent); }
  };
  static constexpr std::string_view name = "key_norm";

  static void validate(const Config& config) {
    constexpr std::size_t most = std::size_t{1} << 40;
    require(config.recent <= most, "KeyNormScorer: recent is ", config.recent,
            ", must be at most 2^40");
  }
  [[nodiscard]] static std::size_t kept_rows(const Config& config) { return config.recent; }

  [[nodiscard]] static float score_key(const Config&, std::span<const float> key) {
    double squares = 0.0;
    for (const float number : key) {
      squares += static_cast<double>(number) * static_cast<double>(number);
    }
    return -static_cast<float>(std::sqrt(squares));
  }
};

static_assert(RowScorer<KeyNormScorer>);

}  // namespace kvpolicy
