// SPDX-License-Identifier: Apache-2.0
//
// Finds the plan that harms a model least within a number of bytes. The input are the settings that a head
// may get, and how much worse the model gets if a head gets them; the search gives each head one of them.
// It is for engine authors who know how much memory a sequence may take, but not which policy to spend it
// on. Choices of all policies and storages compete, so a plan may mix them head by head.
//
//     const auto choices = kvpolicy::choices_by_importance<float>(shape, gates, context);
//     const auto found = kvpolicy::search_plan<float>(
//         shape, choices, {.bytes = bytes, .context = context});
//     kvpolicy::KvCache cache{found.plan};
//
// The damages of heads are added up. That makes the search fast, and it is an assumption: heads that can
// replace each other do more damage when all of them are limited than the sum of their single damages. The
// damages may be measured, by trying each choice on each head (`identify_heads damage`), or guessed from
// gates (plan/search_menu.hpp).
//
// Method: a multiple-choice knapsack by Lagrange multipliers (Everett, 1963). At a given price per byte
// every head takes the choice that costs it least, and the price is lowered until the bytes are spent. The
// remaining bytes go to single heads. The papers on per-head budgets do not mix policies: DuoAttention
// (arXiv:2410.10819) chooses between two, HeadKV (arXiv:2410.19258) between numbers of rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/plan/cache_options.hpp>
#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/plan/head_table.hpp>
#include <kvpolicy/plan/require_fits.hpp>
#include <kvpolicy/plan/saturating.hpp>

