// SPDX-License-Identifier: Apache-2.0
//
// One rank's part of the reference Llama as the model that a server steps: its caches have the heads of this rank, each
// whole.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/plan/shards.hpp>
#include <reference_model/parallel/parallel_llama.hpp>

#include "common/text_model.hpp"
#include "serve/served_model.hpp"

namespace kvpolicy::serve {

class ParallelServed final : public ServedModel {
 public:
  /// `plan`: the one by which heads are divided, for texts of `tokens` tokens. Requests may name others; their heads
  /// are where this plan's are. Model and ranks must outlive it.
  /// @throws ConfigError, on every rank, if a rank would hold no head at all, or heads share budgets; if ranks have
  /// other models or shards; CommunicationError
  ParallelServed(const tools::TextModel& model, const Plan& plan, std::size_t tokens,
                 reference::Communicator& ranks);

  /// Of the whole model.
  [[nodiscard]] ModelShape shape() const override { return model_->config().shape(); }
  [[nodiscard]] std::size_t context() const override { return model_->config().max_positions; }
  [[nodiscard]] const ValueOutputs* value_outputs() const override { return value_outputs_; }
  /// @throws ConfigError for a plan whose heads share budgets, of which ranks know only their own
  void fit(Plan& plan) const override;
  [[nodiscard]] std::shared_ptr<const Plan> own_plan(const std::shared_ptr<const Plan>& plan) override;
  [[nodiscard]] std::vector<reference::BatchedRead> read(std::span<const StepCall> calls) override;
  [[nodiscard]] bool is_end(int token) const override { return model_->is_end(token); }

  [[nodiscard]] const Shards& shards() const { return shards_; }

 private:
  const tools::TextModel* model_;
  Shards shards_;
  reference::ParallelLlama part_;
  const ValueOutputs* value_outputs_;
  std::size_t rank_;
  std::vector<std::pair<std::shared_ptr<const Plan>, std::shared_ptr<const Plan>>> plans_;  // the latest
};

}  // namespace kvpolicy::serve
