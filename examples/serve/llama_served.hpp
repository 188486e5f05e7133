// SPDX-License-Identifier: Apache-2.0
//
// The reference Llama as the model that a server steps.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "common/text_model.hpp"
#include "serve/served_model.hpp"

namespace kvpolicy::serve {

/// What the reader of a model reads in a step.
[[nodiscard]] std::vector<BatchCall<Cache>> batch_of(std::span<const StepCall> calls);

/// The model must outlive it.
class LlamaServed final : public ServedModel {
 public:
  explicit LlamaServed(const tools::TextModel& model) : model_{&model} {}

  [[nodiscard]] ModelShape shape() const override { return model_->config().shape(); }
  [[nodiscard]] std::size_t context() const override { return model_->config().max_positions; }
  [[nodiscard]] const ValueOutputs* value_outputs() const override { return model_->llama().value_outputs(); }
  void fit(Plan& plan) const override;
  [[nodiscard]] std::vector<reference::BatchedRead> read(std::span<const StepCall> calls) override;
  [[nodiscard]] bool is_end(int token) const override { return model_->is_end(token); }

 private:
  const tools::TextModel* model_;
};

}  // namespace kvpolicy::serve
