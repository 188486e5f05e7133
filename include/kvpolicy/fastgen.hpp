// SPDX-License-Identifier: Apache-2.0
//
// FastGen: the prompt itself shows what each head needs. After the prompt, every head gets the cheapest of
// four policies that keeps enough of the attention that the prompt's last queries paid. It suits models
// about which nothing is known beforehand, and prompts that are worth reading in full once.
//
//     KvCache<HeadPlan<FullCache<DenseStorage<float16>>>> whole{full, {.kept_queries = 8}};
//     …prefill…
//     auto profile = kvpolicy::profile_attention(whole, 8);
//     auto plan = kvpolicy::fastgen_plan<float16>(shape, profile, {.recovery = 0.95});
//     auto cache = whole.fork_as(plan);  cache.compress();  …decode…
//
// Method: Ge et al., arXiv:2310.01801. Where we differ:
// - There are no token classes: the first rows of the text stand for the special tokens, and nothing
//   stands for punctuation.
// - The policy "latest and frequent rows" keeps the most attended rows, as many as both kinds have.
//   Such rows include the latest ones that matter, so it keeps no less attention in no more rows.
// - The profile covers the latest queries, not all: a full profile would be a second prefill.
// - The choice is made for KV heads; every query head of a group has to keep enough.
// - Rows that are decoded later stay, except in `locality` heads, unless `compress_every` is set.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/plan/require_fits.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>
#include <kvpolicy/policy/top_rows.hpp>

namespace kvpolicy {

/// The attention of a full cache after a prompt: for each KV head [group, rows], each row's attention,
/// summed over the latest `queries` queries, as `AttentionEngine::observe` writes it.
struct AttentionProfile {
  HeadTable<std::vector<float>> sums;  ///< [layers, kv_heads]
  std::size_t queries = 0;
};

/// The profile of a cache whose heads keep every row, over the latest `queries` queries or, if it has kept
/// fewer, over those. @throws ConfigError if it has kept none, or a head keeps fewer rows; otherwise as
/// KvCache::observe
template <class Cache>
[[nodiscard]] AttentionProfile profile_attention(Cache& cache, std::size_t queries) {
  const ModelShape& shape = cache.plan().shape();
  const LayerShape same = same_heads(shape, "profile_attention");
  AttentionProfile profile{{shape.layers, same.kv_heads}, 0};
  std::vector<std::vector<float>> sums;
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    profile.queries = cache.observe(layer, queries, sums);
    require(profile.queries > 0, "profile_attention: the cache has kept no queries, ",
            "kept_queries must be at least 1");
    for (std::size_t head = 0; head < same.kv_heads; ++head) {
      const std::size_t rows = sums[head].size() / same.queries_per_kv();
      require(rows == cache.tokens(layer), "profile_attention: KV head ", head, " of layer ", layer, " has ",
              rows, " rows of ", cache.tokens(layer), ", must keep all");
      profile.sums(layer, head) = std::move(sums[head]);
    }
  }
  return profile;
}

/// The policies, from the cheapest to the most expensive.
enum class FastGenChoice : std::uint8_t {
  locality,                ///< the first and the latest rows
  frequency,               ///< the most attended rows
  locality_and_frequency,  ///< the most attended rows, as many as both of these keep
  full
};
using FastGenChoices = HeadTable<FastGenChoice>;  ///< [layers, kv_heads]

/// Settings of `fastgen_plan`: how much attention a choice must keep, and what each choice keeps.
struct FastGenConfig {
  double recovery = 0.95;              ///< Share of each query head's attention that the kept rows must have.
  double local_share = 0.3;            ///< Latest rows, as a share of the prompt's rows.
  double frequent_share = 0.3;         ///< Most attended rows, as a share of the prompt's rows.
  std::size_t sinks = 4;               ///< First rows that `locality` keeps besides.
  std::size_t observation_window = 8;  ///< Latest rows, always kept; their queries rank the rows.
  std::size_t compress_every = 0;      ///< Rows decoded between compressions; 0: only on request.

  /// @throws ConfigError
  void validate() const {
    // Written so that NaN fails.
    require(recovery >= 0.0 && recovery <= 1.0, "FastGenConfig: recovery is ", recovery, ", must be 0 to 1");
    require(local_share > 0.0 && local_share <= 1.0, "FastGenConfig: local_share is ", local_share,
            ", must be more than 0 and at most 1");
    require(frequent_share > 0.0 && frequent_share <= 1.0, "FastGenConfig: frequent_share is ",
            frequent_share, ", must be more than 0 and at most 1");
    SnapKvScorer::validate(scorer());
  }
  /// The scorer without pooling: rows are ranked one by one.
  [[nodiscard]] SnapKvScorer::Config scorer() const {
    return {.observation_window = observation_window, .pooling = Pooling::max, .kernel = 1};
  }
  [[nodiscard]] std::size_t recent(std::size_t rows) const { return part(local_share, rows); }
  /// Rows that a head with ranked rows keeps, latest ones included.
  [[nodiscard]] std::size_t ranked(FastGenChoice choice, std::size_t rows) const {
    const std::size_t both = choice == FastGenChoice::frequency ? 0 : part(local_share, rows);
    return std::max(observation_window, part(frequent_share, rows) + both);
  }

