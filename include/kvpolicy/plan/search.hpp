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
// What a decode step reads may be limited as well, with or instead of what a cache takes: a head that is read with a
// bound holds every row and reads few, which a limit of memory alone does not see.
//
// Method: a multiple-choice knapsack by Lagrange multipliers (Everett, 1963). At a given price per byte
// every head takes the choice that costs it least, and the price is lowered until the bytes are spent. The
// remaining bytes go to single heads. The papers on per-head budgets do not mix policies: DuoAttention
// (arXiv:2410.10819) chooses between two, HeadKV (arXiv:2410.19258) between numbers of rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/plan/cache_options.hpp>
#include <kvpolicy/plan/choose_offers.hpp>
#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/plan/head_table.hpp>
#include <kvpolicy/plan/require_fits.hpp>
#include <kvpolicy/plan/step_costs.hpp>

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
  /// The most bytes of rows that a decode step may read then (plan/step_costs.hpp); none: any number. Heads with
  /// `HeadChoice::rows_read` read what a bound leaves them.
  std::optional<std::size_t> bytes_read = {};
};

/// The result of `search_plan`. `bytes` is `plan.memory(context, options, true).total()`: heads with a
/// budget count as compressed.
template <Element E>
struct FoundPlan {
  HeadPlan<E> plan;
  std::size_t bytes = 0;
  double damage = 0;                      ///< summed over the heads
  std::optional<double> bytes_read = {};  ///< by a decode step, where the config limits it
};

namespace detail {

/// Bytes that a decode step reads of each head under a choice.
template <Element E>
[[nodiscard]] HeadTable<double> step_reads(const HeadChoice<E>& choice, const ModelShape& shape,
                                           std::size_t tokens) {
  const LayerShape layer = shape.layer(0);
  const HeadRule rule = choice.settings.rule(layer.head_dim);
  HeadTable<double> read{shape.layers, layer.kv_heads, bytes_read(rule, tokens, layer, sizeof(E))};
  for (std::size_t i = 0; i < choice.rows_read.values().size(); ++i) {
    read.values()[i] = bytes_read_with_bound(rule, tokens, layer, sizeof(E), choice.rows_read.values()[i]);
  }
  return read;
}

/// The sum of what each head reads under the choice that reads least of it, in whole bytes.
[[nodiscard]] inline std::size_t least_read(std::span<const HeadTable<double>> read) {
  double sum = 0;
  for (std::size_t i = 0; i < read.front().values().size(); ++i) {
    double least = read.front().values()[i];
    for (const HeadTable<double>& choice : read) least = std::min(least, choice.values()[i]);
    sum += least;
  }
  return static_cast<std::size_t>(std::ceil(sum));
}

}  // namespace detail

/// The plan with the smallest sum of `damage` whose cache takes at most `config.bytes` when it holds
/// `config.context` tokens, and whose decode step reads at most `config.bytes_read` then, but for rounding.
/// Deterministic: ties go to the choice of fewer bytes, then to the earlier one. A pure function, so threads may call
/// it at the same time. Within one limit the damage is within one head's step of the least; within two it is near it.
/// @throws ConfigError if there is no choice, a damage is negative or not finite, a table does not fit the shape, a
/// config does not work, `rows_read` are no shares or of keys that are not in halves, a policy does not state its rule
/// where a limit of what is read asks for it, or `bytes` or `bytes_read` are fewer than the smallest plan takes;
/// CapacityError for a context beyond `max_text_tokens`
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
  std::vector<HeadTable<double>> read(
      choices.size());  // of each choice, if it counts, what a step reads of each head
  for (const HeadChoice<E>& choice : choices) {
    detail::require_fits(choice.damage, shape, "search_plan");
    for (const double damage : choice.damage.values()) {
      require(damage >= 0.0 && std::isfinite(damage), "search_plan: a damage of choice ", size.size(), " is ",
              damage, ", must be 0 or positive and finite");
    }
    if (!choice.rows_read.values().empty()) detail::require_fits(choice.rows_read, shape, "search_plan");
    if (config.bytes_read) read[size.size()] = detail::step_reads(choice, shape, context);
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
        heads[i].push_back(
            {c, size[c], choices[c].damage.values()[i], config.bytes_read ? read[c].values()[i] : 0.0});
      }
    }
    if (heads.front().empty()) return std::nullopt;
    const std::size_t taken = fixed.tail + queries;
    if (taken > bytes) return std::nullopt;
    std::optional<std::vector<std::size_t>> indices;
    if (config.bytes_read) {
      for (auto& offers : heads) offers = detail::worthwhile_in_both(std::move(offers));
      indices = detail::TwoLimits{heads, bytes - taken, static_cast<double>(*config.bytes_read)}.choose();
    } else {
      for (auto& offers : heads) offers = detail::worthwhile(std::move(offers));
      indices = detail::choose_offers(heads, bytes - taken);
    }
    if (!indices) return std::nullopt;
    FoundPlan<E> found{plan_of(heads, *indices), 0, 0};
    if (config.bytes_read) {
      found.bytes_read = 0.0;
      for (std::size_t i = 0; i < heads.size(); ++i) *found.bytes_read += heads[i][(*indices)[i]].read;
    }
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
    if (config.bytes_read && needed <= bytes) {
      fail<ConfigError>("search_plan: no plan was found that reads ", *config.bytes_read,
                        " bytes at a step of ", context,
                        " tokens: the least that each head can read adds up to ", detail::least_read(read),
                        " bytes, and the least that a cache can take is ", needed);
    }
    fail<ConfigError>("search_plan: ", bytes, " bytes are too few for ", context,
                      " tokens: with every head under the smallest of the ", choices.size(),
                      " choices a cache takes ", needed);
  }
  return *std::move(best);
}

}  // namespace kvpolicy
