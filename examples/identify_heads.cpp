// SPDX-License-Identifier: Apache-2.0
//
// Finds out what each head of a model needs, and writes it in the file formats that were published
// with the methods. examples/identify/ has one file for each method.
#include <functional>

#include <common/run_tool.hpp>
#include <identify/subcommands.hpp>

using namespace kvpolicy::tools;

namespace {

constexpr const char* description =
    "Finds out which heads of a model need the whole text, so that plans for its KV cache can be "
    "made.";

constexpr const char* footer = R"(
Examples:
  identify_heads duo --out gates                    train gates for the shipped model
  identify_heads duo --method ablation --out gates  or try each head by itself
  generate --plan duo@gates:0.5 --prompt 'In the beginning'  a cache with half of the heads streaming
  identify_heads headkv                             score query heads, to headkv/retrieval_heads.json
  generate --plan headkv/retrieval_heads.json --capacity 128 --prompt 'In the beginning'
  identify_heads razor --out razor                  echo and induction, from random tokens
  identify_heads kvzip --out kvzip                  what repeating a text takes of each head
  identify_heads shares --out shares                what a bound reads, what dropping rows unasked loses
  identify_heads damage --out damage.json           what each head loses under each policy
  plan search --damage damage.json --weights DIR --bytes 1/16 --context 4096 plan.json
  identify_heads duo --help                         all settings
)";

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{description, "identify_heads"};
  app.footer(footer);
  app.require_subcommand(1);
  std::function<void()> work;
  add_duo(app, work);
  add_headkv(app, work);
  add_razor(app, work);
  add_kvzip(app, work);
  add_shares(app, work);
  add_damage(app, work);
  return run_tool(app, argc, argv, [&] { work(); });
}
