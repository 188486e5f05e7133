// SPDX-License-Identifier: Apache-2.0
//
// A prompt that one cache reads for many plans: the tokens after it must be, bit for bit, those of
// plans that read the prompt themselves.
#include <evaluate/prompt_forks.hpp>

#include <cstddef>
#include <memory>
#include <span>
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
  for (const char* name :
       {"full", "snapkv:40", "adakv:40", "criticalkv:40", "tova:40", "h2o:40", "keynorm:40"}) {
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

TEST_CASE("plans that score rows by repeating the prompt share what that found") {
  const reference::Llama model = random_byte_model();
  std::vector<int> prompt(200);
  for (std::size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<int>((i * i + 3 * i) % 251);
  const reference::RepeatRequest ask{{1, 2, 3}, {4, 5}, 64, 4};
  PromptForks forks{model, prompt, Prefill::shared, ask};
  std::vector<std::size_t> rows;
  for (const char* name : {"kvzip:20", "kvzip:60", "kvzip:60,compete=head", "kvzip:300"}) {
    CAPTURE(name);
    const ExamPlan exam = make_exam_plan(name, model.config().shape(), "", Compress::after_text);
    CHECK(exam.scores);
    const auto own = forks.under(exam);
    CHECK(own->tokens() == prompt.size());
    own->compress();
    // The same by a sequence that reads the prompt itself.
    const auto alone = make_sequence(model, exam.plan);
    const std::span<const int> all{prompt};
    static_cast<void>(alone->prefill(all.first(prompt.size() - read_by_forks)));  // in the same parts
    static_cast<void>(alone->prefill(all.last(read_by_forks)));
    alone->score_rows(prompt, ask);
    alone->compress();
    CHECK(own->head_bytes() == alone->head_bytes());
    CHECK(own->largest_scores(0, 0) == alone->largest_scores(0, 0));
    for (int token = 1; token < 4; ++token)
      CHECK(test::same_bits(own->decode(token, {}), alone->decode(token, {})));
    std::size_t total = 0;
    for (const std::size_t bytes : own->head_bytes()) total += bytes;
    rows.push_back(total / (2 * model.config().head_dim * sizeof(bfloat16)));
  }
  const std::size_t heads = model.config().shape().kv_head_count();
  // And the three tokens after it.
  CHECK(rows == std::vector<std::size_t>{23 * heads, 63 * heads, 63 * heads, 203 * heads});
  CHECK(test::contains(test::thrown<ConfigError>([&] {
                         static_cast<void>(make_exam_plan("kvzip:20", model.config().shape(), ""));
                       }),
                       "give --compress text"));
}
