// SPDX-License-Identifier: Apache-2.0
//
// `shards_bench predict`: Llama-3's larger shapes on 1 to 64 ranks, as the model of a step predicts them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <kvpolicy/duo.hpp>
#include <kvpolicy/io/cost_table_json.hpp>
#include <kvpolicy/io/duo_pattern.hpp>
#include <kvpolicy/plan/low_bits.hpp>

#include "common/files.hpp"
#include "common/progress.hpp"
#include "common/random.hpp"
#include "common/terminal.hpp"
#include "step_model.hpp"

namespace kvpolicy::bench {

struct PredictArguments {
  std::string costs;    ///< a file of costs
  std::string pattern;  ///< a folder of a DuoAttention pattern; empty: heads drawn at random
  double sparsity = 0.5;
  std::size_t context = 131072;
  std::size_t texts = 8;  ///< of strong scaling
  double bandwidth_gb = 3350;
  double memory_gb = 80;
  std::vector<std::size_t> ranks = {1, 2, 4, 8, 16, 32, 64};
  std::string json;
};

/// Sizes as the models' config.json has them.
[[nodiscard]] inline std::vector<ModelSize> predicted_models() {
  return {{"Llama-3-70B", {80, 64, 8, 128}, 8192, 28672, 128256},
          {"Llama-3-405B", {126, 128, 8, 128}, 16384, 53248, 128256}};
}

/// A pattern for a model of more layers than it was found for: a layer takes the gates of the layer that lies as deep.
/// @throws ConfigError unless it has as many KV heads
[[nodiscard]] inline HeadGates stretched(const HeadGates& gates, std::size_t layers, std::size_t heads) {
  require(gates.heads() == heads, "the pattern has ", gates.heads(), " KV heads, the model has ", heads);
  HeadGates all{layers, heads};
  for (std::size_t layer = 0; layer < layers; ++layer) {
    for (std::size_t head = 0; head < heads; ++head) {
      all(layer, head) = gates(layer * gates.layers() / layers, head);
    }
  }
  return all;
}

class Predictions {
 public:
  using Json = nlohmann::ordered_json;

  /// @throws FormatError, ConfigError
  explicit Predictions(const PredictArguments& arguments)
      : a_{arguments},
        costs_{io::load_costs<bfloat16>(arguments.costs)},
        device_{.bandwidth = arguments.bandwidth_gb * 1e9, .memory = arguments.memory_gb * 1e9},
        pattern_{HeadGates{32, 8}} {
    require(costs_.bandwidth > 0, arguments.costs,
            ": has no bandwidth, which relates this processor's times to a device's; measure the costs with "
            "`shards_bench costs`");
    if (!a_.pattern.empty()) {
      pattern_ = io::load_duo_pattern(a_.pattern);
      return;
    }
    tools::Random random{1, 0, 0};
    for (std::size_t layer = 0; layer < 32; ++layer) {
      for (std::size_t head = 0; head < 8; ++head) {
        pattern_.gates(layer, head) = static_cast<double>(random.below(1U << 20)) / (1U << 20);
      }
    }
    pattern_.sinks = 64;
    pattern_.recent = 256;
  }

  [[nodiscard]] Json json() {
    tools::Progress progress;
    Json cases = Json::array();
    const auto models = predicted_models();
    std::size_t done = 0;
    for (const ModelSize& model : models) {
      for (const char* plan : {"full", "duo", "duo+int4"}) {
        const Plan own = plan_of(plan, model);
        for (const std::size_t ranks : a_.ranks) {
          progress.update(
              static_cast<double>(done++) / static_cast<double>(models.size() * 3 * a_.ranks.size()),
              fmt::format("{}, {}, {} ranks", model.name, plan, ranks));
          for (const Network& network : networks(ranks)) {
            for (const bool equal : {true, false}) {
              for (const RowsBy by : {RowsBy::times, RowsBy::bytes}) {
                by_ = by;
                Json one{{"model", model.name},
                         {"plan", plan},
                         {"ranks", ranks},
                         {"node", std::min(network.node, ranks)},
                         {"network", network.nodes(ranks) == 1 ? "NVLink" : "NVLink and 400 Gb/s"},
                         {"division", equal ? "equal heads" : "balanced"},
                         {"rows_by", by == RowsBy::times ? "times" : "bytes"}};
                one.update(loads(own, model, network, ranks, equal));
                cases.push_back(std::move(one));
              }
            }
          }
        }
      }
    }
    progress.clear();
    const Network network;
    return {{"context",
             {{"predicted", true},
              {"tokens", a_.context},
              {"pattern", pattern_name()},
              {"sparsity", a_.sparsity},
              {"device", "H100 SXM"},
              {"device_bandwidth", device_.bandwidth},
              {"device_memory", device_.memory},
              {"measured_bandwidth", costs_.bandwidth},
              {"strong_texts", a_.texts},
              {"nvlink", network.inside},
              {"network_card", network.between}}},
            {"cases", std::move(cases)}};
  }

 private:
  using Plan = HeadPlan<bfloat16>;

