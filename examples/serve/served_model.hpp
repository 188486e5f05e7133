// SPDX-License-Identifier: Apache-2.0
//
// What a server steps: a model that reads tokens of many sequences at once.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include <kvpolicy/cpu.hpp>
#include <reference_model/language_model.hpp>

#include "tool_plan.hpp"

namespace kvpolicy::serve {

/// Rows are kept in bfloat16.
using Cache = cpu::KvCache<bfloat16>;
using Plan = HeadPlan<bfloat16>;

/// What one sequence reads in a step.
struct StepCall {
  Cache* cache = nullptr;
  std::span<const int> tokens;
  bool wants_logits = false;  ///< of its last token
  bool selects = false;       ///< heads that retrieve read the chunks that this token chooses
};

class ServedModel {
 public:
  ServedModel() = default;
  ServedModel(const ServedModel&) = delete;
  ServedModel& operator=(const ServedModel&) = delete;
  virtual ~ServedModel() = default;

  [[nodiscard]] virtual ModelShape shape() const = 0;
  /// Most tokens of a text; 0: no limit.
  [[nodiscard]] virtual std::size_t context() const = 0;
  /// The model's output projections, for heads that weigh rows by them; null: it says nothing of them.
  [[nodiscard]] virtual const ValueOutputs* value_outputs() const { return nullptr; }
  /// Changes a plan as the model needs it. @throws ConfigError for one that cannot be served
  virtual void fit(Plan&) const {}
  /// The part of a plan that this process has the heads of.
  [[nodiscard]] virtual std::shared_ptr<const Plan> own_plan(const std::shared_ptr<const Plan>& plan) {
    return plan;
  }
  /// One result for each call; see reference::LlamaReader::read_each.
  [[nodiscard]] virtual std::vector<reference::BatchedRead> read(std::span<const StepCall> calls) = 0;
  /// Whether a token ends a text.
  [[nodiscard]] virtual bool is_end(int token) const = 0;
};

}  // namespace kvpolicy::serve
