// SPDX-License-Identifier: Apache-2.0
//
// What reads and drops take of each KV head: the share of its rows that a read with a bound reads in full, and what it
// loses of its output where rows are dropped before it is known which queries come. All settings see the same text: the
// model reads it once with full attention, and beside that every setting's cache gets the same queries, keys and
// values. So a head's loss is its own, not that of the layers before it, and one reading of a text serves all heads and
// all settings, where `identify_heads damage` (head_damage.hpp) runs the model for each of them.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/plan/head_table.hpp>

#include "../common/text_model.hpp"

namespace kvpolicy::tools {

/// A text, and what comes after rows of it were dropped: a question and its answer, or the text's own next tokens.
struct SplitText {
  std::vector<int> context;
  std::vector<int> later;
};

/// A sample for each text: [layers, kv_heads] of [texts].
using SampledShares = HeadTable<std::vector<double>>;

/// What was found about one setting. Shares are means over the later tokens and over a KV head's query heads.
struct SettingShares {
  /// How far the head's output is off: the sum of the squared differences to full attention's, as a share of the sum
  /// of its squares. Errors of several heads add up in it where they have nothing to do with each other.
  SampledShares error;
  /// Of a query's attention, what the rows have that the head dropped. Only where all rows that it keeps are exact.
  SampledShares lost;
  /// Of a read with a bound: of the rows in halves, those that were read in full.
  SampledShares rows_read;
  /// Of a read with a bound: what the rows left unread hold of a query's attention at most, by the bound.
  SampledShares unread;
};

/// How heads whose keys are in halves are read: with a sure bound, as a plan that is found by the shares is.
struct SharesConfig {
  float epsilon = 0.05F;
};

/// Is called with the share of the work that is done.
using SharesReport = std::function<void(double share)>;

/// Measures each setting on each head. Heads that compress do so between the context and the later tokens; a setting
/// with keys in halves is read with the bound. Texts are distributed over threads.
/// @throws ConfigError for no texts, a text without a context or later tokens, or one so short that a head with keys in
/// halves has no row in halves; for a setting whose rows compete with those of other heads or wait for a scoring pass;
/// what caches and model throw
[[nodiscard]] std::vector<SettingShares> measure_shares(const TextModel& model,
                                                        std::span<const HeadSettings<bfloat16>> settings,
                                                        std::span<const SplitText> texts,
                                                        const SharesConfig& config = {},
                                                        const SharesReport& report = {});

/// The mean of each head's samples.
[[nodiscard]] HeadTable<double> mean_of(const SampledShares& samples);

}  // namespace kvpolicy::tools
