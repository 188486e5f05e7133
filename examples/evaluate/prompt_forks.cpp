// SPDX-License-Identifier: Apache-2.0
#include "prompt_forks.hpp"

#include <algorithm>
#include <span>
#include <utility>

#include <kvpolicy/policy/h2o_scorer.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/kvzip_scorer.hpp>

namespace kvpolicy::tools {

bool reads_prompt_in_full(const HeadPlan<bfloat16>& plan) {
  bool in_full = true;
  plan.for_each_head([&](std::size_t, std::size_t, const HeadSettings<bfloat16>& settings) {
    const HeadRule rule = settings.rule(plan.shape().head_dim);
    const bool is_window = rule.recent > 0;
    in_full = in_full && !is_window && (rule.compress_every == 0 || rule.after_first_compress);
  });
  return in_full;
}

namespace {

// Whether a head ranks rows by the attention that they received since the first query.
bool accumulates(const HeadPlan<bfloat16>& plan) {
  bool any = false;
  plan.for_each_head([&](std::size_t, std::size_t, const HeadSettings<bfloat16>& settings) {
    any = any || settings.roles().accumulates;
  });
  return any;
}

}  // namespace

PromptForks::PromptForks(const reference::Llama& model, std::vector<int> prompt, Prefill prefill,
                         reference::RepeatRequest ask)
    : model_{&model},
      prompt_{std::move(prompt)},
      shared_{prompt_.size() - std::min(prompt_.size(), read_by_forks)},
      prefill_{prefill},
      ask_{std::move(ask)} {}

std::unique_ptr<Sequence> PromptForks::in_full() { return to_the_end(full().fork()); }

std::unique_ptr<Sequence> PromptForks::under(const ExamPlan& plan) {
  if (plan.scores) return scored().fork_as(plan.plan);
  const bool shares = prefill_ == Prefill::shared && reads_prompt_in_full(plan.plan);
  auto own = to_the_end(shares ? (accumulates(plan.plan) ? added_up() : full()).fork_as(plan.plan)
                               : read(plan.plan));
  if (plan.fastgen) own->choose_after_prompt(*plan.fastgen);
  return own;
}

const Sequence& PromptForks::full() {
  if (!full_) full_ = read(HeadPlan<bfloat16>{model_->config().shape()});
  return *full_;
}

// This cache also keeps every row, and has added up the attention that each row received.
const Sequence& PromptForks::added_up() {
  constexpr std::size_t every_row = std::size_t{1} << 40;
  using Adding = HeadBudgetCache<DenseStorage<bfloat16>, H2oScorer>;
  if (!added_up_) {
    added_up_ = read(HeadPlan<bfloat16>{model_->config().shape(), Adding::Config{.budget = every_row}});
  }
  return *added_up_;
}

// This one keeps every row too, and knows what repeating the prompt takes of each.
const Sequence& PromptForks::scored() {
  constexpr std::size_t every_row = std::size_t{1} << 40;
  using Scored = HeadBudgetCache<DenseStorage<bfloat16>, KvZipScorer>;
  if (!scored_) {
    scored_ =
        to_the_end(read(HeadPlan<bfloat16>{model_->config().shape(), Scored::Config{.budget = every_row}}));
    if (!prompt_.empty()) scored_->score_rows(prompt_, ask_);
  }
  return *scored_;
}

// Reads the part of the prompt that forks share.
std::unique_ptr<Sequence> PromptForks::read(HeadPlan<bfloat16> plan) const {
  auto sequence = make_sequence(*model_, std::move(plan));
  const std::span<const int> front{prompt_.data(), shared_};
  if (!front.empty()) static_cast<void>(sequence->prefill(front));
  return sequence;
}

std::unique_ptr<Sequence> PromptForks::to_the_end(std::unique_ptr<Sequence> sequence) const {
  const std::span<const int> end = std::span{prompt_}.subspan(shared_);
  if (!end.empty()) static_cast<void>(sequence->prefill(end));
  return sequence;
}

}  // namespace kvpolicy::tools
