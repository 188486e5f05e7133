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

#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/storage/dense_storage.hpp>
#include <kvpolicy/storage/page.hpp>

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
///     struct Config { … };                               // a type of its own, equality comparable
///     Policy(const Config&, const StorageContext&);      // throws ConfigError
///     void reserve(std::size_t rows);                    // may throw; all memory for `commit`
///     void release_spare() noexcept;                     // gives back what `reserve` obtained
///     void commit(const Segment& rows);                  // the next rows of the text
///     void segments(const ReadRequest&, SegmentList& out) const;
///     std::size_t rows() const, bytes() const, shared_bytes() const;
///
/// Copying a policy makes a fork; with the library's storages the default copy does. Optional:
///
///     static void validate(const Config&, const StorageContext&);    // before any memory is asked for
///     void check(const Segment& rows) const;             // throws ShapeError for rows it cannot hold
///     void uncommitted(const Segment& rows, const ReadRequest&, SegmentList& out) const;
///                                                        // how rows not yet committed are seen;
///                                                        // nodes of a tree come with `positions`
///     static std::size_t bytes_of_tokens(const Config&, const StorageContext&, std::size_t tokens);
///                                                        // for HeadPlan::memory and max_context
///     static std::size_t bytes_of_step(const Config&, const StorageContext&, std::size_t tokens);
///     static std::size_t max_bytes(const Config&, const StorageContext&, std::size_t tokens);
///                                                        // for max_context: held while the last
///                                                        // of `tokens` rows comes, and a bound on
///                                                        // that which never falls; without them
///                                                        // bytes_of_tokens must never fall
///     static constexpr bool commit_changes_rows;         // see below
template <class P>
concept KvPolicy = std::copyable<P> && Element<typename P::element_type> &&
                   std::equality_comparable<typename P::Config> &&
                   std::constructible_from<P, const typename P::Config&, const StorageContext&> &&
                   requires(P policy, const P& seen, std::size_t n, const Segment& rows,
                            const ReadRequest& request, SegmentList& out) {
                     policy.reserve(n);
                     policy.release_spare();
                     policy.commit(rows);
                     seen.segments(request, out);
                     { seen.rows() } -> std::convertible_to<std::size_t>;
                     { seen.bytes() } -> std::convertible_to<std::size_t>;
                     { seen.shared_bytes() } -> std::convertible_to<std::size_t>;
                   };

/// A policy that chooses which committed rows to read (ChunkRetrievalCache).
template <class P>
concept SelectingPolicy = requires(const P& seen) {
  { seen.selection_is_stale() } -> std::convertible_to<bool>;
};

/// A policy that drops rows by rank (HeadBudgetCache), mostly by how much attention they got.
template <class P>
concept CompressingPolicy = requires(const P& seen) {
  { seen.observed_queries() } -> std::convertible_to<std::size_t>;
};

/// One of them that adds up how much attention each row gets: the cache observes every call.
template <class P>
concept AccumulatingPolicy =
    CompressingPolicy<P> && requires(P& policy, std::span<const float> sums, std::size_t group) {
      policy.accumulate(sums, group);
    };

/// One of them that may compete with the other heads of its layer for rows.
template <class P>
concept SharingPolicy = CompressingPolicy<P> && requires(const P& seen) {
  { seen.shares_in_layer() } -> std::convertible_to<bool>;
};

/// Whether rows of a head read otherwise after a commit than before: its storage quantises them, or the
/// policy says so itself. Which rows are read as exact then depends on when they are committed.
template <class P>
[[nodiscard]] constexpr bool commit_changes_rows() {
  if constexpr (requires { P::commit_changes_rows; }) {
    return P::commit_changes_rows;
  } else if constexpr (requires { P::storage_type::commit_changes_rows; }) {
    return P::storage_type::commit_changes_rows;
  } else {
    return false;
  }
}

/// Refuses settings that cannot work, if the policy says which.
template <class P>
void validate_policy(const typename P::Config& config, const StorageContext& context) {
  if constexpr (requires { P::validate(config, context); }) P::validate(config, context);
}

/// Rows that the cache holds itself, the caller's chunk among them, as `policy` wants them seen.
template <class P>
void show_uncommitted(const P& policy, const Segment& rows, const ReadRequest& request,
                      SegmentList& out) {
  if (rows.rows == 0) return;
  if constexpr (requires { policy.uncommitted(rows, request, out); }) {
    policy.uncommitted(rows, request, out);
  } else {
    out.push_back(rows);
  }
}

/// Contiguous rows [count, head_dim] from a plain pointer, as policies take and engines read them.
/// Stand-alone use of a policy begins here; a row's position is its place in the text.
template <Element T>
[[nodiscard]] Segment rows_of(const T* keys, const T* values, std::size_t count,
                              std::size_t head_dim, std::int64_t position) {
  const auto plane = [&](const T* rows) {
    return Plane{.format = {.encoding = encoding_of<T>},
                 .base = reinterpret_cast<const std::byte*>(rows),
                 .row_stride = head_dim * sizeof(T)};
  };
  return {.keys = plane(keys), .values = plane(values), .rows = count, .position = position};
}

}  // namespace kvpolicy
