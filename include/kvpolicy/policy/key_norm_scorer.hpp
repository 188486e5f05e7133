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
#include <kvpolicy/core/head_rule.hpp>
#include <kvpolicy/core/host_device.hpp>
#include <kvpolicy/policy/row_scorer.hpp>

namespace kvpolicy {

/// A GatheringKeyScorer.
struct KeyNormScorer {
  /// What is kept besides the short keys.
  struct Config {
    std::size_t recent = 0;  ///< Latest rows that are always kept, besides the budget.
    friend bool operator==(const Config&, const Config&) = default;
    void fields(FieldVisitor& visit) { visit("recent", recent); }
    /// Adds how rows are ranked to a head's rule.
    void describe(HeadRule& rule) const { rule.ranking = Ranking::keys; }
  };
  static constexpr std::string_view name = "key_norm";

  static void validate(const Config& config) {
    constexpr std::size_t most = std::size_t{1} << 40;
    require(config.recent <= most, "KeyNormScorer: recent is ", config.recent, ", must be at most 2^40");
  }
  [[nodiscard]] static std::size_t kept_rows(const Config& config) { return config.recent; }

  /// Sums in double and in the order of the channels, so that host and device rank rows alike.
  struct Gather {
    double squares = 0.0;

    KVPOLICY_HOST_DEVICE explicit Gather(const KeyNumbers&) {}
    KVPOLICY_HOST_DEVICE void add(float number) {
      squares += static_cast<double>(number) * static_cast<double>(number);
    }
    KVPOLICY_HOST_DEVICE float score() const { return -static_cast<float>(std::sqrt(squares)); }
  };
  [[nodiscard]] static float score_key(const Config&, std::span<const float> key) {
    return gather_key<Gather>({}, key);
  }
};

static_assert(RowScorer<KeyNormScorer> && GatheringKeyScorer<KeyNormScorer>);

}  // namespace kvpolicy
