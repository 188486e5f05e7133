// SPDX-License-Identifier: Apache-2.0
#include "exam_plan.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <kvpolicy/format.hpp>
#include <kvpolicy/policy/expected_attention_scorer.hpp>
#include <kvpolicy/policy/h2o_scorer.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/key_diff_scorer.hpp>
#include <kvpolicy/policy/key_norm_scorer.hpp>
#include <kvpolicy/policy/kvzip_scorer.hpp>
#include <kvpolicy/policy/tova_scorer.hpp>

#include "../tool_plan.hpp"
#include "error_text.hpp"
#include "plan_name.hpp"

namespace kvpolicy::tools {
namespace {

// Words for the rows that the head's scorer keeps.
std::string ranked_rows(const HeadRule& rule) {
  if (rule.scorer == TovaScorer::name) return "the rows that the latest one looks at most";
  if (rule.scorer == KeyNormScorer::name) return "the rows with the shortest keys";
  if (rule.scorer == KeyDiffScorer::name) return "the rows whose keys differ most from the others";
  if (rule.scorer == ExpectedAttentionScorer::name) return "the rows that queries to come may look at most";
  if (rule.scorer == KvZipScorer::name) return "the rows that repeating the text takes";
  if (rule.scorer == H2oScorer::name) {
    return fmt::format("the latest {} rows and those that got most attention", rule.kept_rows);
  }
  return fmt::format("the rows that the latest {} look at most", rule.observation_window);
}

// Words for what one head keeps, without its budget, which differs from head to head.
std::string describe_head(const HeadSettings<bfloat16>& settings, std::size_t head_dim) {
  const HeadRule rule = settings.rule(head_dim);
  if (!rule.compresses) return describe(settings);
  std::string text = ranked_rows(rule);
  if (rule.adaptive_in_layer) {
    text += rule.adaptive_in_model ? " among all heads of the model" : " among all heads of the layer";
  }
  if (rule.is_quantized()) text += fmt::format(" in {}", describe_precision(settings.rule(0)));
  return text;
}

// Parses fastgen:recovery,local,frequent
FastGenConfig fastgen_config(PlanName& name) {
  FastGenConfig config;
  name.place({"recovery", "local", "frequent"});
  name.require_exact_rows();
  config.recovery = name.number("recovery", config.recovery);
  config.local_share = name.number("local", config.local_share);
  config.frequent_share = name.number("frequent", config.frequent_share);
  config.sinks = name.count("sinks", config.sinks);
  config.observation_window = name.count("window", config.observation_window);
  name.refuse_others();
  return named_by("--plan " + name.text, [&] {
    config.validate();
    return config;
  });
}

}  // namespace

ExamPlan make_exam_plan(const std::string& name, const ModelShape& shape, const std::string& model_folder,
                        Compress compress) {
  if (name == named(Structure::triforce).name) {
    const SpeculationSetup setup;
    const std::string folder = draft_folder_of(model_folder);
    require_draft_folder(folder);
    ExamPlan exam{.name = name, .plan = target_plan(shape, setup), .compress = compress};
    exam.settings = {{"chunk", setup.chunk}, {"budget", setup.budget}};
    exam.speculation = setup;
    exam.small_model = std::make_shared<const reference::Llama>(reference::Llama::load(folder));
    return exam;
  }
  if (PlanName parts{name}; parts.name == "fastgen") {
    const FastGenConfig config = fastgen_config(parts);
    // Until FastGen chooses, every head keeps all rows, and the cache the queries that the choice
    // needs.
    constexpr std::size_t every_row = std::size_t{1} << 40;
    HeadPlan<bfloat16> plan{shape, HeadBudgetCache<DenseStorage<bfloat16>>::Config{
                                       .budget = every_row, .scorer = config.scorer()}};
    ExamPlan exam{.name = name, .plan = std::move(plan), .compresses = true, .compress = compress};
    exam.settings = parts.settings();
    exam.fastgen = config;
    return exam;
  }
  PlanArguments arguments;
  arguments.plan = name;
  io::OrderedJson settings;
  auto plan = make_plan<bfloat16>(arguments, shape, model_folder, &settings);
  const PlanNeeds needs = needs_of(plan);
  require(!needs.scoring || compress == Compress::after_text, "--plan ", name,
          ": rows are scored by repeating the text, before a question is known; give --compress text");
  const Reading reading = reading_of(name, needs);
  return {.name = name,
          .plan = std::move(plan),
          .settings = std::move(settings),
          .reading = reading,
          .compresses = needs.compress,
          .scores = needs.scoring,
          .compress = compress};
}

std::string describe(const HeadPlan<bfloat16>& plan) {
  struct Kind {
    std::string text;
    std::size_t heads = 0;
    std::size_t least = 0;  // smallest budget
    std::size_t most = 0;
    bool budgeted = false;
  };
  std::vector<Kind> kinds;
  plan.for_each_head([&](std::size_t, std::size_t, const HeadSettings<bfloat16>& settings) {
    const std::string text = describe_head(settings, plan.shape().head_dim);
    auto kind = std::ranges::find(kinds, text, &Kind::text);
    if (kind == kinds.end()) kind = kinds.insert(kinds.end(), Kind{text});
    ++kind->heads;
    const HeadRule rule = settings.rule(plan.shape().head_dim);
    if (!rule.compresses) return;
    kind->least = kind->budgeted ? std::min(kind->least, rule.budget) : rule.budget;
    kind->most = std::max(kind->most, rule.budget);
    kind->budgeted = true;
  });
  // Heads that keep every row come first.
  std::stable_partition(kinds.begin(), kinds.end(),
                        [](const Kind& kind) { return kind.text.starts_with("every"); });
  std::string text;
  for (const Kind& kind : kinds) {
    if (!text.empty()) text += "; ";
    if (kinds.size() > 1) text += fmt::format("{} head{}: ", kind.heads, kind.heads == 1 ? "" : "s");
    text += kind.text;
    if (kind.budgeted && kind.least == kind.most) {
      text += fmt::format(", {} for each head", kind.most);
    } else if (kind.budgeted) {
      text += fmt::format(", {} to {} for a head", kind.least, kind.most);
    }
  }
  return text;
}

std::string describe(const ExamPlan& plan) {
  std::string text;
  if (plan.fastgen) {
    text = "for each head, after the prompt, the fewest rows with so much of the attention";
  } else if (plan.speculation) {
    text = "every row; a small model and chosen rows guess, all rows decide";
  } else {
    text = describe(plan.plan);
  }
  const std::string settings = shown_settings(plan.settings);
  return settings.empty() ? text : fmt::format("{} ({})", text, settings);
}

HeadKinds kinds_of(const HeadPlan<bfloat16>& plan) {
  HeadKinds kinds{plan.shape().layers, plan.shape().kv_heads, HeadKind::retrieval};
  plan.for_each_head([&](std::size_t layer, std::size_t head, const HeadSettings<bfloat16>& settings) {
    const bool is_window = settings.rule(plan.shape().head_dim).recent > 0;
    if (is_window) kinds(layer, head) = HeadKind::streaming;
  });
  return kinds;
}

}  // namespace kvpolicy::tools
