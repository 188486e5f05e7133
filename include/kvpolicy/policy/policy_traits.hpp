// SPDX-License-Identifier: Apache-2.0
//
// What a policy may have besides what every policy has (policy/policy.hpp), and what stands in for
// a member that is missing. Caches and plans ask these traits and nothing else, and no other file looks for
// members of a policy. A type that cannot be given members specialises them:
//
//     template <>
//     struct kvpolicy::policy_traits<Mine> : kvpolicy::policy_defaults<Mine> {
//       static std::size_t bytes_of_tokens(…) { … }
//     };
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <optional>
#include <string_view>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/expected_queries.hpp>
#include <kvpolicy/core/fields.hpp>
#include <kvpolicy/core/head_rule.hpp>
#include <kvpolicy/policy/policy.hpp>
#include <kvpolicy/policy/policy_names.hpp>
#include <kvpolicy/policy/policy_roles.hpp>
#include <kvpolicy/policy/shared_config.hpp>
#include <kvpolicy/state/archive.hpp>
#include <kvpolicy/storage/dense_storage.hpp>

namespace kvpolicy {

template <KvPolicy P>
struct policy_traits;

namespace detail {

template <class P>
struct ExactStorageOfPolicy {
  using type = DenseStorage<typename P::element_type>;
};
template <class P>
  requires requires { typename P::storage_type; }
struct ExactStorageOfPolicy<P> {
  using type = ExactStorage<typename P::storage_type>;
};
template <class P>
concept HasStorageConfig = requires(typename P::storage_type::Config storage,
                                    const typename P::Config& config) { storage = config.storage; };

}  // namespace detail

/// The traits of a policy, from its members where it has them. Optional members:
///
///     static constexpr std::string_view name;                        // in files and messages
///     static void validate(const Config&, const StorageContext&);    // before any memory is asked for
///     Policy(const SharedConfig<Config>&, const StorageContext&);  // shares its settings with the plan
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
///     using storage_type = …;                            // in what its rows are kept
///     storage_type& storage();                           // with a rule that keeps every row, and
///                                                        // Config::storage: where there is slow memory,
///                                                        // full pages of final rows go there
///     static std::size_t stored_rows(const Config&, std::size_t rows);
///     std::size_t stored_rows(std::size_t rows) const;   // how many rows storage() has once `rows` rows
///                                                        // came: fewer where some are kept elsewhere
///     bool cut(std::size_t row) noexcept;                // goes back to what it was before row `row` came;
///                                                        // false if that is not known any more. Without
///                                                        // it a prefix cache needs marks
///     void add_to(HeadContents&) const;                  // what a copy elsewhere must know besides rows,
///                                                        // and the choices that rows are copied for
///     void take(const HeadContents&);                    // a new policy becomes such a copy
///     Votes votes() const;                               // of a policy that compresses: what the attention of
///                                                        // several queries comes to; without it the sum
///     std::optional<ExpectedQueries> expected_queries() const;        // it goes by queries to come
///     static constexpr bool waits_for_scoring;           // it adds up attention in scoring passes alone,
///     std::size_t unscored_rows(std::size_t more) const;  // and cannot rank rows that were in none; `more`
///                                                        // are about to be committed
///     static bool is_adaptive_in_model(const Config&);   // its head shares with those of all layers, and so is
///     bool is_adaptive_in_model() const;                 // adaptive in its layer, too
///     template <class Archive> void serialize(Archive&);              // to be saved
///     void Config::fields(FieldVisitor&);                             // to be saved, to stand in files
///
/// Besides these, the members of a role: a policy that selects, compresses, adds up attention or shares a
/// layer's budget. One member makes it a policy of that role, which has them all (policy_roles.hpp).
template <KvPolicy P>
struct policy_defaults {
  using Config = typename P::Config;

  static constexpr bool selects = detail::selects<P>();
  static constexpr bool compresses = detail::compresses<P>();
  static constexpr bool accumulates = detail::accumulates<P>();
  static constexpr bool shares = detail::shares<P>();
  static constexpr bool shares_in_model = detail::shares_in_model<P>();
  /// Whether the policy adds up attention in scoring passes alone (AttendOptions::scores_rows).
  static constexpr bool waits_for_scoring = detail::waits_for_scoring_passes<P>();

