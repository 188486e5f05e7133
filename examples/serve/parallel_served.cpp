// SPDX-License-Identifier: Apache-2.0
#include "serve/parallel_served.hpp"

#include <algorithm>

#include <kvpolicy/core/error.hpp>
#include <reference_model/run.hpp>

#include "serve/llama_served.hpp"

namespace kvpolicy::serve {
namespace {

// @throws ConfigError unless each rank holds a head
Shards divided(const Plan& plan, std::size_t tokens, std::size_t ranks) {
  Shards shards = balance(plan, tokens, {.ranks = ranks, .cut_rows = false});
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    std::size_t heads = 0;
    for (std::size_t layer = 0; layer < shards.layers(); ++layer) heads += shards.parts(layer, rank).size();
    require(heads > 0, "server: rank ", rank, " of ", ranks, " would hold none of the model's ",
            plan.shape().kv_head_count(), " KV heads, which the server does not cut; start fewer ranks");
  }
  return shards;
}

}  // namespace

ParallelServed::ParallelServed(const tools::TextModel& model, const Plan& plan, std::size_t tokens,
                               reference::Communicator& ranks)
    : model_{&model},
      shards_{divided(plan, tokens, ranks.size())},
      part_{model.llama(), shards_, ranks},
      value_outputs_{part_.value_outputs()},
      rank_{ranks.rank()} {}

void ParallelServed::fit(Plan& plan) const {
  reference::limit_windows(plan, model_->config());
  plan.for_each_head([&](std::size_t layer, std::size_t head, const HeadSettings<bfloat16>& settings) {
    require(!settings.is_adaptive_in_layer(), "head ", head, " of layer ", layer,
            " shares its budget with other heads, of which ranks know only their own; give each head its own "
            "budget (compete=head)");
  });
}

std::shared_ptr<const Plan> ParallelServed::own_plan(const std::shared_ptr<const Plan>& plan) {
  const auto known = std::ranges::find(plans_, plan, &decltype(plans_)::value_type::first);
  if (known != plans_.end()) return known->second;
  constexpr std::size_t most = 64;
  if (plans_.size() == most) plans_.erase(plans_.begin());
  auto own = std::make_shared<const Plan>(plan_of_rank(*plan, shards_, rank_));
  return plans_.emplace_back(plan, std::move(own)).second;
}

std::vector<reference::BatchedRead> ParallelServed::read(std::span<const StepCall> calls) {
  const std::vector<BatchCall<Cache>> batch = batch_of(calls);
  return reference::ModelReader{part_}.read_each(std::span{batch});
}

}  // namespace kvpolicy::serve
