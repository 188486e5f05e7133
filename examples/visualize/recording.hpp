// SPDX-License-Identifier: Apache-2.0
//
// What every KV head of a model kept and read while a text went through it under one plan: what the
// page of `visualize` shows. Nothing is computed a second time from the plan: the rows that a query
// read are those that its cache handed to the attention engine, with the engine's own attention.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/plan/head_plan.hpp>
#include <reference_model/llama.hpp>

namespace kvpolicy::tools {

/// Rows of the text, here always as text positions; lists of them ascend and touch nowhere.
using RowRuns = std::vector<RowRun>;

[[nodiscard]] std::size_t rows_in(const RowRuns& runs);
[[nodiscard]] bool holds_row(const RowRuns& runs, std::size_t row);

/// The attention that one row got from one query, as a mean over the head's query heads.
struct RowAttention {
  std::size_t row = 0;
  float share = 0;  ///< of the query's attention, which sums to 1 over the rows that it read
};

/// One KV head at one step.
struct HeadStep {
  RowRuns kept;                         ///< behind the step
  RowRuns exact;                        ///< of these, the ones that are not quantised
  std::size_t bytes = 0;                ///< held for the head, in whole pages
  RowRuns read;                         ///< by the step's query; none where there is no query
  std::size_t bytes_read = 0;           ///< of these rows, but for those that the call itself brought
  std::vector<RowAttention> attention;  ///< of the rows read that got at least `least_attention`
};

enum class StepKind : std::uint8_t {
  prompt,    ///< a piece of the prompt was read; the query is that of its last token
  compress,  ///< behind the prompt heads with a budget dropped rows; there is no query
  generate   ///< one new token was read; the query is its own
};

struct Step {
  StepKind kind = StepKind::prompt;
  std::size_t tokens = 0;           ///< of the text behind the step; the query's is the last of them
  std::size_t bytes = 0;            ///< of the whole cache
  std::size_t full_head_bytes = 0;  ///< what a head would hold that keeps every row, exactly
  std::vector<HeadStep> heads = {}; ///< [layers * kv_heads]
};

struct Recording {
  std::string model = {};        ///< for people, as is the plan's name
  std::string plan = {};
  HeadPlan<bfloat16> heads;       ///< as it was, windows of the model's own included
  std::size_t vocabulary = 0;    ///< 256: tokens are bytes
  std::vector<int> tokens = {};  ///< the prompt, and what the model said
  std::size_t prompt_tokens = 0;
  std::size_t piece = 0;         ///< prompt tokens read at once
  float least_attention = 0;
  std::vector<Step> steps = {};

  /// What a full cache would hold behind a step.
  [[nodiscard]] std::size_t full_bytes(const Step& step) const {
    return step.full_head_bytes * heads.shape().kv_head_count();
  }
};

struct RecordSettings {
  std::size_t prompt_steps = 64;  ///< pieces into which the prompt is cut, at most
  std::size_t most_new = 48;      ///< tokens to continue with, by the likeliest each time
  std::vector<int> stop = {};     ///< ends behind these tokens
  float least_attention = 0.0005F;
};

/// Called with the tokens done and those there will be at most.
using RecordReport = std::function<void(std::size_t done, std::size_t total)>;

/// Reads the prompt under the plan and goes on with it. As in the other tools a prompt reads all rows,
/// heads with a budget compress behind it, and heads that select do so anew at each new token.
/// @throws ShapeError for no prompt or tokens outside the vocabulary, ConfigError if the plan does not
/// fit the model, std::bad_alloc
[[nodiscard]] Recording record(const reference::Llama& model, HeadPlan<bfloat16> plan,
                               std::span<const int> prompt, const RecordSettings& settings,
                               const RecordReport& report = {});

}  // namespace kvpolicy::tools
