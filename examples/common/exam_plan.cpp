// SPDX-License-Identifier: Apache-2.0
#include "exam_plan.hpp"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <system_error>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <kvpolicy/format.hpp>

#include "../tool_plan.hpp"
#include "terminal.hpp"

namespace kvpolicy::tools {
namespace {

// What HeadKV's paper chose for large models over word pieces does not fit small ones over bytes:
// votes are pooled over 7 word pieces, about 28 bytes, so that what surrounds a row that is looked
// at survives with it; and where few heads have nearly all of the score, beta = 1.005 leaves the
// others with their window alone, beta = 2 with half of an equal share.
constexpr std::size_t byte_kernel = 4 * 7 + 1;
constexpr double byte_beta = 2.0;

// Which rows a scorer keeps.
std::string ranked_rows(const SnapKvScorer::Config& scorer) {
  return fmt::format("the rows that the latest {} look at most", scorer.window);
}
std::string ranked_rows(const TovaScorer::Config&) {
  return "the rows that the latest one looks at most";
}
std::string ranked_rows(const H2oScorer::Config& scorer) {
  return fmt::format("the latest {} rows and those that got most attention", scorer.recent);
}
std::string ranked_rows(const KeyNormScorer::Config&) { return "the rows with the shortest keys"; }

// What one head keeps; budgets differ from head to head and are told apart from it.
template <class P>
std::string describe_head(const typename P::Config& config) {
  if constexpr (CompressingPolicy<P>) {
    std::string text = ranked_rows(config.scorer);
    if (config.share_in_layer) text += " among all heads of the layer";
    if constexpr (requires { config.storage.bits; }) text += fmt::format(" in {}", config.storage);
    return text;
  } else {
    return fmt::format("{}", config);
  }
}

// fastgen:recovery,local,frequent
FastGenConfig fastgen_config(const std::string& name) {
  // Bytes, not word pieces: four times as many, so that the queries are those of the whole question.
  FastGenConfig config{.sinks = 16, .window = 32};
  const std::size_t colon = std::min(name.find(':'), name.size());
  require(name.substr(0, colon) == "fastgen", "--plan ", name, ": is not the name of a plan");
  const char* at = name.data() + colon;
  const char* const end = name.data() + name.size();
  for (double* number : {&config.recovery, &config.local_share, &config.frequent_share}) {
    if (at == end) break;
    const auto [next, error] = std::from_chars(at + 1, end, *number);
    require(error == std::errc{} && (next == end || *next == ','), "--plan ", name,
            ": behind the colon come up to three numbers: recovery, local, frequent");
    at = next;
  }
  require(at == end, "--plan ", name, ": fastgen takes at most 3 numbers");
  config.validate();
  return config;
}

}  // namespace

ExamPlan make_exam_plan(const std::string& name, const ModelShape& shape,
                        const std::string& model_folder, Compress compress) {
  if (name == named(Structure::triforce).name) {
    const SpeculationSetup setup;
    const std::string folder = draft_folder_of(model_folder);
    require_draft_folder(folder);
    return {name,
            target_plan(shape, setup),
            {},
            false,
            compress,
            setup,
            std::make_shared<const reference::Llama>(reference::Llama::load(folder)),
            {}};
  }
  if (name.starts_with("fastgen")) {
    const FastGenConfig config = fastgen_config(name);
    // Until it chooses, every head keeps all rows, and the queries to choose by.
    constexpr std::size_t every_row = std::size_t{1} << 40;
    AnyPlan<bfloat16> plan{shape, HeadBudgetCache<DenseStorage<bfloat16>>::Config{
                                      .budget = every_row, .scorer = config.scorer()}};
    return {name, std::move(plan), {}, true, compress, {}, nullptr, config};
  }
  PlanArguments arguments;
  arguments.plan = name;
  arguments.headkv.kernel = byte_kernel;
  arguments.headkv.beta = byte_beta;
  auto plan = make_plan<bfloat16>(arguments, shape, model_folder);
  const PlanNeeds needs = needs_of(plan);
  const Reading reading{needs.selected_reads ? Read::selected : Read::all, needs.selected_reads};
  return {name, std::move(plan), reading, needs.compress, compress, {}, nullptr, {}};
}

std::string describe(const AnyPlan<bfloat16>& plan) {
  struct Kind {
    std::string text;
    std::size_t heads = 0;
    std::size_t least = 0;  // budget
    std::size_t most = 0;
    bool budgeted = false;
  };
  std::vector<Kind> kinds;
  const ModelShape& shape = plan.shape();
  for (std::size_t i = 0; i < shape.kv_head_count(); ++i) {
    AnyPlan<bfloat16>::visit(plan.at(i / shape.kv_heads, i % shape.kv_heads),
                             [&]<class P>(const typename P::Config& config) {
                               const std::string text = describe_head<P>(config);
                               auto kind = std::ranges::find(kinds, text, &Kind::text);
                               if (kind == kinds.end())
                                 kind = kinds.insert(kinds.end(), Kind{text});
                               ++kind->heads;
                               if constexpr (CompressingPolicy<P>) {
                                 kind->least = kind->budgeted ? std::min(kind->least, config.budget)
                                                              : config.budget;
                                 kind->most = std::max(kind->most, config.budget);
                                 kind->budgeted = true;
                               }
                             });
  }
  // The heads that keep most come first.
  std::ranges::stable_partition(kinds,
                                [](const Kind& kind) { return kind.text.starts_with("every"); });
  std::string text;
  for (const Kind& kind : kinds) {
    if (!text.empty()) text += "; ";
    if (kinds.size() > 1)
      text += fmt::format("{} head{}: ", kind.heads, kind.heads == 1 ? "" : "s");
    text += kind.text;
    if (kind.budgeted) text += fmt::format(", {} to {} for a head", kind.least, kind.most);
  }
  return text;
}

std::string describe(const ExamPlan& plan) {
  if (plan.fastgen) {
    return fmt::format("for each head, behind the prompt, the fewest rows with {} of the attention",
                       percent(plan.fastgen->recovery));
  }
  if (!plan.speculation) return describe(plan.plan);
  return fmt::format("every row; a small model and {} rows in chunks of {} guess, all rows decide",
                     thousands(plan.speculation->budget), plan.speculation->chunk);
}

HeadKinds kinds_of(const AnyPlan<bfloat16>& plan) {
  HeadKinds kinds{plan.shape().layers, plan.shape().kv_heads, HeadKind::retrieval};
  plan.for_each_head([&](std::size_t layer, std::size_t head, const auto& config) {
    if constexpr (requires { config.recent; }) kinds(layer, head) = HeadKind::streaming;
  });
  return kinds;
}

}  // namespace kvpolicy::tools
