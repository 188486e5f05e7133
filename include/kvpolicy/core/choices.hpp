// SPDX-License-Identifier: Apache-2.0
//
// Computes how rollbacks affect the selections of a ChunkRetrieval head. A selection (here also: a choice)
// belongs to the text up to the query that made it. A rollback that takes that query back also takes back
// the selection, and the head reads the selection before it again. A ring keeps the latest selections; a
// rollback past all of them makes the head choose a new one.
#pragma once

#include <kvpolicy/core/host_device.hpp>

namespace kvpolicy {

/// Whether a rollback to `length` tokens takes back a choice. `chosen_at` is the length of the text up to
/// and including the query that made the choice.
template <class Int>
[[nodiscard]] KVPOLICY_HOST_DEVICE constexpr bool is_taken_back(Int chosen_at, Int length) {
  return chosen_at > length;
}

/// The state of a ring of choices.
template <class Int>
struct ChoiceRing {
  Int latest = 0;  ///< slot of the latest choice
  Int valid = 0;   ///< choices that are still valid, the latest included
  Int slots = 0;

  /// The ring after one more choice, made at `length` tokens; the new choice belongs into the slot `latest`
  /// of the result. `tokens` [slots] are the lengths at which the choices were made. A choice at the length
  /// of the latest one replaces it, because every rollback drops both or none.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr ChoiceRing after_choice(Int length, const Int* tokens) const {
    if (valid > 0 && tokens[latest] == length) return *this;
    return {(latest + 1) % slots, detail::smaller(valid + 1, slots), slots};
  }
  /// The ring after a rollback to `length` tokens, which drops the choices made later.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr ChoiceRing after_rollback(Int length,
                                                                         const Int* tokens) const {
    ChoiceRing left = *this;
    while (left.valid > 0 && is_taken_back(tokens[left.latest], length)) {
      left.latest = (left.latest > 0 ? left.latest : slots) - 1;
      --left.valid;
    }
    return left;
  }

  friend bool operator==(const ChoiceRing&, const ChoiceRing&) = default;
};

}  // namespace kvpolicy