 private:
  [[nodiscard]] static std::size_t part(double share, std::size_t rows) {
    return static_cast<std::size_t>(std::ceil(share * static_cast<double>(rows)));
  }
};

namespace detail {

// The rows that a choice would keep, given the attention `sums` [group, rows].
[[nodiscard]] inline std::vector<std::size_t> kept_rows(FastGenChoice choice, std::span<const float> sums,
                                                        std::size_t group, std::size_t queries,
                                                        const FastGenConfig& config) {
  const std::size_t rows = sums.size() / group;
  std::vector<std::size_t> kept;
  if (choice == FastGenChoice::locality || choice == FastGenChoice::full) {
    const std::size_t recent = choice == FastGenChoice::full ? rows : config.recent(rows);
    for (std::size_t row = 0; row < rows; ++row) {
      if (row < config.sinks || row + recent >= rows) kept.push_back(row);
    }
    return kept;
  }
  const std::size_t candidates = rows - std::min(rows, config.observation_window);
  std::vector<float> scores(candidates);
  SnapKvScorer::score(config.scorer(), sums, group, queries, scores);
  kept = top_rows(scores, config.ranked(choice, rows) - config.observation_window);
  for (std::size_t row = candidates; row < rows; ++row) kept.push_back(row);
  return kept;
}

// Whether the rows `kept` have enough of the attention of every query head.
[[nodiscard]] inline bool recovers(std::span<const std::size_t> kept, std::span<const float> sums,
                                   std::size_t group, double recovery) {
  const std::size_t rows = sums.size() / group;
  for (std::size_t head = 0; head < group; ++head) {
    const auto own = sums.subspan(head * rows, rows);
    double all = 0.0;
    double found = 0.0;
    for (const float share : own) all += static_cast<double>(share);
    for (const std::size_t row : kept) found += static_cast<double>(own[row]);
    if (!(found >= recovery * all)) return false;
  }
  return true;
}

}  // namespace detail

/// For each KV head the choice with the fewest rows that recovers enough attention; of equally many rows
/// the cheaper policy. @throws ConfigError for settings that do not work, or a profile that does not fit
/// the shape, has no queries or rows, or has a sum that is negative or not finite.
[[nodiscard]] inline FastGenChoices fastgen_choices(const ModelShape& shape, const AttentionProfile& profile,
                                                    const FastGenConfig& config = {}) {
  shape.validate();
  config.validate();
  detail::require_fits(profile.sums, shape, "fastgen_choices");
  require(profile.queries > 0, "fastgen_choices: a profile of no queries");
  const std::size_t group = shape.layer(0).queries_per_kv();
  FastGenChoices choices{shape.layers, profile.sums.heads(), FastGenChoice::full};
  for (std::size_t i = 0; i < choices.values().size(); ++i) {
    const std::span<const float> sums{profile.sums.values()[i]};
    const auto fits = [](float share) { return share >= 0.0F && std::isfinite(share); };
    require(!sums.empty() && sums.size() % group == 0 && std::ranges::all_of(sums, fits),
            "fastgen_choices: the profile of layer ", i / choices.heads(), ", KV head ", i % choices.heads(),
            " must be [", group, ", rows] of numbers that are 0 or more");
    std::size_t fewest = sums.size() / group;
    for (const auto choice :
         {FastGenChoice::locality, FastGenChoice::frequency, FastGenChoice::locality_and_frequency}) {
      const auto kept = detail::kept_rows(choice, sums, group, profile.queries, config);
      if (kept.size() >= fewest) continue;
      if (!detail::recovers(kept, sums, group, config.recovery)) continue;
      choices.values()[i] = choice;
      fewest = kept.size();
    }
  }
  return choices;
}

/// The plan for a fork of the profiled cache (`KvCache::fork_as`). Call `compress()` on the fork.
/// @throws ConfigError like `fastgen_choices`.
template <Element E = float>
[[nodiscard]] HeadPlan<E> fastgen_plan(const ModelShape& shape, const AttentionProfile& profile,
                                       const FastGenConfig& config = {}) {
  using Dense = DenseStorage<E>;
  const FastGenChoices choices = fastgen_choices(shape, profile, config);
  HeadPlan<E> plan{shape, typename FullCache<Dense>::Config{}};
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    for (std::size_t head = 0; head < choices.heads(); ++head) {
      const FastGenChoice choice = choices(layer, head);
      const std::size_t rows = profile.sums(layer, head).size() / shape.layer(0).queries_per_kv();
      if (choice == FastGenChoice::full) continue;
      if (choice == FastGenChoice::locality) {
        plan.set(
            layer, head,
            typename SinkRecentCache<Dense>::Config{.sinks = config.sinks, .recent = config.recent(rows)});
      } else {
        plan.set(layer, head,
                 typename HeadBudgetCache<Dense>::Config{
                     .budget = config.ranked(choice, rows) - config.observation_window,
                     .compress_every = config.compress_every,
                     .scorer = config.scorer()});
      }
    }
  }
  return plan;
}

}  // namespace kvpolicy
