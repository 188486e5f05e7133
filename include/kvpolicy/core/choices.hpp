// SPDX-License-Identifier: Apache-2.0
//
// A head's choices of chunks as a rollback sees them. A choice belongs to the text up to the query
// that made it. When that query is taken back, the choice goes, and the one before it is read again.
// A ring remembers the latest choices. After a longer rollback the head chooses anew.
#pragma once

#include <kvpolicy/core/host_device.hpp>

namespace kvpolicy {

/// Whether a rollback to `length` tokens takes back a choice; with the query that made it the text had
/// `chosen_at` tokens.
template <class Int>
[[nodiscard]] KVPOLICY_HOST_DEVICE constexpr bool is_taken_back(Int chosen_at, Int length) {
  return chosen_at > length;
}

/// Where a ring of choices stands.
template <class Int>
struct ChoiceRing {
  Int latest = 0;  ///< slot of the latest choice
  Int valid = 0;   ///< choices that are still valid, the latest included
  Int slots = 0;

  /// With one more choice, made at `length` tokens, which goes into the slot `latest`. `tokens` [slots]
  /// are the lengths at which the choices were made. A choice at the length of the latest one replaces
  /// it, because every rollback drops both or none.
  [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr ChoiceRing after_choice(Int length,
                                                                       const Int* tokens) const {
    if (valid > 0 && tokens[latest] == length) return *this;
    return {(latest + 1) % slots, detail::smaller(valid + 1, slots), slots};
  }
  /// Without the choices that a rollback to `length` tokens takes back.
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
