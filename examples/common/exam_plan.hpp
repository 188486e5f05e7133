// SPDX-License-Identifier: Apache-2.0
//
// A plan for an exam, together with the calls that it needs of its cache.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/fastgen.hpp>
#include <kvpolicy/io/policy_json.hpp>
#include <kvpolicy/plan/duo_gates.hpp>
#include <kvpolicy/plan/head_plan.hpp>

#include "sequence.hpp"
#include "speculative_text.hpp"

namespace kvpolicy::tools {

/// When a cache with budgets drops rows. It keeps the rows that the latest queries attend to. After
/// the question these queries show what the question needs, which is the published way, because the
/// prompt holds the question; after the text alone the cache does not know the question.
enum class Compress : std::uint8_t { after_question, after_text };

struct ExamPlan {
  std::string name;  ///< as on the command line: "duo+int4"
  HeadPlan<bfloat16> plan;
  io::OrderedJson settings = {};  ///< that the plan was made with (tool_plan.hpp)
  Reading reading = {};           ///< how tokens of the answer are read
  bool compresses = false;
  bool scores = false;  ///< rows are scored by repeating the text (KVzip), and dropped right after it
  Compress compress = Compress::after_question;
  /// Set if answers are decoded speculatively; `plan` is then that of the target's cache.
  std::optional<SpeculationSetup> speculation = {};
  std::shared_ptr<const reference::Llama> small_model = nullptr;  ///< proposes draft tokens
  /// Set if the plan is chosen when the cache is first compressed; until then it keeps all rows.
  std::optional<FastGenConfig> fastgen = {};
};

/// What the demo asks the shipped model, which reads bytes and knows no words. kernel and beta of HeadKV suit a small model of
/// bytes; docs/results.md says how they were chosen.
inline const std::vector<std::string> plans_of_bytes{
    "full", "sink_recent", "duo", "headkv:128,kernel=29,beta=2", "quest", "int4", "duo+int4", "triforce"};

/// `name` is a `--plan` (tool_plan.hpp); gates and scores are searched beside the model's weights.
/// Heads that select rows choose a new selection for every token. "triforce" is full attention with
/// draft tokens from the small model whose folder is beside that of the model. "fastgen:0.95" is
/// FastGen with that recovery; "fastgen:0.95,0.1,0.2" also sets the shares of the latest and of the
/// most attended rows; "fastgen:0.95,sinks=16,window=32" sets the sinks of the local choice and the
/// number of latest queries that decide, for which the library's defaults are 4 and 8.
/// @throws ConfigError, FormatError
[[nodiscard]] ExamPlan make_exam_plan(const std::string& name, const ModelShape& shape,
                                      const std::string& model_folder,
                                      Compress compress = Compress::after_question);

/// Describes what the heads keep: "8 heads every row, 8 heads the first 16 rows and latest 128".
[[nodiscard]] std::string describe(const HeadPlan<bfloat16>& plan);

/// The same, followed by the settings.
[[nodiscard]] std::string describe(const ExamPlan& plan);

/// Which heads a plan treats as streaming heads, that is, as heads with sinks and a window.
[[nodiscard]] HeadKinds kinds_of(const HeadPlan<bfloat16>& plan);

}  // namespace kvpolicy::tools
