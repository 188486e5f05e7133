// SPDX-License-Identifier: Apache-2.0
//
// What a policy is: it takes committed rows of one KV head, in text order, and shows segments. It
// computes no attention, knows no other head and never takes a row back: rows that may still be
// rolled back belong to the cache, which reads them as one more segment.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/policy/head_contents.hpp>
#include <kvpolicy/policy/shared_rows.hpp>
#include <kvpolicy/storage/dense_storage.hpp>
#include <kvpolicy/storage/storage_context.hpp>

namespace kvpolicy {

/// The queries that are about to read a head.
struct ReadRequest {
  std::int64_t first_position = 0;  ///< lowest text position of the queries
  std::size_t tokens = 1;           ///< positions from there to the highest
  Read read = Read::all;
};

/// What a policy is.
/// The customisation point. Required of a policy:
///
///     using element_type = float | half | bfloat16;      // of its exact rows
///     struct Config { using policy_type = …; … };        // a type of its own, equality comparable
///     Policy(const Config&, const StorageContext&);      // throws ConfigError
///     void reserve(std::size_t rows);                    // may throw; all memory for `commit`
///     void release_unused() noexcept;                     // gives back what `reserve` obtained
///     void commit(const Segment& rows);                  // the next rows of the text
///     void segments(const ReadRequest&, SegmentList& out) const;
///     std::size_t rows() const, bytes() const, shared_bytes() const;
///
/// Copying a policy makes a fork; with the library's storages the default copy does. What a policy
/// may have besides, and what stands in for it otherwise: policy/policy_traits.hpp. A policy that
/// selects, compresses, accumulates or shares has all members of the concept below.
template <class P>
concept KvPolicy =
    std::copyable<P> && Element<typename P::element_type> && std::equality_comparable<typename P::Config> &&
    std::constructible_from<P, const typename P::Config&, const StorageContext&> &&
    requires(P policy, const P& seen, std::size_t n, const Segment& rows, const ReadRequest& request,
             SegmentList& out) {
      policy.reserve(n);
      policy.release_unused();
      policy.commit(rows);
      seen.segments(request, out);
      { seen.rows() } -> std::convertible_to<std::size_t>;
      { seen.bytes() } -> std::convertible_to<std::size_t>;
      { seen.shared_bytes() } -> std::convertible_to<std::size_t>;
    };

/// Settings of a policy, which say whose they are.
template <class C>
concept PolicyConfig = std::same_as<typename C::policy_type::Config, C>;

/// Gives a selecting policy the scores of its chunks: the dot products of one query [head_dim] with
/// `out.size()` dense rows. An attention engine, whatever its type.
class ChunkScorer {
 public:
  virtual ~ChunkScorer() = default;
  virtual void score(const Plane& rows, std::span<const float> query, std::span<float> out) = 0;
};

/// A policy that chooses which committed rows to read (ChunkRetrievalCache).
template <class P>
concept SelectingPolicy = requires(P& policy, const P& seen, std::span<const float> queries,
                                   ChunkScorer& scorer, std::size_t tokens) {
  // Whether a selected read must choose first.
  { seen.selection_is_stale() } -> std::convertible_to<bool>;
  // Chooses for the queries [group, head_dim]; `tokens`: of the text, with the query that
  // chooses. Throws with the choice as it was. `segments` shows the new choice at once.
  policy.prepare_refresh(queries, scorer, tokens);
  policy.finish_refresh();      // noexcept: the new choice stays
  policy.abandon_refresh();     // noexcept: the old one does
  policy.undo_refresh(tokens);  // noexcept: the text ends after `tokens` tokens now
  policy.forget_selection();    // noexcept: the next selected read chooses first
};

/// A policy that drops rows by rank (HeadBudgetCache), mostly by how much attention they got.
template <class P>
concept CompressingPolicy = requires(P& policy, const P& seen, const typename P::Config& config,
                                     std::span<const float> sums, std::size_t n) {
  // Latest queries whose attention decides; the cache keeps them. 0: no query is asked.
  { P::observed_queries(config) } -> std::convertible_to<std::size_t>;
  { seen.observed_queries() } -> std::convertible_to<std::size_t>;
  // Whether the settings make it compress unasked, and whether they do now.
  { P::compresses_by_itself(config) } -> std::convertible_to<bool>;
  { seen.wants_compress() } -> std::convertible_to<bool>;
  // Whether rows would go once `n` more were committed.
  { seen.is_compressible(n) } -> std::convertible_to<bool>;
  // (sums [group, rows] of the observed queries, group, number of queries): copies the
  // survivors, and throws with everything as it was.
  policy.prepare_compress(sums, n, n);
  policy.finish_compress();   // noexcept: the survivors replace the rows
  policy.abandon_compress();  // noexcept: the rows stay
};

/// One of them that adds up how much attention each row gets: the cache observes every call.
template <class P>
concept AccumulatingPolicy =
    CompressingPolicy<P> && requires(P& policy, const P& seen, std::span<const float> sums,
                                     std::span<const double> others, std::size_t group) {
      policy.accumulate(sums, group);  // noexcept; sums [group, rows] of a call's queries
      { seen.accumulated() } -> std::convertible_to<std::span<const double>>;
      policy.inherit(others);  // what another head that holds the same rows has added up
    };

/// One of them that may compete with the other heads of its layer for rows.
template <class P>
concept AdaptiveBudgetPolicy =
    CompressingPolicy<P> &&
    requires(P& policy, const P& seen, const typename P::Config& config, std::span<const float> sums,
             std::size_t n, std::vector<std::size_t> rows) {
      { seen.is_adaptive_in_layer() } -> std::convertible_to<bool>;
      { P::is_adaptive_in_layer(config) } -> std::convertible_to<bool>;
      // Whether heads of these two settings may share: they agree in all but the budget.
      { P::may_share(config, config) } -> std::convertible_to<bool>;
      { seen.compete(sums, n, n) } -> std::same_as<SharingHead>;
      policy.prepare_survivors(std::move(rows));
    };

/// Contiguous rows [count, head_dim] from a plain pointer, as policies take and engines read them.
/// Stand-alone use of a policy begins here; a row's position is its place in the text.
template <Element T>
[[nodiscard]] Segment rows_of(const T* keys, const T* values, std::size_t count, std::size_t head_dim,
                              std::int64_t position) {
  const auto plane = [&](const T* rows) {
    return Plane{.format = {.encoding = encoding_of<T>},
                 .base = reinterpret_cast<const std::byte*>(rows),
                 .row_stride = head_dim * sizeof(T)};
  };
  return {.keys = plane(keys), .values = plane(values), .rows = count, .position = position};
}

}  // namespace kvpolicy
