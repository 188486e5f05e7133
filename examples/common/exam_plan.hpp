// SPDX-License-Identifier: Apache-2.0
//
// A plan as it is put to a model: with the way its cache has to be used to show what it can.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/fastgen.hpp>
#include <kvpolicy/io/policy_json.hpp>
#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/plan/duo_gates.hpp>

#include "sequence.hpp"
#include "speculative_text.hpp"

namespace kvpolicy::tools {

/// When a cache with budgets drops rows. It keeps what the latest queries look at: behind a
/// question that is what the question needs (the published way: the prompt holds the question),
/// behind the text alone it can only guess.
enum class Compress : std::uint8_t { behind_question, behind_text };

struct ExamPlan {
  std::string name;  ///< as the command line has it: "duo+int4"
  HeadPlan<bfloat16> plan;
  io::OrderedJson settings = {};  ///< that it was made with: tool_plan.hpp
  Reading reading = {};           ///< of the tokens that it answers with
  bool compresses = false;
  Compress compress = Compress::behind_question;
  /// Answers come by guesses: the plan is that of the target's cache.
  std::optional<SpeculationSetup> speculation = {};
  std::shared_ptr<const reference::Llama> small_model = nullptr;  ///< that guesses
  /// The plan is chosen when the cache is first compressed; until then it keeps all rows.
  std::optional<FastGenConfig> fastgen = {};
};

/// `name` is a `--plan` (tool_plan.hpp); gates and scores lie beside the model's weights.
/// Heads that select read what they select, and select anew for every token. "triforce" is full
/// attention whose tokens are guessed before, with the help of the small model beside the model's
/// folder. "fastgen:0.95" is FastGen with that recovery; "fastgen:0.95,0.1,0.2" with those shares
/// of latest and of most attended rows; "fastgen:0.95,sinks=16,window=32" with so many opening rows
/// that the local choice keeps, and so many latest queries that decide, where the library has 4
/// and 8.
/// @throws ConfigError, FormatError
[[nodiscard]] ExamPlan make_exam_plan(const std::string& name, const ModelShape& shape,
                                      const std::string& model_folder,
                                      Compress compress = Compress::behind_question);

/// What the heads keep, on a line: "8 heads every row, 8 heads the first 16 rows and latest 128".
[[nodiscard]] std::string describe(const HeadPlan<bfloat16>& plan);

/// The same, and the settings.
[[nodiscard]] std::string describe(const ExamPlan& plan);

/// Which heads a plan treats as streaming heads: those with sinks and a window.
[[nodiscard]] HeadKinds kinds_of(const HeadPlan<bfloat16>& plan);

}  // namespace kvpolicy::tools
