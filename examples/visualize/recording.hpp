// SPDX-License-Identifier: Apache-2.0
//
// Records what every KV head of a model kept and read while the model read a text under one plan;
// the page of `visualize` shows it. Nothing is computed again from the plan: the rows that a query
// read are those that its cache passed to the attention engine, and the attention is the engine's. Where a
// read has a bound, the engine is asked for the attention to all rows before the read leaves some of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/plan/head_plan.hpp>

#include <common/sequence.hpp>
#include <common/text_model.hpp>

namespace kvpolicy::tools {

/// Rows of the text, here always as text positions. The runs of a list ascend, and no two of them
/// are adjacent.
using RowRuns = std::vector<RowRun>;

[[nodiscard]] std::size_t rows_in(const RowRuns& runs);
[[nodiscard]] bool holds_row(const RowRuns& runs, std::size_t row);

/// The attention of one query to one row, as a mean over the head's query heads.
struct RowAttention {
  std::size_t row = 0;
  /// Of the query's attention, which sums to 1 over the rows that it read, or over all where the read had a bound.
  float share = 0;
};

/// What a query that was read with a bound left unread, as shares of its attention and means over the head's query
/// heads.
struct UnreadShare {
  float bound = 0;     ///< what the rows that it left hold at most (ReadBound::unread)
  float measured = 0;  ///< what they hold
};

/// One KV head at one step.
struct HeadStep {
  RowRuns kept;           ///< after the step
  RowRuns exact;          ///< the rows of `kept` that are not quantised
  std::size_t bytes = 0;  ///< that the head holds, in whole pages
  RowRuns read;           ///< by the step's query; none where there is no query
  /// Of these rows, without those that the call itself brought; of a read with a bound also the upper halves of keys.
  std::size_t bytes_read = 0;
  /// For rows that got at least `least_attention`. Where the read had a bound, for those that it left, too.
  std::vector<RowAttention> attention;
  std::optional<UnreadShare> unread;  ///< of a read with a bound
};

enum class StepKind : std::uint8_t {
  prompt,    ///< a part of the prompt was read; the query is that of its last token
  compress,  ///< after the prompt, heads with a budget dropped rows; there is no query
  generate   ///< one new token was read; the query is that token's
};

struct Step {
  StepKind kind = StepKind::prompt;
  std::size_t tokens = 0;            ///< of the text after the step; the query belongs to the last of them
  std::size_t bytes = 0;             ///< of the whole cache
  std::size_t full_head_bytes = 0;   ///< what a head would hold that keeps every row exactly
  std::vector<HeadStep> heads = {};  ///< [layers * kv_heads]
};

struct Recording {
  std::string model = {};  ///< a readable name, as is the plan's
  std::string plan = {};
  HeadPlan<bfloat16> heads;      ///< the plan in use, with windows of the model's own
  std::vector<int> tokens = {};  ///< the prompt and the model's continuation
  /// What each token adds to the text, whole characters; the last token of a character has it.
  std::vector<std::string> texts = {};
  std::size_t prompt_tokens = 0;
  std::size_t piece = 0;  ///< prompt tokens read in one call
  float least_attention = 0;
  std::vector<Step> steps = {};

  /// Bytes that a full cache would hold after a step.
  [[nodiscard]] std::size_t full_bytes(const Step& step) const {
    return step.full_head_bytes * heads.shape().kv_head_count();
  }
  /// The continuation.
  [[nodiscard]] std::string new_text() const;
};

struct RecordSettings {
  std::size_t prompt_steps = 64;  ///< at most so many parts of the prompt, each read in one call
  std::size_t most_new = 48;      ///< at most so many tokens of continuation, always the likeliest
  std::string stop = {};          ///< the continuation ends with the token that completes this text
  float least_attention = 0.0005F;
  std::optional<Reading> reading = {};  ///< of new tokens; none: all rows, or what the plan's heads select
};

/// Is called with the tokens done, and with the most that there will be.
using RecordReport = std::function<void(std::size_t done, std::size_t total)>;

/// Reads the prompt under the plan and continues it. As in the other tools, a prompt reads all
/// rows, and heads with a budget compress after it. Unless the settings say otherwise, selecting heads
/// choose a new selection at each new token.
/// @throws ShapeError for no prompt or tokens outside the vocabulary, ConfigError if the plan does
/// not fit the model, std::bad_alloc
[[nodiscard]] Recording record(const TextModel& model, HeadPlan<bfloat16> plan, std::span<const int> prompt,
                               const RecordSettings& settings, const RecordReport& report = {});

}  // namespace kvpolicy::tools