namespace kvpolicy {

using HeadDamage = HeadTable<double>;  ///< [layers, kv_heads], any unit, the same for all choices

/// Settings that any head may get, and how much worse the model gets if only this head gets them.
template <Element E>
struct HeadChoice {
  HeadSettings<E> settings;
  HeadDamage damage;
  /// [layers, kv_heads]: the head is read with a bound (Read::bounded), which reads this share of its rows in halves in
  /// full. Empty: it is read as its rule says.
  HeadTable<double> rows_read = {};
};

/// Settings of `search_plan`: how many bytes a plan may take, and for how long a text.
struct SearchConfig {
  std::size_t bytes = 0;      ///< The most that a cache may take, tail and kept queries included.
  std::size_t context = 0;    ///< Tokens that the cache holds then.
  CacheOptions options = {};  ///< Options of that cache.
};

/// The result of `search_plan`. `bytes` is `plan.memory(context, options, true).total()`: heads with a
/// budget count as compressed.
template <Element E>
struct FoundPlan {
  HeadPlan<E> plan;
  std::size_t bytes = 0;
  double damage = 0;  ///< summed over the heads
};

namespace detail {

/// One choice for one head: the index of the choice, its bytes and its damage.
struct Offer {
  std::size_t choice = 0;
  std::size_t bytes = 0;
  double damage = 0;
};

/// One head's offers in ascending bytes, without those that another offer beats in both bytes and damage.
[[nodiscard]] inline std::vector<Offer> worthwhile(std::vector<Offer> offers) {
  // If two are equal in both, the first choice stays.
  std::ranges::sort(offers, {},
                    [](const Offer& offer) { return std::tuple{offer.bytes, offer.damage, offer.choice}; });
  std::vector<Offer> kept;
  for (const Offer& offer : offers) {
    if (kept.empty() || offer.damage < kept.back().damage) kept.push_back(offer);
  }
  return kept;
}

/// The index of the offer that costs least if a byte costs `price`; the smaller offer if two cost the same.
[[nodiscard]] inline std::size_t cheapest(std::span<const Offer> offers, double price) {
  const auto cost = [&](const Offer& offer) {
    return offer.damage + price * static_cast<double>(offer.bytes);
  };
  return static_cast<std::size_t>(std::ranges::min_element(offers, {}, cost) - offers.begin());
}

/// One offer index for each head, with at most `budget` bytes in total. The damage exceeds the minimum by
/// at most the difference between two choices of one head. Every head must have an offer. Returns nothing
/// if even the smallest offers do not fit.
[[nodiscard]] inline std::optional<std::vector<std::size_t>> choose_offers(
    std::span<const std::vector<Offer>> heads, std::size_t budget) {
  std::vector<std::size_t> chosen(heads.size(), 0);
  std::size_t used = 0;
  for (const auto& offers : heads) {
    if (offers.front().bytes > budget - used) return std::nullopt;
    used += offers.front().bytes;
  }
  const auto at_price = [&](double price) {
    std::vector<std::size_t> indices;
    for (const auto& offers : heads) indices.push_back(cheapest(offers, price));
    return indices;
  };
  const auto bytes_of = [&](const std::vector<std::size_t>& indices) {
    std::size_t sum = 0;
    for (std::size_t i = 0; i < heads.size(); ++i) {
      sum = saturating_sum(sum, heads[i][indices[i]].bytes);
    }
    return sum;
  };
  // The price is found by bisection of its logarithm. At the highest price every head takes its smallest
  // offer.
  double low = 1e-30;
  double high = 0;
  for (const auto& offers : heads) high = std::max(high, offers.front().damage + 1.0);
  if (const auto free = at_price(0.0); bytes_of(free) <= budget) {
    chosen = free;
  } else {
    for (int step = 0; step < 200 && high > low * (1 + 1e-12); ++step) {
      const double price = std::sqrt(low * high);
      auto indices = at_price(price);
      if (bytes_of(indices) <= budget) {
        chosen = std::move(indices);
        high = price;
      } else {
        low = price;
      }
    }
  }
  // The remaining bytes go to single changes: each time to the one that avoids the most damage per byte.
  used = bytes_of(chosen);
  for (;;) {
    std::size_t best_head = heads.size();
    std::size_t best_index = 0;
    double best_gain = 0;
    for (std::size_t i = 0; i < heads.size(); ++i) {
      const Offer& now = heads[i][chosen[i]];
      for (std::size_t index = chosen[i] + 1; index < heads[i].size(); ++index) {
        const std::size_t more = heads[i][index].bytes - now.bytes;
        if (more > budget - used) break;
        const double gain = (now.damage - heads[i][index].damage) / static_cast<double>(more);
        if (gain > best_gain) {
          best_gain = gain;
          best_head = i;
          best_index = index;
        }
      }
    }
    if (best_head == heads.size()) return chosen;
    used += heads[best_head][best_index].bytes - heads[best_head][chosen[best_head]].bytes;
    chosen[best_head] = best_index;
  }
}

}  // namespace detail

/// The plan with the smallest sum of `damage` whose cache takes at most `config.bytes` when it holds
/// `config.context` tokens. Deterministic: ties go to the choice of fewer bytes, then to the earlier one. A
/// pure function, so threads may call it at the same time.
/// @throws ConfigError if there is no choice, a damage is negative or not finite, a table does not fit
/// the shape, a config does not work, or `bytes` are fewer than the smallest plan takes; CapacityError for
/// a context beyond `max_text_tokens`
template <Element E>
[[nodiscard]] FoundPlan<E> search_plan(const ModelShape& shape, std::span<const HeadChoice<E>> choices,
                                       const SearchConfig& config) {
  const std::size_t bytes = config.bytes, context = config.context;
  const CacheOptions& options = config.options;
  require(!choices.empty(), "search_plan: there are no choices");
  check_text_tokens("search_plan", context);
  shape.validate();
  // The size of one head under each choice. The queries that a layer keeps are added below.
  const LayerShape layer = same_heads(shape, "search_plan");
  for (std::size_t l = 1; l < shape.layers; ++l) {
    require(shape.layer(l) == layer, "search_plan: layer ", l,
            " differs from layer 0, but heads are compared by what one head of any layer takes");
  }
  ModelShape one_head{1, 1, 1, layer.head_dim, layer.value_dim};
  if (layer.window > 0) one_head.change(0).window = layer.window;
  std::vector<std::size_t> size;
  for (const HeadChoice<E>& choice : choices) {
    detail::require_fits(choice.damage, shape, "search_plan");
    for (const double damage : choice.damage.values()) {
      require(damage >= 0.0 && std::isfinite(damage), "search_plan: a damage of choice ", size.size(), " is ",
              damage, ", must be 0 or positive and finite");
    }
    size.push_back(HeadPlan<E>{one_head, choice.settings}.memory(context, options, true).heads);
  }

  const auto plan_of = [&](std::span<const std::vector<detail::Offer>> heads,
                           const std::vector<std::size_t>& indices) {
    HeadPlan<E> plan{shape, choices.front().settings};
    for (std::size_t i = 0; i < indices.size(); ++i) {
      plan.set(i / layer.kv_heads, i % layer.kv_heads, choices[heads[i][indices[i]].choice].settings);
    }
    return plan;
  };
  const auto search = [&](bool with_queries) -> std::optional<FoundPlan<E>> {
    // Kept queries belong to a layer and not to a head. Therefore either no head of any layer gets a
    // budget, or every layer reserves room for the widest observation window.
    std::vector<std::vector<detail::Offer>> heads(shape.kv_head_count());
    MemoryEstimate fixed = HeadPlan<E>{shape, choices.front().settings}.memory(0, options, true);
    std::size_t queries = 0;
    for (std::size_t c = 0; c < choices.size(); ++c) {
      const std::size_t own = HeadPlan<E>{shape, choices[c].settings}.memory(0, options, true).queries;
      if (own > 0 && !with_queries) continue;
      queries = std::max(queries, own);
      for (std::size_t i = 0; i < heads.size(); ++i) {
        heads[i].push_back({c, size[c], choices[c].damage.values()[i]});
      }
    }
    if (heads.front().empty()) return std::nullopt;
    for (auto& offers : heads) offers = detail::worthwhile(std::move(offers));
    const std::size_t taken = fixed.tail + queries;
    if (taken > bytes) return std::nullopt;
    const auto indices = detail::choose_offers(heads, bytes - taken);
    if (!indices) return std::nullopt;
    FoundPlan<E> found{plan_of(heads, *indices), 0, 0};
    found.bytes = found.plan.memory(context, options, true).total();
    for (std::size_t i = 0; i < heads.size(); ++i) found.damage += heads[i][(*indices)[i]].damage;
    return found;
  };

  std::optional<FoundPlan<E>> best = search(false);
  if (std::optional<FoundPlan<E>> other = search(true); other && (!best || other->damage < best->damage)) {
    best = std::move(other);
  }
  if (!best) {
    const auto least = std::ranges::min_element(size) - size.begin();
    const std::size_t needed = HeadPlan<E>{shape, choices[static_cast<std::size_t>(least)].settings}
                                   .memory(context, options, true)
                                   .total();
    fail<ConfigError>("search_plan: ", bytes, " bytes are too few for ", context,
                      " tokens: with every head under the smallest of the ", choices.size(),
                      " choices a cache takes ", needed);
  }
  return *std::move(best);
}

}  // namespace kvpolicy
