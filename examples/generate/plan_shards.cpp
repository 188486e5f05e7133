// SPDX-License-Identifier: Apache-2.0
#include "plan_shards.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include <kvpolicy/format.hpp>
#include <kvpolicy/io/cost_table_json.hpp>

#include "../common/error_text.hpp"
#include "../common/model_sizes.hpp"
#include "../common/run_tool.hpp"
#include "../common/table.hpp"
#include "../common/terminal.hpp"

namespace kvpolicy::tools {
namespace {

double seconds_per_cost(const ShardArguments& a) {
  return a.costs.empty() ? 1 / (a.bandwidth_gb * 1e9) : 1.0;
}

// Seconds that were measured, or bytes.
HeadCosts costs_of(const HeadPlan<bfloat16>& plan, std::size_t context, const ShardArguments& a) {
  if (a.costs.empty()) return bytes_read(plan, context);
  return named_by(a.costs,
                  [&] { return seconds_read(plan, context, io::load_costs<bfloat16>(a.costs).table); });
}

BalanceConfig config_of(const ShardArguments& a) {
  BalanceConfig config = a.balance;
  config.cut_rows = !a.whole && !config.equal_heads;
  config.merge_cost = a.message_us * 1e-6 / seconds_per_cost(a);
  if (!a.memory.empty()) config.most_bytes = static_cast<double>(parse_bytes(a.memory));
  return config;
}

}  // namespace

void ShardArguments::add_to(CLI::App& command) {
  command.add_option("--ranks", balance.ranks, "Processes, each with a device")
      ->check(whole_number(1, 1024))
      ->capture_default_str();
  auto* equal_option = command.add_flag("--equal-heads", balance.equal_heads,
                                        "As many heads for every rank, for engines that need it");
  command.add_flag("--whole", whole, "Cut no head by rows")->excludes(equal_option);
  command.add_flag("--cut-budgets", balance.cut_budgets,
                   "Cut heads with a budget too; ranks then exchange scores when they compress");
  command
      .add_option("--most-parts", balance.most_parts,
                  "Heads and parts that a rank may hold of a layer; 0: any number")
      ->check(whole_number(0, 1 << 20))
      ->capture_default_str();
  command.add_option("--memory", memory, "What a rank may hold: 40GB, 24GiB, …")->type_name("SIZE");
  auto* costs_option =
      command
          .add_option(
              "--costs", costs,
              "Costs that were measured, as `shards_bench costs` writes them: divide heads by these times "
              "instead of bytes")
          ->type_name("FILE");
  command
      .add_option("--bandwidth", bandwidth_gb,
                  "GB that a device reads in a second; 2,039: an A100 with 80 GB")
      ->check(number_from(1e-3, 1e9))
      ->excludes(costs_option)
      ->capture_default_str();
  command.add_option("--message", message_us, "Microseconds that each part of a cut head adds to its layer")
      ->check(number_from(0, 1e9))
      ->capture_default_str();
}

PlanShards::PlanShards(const HeadPlan<bfloat16>& plan, std::size_t context, const CacheOptions& options,
                       const ShardArguments& arguments)
    : arguments_{arguments},
      context_{context},
      heads_{plan.shape().kv_head_count()},
      seconds_per_cost_{seconds_per_cost(arguments)},
      costs_{costs_of(plan, context, arguments)},
      held_{bytes_held(plan, context, options)},
      shards_{balance(plan, costs_, held_, config_of(arguments))},
      ranks_(shards_.ranks()) {
  const std::size_t ranks = shards_.ranks();
  const HeadCosts read = bytes_read(plan, context);
  double all = 0;
  for (const auto& layer : costs_) all += std::accumulate(layer.begin(), layer.end(), 0.0);
  ideal_seconds_ = all / static_cast<double>(ranks) * seconds_per_cost_;
  for (std::size_t layer = 0; layer < shards_.layers(); ++layer) {
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      for (const HeadPart& part : shards_.parts(layer, rank)) {
        ranks_[rank].read_bytes += read[layer][part.head] * part.rows.share();
        ranks_[rank].seconds += part.cost * seconds_per_cost_;
        ranks_[rank].held_bytes += held_[layer][part.head] * part.rows.share();
      }
    }
  }
  const bool divides =
      std::ranges::all_of(read, [&](const std::vector<double>& heads) { return heads.size() % ranks == 0; });
  if (divides) even_seconds_ = seconds_of(even_shards(plan, costs_, ranks));
}

double PlanShards::seconds_of(const Shards& shards) const {
  double cost = 0;
  for (std::size_t layer = 0; layer < shards.layers(); ++layer) cost += shards.slowest(layer);
  return cost * seconds_per_cost_;
}

std::size_t PlanShards::cut_heads() const {
  std::size_t cut = 0;
  for (std::size_t layer = 0; layer < shards_.layers(); ++layer) cut += shards_.merges(layer).size();
  return cut;
}

