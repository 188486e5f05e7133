// SPDX-License-Identifier: Apache-2.0
//
// What a policy may have besides what every policy has (policy/policy.hpp), and what stands in for
// a member that is missing. Caches and plans ask these traits and nothing else. A type that cannot be given
// members specialises them:
//
//     template <>
//     struct kvpolicy::policy_traits<Mine> : kvpolicy::policy_defaults<Mine> {
//       static std::size_t bytes_of_tokens(…) { … }
//     };
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <string_view>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/fields.hpp>
#include <kvpolicy/core/head_rule.hpp>
#include <kvpolicy/policy/policy.hpp>
#include <kvpolicy/policy/policy_names.hpp>

namespace kvpolicy {

template <KvPolicy P>
struct policy_traits;

/// The traits of a policy, from its members where it has them. Optional members:
///
///     static constexpr std::string_view name;                        // in files and messages
///     static void validate(const Config&, const StorageContext&);    // before any memory is asked for
///     void check(const Segment& rows) const;             // throws ShapeError for rows it cannot hold
///     void uncommitted(const Segment& rows, const ReadRequest&, SegmentList& out) const;
///                                                        // how rows not yet committed are seen;
///                                                        // nodes of a tree come with `positions`
///     std::size_t overhead_bytes() const;                // bookkeeping besides the object itself
///     static constexpr bool commit_changes_rows;         // rows read otherwise after a commit
///     static std::size_t bytes_of_tokens(const Config&, const StorageContext&, std::size_t tokens);
///                                                        // for HeadPlan::memory and max_context
///     static std::size_t bytes_of_step(const Config&, const StorageContext&, std::size_t tokens);
///     static std::size_t max_bytes(const Config&, const StorageContext&, std::size_t tokens);
///                                                        // for max_context: held while the last
///                                                        // of `tokens` rows comes, and a bound on
///                                                        // that which never falls; without them
///                                                        // bytes_of_tokens must never fall
///     static std::size_t bytes_compressed(const Config&, const StorageContext&, std::size_t tokens);
///     static HeadRule rule(const Config&, std::size_t head_dim);      // to run on a device, to print
///     Storage& storage();                                // with a rule that keeps every row: where there
///                                                        // is slow memory, full pages go there
///     void add_to(HeadContents&) const;                  // what a copy elsewhere must know besides rows
///     void take(const HeadContents&);                    // a new policy becomes such a copy
///     template <class Archive> void serialize(Archive&);              // to be saved
///     void Config::fields(FieldVisitor&);                             // to be saved, to stand in files
template <KvPolicy P>
struct policy_defaults {
  using Config = typename P::Config;

  static constexpr bool selects = SelectingPolicy<P>;
  static constexpr bool compresses = CompressingPolicy<P>;
  static constexpr bool accumulates = AccumulatingPolicy<P>;
  static constexpr bool shares = AdaptiveBudgetPolicy<P>;

  static constexpr bool has_name = requires { std::string_view{P::name}; };
  [[nodiscard]] static PolicyNames names() {
    if constexpr (has_name) return PolicyNames::of<P>();
    return {.policy = PolicyNames::nameless};
  }

  static void validate([[maybe_unused]] const Config& config,
                       [[maybe_unused]] const StorageContext& context) {
    if constexpr (requires { P::validate(config, context); }) P::validate(config, context);
  }
  static void check([[maybe_unused]] const P& policy, [[maybe_unused]] const Segment& rows) {
    if constexpr (requires { policy.check(rows); }) policy.check(rows);
  }
  static void show_uncommitted(const P& policy, const Segment& rows, const ReadRequest& request,
                               SegmentList& out) {
    if (rows.rows == 0) return;
    if constexpr (requires { policy.uncommitted(rows, request, out); }) {
      policy.uncommitted(rows, request, out);
    } else {
      out.push_back(rows);
    }
  }

