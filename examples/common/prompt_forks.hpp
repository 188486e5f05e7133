// SPDX-License-Identifier: Apache-2.0
//
// One prompt for many plans: it is read once over a full cache, and each plan gets a fork of that
// whose rows are kept the plan's way. Plans under which the prompt itself is read differently
// (windows, heads that evict while they read) read it themselves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <reference_model/llama.hpp>

#include "exam_plan.hpp"
#include "sequence.hpp"

namespace kvpolicy::tools {

/// Who reads a prompt. `shared`: attention over the prompt is full for every plan that keeps all of
/// it, and rows are quantised behind it (as published: KIVI's prompt attends to exact rows). `own`:
/// each plan reads it in chunks of 512, and a chunk sees the chunks before it as the plan keeps
/// them.
enum class Prefill : std::uint8_t { shared, own };

/// Whether the prompt reads every row exactly under the plan, so that a full cache can read it.
[[nodiscard]] bool reads_prompt_in_full(const HeadPlan<bfloat16>& plan);

/// The end of a prompt is read by each fork itself: a plan that evicts goes by its latest queries,
/// and a fork has those that it has read.
inline constexpr std::size_t read_by_forks = 64;

class PromptForks {
 public:
  /// Nothing is read yet. The model must outlive this and all forks.
  PromptForks(const reference::Llama& model, std::vector<int> prompt, Prefill prefill);

  /// A sequence that has read the prompt, for the caller alone. Not synchronised.
  /// @throws ConfigError, ShapeError if the plan does not fit the model.
  [[nodiscard]] std::unique_ptr<Sequence> under(const ExamPlan& plan);

  /// The same over the full cache.
  [[nodiscard]] std::unique_ptr<Sequence> in_full();

 private:
  [[nodiscard]] std::unique_ptr<Sequence> read(HeadPlan<bfloat16> plan) const;
  [[nodiscard]] std::unique_ptr<Sequence> to_the_end(std::unique_ptr<Sequence> sequence) const;
  [[nodiscard]] const Sequence& full();
  [[nodiscard]] const Sequence& added_up();

  const reference::Llama* model_;
  std::vector<int> prompt_;
  std::size_t shared_;  // tokens in front that forks need not read
  Prefill prefill_;
  std::unique_ptr<Sequence> full_;      // read when it is first needed
  std::unique_ptr<Sequence> added_up_;  // likewise
};

}  // namespace kvpolicy::tools
