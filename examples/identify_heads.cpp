// SPDX-License-Identifier: Apache-2.0
//
// Finds out which heads of a model need what, and writes it down in the formats that were published
// with the methods. examples/identify/ holds a file for each of them.
#include <functional>

#include <common/run_tool.hpp>
#include <identify/subcommands.hpp>

using namespace kvpolicy::tools;

namespace {

constexpr const char* description =
    "Finds out which heads of a model need the whole text: what plans for its KV cache are made "
    "from.";

constexpr const char* footer = R"(
Examples:
  identify_heads duo --out gates                    train gates for the shipped model
  identify_heads duo --method ablation --out gates  or try each head by itself
  generate --plan duo@gates:0.5 --prompt 'In the beginning'  a cache with half of the heads streaming
  identify_heads headkv                             score query heads, to headkv/retrieval_heads.json
  generate --plan headkv/retrieval_heads.json --capacity 128 --prompt 'In the beginning'
  identify_heads damage --out damage.json           what each head loses under each policy
  plan search --damage damage.json --weights DIR --bytes 1/16 --context 4096 plan.json
  identify_heads duo --help                         what there is to choose
)";

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{description, "identify_heads"};
  app.footer(footer);
  app.require_subcommand(1);
  std::function<void()> work;
  add_duo(app, work);
  add_headkv(app, work);
  add_damage(app, work);
  return run_tool(app, argc, argv, [&] { work(); });
}
