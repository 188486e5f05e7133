// SPDX-License-Identifier: Apache-2.0
#include "bound_summary.hpp"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/head_rule.hpp>

#include "../common/terminal.hpp"

namespace kvpolicy::tools {
namespace {

ShareRange range_of(std::vector<double> shares) {
  std::ranges::sort(shares);
  const std::size_t middle = shares.size() / 2;
  const double median = shares.size() % 2 == 1 ? shares[middle] : (shares[middle - 1] + shares[middle]) / 2;
  return {.largest = shares.back(), .median = median};
}

struct Rows {
  std::size_t read = 0;
  std::size_t kept = 0;
  [[nodiscard]] double share() const {
    return kept == 0 ? -1.0 : static_cast<double>(read) / static_cast<double>(kept);
  }
};

}  // namespace

std::optional<BoundSummary> summarize_bound(const Recording& recording) {
  const ModelShape& shape = recording.heads.shape();
  std::vector<double> bounds, measured;
  std::vector<Rows> by_layer(shape.layers);
  Rows all;
  for (const Step& step : recording.steps) {
    for (std::size_t i = 0; i < step.heads.size(); ++i) {
      const HeadStep& head = step.heads[i];
      const std::size_t layer = i / shape.kv_heads;
      const HeadRule rule = recording.heads.at(layer, i % shape.kv_heads).rule(shape.layer(layer).head_dim);
      if (!head.unread || !is_in_halves(rule.key_encoding)) continue;
      bounds.push_back(static_cast<double>(head.unread->bound));
      measured.push_back(static_cast<double>(head.unread->measured));
      for (Rows* rows : {&by_layer[layer], &all}) {
        rows->read += rows_in(head.read);
        rows->kept += rows_in(head.kept);
      }
    }
  }
  if (bounds.empty()) return std::nullopt;
  BoundSummary summary{.reads = bounds.size(),
                       .bound = range_of(std::move(bounds)),
                       .measured = range_of(std::move(measured)),
                       .rows_read = all.share(),
                       .rows_read_by_layer = {}};
  for (const Rows& rows : by_layer) summary.rows_read_by_layer.push_back(rows.share());
  return summary;
}

std::string shown(const BoundSummary& summary) {
  std::string text = fmt::format(
      "  unread     at most {} of a query's attention by the bound (median {}), {} as measured (median {})\n"
      "  rows read  {} of the rows kept, over {} reads of a head; by layer, in %:\n",
      percent(summary.bound.largest), percent(summary.bound.median), percent(summary.measured.largest),
      percent(summary.measured.median), percent(summary.rows_read), thousands(summary.reads));
  constexpr std::size_t layers_in_line = 10;
  const std::vector<double>& shares = summary.rows_read_by_layer;
  for (std::size_t first = 0; first < shares.size(); first += layers_in_line) {
    const std::size_t end = std::min(shares.size(), first + layers_in_line);
    text += fmt::format("             {:>3} to {:<3}", first, end - 1);
    for (std::size_t layer = first; layer < end; ++layer) {
      text += shares[layer] < 0 ? "    -" : fmt::format("{:>5.0f}", 100 * shares[layer]);
    }
    text += '\n';
  }
  return text;
}

}  // namespace kvpolicy::tools