  /// What the policy holds, of `committed` rows that it was given.
  [[nodiscard]] static HeadContents contents(const P& policy, std::size_t committed) {
    HeadContents all{.committed = committed};
    policy.segments({.first_position = 0, .tokens = std::max<std::size_t>(committed, 1)}, all.rows);
    if constexpr (requires { policy.add_to(all); }) policy.add_to(all);
    return all;
  }
  /// A new policy takes what another one held. One that has no `take` is given every row of the text
  /// anew, zeros where the other one had dropped rows: it drops them again.
  /// @throws std::bad_alloc
  static void take(P& policy, const HeadContents& all, std::size_t head_dim) {
    if constexpr (requires { policy.take(all); }) {
      policy.take(all);
    } else {
      constexpr Encoding encoding = encoding_of<typename P::element_type>;
      const std::vector<std::byte> zero(head_dim * sizeof(typename P::element_type));
      std::size_t next = 0;
      const auto commit = [&](const Segment& rows) {
        if (rows.rows == 0) return;
        policy.reserve(rows.rows);
        policy.commit(rows);
        next += rows.rows;
      };
      for (const Segment& rows : all.rows) {
        const auto first = static_cast<std::size_t>(rows.position);
        commit(detail::zero_rows(zero, encoding, first - next, next));
        commit(
            Segment{.keys = rows.keys, .values = rows.values, .rows = rows.rows, .position = rows.position});
      }
      commit(detail::zero_rows(zero, encoding, all.committed - next, next));
    }
    policy.release_unused();
  }

  /// Whether rows of a head read otherwise after a commit than before: its storage quantises them, or
  /// the policy says so itself. Which rows are read as exact then depends on when they are committed.
  static constexpr bool commit_changes_rows = [] {
    if constexpr (requires { P::commit_changes_rows; })
      return bool{P::commit_changes_rows};
    else if constexpr (requires { P::storage_type::commit_changes_rows; })
      return bool{P::storage_type::commit_changes_rows};
    else
      return false;
  }();

  [[nodiscard]] static std::size_t overhead_bytes([[maybe_unused]] const P& policy) {
    if constexpr (requires { policy.overhead_bytes(); }) return policy.overhead_bytes();
    return 0;
  }

  static constexpr bool predicts_memory = requires(const Config& config, const StorageContext& context) {
    P::bytes_of_tokens(config, context, std::size_t{});
  };
  /// @throws ConfigError if the policy does not say how much it will hold
  [[nodiscard]] static std::size_t bytes_of_tokens(const Config& config, const StorageContext& context,
                                                   std::size_t tokens) {
    if constexpr (predicts_memory) {
      return P::bytes_of_tokens(config, context, tokens);
    } else {
      fail<ConfigError>("HeadPlan: ", names().policy,
                        " does not say how much memory it takes; give it bytes_of_tokens");
    }
  }
  static constexpr bool predicts_compressed = requires(const Config& config, const StorageContext& context) {
    P::bytes_compressed(config, context, std::size_t{});
  };
  /// A head that compresses counts as compressed.
  [[nodiscard]] static std::size_t bytes_compressed(const Config& config, const StorageContext& context,
                                                    std::size_t tokens) {
    if constexpr (predicts_compressed)
      return P::bytes_compressed(config, context, tokens);
    else
      return policy_traits<P>::bytes_of_tokens(config, context, tokens);
  }
  [[nodiscard]] static std::size_t max_bytes(const Config& config, const StorageContext& context,
                                             std::size_t tokens) {
    if constexpr (requires { P::max_bytes(config, context, tokens); }) {
      return P::max_bytes(config, context, tokens);
    } else {
      return policy_traits<P>::bytes_compressed(config, context, tokens);
    }
  }
  [[nodiscard]] static std::size_t bytes_of_step(const Config& config, const StorageContext& context,
                                                 std::size_t tokens) {
    if constexpr (requires { P::bytes_of_step(config, context, tokens); }) {
      return P::bytes_of_step(config, context, tokens);
    } else {
      return std::max(
          policy_traits<P>::bytes_compressed(config, context, tokens - std::min<std::size_t>(tokens, 1)),
          policy_traits<P>::bytes_compressed(config, context, tokens));
    }
  }

  [[nodiscard]] static std::size_t observed_queries([[maybe_unused]] const Config& config) {
    if constexpr (compresses) return P::observed_queries(config);
    return 0;
  }
  [[nodiscard]] static bool compresses_by_itself([[maybe_unused]] const Config& config) {
    if constexpr (compresses) return P::compresses_by_itself(config);
    return false;
  }

  [[nodiscard]] static bool is_adaptive_in_layer([[maybe_unused]] const Config& config) {
    if constexpr (shares) return P::is_adaptive_in_layer(config);
    return false;
  }

