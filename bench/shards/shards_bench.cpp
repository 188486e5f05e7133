// SPDX-License-Identifier: Apache-2.0
//
// What heads cost on this processor, and what ranks would make of it: see docs/distributed.md.
#include <cstddef>
#include <string>

#include <CLI/CLI.hpp>

#include "common/run_tool.hpp"
#include "costs_command.hpp"
#include "predict_command.hpp"
#include "prompt_command.hpp"

namespace {

using namespace kvpolicy;
using namespace kvpolicy::bench;

constexpr const char* description =
    R"(Measures what KV heads of each kind cost on one thread of this processor, and predicts steps of
decoding over many ranks from it. What several processes take on this machine is shards_mpi's to measure.)";

constexpr const char* examples =
    R"(Examples:
  shards_bench costs --json costs.json             a few minutes, on a machine with nothing else to do
  plan shards --ranks 8 --shape llama-3-8b --plan duo+int4@PATTERN_FOLDER:0.5 --costs costs.json
  shards_bench predict --costs costs.json --pattern PATTERN_FOLDER --json predicted.json
  shards_bench prompt                              what ranks send each other for a long prompt

'shards_bench COMMAND --help' says more about each.)";

constexpr const char* costs_footer =
    R"(A head of each kind, length and number of query heads is checked against plain loops and then timed,
cold: a buffer as large as the last-level cache is read before each sample. Times are processor time of
one thread. The file has the median, and the 10th and 90th percentile.)";

constexpr const char* predict_footer =
    R"(A rank is a device that reads weights at the bandwidth of its memory, and rows as many times as fast as
the processor that was measured as its memory is faster; the JSON also has steps whose rows take their
bytes at that bandwidth. Messages take what NCCL's own model of NVLink and networks says. Nothing overlaps.
docs/distributed.md says where this stops being believable.)";

}  // namespace

int main(int argc, char** argv) {
  CostsArguments costs;
  PredictArguments predicted;
  PromptArguments prompt;
  CLI::App app{description, "shards_bench"};
  app.footer(examples);
  app.require_subcommand(1);

  CLI::App* costs_command = app.add_subcommand("costs", "Measures what a head of each kind costs");
  costs_command
      ->add_option("--formats", costs.formats, "full, or precisions as in names of plans: int8, int4, int2")
      ->type_name("NAME")
      ->capture_default_str();
  costs_command->add_option("--head-dim", costs.measure.head_dim, "Channels of a key and of a value")
      ->check(tools::whole_number(8, 512))
      ->capture_default_str();
  costs_command->add_option("--queries", costs.measure.queries, "Query heads that read a KV head")
      ->check(tools::whole_number(1, 128))
      ->type_name("N")
      ->capture_default_str();
  costs_command->add_option("--rows", costs.measure.rows, "Rows of a head, ascending")
      ->check(tools::whole_number(1, 1 << 24))
      ->type_name("N")
      ->capture_default_str();
  costs_command->add_option("--samples", costs.measure.samples, "Samples of each point")
      ->check(tools::whole_number(1, 10'000))
      ->capture_default_str();
  costs_command->add_option("--json", costs.json, "Write the table there")->type_name("FILE");
  costs_command->add_flag("--smoke", costs.smoke, "Everything tiny: a test");
  costs_command->footer(costs_footer);

  CLI::App* predict_command = app.add_subcommand("predict", "Predicts Llama-3-70B and 405B on 1 to 64 ranks");
  predict_command->add_option("--costs", predicted.costs, "What `shards_bench costs` wrote")
      ->type_name("FILE")
      ->required();
  predict_command
      ->add_option("--pattern", predicted.pattern,
                   "A DuoAttention pattern of 8 KV heads, stretched over the layers; default: random gates")
      ->type_name("FOLDER");
  predict_command->add_option("--sparsity", predicted.sparsity, "Share of heads with a window")
      ->check(tools::number_from(0, 1))
      ->capture_default_str();
  predict_command->add_option("--context", predicted.context, "Tokens of a text")
      ->check(tools::whole_number(1, std::uint64_t{1} << 30))
      ->capture_default_str();
  predict_command->add_option("--texts", predicted.texts, "Texts of strong scaling")
      ->check(tools::whole_number(1, 1 << 20))
      ->capture_default_str();
  predict_command->add_option("--ranks", predicted.ranks, "Numbers of ranks")
      ->check(CLI::IsMember({1, 2, 4, 8, 16, 32, 64}).description(""))
      ->type_name("N")
      ->capture_default_str();
  predict_command
      ->add_option("--bandwidth", predicted.bandwidth_gb, "GB that a rank's memory reads in a second")
      ->check(tools::number_from(1e-3, 1e9))
      ->capture_default_str();
  predict_command->add_option("--memory", predicted.memory_gb, "GB of a rank's memory")
      ->check(tools::number_from(1e-3, 1e9))
      ->capture_default_str();
  predict_command->add_option("--json", predicted.json, "Results for machines")->type_name("FILE");
  predict_command->footer(predict_footer);

  CLI::App* prompt_command =
      app.add_subcommand("prompt", "Counts what ranks send each other for a prompt of Llama-3-8B");
  prompt_command->add_option("--tokens", prompt.tokens, "Tokens of the prompt")
      ->check(tools::whole_number(1, std::uint64_t{1} << 30))
      ->capture_default_str();
  prompt_command->add_option("--sinks", prompt.sinks, "Opening rows that a window's head keeps")
      ->check(tools::whole_number(0, 1 << 20))
      ->capture_default_str();
  prompt_command->add_option("--recent", prompt.recent, "Latest rows that it keeps besides")
      ->check(tools::whole_number(1, 1 << 20))
      ->capture_default_str();
  prompt_command->add_option("--ranks", prompt.ranks, "Numbers of ranks")
      ->check(tools::whole_number(1, 64))
      ->type_name("N")
      ->capture_default_str();
  prompt_command->add_option("--json", prompt.json, "Results for machines")->type_name("FILE");

  return tools::run_tool(app, argc, argv, [&] {
    if (*costs_command) measure_costs(costs);
    if (*predict_command) predict_all(predicted);
    if (*prompt_command) print_prompt(prompt);
  });
}
