// SPDX-License-Identifier: Apache-2.0
//
// A prompt that one cache reads for many plans: the tokens after it must be, bit for bit, those of
// plans that read the prompt themselves.
#include <evaluate/prompt_forks.hpp>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <common/exam_plan.hpp>
#include <tool_plan.hpp>

#include "byte_model.hpp"
#include "support/compare.hpp"

using namespace kvpolicy;
using namespace kvpolicy::tools;

namespace {

HeadPlan<bfloat16> plan_named(const std::string& name, const ModelShape& shape) {
  PlanArguments arguments;
  arguments.plan = name;
  return make_plan<bfloat16>(arguments, shape);
}

}  // namespace

TEST_CASE("plans that keep a prompt whole continue from a shared prompt as from their own") {
  const reference::Llama model = random_byte_model();
  std::vector<int> prompt(560);
  for (std::size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<int>((i * i + 7 * i) % 251);
  PromptForks shared{model, prompt, Prefill::shared};
  PromptForks own{model, prompt, Prefill::own};
  for (const char* name : {"full", "snapkv:40", "adakv:40", "tova:40", "h2o:40", "keynorm:40"}) {
    CAPTURE(name);
    const auto plan = plan_named(name, model.config().shape());
    const ExamPlan exam{.name = name, .plan = plan, .compresses = true};
    CHECK(reads_prompt_in_full(plan));
    const auto one = shared.under(exam);
    const auto other = own.under(exam);
    CHECK(one->tokens() == prompt.size());
    CHECK(one->bytes() == other->bytes());
    const std::size_t before = one->bytes();
    one->compress();
    other->compress();
    CHECK(one->bytes() == other->bytes());
    CHECK((one->bytes() < before) == (std::string{name} != "full"));
    for (int token = 1; token < 6; ++token) {
      const auto logits = one->decode(token, {});
      CHECK(test::same_bits(logits, other->decode(token, {})));
    }
    CHECK(one->bytes() == other->bytes());
  }
  CHECK_FALSE(reads_prompt_in_full(plan_named("sink_recent:4,40", model.config().shape())));
}
