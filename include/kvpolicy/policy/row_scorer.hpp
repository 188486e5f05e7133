// SPDX-License-Identifier: Apache-2.0
//
// How a head with a budget ranks its rows (policy/head_budget_cache.hpp): what a scorer is, in four
// kinds that differ in what they look at. One published method is one scorer, in a file of its own.
#pragma once

#include <concepts>
#include <cstddef>
#include <span>
#include <type_traits>

#include <kvpolicy/core/expected_queries.hpp>
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

/// What the attention of several queries comes to for a scorer: the mean, unless its settings have `votes`.
template <class Config>
[[nodiscard]] Votes votes_of([[maybe_unused]] const Config& config) {
  if constexpr (requires { config.votes; }) return config.votes;
  return Votes::mean;
}

/// Looks at the attention of the text's latest queries, which the cache keeps and an engine observes
/// (`AttentionEngine::observe`). `sums` is [group, rows]: each row's probability summed over `queries`
/// queries, `observed_queries` or all there are, or the largest of them if the settings have `votes` and it says so;
/// its first `out.size()` rows are the candidates.
template <class S>
concept ObservingScorer =
    AnyScorer<S> && requires(const typename S::Config& config, std::span<const float> sums, std::size_t n,
                             std::span<float> out) {
      { S::observed_queries(config) } -> std::convertible_to<std::size_t>;
      S::score(config, sums, n, n, out);  // (config, sums, group, queries, out)
    };

/// An ObservingScorer that asks for the attention of queries that have not come: what `sums` then are, as
/// `S::expected_queries(config)` says.
template <class S>
concept ExpectingScorer = ObservingScorer<S> && requires(const typename S::Config& config) {
  { S::expected_queries(config) } -> std::same_as<ExpectedQueries>;
};

/// Looks at the attention of all queries since a row came: the cache has every call observed, which
/// reads all keys a second time. `sums` [candidates] are means over a KV head's query heads, or the largest of all if
/// the settings have `votes` and it says so. A scorer with `waits_for_scoring` has only the calls of scoring passes
/// observed (`AttendOptions::scores_rows`), takes the largest vote, and cannot rank rows that none has seen.
template <class S>
concept AccumulatingScorer =
    AnyScorer<S> && requires(const typename S::Config& config, std::span<const double> sums,
                             std::span<float> out) { S::score_sums(config, sums, out); };

/// Whether an AccumulatingScorer adds up in scoring passes alone.
template <class S>
[[nodiscard]] consteval bool waits_for_scoring() {
  if constexpr (requires { S::waits_for_scoring; }) return S::waits_for_scoring;
  return false;
}

/// Looks at a row's key and at what all keys of the head have in common, its `Anchor`: made for some channels, it is
/// shown every key before the first one is scored.
template <class S>
concept AnchoredKeyScorer = AnyScorer<S> && std::constructible_from<typename S::Anchor, std::size_t> &&
                            requires(const typename S::Config& config, typename S::Anchor& anchor,
                                     const typename S::Anchor& seen, std::span<const float> key) {
                              anchor.add(key);
                              { S::score_key(config, seen, key) } -> std::convertible_to<float>;
                            };

/// Looks at a row's key, as it is stored, and at no query.
template <class S>
concept KeyScorer = AnyScorer<S> && requires(const typename S::Config& config, std::span<const float> key) {
  { S::score_key(config, key) } -> std::convertible_to<float>;
};

/// A KeyScorer whose function of the key is written once, for the host and for kernels: `Gather` is made from
/// the settings in the head's rule, sees the key's numbers channel by channel, and then says the score. Its
/// members are marked KVPOLICY_HOST_DEVICE. A device cache serves such a scorer once its engine was told to
/// (`gpu::Engine::serve`).
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

/// Just one of the four.
template <class S>
concept RowScorer = (ObservingScorer<S> ? 1 : 0) + (AccumulatingScorer<S> ? 1 : 0) + (KeyScorer<S> ? 1 : 0) +
                        (AnchoredKeyScorer<S> ? 1 : 0) ==
                    1;

}  // namespace kvpolicy