  static constexpr bool has_rule = requires(const Config& config, std::size_t head_dim) {
    { P::rule(config, head_dim) } -> std::same_as<HeadRule>;
  };
};

/// The traits of a policy that caches and plans ask. Specialise it for a policy that is not yours.
template <KvPolicy P>
struct policy_traits : policy_defaults<P> {};

namespace detail {

// A policy that has one member of a role has all of them: what is missing is named here.
template <class P>
constexpr void check_roles() {
  if constexpr (requires(const P& seen) { seen.selection_is_stale(); }) {
    constexpr bool chooses =
        requires(P& p, std::span<const float> q, ChunkScorer& s) { p.prepare_refresh(q, s, std::size_t{}); };
    static_assert(chooses,
                  "kvpolicy: a policy that selects (it has selection_is_stale) needs void "
                  "prepare_refresh(std::span<const float>, ChunkScorer&, std::size_t)");
    static_assert(
        requires(P& p) { p.finish_refresh(); },
        "kvpolicy: a policy that selects (it has selection_is_stale) needs void "
        "finish_refresh() noexcept");
    static_assert(
        requires(P& p) { p.abandon_refresh(); },
        "kvpolicy: a policy that selects (it has selection_is_stale) needs void "
        "abandon_refresh() noexcept");
    static_assert(
        requires(P& p) { p.undo_refresh(std::size_t{}); },
        "kvpolicy: a policy that selects (it has selection_is_stale) needs void "
        "undo_refresh(std::size_t tokens) noexcept");
    static_assert(
        requires(P& p) { p.forget_selection(); },
        "kvpolicy: a policy that selects (it has selection_is_stale) needs void "
        "forget_selection() noexcept");
    static_assert(SelectingPolicy<P>, "kvpolicy: a policy that selects must model SelectingPolicy");
  }
  if constexpr (requires(const P& seen) { seen.observed_queries(); }) {
    using Config = typename P::Config;
    static_assert(
        requires(const Config& c) { P::observed_queries(c); },
        "kvpolicy: a policy that compresses (it has observed_queries) needs static "
        "std::size_t observed_queries(const Config&)");
    static_assert(
        requires(const Config& c) { P::compresses_by_itself(c); },
        "kvpolicy: a policy that compresses (it has observed_queries) needs static bool "
        "compresses_by_itself(const Config&)");
    static_assert(
        requires(const P& p) { p.wants_compress(); },
        "kvpolicy: a policy that compresses (it has observed_queries) needs bool "
        "wants_compress() const");
    static_assert(
        requires(const P& p) { p.is_compressible(std::size_t{}); },
        "kvpolicy: a policy that compresses (it has observed_queries) needs bool "
        "is_compressible(std::size_t more) const");
    constexpr bool prepares = requires(P& p, std::span<const float> sums) {
      p.prepare_compress(sums, std::size_t{}, std::size_t{});
    };
    static_assert(prepares,
                  "kvpolicy: a policy that compresses (it has observed_queries) needs void "
                  "prepare_compress(std::span<const float> sums, std::size_t group, "
                  "std::size_t queries)");
    static_assert(
        requires(P& p) { p.finish_compress(); },
        "kvpolicy: a policy that compresses (it has observed_queries) needs void "
        "finish_compress() noexcept");
    static_assert(
        requires(P& p) { p.abandon_compress(); },
        "kvpolicy: a policy that compresses (it has observed_queries) needs void "
        "abandon_compress() noexcept");
    static_assert(CompressingPolicy<P>, "kvpolicy: a policy that compresses must model CompressingPolicy");
  }
  constexpr bool adds_up = requires(P& p, std::span<const float> sums) { p.accumulate(sums, std::size_t{}); };
  static_assert(!adds_up || AccumulatingPolicy<P>,
                "kvpolicy: a policy that adds up attention (it has accumulate) must compress, and needs "
                "std::span<const double> accumulated() const and void inherit(std::span<const double>)");
  constexpr bool competes = requires(const P& p) { p.is_adaptive_in_layer(); };
  static_assert(
      !competes || AdaptiveBudgetPolicy<P>,
      "kvpolicy: a policy that shares a layer's budget (it has is_adaptive_in_layer) must compress, "
      "and needs static bool is_adaptive_in_layer(const Config&), static bool may_share(const Config&, const "
      "Config&), SharingHead "
      "compete(std::span<const float>, std::size_t group, std::size_t queries) const and void "
      "prepare_survivors(std::vector<std::size_t>)");
}

}  // namespace detail
}  // namespace kvpolicy
