// SPDX-License-Identifier: Apache-2.0
#include "serve/llama_served.hpp"

#include <reference_model/run.hpp>

namespace kvpolicy::serve {

void LlamaServed::fit(Plan& plan) const { reference::limit_windows(plan, model_->config()); }

std::vector<BatchCall<Cache>> batch_of(std::span<const StepCall> calls) {
  std::vector<BatchCall<Cache>> batch;
  batch.reserve(calls.size());
  for (const StepCall& call : calls) {
    ModelCall own;
    own.tokens = call.tokens;
    own.logits = call.wants_logits ? LogitsOf::last : LogitsOf::none;
    own.attend.read = call.selects ? Read::selected : Read::all;
    own.attend.refresh_selection = call.selects;
    batch.push_back({call.cache, own});
  }
  return batch;
}

std::vector<reference::BatchedRead> LlamaServed::read(std::span<const StepCall> calls) {
  const std::vector<BatchCall<Cache>> batch = batch_of(calls);
  const reference::LlamaReader reader{model_->llama()};
  return reader.read_each(std::span{batch});
}

}  // namespace kvpolicy::serve
