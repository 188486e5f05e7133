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
#include <kvpolicy/policy/policy_roles.hpp>
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
///     using element_type = float | float16 | bfloat16;      // of its exact rows
///     struct Config { using policy_type = …; … };        // a type of its own, equality comparable
///     Policy(const Config&, const StorageContext&);      // throws ConfigError
///     void reserve(std::size_t rows);                    // may throw; all memory for `commit`
///     void release_unused() noexcept;                    // gives back what `reserve` obtained
///     void commit(const Segment& rows) noexcept;         // the next rows of the text, once reserved
///     void segments(const ReadRequest&, SegmentList& out) const;
///     std::size_t rows() const, bytes() const, shared_bytes() const;
///
/// Copying a policy makes a fork; with the library's storages the default copy does. What a policy
/// may have besides, and what stands in for it otherwise: policy/policy_traits.hpp; a policy that
/// selects, compresses, accumulates or shares: policy/policy_roles.hpp.
template <class P>
concept KvPolicy =
    std::copyable<P> && Element<typename P::element_type> && std::equality_comparable<typename P::Config> &&
    std::constructible_from<P, const typename P::Config&, const StorageContext&> &&
    requires(P policy, const P& seen, std::size_t n, const Segment& rows, const ReadRequest& request,
             SegmentList& out) {
      policy.reserve(n);
      { policy.release_unused() } noexcept;
      { policy.commit(rows) } noexcept;
      seen.segments(request, out);
      { seen.rows() } -> std::convertible_to<std::size_t>;
      { seen.bytes() } -> std::convertible_to<std::size_t>;
      { seen.shared_bytes() } -> std::convertible_to<std::size_t>;
    };

/// Settings of a policy, which say whose they are.
template <class C>
concept PolicyConfig = std::same_as<typename C::policy_type::Config, C>;

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
