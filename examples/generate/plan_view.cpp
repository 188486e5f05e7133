// SPDX-License-Identifier: Apache-2.0
#include "plan_view.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

#include <fmt/format.h>

#include <kvpolicy/format.hpp>

#include "../common/terminal.hpp"
#include "../tool_plan.hpp"

namespace kvpolicy::tools {
namespace {

using Plan = HeadPlan<bfloat16>;

template <Element E>
std::string kind_text(const HeadSettings<E>& settings, std::size_t head_dim) {
  const std::string_view name = settings.names().policy;
  const double bits = settings.rule(head_dim).code_bits();
  return bits == 0 ? std::string{name} : fmt::format("{}, {} bits", name, bits);
}

std::string_view full_glyph(double bits) { return bits == 0 ? "█" : bits >= 6 ? "▓" : bits >= 4 ? "▒" : "░"; }

// Budgets span orders of magnitude, so their bars grow with the logarithm.
std::string_view budget_glyph(std::size_t budget, std::size_t largest) {
  constexpr std::array<std::string_view, 7> bars{"▁", "▂", "▃", "▄", "▅", "▆", "▇"};
  if (largest == 0) return bars.front();
  const double share = std::log1p(static_cast<double>(budget)) / std::log1p(static_cast<double>(largest));
  const auto bar = static_cast<std::size_t>(share * static_cast<double>(bars.size()));
  return bars[std::min(bar, bars.size() - 1)];
}

struct Cell {
  std::string_view glyph;
  std::string_view colour;
  std::string meaning;
};

Cell cell_of(const HeadSettings<bfloat16>& settings, std::size_t head_dim, std::size_t largest_budget) {
  const HeadRule rule = settings.rule(head_dim);
  const double bits = rule.code_bits();
  if (rule.recent > 0) return {"·", "\033[2m", describe(settings)};
  if (rule.compresses) {
    // All budgets share one line of the legend.
    return {budget_glyph(rule.budget, largest_budget), "\033[33m",
            fmt::format("up to {} rows after a compression, and the latest {}{}", thousands(largest_budget),
                        rule.kept_rows, bits == 0 ? "" : fmt::format(", {} bits", bits))};
  }
  if (rule.chunk > 0) return {"◇", "\033[36m", describe(settings)};
  return {full_glyph(bits), "\033[32m", describe(settings)};
}

}  // namespace

std::string tie_text(const io::OrderedJson& settings) {
  if (!settings.contains(tied_heads)) return {};
  return fmt::format(
      "the cut falls into a tie of {} heads, {} of which keep the whole text: heads "
      "spread evenly over the layers, for their gates do not tell them apart",
      thousands(settings[tied_heads].get<std::size_t>()),
      thousands(settings[tied_heads_kept].get<std::size_t>()));
}

std::string plan_map(const Plan& plan, bool colour) {
  const ModelShape& shape = plan.shape();
  std::size_t largest = 0;
  plan.for_each_head([&](std::size_t layer, std::size_t, const HeadSettings<bfloat16>& settings) {
    largest = std::max(largest, settings.rule(shape.layer(layer).head_dim).budget);
  });
  struct Meaning {
    Cell cell;
    std::size_t heads = 0;
  };
  std::vector<Meaning> meanings;
  std::string text;
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    text += fmt::format("  layer{:>4}  ", layer);
    const LayerShape own = shape.layer(layer);
    if (own.reads) text += fmt::format("reads layer {}", *own.reads);
    if (own.kv_heads == 0 && !own.reads) text += "no cache";
    for (std::size_t head = 0; head < own.kv_heads; ++head) {
      const Cell cell = cell_of(plan.at(layer, head), own.head_dim, largest);
      text += colour ? fmt::format("{}{}\033[0m", cell.colour, cell.glyph) : std::string{cell.glyph};
      const auto known =
          std::ranges::find_if(meanings, [&](const Meaning& m) { return m.cell.meaning == cell.meaning; });
      ++(known == meanings.end() ? meanings.emplace_back(Meaning{cell}) : *known).heads;
    }
    text += '\n';
  }
  text += '\n';
  for (const auto& [cell, heads] : meanings) {
    const bool bars = cell.meaning.starts_with("up to");
    text += fmt::format("  {} {:>6} of {} heads: {}\n", bars ? "▁▇" : fmt::format("{} ", cell.glyph),
                        thousands(heads), thousands(shape.kv_head_count()), cell.meaning);
  }
  return text;
}

template <Element E>
std::vector<PolicyShare> policy_shares(const HeadPlan<E>& plan, std::size_t tokens,
                                       const CacheOptions& options) {
  const ModelShape& shape = plan.shape();
  const std::size_t committed = tokens - std::min(tokens, options.max_rollback);
  std::vector<PolicyShare> shares;
  plan.for_each_head([&](std::size_t layer, std::size_t, const HeadSettings<E>& settings) {
    const LayerShape own = shape.layer(layer);
    const StorageContext context = options.context(own.head_dim, own.value_dim);
    const std::string name = kind_text(settings, own.head_dim);
    auto share = std::ranges::find(shares, name, &PolicyShare::name);
    if (share == shares.end()) share = shares.insert(share, PolicyShare{.name = name});
    ++share->heads;
    share->peak_bytes += settings.bytes_of_tokens(context, committed);
    share->bytes += settings.bytes_compressed(context, committed);
  });
  return shares;
}

template std::vector<PolicyShare> policy_shares(const HeadPlan<float>&, std::size_t, const CacheOptions&);
template std::vector<PolicyShare> policy_shares(const HeadPlan<bfloat16>&, std::size_t, const CacheOptions&);

template <Element E>
UnusedBudgets unused_budgets(const HeadPlan<E>& plan, std::size_t tokens) {
  UnusedBudgets unused;
  plan.for_each_head([&](std::size_t layer, std::size_t, const HeadSettings<E>& settings) {
    const HeadRule rule = settings.rule(plan.shape().layer(layer).head_dim);
    const std::size_t capacity = rule.budget + rule.kept_rows;
    // Heads that share a budget pass unused rows on to others.
    if (!rule.compresses || rule.adaptive_in_layer || capacity <= tokens) return;
    ++unused.heads;
    unused.rows += capacity - tokens;
  });
  return unused;
}

template UnusedBudgets unused_budgets(const HeadPlan<float>&, std::size_t);
template UnusedBudgets unused_budgets(const HeadPlan<bfloat16>&, std::size_t);

std::string shown_unused(const UnusedBudgets& unused, std::size_t tokens) {
  return fmt::format("{} head{} may keep more rows than {} tokens have; {} rows of the budgets go to no head",
                     thousands(unused.heads), unused.heads == 1 ? "" : "s", thousands(tokens),
                     thousands(unused.rows));
}

}  // namespace kvpolicy::tools
