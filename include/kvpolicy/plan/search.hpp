// SPDX-License-Identifier: Apache-2.0
//
// The plan that harms a model least within a number of bytes: given what each head could be given and
// how much worse the model gets by it, every head is given one of the choices. For engine authors who
// know how much memory a sequence may have and not which policy to spend it on; choices of all policies
// and storages compete, so that a plan may mix them head by head.
//
//     const auto choices = kvpolicy::choices_by_importance<float>(shape, gates, context);
//     const auto found = kvpolicy::search_plan<float>(
//         shape, choices, {.bytes = bytes, .context = context});
//     kvpolicy::KvCache cache{found.plan};
//
// Damages of heads are added up, which is what makes the search quick and is an assumption: heads that
// stand in for one another are worth more together than the sum of what each is missed alone. Damage
// measured by trying each choice on each head (`identify_heads damage`) or guessed from gates
// (plan/search_menu.hpp) both go in here.
//
// Method: a multiple-choice knapsack by Lagrange multipliers (Everett, 1963): at a price per byte every
// head takes what costs it least, and the price is lowered until the bytes are spent. What is left over
// is spent on single heads. Neither paper of per-head budgets mixes policies: DuoAttention
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

/// What any head may be given, and how much worse the model gets if this head alone is given it.
template <Element E>
struct HeadChoice {
  HeadSettings<E> settings;
  HeadDamage damage;
};

/// What a plan may cost, and when.
struct SearchConfig {
  std::size_t bytes = 0;      ///< The most that a cache may take, tail and kept queries included.
  std::size_t context = 0;    ///< Tokens that it holds then.
  CacheOptions options = {};  ///< Its options.
};

/// What `search_plan` found.
/// `bytes` is `plan.memory(context, options, true).total()`: heads with a budget count as compressed.
template <Element E>
struct FoundPlan {
  HeadPlan<E> plan;
  std::size_t bytes = 0;
  double damage = 0;  ///< summed over the heads
};

namespace detail {

/// One choice of one head: the number of the choice, what it takes and what it harms.
struct Offer {
  std::size_t choice = 0;
  std::size_t bytes = 0;
  double damage = 0;
};

/// Of one head's offers, in ascending bytes, those that another does not beat in both.
[[nodiscard]] inline std::vector<Offer> worthwhile(std::vector<Offer> offers) {
  // Equal in both: the first choice stays.
  std::ranges::sort(offers, {}, [](const Offer& offer) {
    return std::tuple{offer.bytes, offer.damage, offer.choice};
  });
  std::vector<Offer> kept;
  for (const Offer& offer : offers) {
    if (kept.empty() || offer.damage < kept.back().damage) kept.push_back(offer);
  }
  return kept;
}

/// The place of the offer that is cheapest where a byte costs `price`; of equals the smaller one.
[[nodiscard]] inline std::size_t cheapest(std::span<const Offer> offers, double price) {
  const auto cost = [&](const Offer& offer) {
    return offer.damage + price * static_cast<double>(offer.bytes);
  };
  return static_cast<std::size_t>(std::ranges::min_element(offers, {}, cost) - offers.begin());
}

/// One place for each head, of which the bytes are at most `budget`: the damage is within one head's
/// step of the least there is. Every head has an offer; nothing if the smallest do not fit.
[[nodiscard]] inline std::optional<std::vector<std::size_t>> choose_offers(
    std::span<const std::vector<Offer>> heads, std::size_t budget) {
  std::vector<std::size_t> chosen(heads.size(), 0);
  std::size_t used = 0;
  for (const auto& offers : heads) {
    if (offers.front().bytes > budget - used) return std::nullopt;
    used += offers.front().bytes;
  }
  const auto at_price = [&](double price) {
    std::vector<std::size_t> places;
    for (const auto& offers : heads) places.push_back(cheapest(offers, price));
    return places;
  };
  const auto bytes_of = [&](const std::vector<std::size_t>& places) {
    std::size_t sum = 0;
    for (std::size_t i = 0; i < heads.size(); ++i) {
      sum = saturating_sum(sum, heads[i][places[i]].bytes);
    }
    return sum;
  };
  // The price falls by bisection of its logarithm. At the highest every head takes its smallest offer.
  double low = 1e-30;
  double high = 0;
  for (const auto& offers : heads) high = std::max(high, offers.front().damage + 1.0);
  if (const auto free = at_price(0.0); bytes_of(free) <= budget) {
    chosen = free;
  } else {
    for (int step = 0; step < 200 && high > low * (1 + 1e-12); ++step) {
      const double price = std::sqrt(low * high);
      auto places = at_price(price);
      if (bytes_of(places) <= budget) {
        chosen = std::move(places);
        high = price;
      } else {
        low = price;
      }
    }
  }
  // What is left over goes to the single changes that avoid the most damage for a byte, then for all
  // that is left.
  used = bytes_of(chosen);
  for (;;) {
    std::size_t best_head = heads.size();
    std::size_t best_place = 0;
    double best_gain = 0;
    for (std::size_t i = 0; i < heads.size(); ++i) {
      const Offer& now = heads[i][chosen[i]];
      for (std::size_t place = chosen[i] + 1; place < heads[i].size(); ++place) {
        const std::size_t more = heads[i][place].bytes - now.bytes;
        if (more > budget - used) break;
        const double gain = (now.damage - heads[i][place].damage) / static_cast<double>(more);
        if (gain > best_gain) {
          best_gain = gain;
          best_head = i;
          best_place = place;
        }
      }
    }
    if (best_head == heads.size()) return chosen;
    used += heads[best_head][best_place].bytes - heads[best_head][chosen[best_head]].bytes;
    chosen[best_head] = best_place;
  }
}

}  // namespace detail