std::string PlanShards::text(bool bold) const {
  const double seconds = seconds_of(shards_);
  const std::string source = arguments_.costs.empty() ? fmt::format("{:g} GB/s", arguments_.bandwidth_gb)
                                                      : "the times in " + arguments_.costs;
  std::string text = fmt::format(
      "on {} ranks at {} tokens; whole heads by number, a cut one with the share of its rows\n\n{}\n{}\n"
      "rows of a step, predicted for {} and {:g} us for each part of a cut head: {:.3f} ms\n"
      "  if nobody waited for anybody, and messages took no time: {:.3f} ms, {:.2f}x\n",
      shards_.ranks(), thousands(context_), map(bold), sums(bold), source, arguments_.message_us,
      1e3 * seconds, 1e3 * ideal_seconds_, seconds / ideal_seconds_);
  if (even_seconds_) {
    text += fmt::format("  with equally many heads a rank, in their order: {:.3f} ms, {:.2f}x\n",
                        1e3 * *even_seconds_, *even_seconds_ / ideal_seconds_);
  }
  const auto [least, most] = std::ranges::minmax(ranks_, {}, &RankSum::held_bytes);
  return text + fmt::format("{} of {} heads cut; a rank holds {} to {}\n", cut_heads(), heads_,
                            Bytes{static_cast<std::size_t>(least.held_bytes)},
                            Bytes{static_cast<std::size_t>(most.held_bytes)});
}

std::string PlanShards::sums(bool bold) const {
  Table table;
  table.add_column("rank");
  table.add_column("reads");
  table.add_column("predicted ms");
  table.add_column("holds");
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    const RankSum& sum = ranks_[rank];
    const auto bytes = [](double count) { return fmt::format("{}", Bytes{static_cast<std::size_t>(count)}); };
    table.add_row({std::to_string(rank), bytes(sum.read_bytes), fmt::format("{:.3f}", 1e3 * sum.seconds),
                   bytes(sum.held_bytes)});
  }
  return table.text(bold);
}

std::string PlanShards::map(bool bold) const {
  Table table;
  table.add_column("layer");
  for (std::size_t rank = 0; rank < shards_.ranks(); ++rank) {
    table.add_column(fmt::format("rank {}", rank), "", Align::left);
  }
  table.add_column("slowest / mean");
  for (std::size_t layer = 0; layer < shards_.layers(); ++layer) {
    std::vector<std::string> cells{std::to_string(layer)};
    for (std::size_t rank = 0; rank < shards_.ranks(); ++rank) {
      std::string cell;
      for (const HeadPart& part : shards_.parts(layer, rank)) {
        if (!cell.empty()) cell += ' ';
        cell += std::to_string(part.head);
        if (!part.rows.is_whole()) cell += fmt::format(":{:.0f}%", 100 * part.rows.share());
      }
      cells.push_back(cell.empty() ? "-" : cell);
    }
    const double mean = shards_.mean(layer);
    cells.push_back(mean > 0 ? fmt::format("{:.3f}", shards_.slowest(layer) / mean) : "");
    table.add_row(std::move(cells));
  }
  return table.text(bold);
}

nlohmann::ordered_json PlanShards::json() const {
  auto layers = nlohmann::ordered_json::array();
  for (std::size_t layer = 0; layer < shards_.layers(); ++layer) {
    auto ranks = nlohmann::ordered_json::array();
    for (std::size_t rank = 0; rank < shards_.ranks(); ++rank) {
      auto parts = nlohmann::ordered_json::array();
      for (const HeadPart& part : shards_.parts(layer, rank)) {
        nlohmann::ordered_json one{{"head", part.head}};
        if (!part.rows.is_whole()) one["slots"] = {part.rows.begin, part.rows.end};
        one["cost"] = part.cost;
        parts.push_back(std::move(one));
      }
      ranks.push_back(std::move(parts));
    }
    auto merges = nlohmann::ordered_json::array();
    for (const HeadMerge& merge : shards_.merges(layer)) {
      merges.push_back({{"head", merge.head}, {"ranks", merge.ranks}});
    }
    layers.push_back({{"ranks", std::move(ranks)},
                      {"merges", std::move(merges)},
                      {"order", shards_.order(layer)},
                      {"slowest", shards_.slowest(layer)},
                      {"mean", shards_.mean(layer)}});
  }
  const auto of_ranks = [&](double RankSum::*what) {
    std::vector<double> numbers;
    for (const RankSum& sum : ranks_) numbers.push_back(sum.*what);
    return numbers;
  };
  nlohmann::ordered_json json{{"context", context_},
                              {"ranks", shards_.ranks()},
                              {"predicted", true},
                              {"message_seconds", arguments_.message_us * 1e-6},
                              {"step_seconds", seconds_of(shards_)},
                              {"ideal_seconds", ideal_seconds_},
                              {"cut_heads", cut_heads()},
                              {"rank_bytes", of_ranks(&RankSum::held_bytes)},
                              {"rank_read_bytes", of_ranks(&RankSum::read_bytes)},
                              {"rank_seconds", of_ranks(&RankSum::seconds)},
                              {"layers", std::move(layers)}};
  if (arguments_.costs.empty()) {
    json["bandwidth"] = arguments_.bandwidth_gb * 1e9;
  } else {
    json["costs"] = arguments_.costs;
  }
  json["even_seconds"] = even_seconds_ ? nlohmann::ordered_json(*even_seconds_) : nlohmann::ordered_json{};
  return json;
}

}  // namespace kvpolicy::tools