  /// @throws ConfigError, as P's constructor
  [[nodiscard]] static P make(const SharedConfig<Config>& config, const StorageContext& context) {
    if constexpr (std::constructible_from<P, decltype(config), decltype(context)>) {
      return P{config, context};
    } else {
      return P{*config, context};
    }
  }

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
    policy_traits<P>::add_to(policy, all);
    return all;
  }
  static void add_to([[maybe_unused]] const P& policy, [[maybe_unused]] HeadContents& all) {
    if constexpr (requires { policy.add_to(all); }) policy.add_to(all);
  }
  /// A new policy takes what another one held. One that has no `take` is given every row of the text
  /// once more, zeros where the other one had dropped rows: it drops them again.
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

  /// The head goes back to what it was before row `row` came; false if it cannot, and nothing changes.
  [[nodiscard]] static bool cut([[maybe_unused]] P& policy, [[maybe_unused]] std::size_t row) noexcept {
    if constexpr (requires { policy.cut(row); }) {
      static_assert(noexcept(policy.cut(row)),
                    "kvpolicy: a policy's bool cut(std::size_t row) must be noexcept");
      return policy.cut(row);
    }
    return false;
  }

  /// Whether rows of the policy can lie in slow memory, if its rule keeps every row: it states its rule, and
  /// has its rows in one storage that says which of them are final.
  static constexpr bool may_be_slow = [] {
    if constexpr (requires { typename P::storage_type; }) {
      using Storage = typename P::storage_type;
      return FinalRowsStorage<Storage> && requires(P& policy, const Config& config, std::size_t head_dim) {
        { policy.storage() } -> std::same_as<Storage&>;
        { config.storage } -> std::convertible_to<const typename Storage::Config&>;
        { P::rule(config, head_dim) } -> std::same_as<HeadRule>;
      };
    }
    return false;
  }();
  /// How many rows `storage()` has once `rows` rows came.
  [[nodiscard]] static std::size_t stored_rows([[maybe_unused]] const Config& config, std::size_t rows) {
    if constexpr (requires { P::stored_rows(config, rows); }) return P::stored_rows(config, rows);
    return rows;
  }
  [[nodiscard]] static std::size_t stored_rows([[maybe_unused]] const P& policy, std::size_t rows) {
    if constexpr (requires { policy.stored_rows(rows); }) return policy.stored_rows(rows);
    return rows;
  }
  /// The storage of rows that must stay exact, in the kind of memory of the policy's own.
  using exact_storage = typename detail::ExactStorageOfPolicy<P>::type;
  [[nodiscard]] static typename exact_storage::Config exact_config([[maybe_unused]] const Config& config) {
    if constexpr (detail::HasStorageConfig<P>) {
      return kvpolicy::exact_config<typename P::storage_type>(config.storage);
    } else {
      return {};
    }
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
  /// Whether heads of all layers share. Such a policy is adaptive in its layer as well.
  [[nodiscard]] static bool is_adaptive_in_model([[maybe_unused]] const Config& config) {
    if constexpr (shares_in_model) return P::is_adaptive_in_model(config) && is_adaptive_in_layer(config);
    return false;
  }
  [[nodiscard]] static bool is_adaptive_in_model([[maybe_unused]] const P& policy) {
    if constexpr (shares_in_model) return policy.is_adaptive_in_model() && policy.is_adaptive_in_layer();
    return false;
  }
  [[nodiscard]] static Votes votes([[maybe_unused]] const P& policy) {
    if constexpr (requires { policy.votes(); }) return policy.votes();
    return Votes::mean;
  }
  [[nodiscard]] static std::optional<ExpectedQueries> expected_queries([[maybe_unused]] const P& policy) {
    if constexpr (requires { policy.expected_queries(); }) return policy.expected_queries();
    return {};
  }
  [[nodiscard]] static std::size_t unscored_rows([[maybe_unused]] const P& policy,
                                                 [[maybe_unused]] std::size_t more) {
    if constexpr (waits_for_scoring) return policy.unscored_rows(more);
    return 0;
  }

  /// Whether a head can be saved and loaded.
  static constexpr bool is_savable = has_name && Savable<P> && HasFields<Config>;

  static constexpr bool has_rule = requires(const Config& config, std::size_t head_dim) {
    { P::rule(config, head_dim) } -> std::same_as<HeadRule>;
  };
};

/// The traits of a policy that caches and plans ask. Specialise it for a policy that is not yours.
template <KvPolicy P>
struct policy_traits : policy_defaults<P> {};

}  // namespace kvpolicy