/// The plan whose cache takes at most `config.bytes` once it holds `config.context` tokens, and harms
/// least by the sum of `damage`. Deterministic; ties go to the choice of fewer bytes, then to the
/// earlier one. A pure function: threads may call it at once.
/// @throws ConfigError if there is no choice, a damage is negative or not finite, a table does not fit
/// the shape, a config does not work, or `bytes` are fewer than the smallest plan takes; CapacityError for
/// a context beyond `max_text_tokens`
template <Element E>
[[nodiscard]] FoundPlan<E> search_plan(const ModelShape& shape,
                                          std::span<const HeadChoice<E>> choices,
                                          const SearchConfig& config) {
  const std::size_t bytes = config.bytes, context = config.context;
  const CacheOptions& options = config.options;
  require(!choices.empty(), "search_plan: there are no choices");
  check_text_tokens("search_plan", context);
  shape.validate();
  // One head under each choice; what a layer keeps of queries comes on top, see below.
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
      require(damage >= 0.0 && std::isfinite(damage), "search_plan: a damage of choice ", size.size(),
              " is ", damage, ", must be 0 or positive and finite");
    }
    size.push_back(HeadPlan<E>{one_head, choice.settings}.memory(context, options, true).heads);
  }

  const auto plan_of = [&](std::span<const std::vector<detail::Offer>> heads,
                           const std::vector<std::size_t>& places) {
    HeadPlan<E> plan{shape, choices.front().settings};
    for (std::size_t i = 0; i < places.size(); ++i) {
      plan.set(i / layer.kv_heads, i % layer.kv_heads,
               choices[heads[i][places[i]].choice].settings);
    }
    return plan;
  };
  const auto search = [&](bool with_queries) -> std::optional<FoundPlan<E>> {
    // Kept queries belong to a layer and not to a head: either no head of any layer has a budget, or
    // room is left for the widest window in every layer.
    std::vector<std::vector<detail::Offer>> heads(shape.kv_head_count());
    MemoryEstimate fixed = HeadPlan<E>{shape, choices.front().settings}.memory(0, options, true);
    std::size_t queries = 0;
    for (std::size_t c = 0; c < choices.size(); ++c) {
      const std::size_t own =
          HeadPlan<E>{shape, choices[c].settings}.memory(0, options, true).queries;
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
    const auto places = detail::choose_offers(heads, bytes - taken);
    if (!places) return std::nullopt;
    FoundPlan<E> found{plan_of(heads, *places), 0, 0};
    found.bytes = found.plan.memory(context, options, true).total();
    for (std::size_t i = 0; i < heads.size(); ++i) found.damage += heads[i][(*places)[i]].damage;
    return found;
  };

  std::optional<FoundPlan<E>> best = search(false);
  if (std::optional<FoundPlan<E>> other = search(true);
      other && (!best || other->damage < best->damage)) {
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
