// SPDX-License-Identifier: Apache-2.0
//
// Which queries a ring of the latest ones holds. The host's ring (cache/observation_window.hpp) and the
// device's (cuda/query_ring.hpp) keep their books here; only where the numbers lie differs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

namespace kvpolicy {

/// The text positions [begin, end) of queries in a ring of `slots`; a query lies in the slot of its
/// position modulo `slots`.
class QueryRange {
 public:
  explicit QueryRange(std::size_t slots) : slots_{slots} {}

  [[nodiscard]] std::size_t slots() const { return slots_; }
  [[nodiscard]] std::size_t begin() const { return begin_; }
  [[nodiscard]] std::size_t end() const { return end_; }
  [[nodiscard]] std::size_t size() const { return end_ - begin_; }

  /// `count` queries came, the first at `position`.
  void push(std::size_t position, std::size_t count) noexcept {
    if (slots_ == 0) return;
    if (position > end_) begin_ = position;  // queries between were never shown
    end_ = position + count;
    begin_ = std::max(begin_, end_ - std::min(end_, slots_));
  }
  /// Forgets the queries from `position` on.
  void truncate(std::size_t position) noexcept {
    end_ = std::min(end_, position);
    begin_ = std::min(begin_, end_);
  }
  /// The queries at `root + path[i]` were moved to `root + i`. All other queries from `root` on are forgotten.
  /// `path` ascends.
  void accept(std::size_t root, std::span<const std::size_t> path) noexcept {
    const QueryRange before = *this;
    truncate(root);
    for (std::size_t i = 0; i < path.size(); ++i) {
      if (before.holds(root + path[i])) push(root + i, 1);  // else it came without a query
    }
  }
  /// The ring holds the `count` queries that end at `end`, and no others, as many as it has room for.
  void reset(std::size_t end, std::size_t count) noexcept {
    begin_ = end - std::min(count, slots_);
    end_ = end;
  }
  [[nodiscard]] bool holds(std::size_t position) const { return begin_ <= position && position < end_; }

 private:
  std::size_t slots_;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
};

}  // namespace kvpolicy
