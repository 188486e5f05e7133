// SPDX-License-Identifier: Apache-2.0
//
// Ranks rows by the attention of the text's last query alone. With `compress_every = 1` a full head
// drops at each token the row that the token looks at least, which may be the token's own.
//
// Method: TOVA, "Transformers are Multi-State RNNs", arXiv:2401.06104. Difference: a rank per KV
// head, by the mean over its query heads, where the published code averages over all heads of the
// layer, so that they all keep the same rows. As there, a call (the whole prompt, if it is one
// call) attends to all of its own rows and is compressed after it.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include <kvpolicy/core/fields.hpp>
#include <kvpolicy/core/head_rule.hpp>
#include <kvpolicy/policy/row_scorer.hpp>

namespace kvpolicy {

/// An ObservingScorer.
struct TovaScorer {
  /// There is nothing to set.
  struct Config {
    friend bool operator==(const Config&, const Config&) = default;
    void fields(FieldVisitor&) {}
    /// Adds how rows are ranked to a head's rule.
    void describe(HeadRule& rule) const { rule.ranking = Ranking::attention; }
  };
  static constexpr std::string_view name = "tova";

  static void validate(const Config&) {}
  [[nodiscard]] static std::size_t kept_rows(const Config&) { return 0; }
  [[nodiscard]] static std::size_t observed_queries(const Config&) { return 1; }

  static void score(const Config&, std::span<const float> sums, std::size_t group, std::size_t /*queries*/,
                    std::span<float> out) {
    const std::size_t rows = sums.size() / group;
    for (std::size_t row = 0; row < out.size(); ++row) {
      out[row] = 0.0F;
      for (std::size_t head = 0; head < group; ++head) {
        out[row] += sums[head * rows + row] / static_cast<float>(group);
      }
    }
  }
};

static_assert(RowScorer<TovaScorer>);

}  // namespace kvpolicy
