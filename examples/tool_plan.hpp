// SPDX-License-Identifier: Apache-2.0
//
// The `--plan` option of every tool: a plan file, a published pattern or score file, or a name with
// settings, which becomes a plan for the model that the tool runs.
//
//     tools::PlanArguments arguments;
//     tools::add_plan_options(app, arguments);
//     …
//     const auto plan = tools::make_plan<bfloat16>(arguments, config.shape(), weights_folder);
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include <CLI/CLI.hpp>

#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/headkv.hpp>
#include <kvpolicy/io/policy_json.hpp>
#include <kvpolicy/plan/duo_gates.hpp>
#include <kvpolicy/plan/head_plan.hpp>

#include "common/sequence.hpp"

namespace kvpolicy::tools {

struct PlanArguments {
  std::string plan = "full";  ///< see `plan_help`
  double sparsity = 0.5;      ///< DuoAttention patterns: share of streaming heads
  GateCut gate_cut = GateCut::exact_count;
  std::optional<std::size_t> sinks;  ///< default: what the pattern says
  std::optional<std::size_t> recent;
  HeadKvConfig headkv;  ///< for HeadKV score files
};

/// Adds --plan, and the options that go with patterns and scores.
void add_plan_options(CLI::App& app, PlanArguments& arguments);

/// The forms that `--plan` takes and their settings, one form a line.
[[nodiscard]] const char* plan_help();

/// @throws ConfigError unless `plan` is a name or something that exists.
void require_plan_source(const std::string& plan);

/// The setting that records, for a DuoAttention plan whose cut falls into a tie, how many heads tie
/// and how many of them keep every row (plan/highest.hpp).
inline constexpr const char* tied_heads = "tied_heads";
inline constexpr const char* tied_heads_kept = "tied_heads_kept";

/// Makes the plan that the arguments describe; every tool uses it. Names that need trained gates or
/// head scores find them beside the model `weights`, or in the repository's folder for models of this
/// name (common/head_files.hpp): duo/full_attention_heads.tsv with config.json,
/// headkv/retrieval_heads.json. `settings` receives everything that the plan was made with,
/// including defaults that the name left open: {"capacity": 128, "kernel": 7, ...}.
/// @throws ConfigError, FormatError
template <Element E>
[[nodiscard]] HeadPlan<E> make_plan(const PlanArguments& arguments, const ModelShape& shape,
                                    const std::filesystem::path& weights = {},
                                    io::OrderedJson* settings = nullptr);

template <>
HeadPlan<bfloat16> make_plan<bfloat16>(const PlanArguments&, const ModelShape&, const std::filesystem::path&,
                                       io::OrderedJson*);
template <>
HeadPlan<float> make_plan<float>(const PlanArguments&, const ModelShape&, const std::filesystem::path&,
                                 io::OrderedJson*);

/// The calls that a tool must make so that a plan takes effect: `compress()` after the prompt, and before that a
/// scoring pass over it; or reads with `Read::selected` while it decodes.
struct PlanNeeds {
  bool compress = false;
  bool scoring = false;
  bool in_model = false;  ///< all layers must be compressed at once
  bool selected_reads = false;
};

template <Element E>
[[nodiscard]] PlanNeeds needs_of(const HeadPlan<E>& plan) {
  PlanNeeds needs;
  plan.for_each_head([&](std::size_t, std::size_t, const HeadSettings<E>& settings) {
    const HeadRoles roles = settings.roles();
    needs.compress = needs.compress || roles.compresses;
    needs.scoring = needs.scoring || roles.waits_for_scoring;
    needs.in_model = needs.in_model || settings.is_adaptive_in_model();
    needs.selected_reads = needs.selected_reads || roles.selects;
  });
  return needs;
}

/// How a plan that was named so reads while it decodes: `bounded:0.05` with a bound, plans with selecting heads what
/// these choose again at each token, any other plan all rows.
[[nodiscard]] Reading reading_of(const std::string& plan, const PlanNeeds& needs);

/// Refuses, for a tool that reads all rows, a plan that is read with a bound.
/// @throws ConfigError
void require_no_bound(const std::string& plan, std::string_view tool);

/// Refuses, for a tool that reads a prompt once, a plan that needs it read again.
/// @throws ConfigError
inline void require_no_scoring(const PlanNeeds& needs, std::string_view tool) {
  require(!needs.scoring, "the plan scores its rows by reading the prompt a second time (kvzip), which ",
          tool,
          " does not do; generate, compare and evaluate do; keydiff needs no question either, and no second "
          "time");
}

}  // namespace kvpolicy::tools