  [[nodiscard]] Plan plan_of(const std::string& name, const ModelSize& model) const {
    if (name == "full") return Plan{model.shape};
    const DuoConfig config{.sparsity = a_.sparsity, .sinks = pattern_.sinks, .recent = pattern_.recent};
    const HeadGates gates = stretched(pattern_.gates, model.shape.layers, model.shape.kv_heads);
    if (name == "duo") return duo_plan<bfloat16>(model.shape, gates, config);
    return duo_plan<bfloat16>(model.shape, gates, config,
                              LowBitFormat::of_text({4, 4}, model.shape).head<bfloat16>());
  }
  // Nodes of eight, and where that makes a difference NVLink between all ranks.
  [[nodiscard]] static std::vector<Network> networks(std::size_t ranks) {
    if (ranks <= Network{}.node) return {Network{}};
    Network all;
    all.node = 64;
    return {Network{}, all};
  }
  [[nodiscard]] std::string pattern_name() const {
    if (a_.pattern.empty()) return "gates drawn at random";
    return std::filesystem::path{a_.pattern}.lexically_normal().filename().string();
  }

  // What a device takes over rows lies between two numbers: their bytes at its memory's bandwidth, and what this
  // processor took, which computes more slowly than it reads, times the ratio of the bandwidths.
  enum class RowsBy { times, bytes };

  [[nodiscard]] HeadCosts seconds(const Plan& plan, std::size_t queries) const {
    if (by_ == RowsBy::bytes) {
      HeadCosts costs = bytes_read(plan, a_.context);
      for (auto& layer : costs) {
        for (double& cost : layer) cost /= device_.bandwidth;
      }
      return costs;
    }
    ModelShape shape = plan.shape();
    shape.q_heads = shape.kv_heads * queries;
    Plan own{shape};
    plan.for_each_head([&](std::size_t layer, std::size_t head, const HeadSettings<bfloat16>& settings) {
      own.set(layer, head, settings);
    });
    HeadCosts costs = seconds_read(own, a_.context, costs_.table);
    for (auto& layer : costs) {
      for (double& cost : layer) cost *= costs_.bandwidth / device_.bandwidth;
    }
    return costs;
  }

  [[nodiscard]] Json loads(const Plan& plan, const ModelSize& model, const Network& network,
                           std::size_t ranks, bool equal) const {
    const HeadCosts bytes = bytes_held(plan, a_.context);
    const HeadCosts own = seconds(plan, model.shape.queries_per_kv());
    const auto divided = [&](std::size_t texts) {
      if (!equal) return balanced(plan, model, device_, network, ranks, texts, own, bytes);
      return equal_heads(model, ranks, [&](std::size_t queries) { return seconds(plan, queries); }, bytes);
    };
    const auto load = [&](std::size_t texts) {
      const Division division = divided(texts);
      const PredictedStep step = predict(model, device_, network, division, texts);
      const auto fits = texts_that_fit(model, device_, division);
      std::size_t cut = 0;
      for (const std::size_t heads : division.cut_heads) cut += heads;
      return Json{{"texts", texts},
                  {"fits", fits.value_or(0) >= texts},
                  {"seconds", step.total()},
                  {"weights_seconds", step.weights},
                  {"rows_seconds", step.rows},
                  {"messages_seconds", step.messages},
                  {"cut_heads", cut},
                  {"tokens_per_second", static_cast<double>(texts) / step.total()}};
    };
    Json result{{"strong", load(a_.texts)}, {"weak", load(ranks)}};
    // As many texts as fit: of those that fit if heads are divided for so many.
    std::optional<std::size_t> users = texts_that_fit(model, device_, divided(1));
    for (int round = 0; round < 4 && users.value_or(0) > 0; ++round) {
      const auto again = texts_that_fit(model, device_, divided(*users));
      if (again == users) break;
      users = std::min(users, again);
    }
    result["users"] = users ? Json(*users) : Json{};
    if (users.value_or(0) > 0) result["full_memory"] = load(*users);
    return result;
  }

  PredictArguments a_;
  RowsBy by_ = RowsBy::times;
  io::MeasuredCosts<bfloat16> costs_;
  Device device_;
  io::DuoPattern pattern_;
};

inline void predict_all(const PredictArguments& arguments) {
  const auto json = Predictions{arguments}.json();
  fmt::print("predicted, not measured: {} tokens a text, {} for a rank's memory\n",
             tools::thousands(arguments.context),
             fmt::format("{:g} GB at {:g} GB/s", arguments.memory_gb, arguments.bandwidth_gb));
  fmt::print("{:<13} {:<9} {:<12} {:>5} {:>5} {:>12} {:>6} {:>10}\n", "model", "plan", "division", "ranks",
             "node", fmt::format("ms of {}", arguments.texts), "users", "tokens/s");
  for (const auto& one : json["cases"]) {
    const bool any = one.contains("full_memory");
    if (one["rows_by"] == "bytes") continue;
    fmt::print("{:<13} {:<9} {:<12} {:>5} {:>5} {:>12.2f} {:>6} {:>10}\n", one["model"].get<std::string>(),
               one["plan"].get<std::string>(), one["division"].get<std::string>(),
               one["ranks"].get<std::size_t>(), one["node"].get<std::size_t>(),
               1e3 * one["strong"]["seconds"].get<double>(),
               one["users"].is_null() ? "-" : std::to_string(one["users"].get<std::size_t>()),
               any ? fmt::format("{:.0f}", one["full_memory"]["tokens_per_second"].get<double>()) : "-");
  }
  if (!arguments.json.empty()) tools::write_result(arguments.json, json.dump(1) + "\n");
}

}  // namespace kvpolicy::bench
