// SPDX-License-Identifier: Apache-2.0
//
// Keeps track of which pieces of a file are in memory, and decides which of them to release for others. It
// reads nothing itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <vector>

namespace kvpolicy::offload {

/// Pieces are numbered, and every use has a time. The pieces of the last `fetch` and of the
/// read-ahead after it are never released. Of the others, the most recently used are released
/// first: layers are read in a cycle, so the layer that was just read will not be read for the
/// longest time. Pieces that were not used for `forgotten_after` uses are released before all
/// others. Not synchronised.
class Residency {
 public:
  /// Uses after which a piece counts as forgotten. It exceeds the number of layers of several
  /// sequences that alternate.
  static constexpr std::uint64_t forgotten_after = 4096;

  explicit Residency(std::size_t budget) : budget_{budget} {}

  [[nodiscard]] std::size_t budget() const { return budget_; }
  [[nodiscard]] std::size_t resident() const { return resident_; }
  [[nodiscard]] bool is_resident(std::size_t piece) const { return used_[piece] != never; }

  /// Sets the number of pieces.
  void grow(std::size_t pieces) { used_.resize(pieces, never); }

  enum class Use : std::uint8_t { fetch, ahead, other };
  /// Begins a use of the file, which the following calls of `use` belong to. @throws std::bad_alloc
  void begin(Use kind) {
    const auto added = uses_.try_emplace(uses_.end(), now_ + 1);
    if (added != uses_.begin() && std::prev(added)->second.live == 0) uses_.erase(std::prev(added));
    ++now_;
    if (kind == Use::fetch) fetched_ = ahead_ = now_;
    if (kind == Use::ahead) ahead_ = now_;
  }
  /// Records that the piece is in memory. @throws std::bad_alloc
  void use(std::size_t piece) {
    if (used_[piece] == now_) return;
    Pieces& mine = uses_[now_];
    mine.pieces.push_back(piece);
    ++mine.live;
    forget(piece);
    used_[piece] = now_;
    ++resident_;
  }
  /// How many pieces fit in addition to those of the last fetch.
  [[nodiscard]] std::size_t room() const {
    const auto fetched = uses_.find(fetched_);
    const std::size_t taken = fetched == uses_.end() ? 0 : fetched->second.live;
    return budget_ > taken ? budget_ - taken : 0;
  }

  /// Calls give_up(piece) until the budget is kept or only pieces of the last fetch and read-ahead are
  /// left.
  template <class GiveUp>
  void shrink(GiveUp give_up) {
    while (resident_ > budget_) {
      auto victims = uses_.begin();
      while (victims != uses_.end() && is_safe(victims->first)) ++victims;
      if (victims == uses_.end()) return;
      if (victims->first + forgotten_after > now_) {
        victims = std::prev(uses_.end());
        while (is_safe(victims->first)) --victims;
      }
      const std::uint64_t time = victims->first;
      std::vector<std::size_t>& pieces = victims->second.pieces;
      while (resident_ > budget_ && !pieces.empty()) {
        const std::size_t piece = pieces.back();
        pieces.pop_back();
        if (used_[piece] != time) continue;  // used again later
        used_[piece] = never;
        --victims->second.live;
        --resident_;
        give_up(piece);
      }
      if (victims->second.live == 0) uses_.erase(victims);
    }
  }

 private:
  static constexpr std::uint64_t never = std::numeric_limits<std::uint64_t>::max();
  struct Pieces {
    std::vector<std::size_t> pieces;  // used at that time; some may have been used again later
    std::size_t live = 0;             // how many were not used again
  };

  [[nodiscard]] bool is_safe(std::uint64_t time) const { return time == fetched_ || time == ahead_; }
  // Removes a piece from its previous use.
  void forget(std::size_t piece) {
    if (used_[piece] == never) return;
    const auto before = uses_.find(used_[piece]);
    --resident_;
    if (--before->second.live == 0) uses_.erase(before);
  }

  std::size_t budget_;
  std::size_t resident_ = 0;
  std::uint64_t now_ = 0;
  std::uint64_t fetched_ = 0;
  std::uint64_t ahead_ = 0;
  std::vector<std::uint64_t> used_;  // time of each piece's latest use; never: not in memory
  std::map<std::uint64_t, Pieces> uses_;
};

}  // namespace kvpolicy::offload
