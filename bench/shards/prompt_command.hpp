// SPDX-License-Identifier: Apache-2.0
//
// `shards_bench prompt`: what ranks send each other for a long prompt (plan/prompt_moves.hpp), counted.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <kvpolicy/duo.hpp>
#include <kvpolicy/plan/prompt_moves.hpp>
#include <kvpolicy/plan/shards.hpp>

#include "common/files.hpp"
#include "common/terminal.hpp"

namespace kvpolicy::bench {

struct PromptArguments {
  std::size_t tokens = 131072;
  std::size_t sinks = 64;
  std::size_t recent = 256;
  std::vector<std::size_t> ranks = {2, 4, 8};
  std::string json;
};

/// Bytes that a rank sends on average for a prompt of bfloat16 rows, for one head of either kind and for Llama-3-8B
/// whose heads are all full, or half of them in each layer.
[[nodiscard]] inline nlohmann::ordered_json count_prompt(const PromptArguments& a) {
  using Plan = HeadPlan<bfloat16>;
  const ModelShape shape{32, 32, 8, 128};
  const SinkRecentCache<DenseStorage<bfloat16>>::Config window{.sinks = a.sinks, .recent = a.recent};
  const Plan full{shape};
  Plan half{shape};
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    for (std::size_t head = layer % 2; head < shape.kv_heads; head += 2) half.set(layer, head, window);
  }
  const auto mean_of_layers = [&](const Plan& plan, std::size_t ranks, const Shards* shards) {
    const PromptBlocks blocks{a.tokens, ranks};
    std::size_t bytes = 0;
    for (std::size_t layer = 0; layer < plan.shape().layers; ++layer) {
      bytes +=
          bytes_moved(prompt_moves(plan, blocks, layer, shards), plan.shape().layer(layer), sizeof(bfloat16));
    }
    return static_cast<double>(bytes) / static_cast<double>(ranks * plan.shape().layers);
  };
  nlohmann::ordered_json cases = nlohmann::ordered_json::array();
  for (const std::size_t ranks : a.ranks) {
    const ModelShape one{1, 4, 1, 128};
    nlohmann::ordered_json made{{"ranks", ranks},
                                {"full_head", mean_of_layers(Plan{one}, ranks, nullptr)},
                                {"window_head", mean_of_layers(Plan{one, window}, ranks, nullptr)}};
    for (const Plan* plan : {&full, &std::as_const(half)}) {
      const Shards shards = balance(*plan, a.tokens, {.ranks = ranks});
      made[plan == &full ? "full" : "half"] = {{"read", mean_of_layers(*plan, ranks, nullptr)},
                                               {"all", mean_of_layers(*plan, ranks, &shards)}};
    }
    cases.push_back(std::move(made));
  }
  return {{"context",
           {{"model", "Llama-3-8B"},
            {"tokens", a.tokens},
            {"sinks", a.sinks},
            {"recent", a.recent},
            {"unit", "bytes that a rank sends for a layer, mean over ranks and layers"}}},
          {"cases", std::move(cases)}};
}

inline void print_prompt(const PromptArguments& arguments) {
  const auto counted = count_prompt(arguments);
  fmt::print("counted: MB that a rank sends for a layer of Llama-3-8B, {} tokens of bfloat16\n",
             tools::thousands(arguments.tokens));
  fmt::print("{:>5} {:>10} {:>12} {:>16} {:>16}\n", "ranks", "full head", "window head", "all heads full",
             "half with window");
  for (const auto& one : counted["cases"]) {
    const auto megabytes = [](const nlohmann::ordered_json& bytes) { return bytes.get<double>() / 1e6; };
    fmt::print("{:>5} {:>10.2f} {:>12.3f} {:>16.1f} {:>16.1f}\n", one["ranks"].get<std::size_t>(),
               megabytes(one["full_head"]), megabytes(one["window_head"]), megabytes(one["full"]["all"]),
               megabytes(one["half"]["all"]));
  }
  if (!arguments.json.empty()) tools::write_result(arguments.json, counted.dump(1) + "\n");
}

}  // namespace kvpolicy::bench
