// SPDX-License-Identifier: Apache-2.0
//
// What a policy may do besides keeping and showing rows: select, compress, add up attention, share a
// layer's budget. Each is a role with several members. A policy that has a member of a role must have all of
// them: without this rule, one that forgot a member would compile and never compress or select.
#pragma once

#include <concepts>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/policy/shared_rows.hpp>

namespace kvpolicy {

/// Gives a selecting policy the scores of its chunks: the dot products of one query [head_dim] with
/// `out.size()` dense rows. An attention engine, whatever its type.
class ChunkScorer {
 public:
  virtual ~ChunkScorer() = default;
  virtual void score(const Plane& rows, std::span<const float> query, std::span<float> out) = 0;
};

// One concept for each member, so that an error can name the one that is missing.
namespace detail::role {

using Sums = std::span<const float>;

template <class P>
concept SelectionIsStale = requires(const P& seen) {
  { seen.selection_is_stale() } -> std::convertible_to<bool>;
};
template <class P>
concept PrepareRefresh = requires(P& policy, std::span<const float> queries, ChunkScorer& scorer,
                                  std::size_t tokens) { policy.prepare_refresh(queries, scorer, tokens); };
template <class P>
concept FinishRefresh = requires(P& policy) {
  { policy.finish_refresh() } noexcept;
};
template <class P>
concept AbandonRefresh = requires(P& policy) {
  { policy.abandon_refresh() } noexcept;
};
template <class P>
concept UndoRefresh = requires(P& policy, std::size_t tokens) {
  { policy.undo_refresh(tokens) } noexcept;
};
template <class P>
concept ForgetSelection = requires(P& policy) {
  { policy.forget_selection() } noexcept;
};

template <class P>
concept ObservedQueriesOfConfig = requires(const typename P::Config& config) {
  { P::observed_queries(config) } -> std::convertible_to<std::size_t>;
};
template <class P>
concept ObservedQueries = requires(const P& seen) {
  { seen.observed_queries() } -> std::convertible_to<std::size_t>;
};
template <class P>
concept CompressesByItself = requires(const typename P::Config& config) {
  { P::compresses_by_itself(config) } -> std::convertible_to<bool>;
};
template <class P>
concept WantsCompress = requires(const P& seen) {
  { seen.wants_compress() } -> std::convertible_to<bool>;
};
template <class P>
concept IsCompressible = requires(const P& seen, std::size_t more) {
  { seen.is_compressible(more) } -> std::convertible_to<bool>;
};
template <class P>
concept PrepareCompress =
    requires(P& policy, Sums sums, std::size_t n) { policy.prepare_compress(sums, n, n); };
template <class P>
concept FinishCompress = requires(P& policy) {
  { policy.finish_compress() } noexcept;
};
template <class P>
concept AbandonCompress = requires(P& policy) {
  { policy.abandon_compress() } noexcept;
};

template <class P>
concept Accumulate = requires(P& policy, Sums sums, std::size_t group) {
  { policy.accumulate(sums, group) } noexcept;
};
template <class P>
concept Accumulated = requires(const P& seen) {
  { seen.accumulated() } -> std::convertible_to<std::span<const double>>;
};
template <class P>
concept Inherit = requires(P& policy, std::span<const double> others) { policy.inherit(others); };

template <class P>
concept IsAdaptiveOfConfig = requires(const typename P::Config& config) {
  { P::is_adaptive_in_layer(config) } -> std::convertible_to<bool>;
};
template <class P>
concept IsAdaptive = requires(const P& seen) {
  { seen.is_adaptive_in_layer() } -> std::convertible_to<bool>;
};
template <class P>
concept MayShare = requires(const typename P::Config& config) {
  { P::may_share(config, config) } -> std::convertible_to<bool>;
};
template <class P>
concept Compete = requires(const P& seen, Sums sums, std::size_t n) {
  { seen.compete(sums, n, n) } -> std::same_as<SharingHead>;
};
template <class P>
concept PrepareSurvivors =
    requires(P& policy, std::vector<std::size_t> rows) { policy.prepare_survivors(std::move(rows)); };

}  // namespace detail::role

/// A policy that chooses which committed rows to read (ChunkRetrievalCache). It has:
///
///     bool selection_is_stale() const;           // whether a selected read must choose first
///     void prepare_refresh(std::span<const float> queries, ChunkScorer&, std::size_t tokens);
///                                                // chooses for the queries [group, head_dim]; `tokens`: of
///                                                // the text, with the query that chooses. Throws with the
///                                                // choice as it was; `segments` shows the new one at once
///     void finish_refresh() noexcept;            // the new choice stays
///     void abandon_refresh() noexcept;           // the old one does
///     void undo_refresh(std::size_t tokens) noexcept;  // the text ends after `tokens` tokens now
///     void forget_selection() noexcept;          // the next selected read chooses first
template <class P>
concept SelectingPolicy =
    detail::role::SelectionIsStale<P> && detail::role::PrepareRefresh<P> && detail::role::FinishRefresh<P> &&
    detail::role::AbandonRefresh<P> && detail::role::UndoRefresh<P> && detail::role::ForgetSelection<P>;

/// A policy that drops rows by rank (HeadBudgetCache), mostly by how much attention they got. It has:
///
///     static std::size_t observed_queries(const Config&);
///     std::size_t observed_queries() const;      // latest queries whose attention decides; the cache keeps
///                                                // them. 0: no query is asked
///     static bool compresses_by_itself(const Config&);  // whether the settings make it compress unasked,
///     bool wants_compress() const;               // and whether they do now
///     bool is_compressible(std::size_t more) const;     // whether rows would go once `more` were committed
///     void prepare_compress(std::span<const float> sums, std::size_t group, std::size_t queries);
///                                                // copies the survivors by `sums` [group, rows] of the
///                                                // observed queries; throws with everything as it was
///     void finish_compress() noexcept;           // the survivors replace the rows
///     void abandon_compress() noexcept;          // the rows stay
template <class P>
concept CompressingPolicy = detail::role::ObservedQueriesOfConfig<P> && detail::role::ObservedQueries<P> &&
                            detail::role::CompressesByItself<P> && detail::role::WantsCompress<P> &&
                            detail::role::IsCompressible<P> && detail::role::PrepareCompress<P> &&
                            detail::role::FinishCompress<P> && detail::role::AbandonCompress<P>;

/// A compressing policy that adds up how much attention each row gets: the cache observes every call. It
/// also has:
///
///     void accumulate(std::span<const float> sums, std::size_t group) noexcept;
///                                                // sums [group, rows] of a call's queries
///     std::span<const double> accumulated() const;
///     void inherit(std::span<const double>);     // what another head that holds the same rows has added up
template <class P>
concept AccumulatingPolicy = CompressingPolicy<P> && detail::role::Accumulate<P> &&
                             detail::role::Accumulated<P> && detail::role::Inherit<P>;

/// A compressing policy whose head may compete with the other heads of its layer for rows. It also has:
///
///     static bool is_adaptive_in_layer(const Config&);
///     bool is_adaptive_in_layer() const;
///     static bool may_share(const Config&, const Config&);  // whether heads of these two settings may
///                                                           // share: they agree in all but the budget
///     SharingHead compete(std::span<const float> sums, std::size_t group, std::size_t queries) const;
///     void prepare_survivors(std::vector<std::size_t> rows);
template <class P>
concept AdaptiveBudgetPolicy =
    CompressingPolicy<P> && detail::role::IsAdaptiveOfConfig<P> && detail::role::IsAdaptive<P> &&
    detail::role::MayShare<P> && detail::role::Compete<P> && detail::role::PrepareSurvivors<P>;

namespace detail {

// Whether a policy has any member of a role. A member is looked for by its name as well, because one with
// other parameters or results is a member that was meant; and by a call, because an overloaded name or a
// template has no address.
template <class P>
concept MeansToSelect = role::SelectionIsStale<P> || role::PrepareRefresh<P> || role::FinishRefresh<P> ||
                        role::AbandonRefresh<P> || role::UndoRefresh<P> || role::ForgetSelection<P> ||
                        requires { &P::selection_is_stale; } || requires { &P::prepare_refresh; } ||
                        requires { &P::finish_refresh; } || requires { &P::abandon_refresh; } ||
                        requires { &P::undo_refresh; } || requires { &P::forget_selection; };

template <class P>
concept MeansToAccumulate = role::Accumulate<P> || role::Accumulated<P> || role::Inherit<P> || requires {
  &P::accumulate;
} || requires { &P::accumulated; } || requires { &P::inherit; };

template <class P>
concept MeansToShare =
    role::IsAdaptiveOfConfig<P> || role::IsAdaptive<P> || role::MayShare<P> || role::Compete<P> ||
    role::PrepareSurvivors<P> || requires { &P::is_adaptive_in_layer; } || requires { &P::may_share; } ||
    requires { &P::compete; } || requires { &P::prepare_survivors; };

template <class P>
concept MeansToCompress = MeansToAccumulate<P> || MeansToShare<P> || role::ObservedQueriesOfConfig<P> ||
                          role::ObservedQueries<P> || role::CompressesByItself<P> || role::WantsCompress<P> ||
                          role::IsCompressible<P> || role::PrepareCompress<P> || role::FinishCompress<P> ||
                          role::AbandonCompress<P> || requires { &P::observed_queries; } ||
                          requires { &P::compresses_by_itself; } || requires { &P::wants_compress; } ||
                          requires { &P::is_compressible; } || requires { &P::prepare_compress; } ||
                          requires { &P::finish_compress; } || requires { &P::abandon_compress; };

/// Whether P selects; the same for the other roles. A P with a part of the role does not compile, and the
/// first error names what it lacks.
template <class P>
[[nodiscard]] consteval bool selects() {
  if constexpr (MeansToSelect<P>) {
    static_assert(role::SelectionIsStale<P>,
                  "kvpolicy: a policy that selects needs bool selection_is_stale() const");
    static_assert(
        role::PrepareRefresh<P>,
        "kvpolicy: a policy that selects needs void prepare_refresh(std::span<const float> queries, "
        "ChunkScorer&, std::size_t tokens)");
    static_assert(role::FinishRefresh<P>,
                  "kvpolicy: a policy that selects needs void finish_refresh() noexcept");
    static_assert(role::AbandonRefresh<P>,
                  "kvpolicy: a policy that selects needs void abandon_refresh() noexcept");
    static_assert(role::UndoRefresh<P>,
                  "kvpolicy: a policy that selects needs void undo_refresh(std::size_t tokens) noexcept");
    static_assert(role::ForgetSelection<P>,
                  "kvpolicy: a policy that selects needs void forget_selection() noexcept");
  }
  return SelectingPolicy<P>;
}

template <class P>
[[nodiscard]] consteval bool compresses() {
  if constexpr (MeansToCompress<P>) {
    static_assert(role::ObservedQueriesOfConfig<P>,
                  "kvpolicy: a policy that compresses, adds up attention or shares a budget needs static "
                  "std::size_t observed_queries(const Config&)");
    static_assert(role::ObservedQueries<P>,
                  "kvpolicy: a policy that compresses, adds up attention or shares a budget needs "
                  "std::size_t observed_queries() const");
    static_assert(role::CompressesByItself<P>,
                  "kvpolicy: a policy that compresses, adds up attention or shares a budget needs static "
                  "bool compresses_by_itself(const Config&)");
    static_assert(role::WantsCompress<P>,
                  "kvpolicy: a policy that compresses, adds up attention or shares a budget needs bool "
                  "wants_compress() const");
    static_assert(role::IsCompressible<P>,
                  "kvpolicy: a policy that compresses, adds up attention or shares a budget needs bool "
                  "is_compressible(std::size_t more) const");
    static_assert(role::PrepareCompress<P>,
                  "kvpolicy: a policy that compresses, adds up attention or shares a budget needs void "
                  "prepare_compress(std::span<const float> sums, "
                  "std::size_t group, std::size_t queries)");
    static_assert(role::FinishCompress<P>,
                  "kvpolicy: a policy that compresses, adds up attention or shares a budget needs void "
                  "finish_compress() noexcept");
    static_assert(role::AbandonCompress<P>,
                  "kvpolicy: a policy that compresses, adds up attention or shares a budget needs void "
                  "abandon_compress() noexcept");
  }
  return CompressingPolicy<P>;
}

template <class P>
[[nodiscard]] consteval bool accumulates() {
  if constexpr (MeansToAccumulate<P>) {
    static_assert(role::Accumulate<P>,
                  "kvpolicy: a policy that adds up attention needs void accumulate(std::span<const float> "
                  "sums, std::size_t group) noexcept");
    static_assert(
        role::Accumulated<P>,
        "kvpolicy: a policy that adds up attention needs std::span<const double> accumulated() const");
    static_assert(role::Inherit<P>,
                  "kvpolicy: a policy that adds up attention needs void inherit(std::span<const double>)");
  }
  return AccumulatingPolicy<P>;
}

template <class P>
[[nodiscard]] consteval bool shares() {
  if constexpr (MeansToShare<P>) {
    static_assert(role::IsAdaptiveOfConfig<P>,
                  "kvpolicy: a policy that shares a layer's budget needs static bool "
                  "is_adaptive_in_layer(const Config&)");
    static_assert(role::IsAdaptive<P>,
                  "kvpolicy: a policy that shares a layer's budget needs bool is_adaptive_in_layer() const");
    static_assert(
        role::MayShare<P>,
        "kvpolicy: a policy that shares a layer's budget needs static bool may_share(const Config&, "
        "const Config&)");
    static_assert(role::Compete<P>,
                  "kvpolicy: a policy that shares a layer's budget needs SharingHead "
                  "compete(std::span<const float> sums, std::size_t group, std::size_t queries) const");
    static_assert(role::PrepareSurvivors<P>,
                  "kvpolicy: a policy that shares a layer's budget needs void "
                  "prepare_survivors(std::vector<std::size_t>)");
  }
  return AdaptiveBudgetPolicy<P>;
}

/// Whether heads of P may share over the model: P says so of its settings and of itself, and shares in a layer.
template <class P>
[[nodiscard]] consteval bool shares_in_model() {
  constexpr bool by_config = requires(const typename P::Config& config) {
    { P::is_adaptive_in_model(config) } -> std::convertible_to<bool>;
  };
  constexpr bool by_itself = requires(const P& seen) {
    { seen.is_adaptive_in_model() } -> std::convertible_to<bool>;
  };
  static_assert(by_config == by_itself,
                "kvpolicy: a policy that shares the model's budget needs static bool "
                "is_adaptive_in_model(const Config&), and bool is_adaptive_in_model() const");
  static_assert(
      !by_itself || AdaptiveBudgetPolicy<P>,
      "kvpolicy: a policy that shares the model's budget needs the members of one that shares a layer's");
  return by_itself;
}

/// Whether P adds up attention in scoring passes alone.
template <class P>
[[nodiscard]] consteval bool waits_for_scoring_passes() {
  if constexpr (requires { P::waits_for_scoring; }) {
    constexpr bool says_what_is_missing = requires(const P& seen) {
      { seen.unscored_rows(std::size_t{}) } -> std::convertible_to<std::size_t>;
    };
    static_assert(!P::waits_for_scoring || says_what_is_missing,
                  "kvpolicy: a policy that waits for scoring passes needs std::size_t "
                  "unscored_rows(std::size_t more) const");
    static_assert(
        !P::waits_for_scoring || AccumulatingPolicy<P>,
        "kvpolicy: a policy that waits for scoring passes needs the members of one that adds up attention");
    return P::waits_for_scoring;
  }
  return false;
}

}  // namespace detail
}  // namespace kvpolicy
