// SPDX-License-Identifier: Apache-2.0
//
// Counts how many rows of a layer are appended and committed, with the arithmetic of commit and rollback.
// The host cache, the device cache and the kernels use the same functions: a kernel advances its counters
// on the device while the device cache computes the same counters on the host.
#pragma once

#include <kvpolicy/core/host_device.hpp>

namespace kvpolicy {

/// Two counters. `Int` is std::size_t on the host and int in kernels.
template <class Int>
struct TextProgress {
  Int tokens = 0;     ///< rows appended, tentative ones included
  Int committed = 0;  ///< the oldest of them, which can no longer be taken back

  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int uncommitted() const { return tokens - committed; }

  /// The progress after a call that appends `rows` rows. The call commits all rows up to the first
  /// `commit_rows` of its own, except the latest `max_rollback` of those. A step commits all its rows
  /// (`commit_rows` = `rows`), an append commits none (0), and a commit brings no row (`rows` = 0).
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr TextProgress after(Int rows, Int commit_rows,
                                                                  Int max_rollback) const {
    return {tokens + rows, detail::larger(committed, detail::minus(tokens + commit_rows, max_rollback))};
  }
  /// How many rows such a call commits: the oldest of those that were not committed and of its own.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int leaving(Int commit_rows, Int max_rollback) const {
    return after(0, commit_rows, max_rollback).committed - committed;
  }

  /// Whether a rollback to the first `length` tokens is possible.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr bool can_return_to(Int length) const {
    return committed <= length && length <= tokens;
  }
  /// Whether `rows` more rows fit into a text of at most `max_tokens`; 0: any number fits.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr bool has_room(Int rows, Int max_tokens) const {
    return max_tokens == 0 || rows <= detail::minus(max_tokens, tokens);
  }

  friend bool operator==(const TextProgress&, const TextProgress&) = default;
};

}  // namespace kvpolicy
