// SPDX-License-Identifier: Apache-2.0
#include "shards_view.hpp"

#include <cmath>

#include <fmt/format.h>

#include "../common/table.hpp"

namespace kvpolicy::tools {

double step_seconds(const Shards& shards, const ShardTimes& times) {
  double seconds = 0;
  for (std::size_t layer = 0; layer < shards.layers(); ++layer) {
    seconds += times.seconds(shards.slowest(layer));
  }
  return seconds;
}

std::string shards_map(const Shards& shards, bool bold) {
  Table table;
  table.add_column("layer");
  for (std::size_t rank = 0; rank < shards.ranks(); ++rank) {
    table.add_column(fmt::format("rank {}", rank), "", Align::left);
  }
  table.add_column("slowest / mean");
  for (std::size_t layer = 0; layer < shards.layers(); ++layer) {
    std::vector<std::string> cells{std::to_string(layer)};
    for (std::size_t rank = 0; rank < shards.ranks(); ++rank) {
      std::string cell;
      for (const HeadPart& part : shards.parts(layer, rank)) {
        if (!cell.empty()) cell += ' ';
        cell += std::to_string(part.head);
        if (!part.rows.is_whole()) cell += fmt::format(":{:.0f}%", 100 * part.rows.share());
      }
      cells.push_back(cell.empty() ? "-" : cell);
    }
    const double mean = shards.mean(layer);
    cells.push_back(mean > 0 ? fmt::format("{:.3f}", shards.slowest(layer) / mean) : "");
    table.add_row(std::move(cells));
  }
  return table.text(bold);
}

nlohmann::ordered_json shards_json(const Shards& shards) {
  auto layers = nlohmann::ordered_json::array();
  for (std::size_t layer = 0; layer < shards.layers(); ++layer) {
    auto ranks = nlohmann::ordered_json::array();
    for (std::size_t rank = 0; rank < shards.ranks(); ++rank) {
      auto parts = nlohmann::ordered_json::array();
      for (const HeadPart& part : shards.parts(layer, rank)) {
        nlohmann::ordered_json one{{"head", part.head}};
        if (!part.rows.is_whole()) one["slots"] = {part.rows.begin, part.rows.end};
        one["cost"] = part.cost;
        parts.push_back(std::move(one));
      }
      ranks.push_back(std::move(parts));
    }
    auto merges = nlohmann::ordered_json::array();
    for (const HeadMerge& merge : shards.merges(layer)) {
      merges.push_back({{"head", merge.head}, {"ranks", merge.ranks}});
    }
    layers.push_back({{"ranks", std::move(ranks)},
                      {"merges", std::move(merges)},
                      {"order", shards.order(layer)},
                      {"slowest", shards.slowest(layer)},
                      {"mean", shards.mean(layer)}});
  }
  return layers;
}

}  // namespace kvpolicy::tools
