// SPDX-License-Identifier: Apache-2.0
#include "prompt_forks.hpp"

#include <algorithm>
#include <span>
#include <utility>

namespace kvpolicy::tools {

bool reads_prompt_in_full(const HeadPlan<bfloat16>& plan) {
  bool in_full = true;
  plan.for_each_head([&](std::size_t, std::size_t, const auto& config) {
    if constexpr (requires { config.recent; }) in_full = false;  // sinks and a window
    if constexpr (requires { config.compress_every; }) {
      in_full = in_full && (config.compress_every == 0 || config.after_first_compress);
    }
  });
  return in_full;
}

namespace {

// Whether a head ranks rows by the attention that they got from the first query on.
bool accumulates(const HeadPlan<bfloat16>& plan) {
  bool any = false;
  const ModelShape& shape = plan.shape();
  for (std::size_t head = 0; head < shape.kv_head_count(); ++head) {
    HeadPlan<bfloat16>::visit(
        plan.at(head / shape.kv_heads, head % shape.kv_heads),
        [&]<class P>(const typename P::Config&) { any = any || AccumulatingPolicy<P>; });
  }
  return any;
}

}  // namespace

PromptForks::PromptForks(const reference::Llama& model, std::vector<int> prompt, Prefill prefill)
    : model_{&model},
      prompt_{std::move(prompt)},
      shared_{prompt_.size() - std::min(prompt_.size(), read_by_forks)},
      prefill_{prefill} {}

std::unique_ptr<Sequence> PromptForks::in_full() { return to_the_end(full().fork()); }

std::unique_ptr<Sequence> PromptForks::under(const ExamPlan& plan) {
  const bool shares = prefill_ == Prefill::shared && reads_prompt_in_full(plan.plan);
  auto own = to_the_end(shares ? (accumulates(plan.plan) ? added_up() : full()).fork_as(plan.plan)
                               : read(plan.plan));
  if (plan.fastgen) own->choose_behind_prompt(*plan.fastgen);
  return own;
}

const Sequence& PromptForks::full() {
  if (!full_) full_ = read(HeadPlan<bfloat16>{model_->config().shape()});
  return *full_;
}

// Also full, and every row knows what attention it got.
const Sequence& PromptForks::added_up() {
  constexpr std::size_t every_row = std::size_t{1} << 40;
  using Adding = HeadBudgetCache<DenseStorage<bfloat16>, H2oScorer>;
  if (!added_up_) {
    added_up_ = read(HeadPlan<bfloat16>{model_->config().shape(), Adding::Config{.budget = every_row}});
  }
  return *added_up_;
}

// The part that forks share.
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
