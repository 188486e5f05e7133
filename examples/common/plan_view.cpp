// SPDX-License-Identifier: Apache-2.0
#include "plan_view.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

#include <fmt/format.h>

#include <kvpolicy/format.hpp>

#include "../tool_plan.hpp"
#include "terminal.hpp"

namespace kvpolicy::tools {
namespace {

using Plan = HeadPlan<bfloat16>;

template <class Config>
std::size_t bits_of_rows(const Config& config) {
  if constexpr (requires { config.storage.bits; }) return config.storage.bits;
  return 0;
}

template <class P>
std::string kind_text(const typename P::Config& config) {
  const std::size_t bits = bits_of_rows(config);
  return bits == 0 ? std::string{P::name} : fmt::format("{}, {} bits", P::name, bits);
}

std::string_view full_glyph(std::size_t bits) {
  return bits == 0 ? "█" : bits == 8 ? "▓" : bits == 4 ? "▒" : "░";
}

// Budgets differ from head to head: their bars grow with the logarithm, for they span decades.
std::string_view budget_glyph(std::size_t budget, std::size_t largest) {
  constexpr std::array<std::string_view, 7> bars{"▁", "▂", "▃", "▄", "▅", "▆", "▇"};
  if (largest == 0) return bars.front();
  const double share =
      std::log1p(static_cast<double>(budget)) / std::log1p(static_cast<double>(largest));
  const auto bar = static_cast<std::size_t>(share * static_cast<double>(bars.size()));
  return bars[std::min(bar, bars.size() - 1)];
}

struct Cell {
  std::string_view glyph;
  std::string_view colour;
  std::string meaning;
};

template <class P>
Cell cell_of(const typename P::Config& config, std::size_t largest_budget) {
  if constexpr (WindowPolicy<P>) {
    return {"·", "\033[2m", fmt::format("{}", config)};
  } else if constexpr (CompressingPolicy<P>) {
    // One line of meaning for all budgets.
    const std::size_t bits = bits_of_rows(config);
    return {budget_glyph(config.budget, largest_budget), "\033[33m",
            fmt::format("up to {} rows behind a compression, and the latest {}{}",
                        thousands(largest_budget), P::scorer_type::kept_rows(config.scorer),
                        bits == 0 ? "" : fmt::format(", {} bits", bits))};
  } else if constexpr (SelectingPolicy<P>) {
    return {"◇", "\033[36m", fmt::format("{}", config)};
  } else {
    return {full_glyph(bits_of_rows(config)), "\033[32m", fmt::format("{}", config)};
  }
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
  plan.for_each_head([&](std::size_t, std::size_t, const auto& config) {
    if constexpr (requires { config.scorer; }) largest = std::max(largest, config.budget);
  });
  struct Meaning {
    Cell cell;
    std::size_t heads = 0;
  };
  std::vector<Meaning> meanings;
  std::string text;
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    text += fmt::format("  layer{:>4}  ", layer);
    for (std::size_t head = 0; head < shape.kv_heads; ++head) {
      Plan::visit(plan.at(layer, head), [&]<class P>(const typename P::Config& config) {
        const Cell cell = cell_of<P>(config, largest);
        text +=
            colour ? fmt::format("{}{}\033[0m", cell.colour, cell.glyph) : std::string{cell.glyph};
        const auto known = std::ranges::find_if(
            meanings, [&](const Meaning& m) { return m.cell.meaning == cell.meaning; });
        ++(known == meanings.end() ? meanings.emplace_back(Meaning{cell}) : *known).heads;
      });
    }
    text += '\n';
  }
  text += '\n';
  for (const auto& [cell, heads] : meanings) {
    const bool bars = cell.meaning.starts_with("up to");
    text +=
        fmt::format("  {} {:>6} of {} heads: {}\n", bars ? "▁▇" : fmt::format("{} ", cell.glyph),
                    thousands(heads), thousands(shape.kv_head_count()), cell.meaning);
  }
  return text;
}

template <Element E>
std::vector<PolicyShare> policy_shares(const HeadPlan<E>& plan, std::size_t tokens,
                                       const CacheOptions& options) {
  const ModelShape& shape = plan.shape();
  const StorageContext context = options.context(shape.head_dim);
  const std::size_t committed = tokens - std::min(tokens, options.max_rollback);
  std::vector<PolicyShare> shares;
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    for (std::size_t head = 0; head < shape.kv_heads; ++head) {
      HeadPlan<E>::visit(plan.at(layer, head), [&]<class P>(const typename P::Config& config) {
        const std::string name = kind_text<P>(config);
        auto share = std::ranges::find(shares, name, &PolicyShare::name);
        if (share == shares.end()) share = shares.insert(share, PolicyShare{.name = name});
        const std::size_t peak = P::bytes_of_tokens(config, context, committed);
        ++share->heads;
        share->peak_bytes += peak;
        if constexpr (requires { P::bytes_compressed(config, context, committed); }) {
          share->bytes += P::bytes_compressed(config, context, committed);
        } else {
          share->bytes += peak;
        }
      });
    }
  }
  return shares;
}

template std::vector<PolicyShare> policy_shares(const HeadPlan<float>&, std::size_t,
                                                const CacheOptions&);
template std::vector<PolicyShare> policy_shares(const HeadPlan<bfloat16>&, std::size_t,
                                                const CacheOptions&);

template <Element E>
UnusedBudgets unused_budgets(const HeadPlan<E>& plan, std::size_t tokens) {
  UnusedBudgets unused;
  const ModelShape& shape = plan.shape();
  for (std::size_t i = 0; i < shape.kv_head_count(); ++i) {
    HeadPlan<E>::visit(plan.at(i / shape.kv_heads, i % shape.kv_heads),
                      [&]<class P>(const typename P::Config& config) {
                        if constexpr (CompressingPolicy<P>) {
                          // Heads that share hand their rows on.
                          const std::size_t capacity = P::capacity(config);
                          if (config.share_in_layer || capacity <= tokens) return;
                          ++unused.heads;
                          unused.rows += capacity - tokens;
                        }
                      });
  }
  return unused;
}

template UnusedBudgets unused_budgets(const HeadPlan<float>&, std::size_t);
template UnusedBudgets unused_budgets(const HeadPlan<bfloat16>&, std::size_t);

std::string shown_unused(const UnusedBudgets& unused, std::size_t tokens) {
  return fmt::format(
      "{} head{} may keep more rows than {} tokens have; {} rows of the budgets go to no head",
      thousands(unused.heads), unused.heads == 1 ? "" : "s", thousands(tokens),
      thousands(unused.rows));
}

}  // namespace kvpolicy::tools
