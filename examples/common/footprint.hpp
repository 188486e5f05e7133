// SPDX-License-Identifier: Apache-2.0
//
// How much a cache holds and for how long: rows times the tokens for which they are held, as a share of what a full
// cache comes to.
//
// Method: the KV footprint of PruLong, arXiv:2506.17121: how many KV entries are stored, and for how long. It counts
// rows, whatever their precision: bytes are another number. Time is counted in tokens, one step each, so that
// it does not matter in how many calls a text comes: while a token is read, a head holds what it held before the call
// and the rows of the call up to the token's own. What a head drops goes at the end of a call.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpolicy::tools {

/// Adds up rows over the tokens of one text. A copy goes on for a fork.
class Footprint {
 public:
  /// A call read `tokens`, each of which gave a row to each of `heads`; before it these held `rows` together.
  void add(std::size_t rows, std::size_t heads, std::size_t tokens) {
    row_steps_ += std::uint64_t{rows} * tokens + sum_to(tokens) * heads;
  }
  /// Rows times the tokens for which they were held.
  [[nodiscard]] std::uint64_t row_steps() const { return row_steps_; }
  /// The same as a share of what heads come to that keep each row of a text of `tokens`. 0 for no text.
  [[nodiscard]] double share_of_full(std::size_t heads, std::size_t tokens) const {
    const std::uint64_t full = sum_to(tokens) * heads;
    return full == 0 ? 0.0 : static_cast<double>(row_steps_) / static_cast<double>(full);
  }

 private:
  [[nodiscard]] static std::uint64_t sum_to(std::size_t count) {
    return std::uint64_t{count} * (count + 1) / 2;
  }

  std::uint64_t row_steps_ = 0;
};

}  // namespace kvpolicy::tools
