// SPDX-License-Identifier: Apache-2.0
//
// One prompt for many plans. The prompt is read once over a full cache, and each plan gets a fork,
// whose rows are then kept in the plan's way. Plans that change how the prompt itself is read
// (windows, heads that evict while they read) read it themselves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <reference_model/llama.hpp>
#include <reference_model/repeat_request.hpp>

#include "../common/exam_plan.hpp"
#include "../common/sequence.hpp"

namespace kvpolicy::tools {

/// Who reads a prompt. `shared`: a full cache reads it for every plan that keeps all rows during
/// the prompt, and rows are quantised afterwards (as published: in KIVI the prompt attends to exact
/// rows). `own`: each plan reads it in chunks of 512, and a chunk sees the rows that the plan kept
/// of earlier chunks.
enum class Prefill : std::uint8_t { shared, own };

/// Whether every query of the prompt reads all rows exactly under the plan, so that a full cache
/// can read it.
[[nodiscard]] bool reads_prompt_in_full(const HeadPlan<bfloat16>& plan);

/// The end of a prompt is read by each fork itself, because a plan that evicts ranks rows by the
/// latest queries and a fork has only the queries that it has read.
inline constexpr std::size_t read_by_forks = 64;

class PromptForks {
 public:
  /// Reads nothing yet. The model must outlive this object and all forks. `ask` are the words with which plans that
  /// score rows by repeating the prompt ask for that.
  PromptForks(const reference::Llama& model, std::vector<int> prompt, Prefill prefill,
              reference::RepeatRequest ask = {});

  /// A new sequence that has read the prompt. Not thread-safe.
  /// @throws ConfigError, ShapeError if the plan does not fit the model
  [[nodiscard]] std::unique_ptr<Sequence> under(const ExamPlan& plan);

  /// The same over the full cache.
  [[nodiscard]] std::unique_ptr<Sequence> in_full();

 private:
  [[nodiscard]] std::unique_ptr<Sequence> read(HeadPlan<bfloat16> plan) const;
  [[nodiscard]] std::unique_ptr<Sequence> to_the_end(std::unique_ptr<Sequence> sequence) const;
  [[nodiscard]] const Sequence& full();
  [[nodiscard]] const Sequence& added_up();
  [[nodiscard]] const Sequence& scored();

  const reference::Llama* model_;
  std::vector<int> prompt_;
  std::size_t shared_;  // first tokens of the prompt, which forks need not read
  Prefill prefill_;
  std::unique_ptr<Sequence> full_;      // is read when it is first needed
  std::unique_ptr<Sequence> added_up_;  // likewise
  std::unique_ptr<Sequence> scored_;    // the whole prompt; likewise
  reference::RepeatRequest ask_;
};

}  // namespace kvpolicy::tools
