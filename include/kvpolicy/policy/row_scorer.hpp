// SPDX-License-Identifier: Apache-2.0
//
// How a head with a budget ranks its rows (policy/head_budget_cache.hpp): what a scorer is, in three
// kinds that differ in what they look at. One published method is one scorer, in a file of its own.
#pragma once

#include <concepts>
#include <cstddef>
#include <span>
#include <type_traits>

#include <kvpolicy/core/ranking.hpp>

namespace kvpolicy {

/// What every scorer has: settings, and how many of the latest rows survive whatever their score.
/// The other rows are the candidates; the higher score survives. Of equal scores survives the row
/// that the observed queries themselves looked at more, if the scorer observes any; then the
/// earlier one.
template <class S>
concept AnyScorer =
    std::equality_comparable<typename S::Config> && requires(const typename S::Config& config) {
      S::validate(config);  // throws ConfigError
      { S::kept_rows(config) } -> std::convertible_to<std::size_t>;
    };

/// Looks at the attention of the text's latest queries, which the cache keeps and an engine observes
/// (`AttentionEngine::observe`). `sums` is [group, rows]: each row's probability summed over `queries`
/// queries, `observed_queries` or all there are; its first `out.size()` rows are the candidates.
template <class S>
concept ObservingScorer =
    AnyScorer<S> && requires(const typename S::Config& config, std::span<const float> sums, std::size_t n,
                             std::span<float> out) {
      { S::observed_queries(config) } -> std::convertible_to<std::size_t>;
      S::score(config, sums, n, n, out);  // (config, sums, group, queries, out)
    };

/// Looks at the attention of all queries since a row came: the cache has every call observed, which
/// reads all keys a second time. `sums` [candidates] are means over a KV head's query heads.
template <class S>
concept AccumulatingScorer =
    AnyScorer<S> && requires(const typename S::Config& config, std::span<const double> sums,
                             std::span<float> out) { S::score_sums(config, sums, out); };

/// Looks at a row's key, as it is stored, and at no query.
template <class S>
concept KeyScorer = AnyScorer<S> && requires(const typename S::Config& config, std::span<const float> key) {
  { S::score_key(config, key) } -> std::convertible_to<float>;
};

/// A KeyScorer whose function of the key is written once, for the host and for kernels: `Gather` is made from
/// the settings in the head's rule, sees the key's numbers channel by channel, and then says the score. Its
/// members are marked KVPOLICY_HOST_DEVICE. A device cache serves such a scorer once its engine was told to
/// (`cuda::Engine::serve`).
template <class S>
concept GatheringKeyScorer = KeyScorer<S> && std::is_trivially_copyable_v<typename S::Gather> &&
                             requires(typename S::Gather gather, const KeyNumbers& numbers, float number) {
                               { S::name };
                               { typename S::Gather{numbers} };
                               { gather.add(number) };
                               { gather.score() } -> std::convertible_to<float>;
                             };

/// The score of a key: for the `score_key` of a GatheringKeyScorer.
template <class Gather>
[[nodiscard]] float gather_key(const KeyNumbers& numbers, std::span<const float> key) {
  Gather gather{numbers};
  for (const float number : key) gather.add(number);
  return gather.score();
}

/// Just one of the three.
template <class S>
concept RowScorer =
    (ObservingScorer<S> ? 1 : 0) + (AccumulatingScorer<S> ? 1 : 0) + (KeyScorer<S> ? 1 : 0) == 1;

}  // namespace kvpolicy
