// SPDX-License-Identifier: Apache-2.0
//
// Divides the KV heads of one layer among ranks (plan/shards.hpp).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

namespace kvpolicy {

/// Slots that the rows of a cut head are dealt to.
inline constexpr std::size_t row_slots = 1024;

/// The slot of a row.
[[nodiscard]] constexpr std::size_t slot_of_row(std::size_t row) noexcept { return row * 633 % row_slots; }

/// Some rows of a head: those in the slots [begin, end).
struct RowShare {
  std::size_t begin = 0;
  std::size_t end = row_slots;

  [[nodiscard]] constexpr bool is_whole() const noexcept { return begin == 0 && end == row_slots; }
  [[nodiscard]] constexpr bool has(std::size_t row) const noexcept {
    return slot_of_row(row) >= begin && slot_of_row(row) < end;
  }
  /// The share of all rows.
  [[nodiscard]] constexpr double share() const noexcept {
    return static_cast<double>(end - begin) / static_cast<double>(row_slots);
  }
  /// How many of the first `rows` rows these are.
  [[nodiscard]] constexpr std::size_t rows_of(std::size_t rows) const noexcept {
    std::size_t count = rows / row_slots * (end - begin);
    for (std::size_t row = rows / row_slots * row_slots; row < rows; ++row) count += has(row) ? 1 : 0;
    return count;
  }

  friend bool operator==(const RowShare&, const RowShare&) = default;
};

/// A KV head, or some of its rows, that a rank holds.
struct HeadPart {
  std::size_t head = 0;  ///< as in the whole model
  RowShare rows = {};
  double cost = 0;  ///< of a step, with the messages that merge a part

  friend bool operator==(const HeadPart&, const HeadPart&) = default;
};

namespace detail {

struct LayerLimits {
  std::size_t ranks = 1;
  std::size_t most_parts = 0;  // of a rank; 0: any number
  double merge_cost = 0;       // of a part of a cut head

  [[nodiscard]] bool has_room(std::size_t parts) const { return most_parts == 0 || parts < most_parts; }
};

// [ranks], each with its parts
using LayerParts = std::vector<std::vector<HeadPart>>;

[[nodiscard]] inline double slowest_of(const LayerParts& ranks) {
  double most = 0;
  for (const auto& parts : ranks) {
    double sum = 0;
    for (const HeadPart& part : parts) sum += part.cost;
    most = std::max(most, sum);
  }
  return most;
}

// The dearest first, of equal ones the first.
[[nodiscard]] inline std::vector<std::size_t> dearest_first(std::span<const double> costs) {
  std::vector<std::size_t> order(costs.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, std::greater{}, [&](std::size_t head) { return costs[head]; });
  return order;
}

// Divides whole heads: the dearest goes to the rank that has least so far (Graham, 1969), then a search by depth goes
// back on those choices, the last first, as long as something better can come of it. It gives up after some work, so it
// is exact for few heads.
class WholeHeads {
 public:
  WholeHeads(std::span<const double> costs, const LayerLimits& limits)
      : costs_{costs},
        limits_{limits},
        order_{dearest_first(costs)},
        loads_(limits.ranks, 0.0),
        parts_(limits.ranks, 0),
        rank_of_(costs.size(), 0) {
    const double all = std::accumulate(costs.begin(), costs.end(), 0.0);
    least_ = all / static_cast<double>(limits.ranks);
    if (!order_.empty()) least_ = std::max(least_, costs[order_.front()]);
  }

  [[nodiscard]] LayerParts find() {
    if (order_.size() > most_heads) {
      place_all();
    } else {
      place(0);
    }
    LayerParts ranks(limits_.ranks);
    for (std::size_t head = 0; head < costs_.size(); ++head) {
      ranks[best_[head]].push_back({head, {}, costs_[head]});
    }
    return ranks;
  }

 private:
  static constexpr std::size_t most_steps = 50'000;
  // More heads are divided once, which is near the best then.
  static constexpr std::size_t most_heads = 256;
  static constexpr double rounding = 1e-12;

  void place_all() {
    for (const std::size_t head : order_) {
      std::size_t least = limits_.ranks;
      for (std::size_t rank = 0; rank < limits_.ranks; ++rank) {
        if (limits_.has_room(parts_[rank]) && (least == limits_.ranks || loads_[rank] < loads_[least]))
          least = rank;
      }
      rank_of_[head] = least;
      loads_[least] += costs_[head];
      ++parts_[least];
    }
    best_ = rank_of_;
  }
  // Places the heads from `order_[at]` on.
  void place(std::size_t at) {
    if (at == order_.size()) {
      best_ = rank_of_;
      best_load_ = *std::ranges::max_element(loads_);
      return;
    }
    if (is_done()) return;
    ++steps_;
    const std::size_t head = order_[at];
    std::vector<std::size_t> ranks(limits_.ranks);
    std::iota(ranks.begin(), ranks.end(), std::size_t{0});
    std::ranges::stable_sort(ranks, {}, [&](std::size_t rank) { return loads_[rank]; });
    double tried = -1;
    std::size_t tried_parts = 0;
    for (const std::size_t rank : ranks) {
      if (!limits_.has_room(parts_[rank])) continue;
      // Ranks with the same load and room are alike.
      if (loads_[rank] == tried && parts_[rank] == tried_parts) continue;
      tried = loads_[rank];
      tried_parts = parts_[rank];
      if (loads_[rank] + costs_[head] >= best_load_ * (1 - rounding)) continue;
      const double before = loads_[rank];
      loads_[rank] += costs_[head];
      ++parts_[rank];
      rank_of_[head] = rank;
      place(at + 1);
      loads_[rank] = before;
      --parts_[rank];
      if (is_done()) return;
    }
  }
  [[nodiscard]] bool is_done() const {
    return !best_.empty() && (steps_ > most_steps || best_load_ <= least_ * (1 + rounding));
  }

  std::span<const double> costs_;
  const LayerLimits& limits_;
  std::vector<std::size_t> order_;
  std::vector<double> loads_;
  std::vector<std::size_t> parts_;
  std::vector<std::size_t> rank_of_;  // of each head
  std::vector<std::size_t> best_;
  double best_load_ = std::numeric_limits<double>::infinity();
  double least_ = 0;
  std::size_t steps_ = 0;
};

[[nodiscard]] inline LayerParts whole_heads(std::span<const double> costs, const LayerLimits& limits) {
  if (costs.empty()) return LayerParts(limits.ranks);
  return WholeHeads{costs, limits}.find();
}

// Fills ranks up to `level`: first whole heads, those that cannot be cut before the others, then what is left of the
// others in parts, to the emptiest ranks. Returns nothing if not all fit.
[[nodiscard]] inline std::optional<LayerParts> fill(std::span<const double> costs,
                                                    const std::vector<bool>& cuttable,
                                                    const LayerLimits& limits, double level) {
  LayerParts ranks(limits.ranks);
  std::vector<double> room(limits.ranks, level);
  const auto emptiest = [&]() -> std::optional<std::size_t> {
    std::optional<std::size_t> found;
    for (std::size_t rank = 0; rank < limits.ranks; ++rank) {
      if (!limits.has_room(ranks[rank].size())) continue;
      if (!found || room[rank] > room[*found]) found = rank;
    }
    return found;
  };
  std::vector<std::size_t> left;
  const auto place_whole = [&](std::size_t head) {
    const auto rank = emptiest();
    if (!rank || room[*rank] < costs[head]) return false;
    ranks[*rank].push_back({head, {}, costs[head]});
    room[*rank] -= costs[head];
    return true;
  };
  const std::vector<std::size_t> order = dearest_first(costs);
  for (const std::size_t head : order) {
    if (!cuttable[head] && !place_whole(head)) return std::nullopt;
  }
  for (const std::size_t head : order) {
    if (cuttable[head] && !place_whole(head)) left.push_back(head);
  }
  for (const std::size_t head : left) {
    for (std::size_t slot = 0; slot < row_slots;) {
      const auto rank = emptiest();
      if (!rank || !(costs[head] > 0)) return std::nullopt;
      const double fits = std::floor((room[*rank] - limits.merge_cost) / costs[head] * row_slots + 1e-6);
      if (fits < 1) return std::nullopt;
      const std::size_t slots =
          static_cast<std::size_t>(std::min(fits, static_cast<double>(row_slots - slot)));
      const RowShare rows{slot, slot + slots};
      const double cost = costs[head] * rows.share() + limits.merge_cost;
      ranks[*rank].push_back({head, rows, cost});
      room[*rank] -= cost;
      slot += slots;
    }
  }
  for (auto& parts : ranks) std::ranges::sort(parts, {}, &HeadPart::head);
  return ranks;
}

// Divides heads, some of them cut, so that the slowest rank costs as little as possible and less than `most`; nothing
// if that cannot be.
[[nodiscard]] inline std::optional<LayerParts> cut_heads(std::span<const double> costs,
                                                         const std::vector<bool>& cuttable,
                                                         const LayerLimits& limits, double most) {
  double low = std::accumulate(costs.begin(), costs.end(), 0.0) / static_cast<double>(limits.ranks);
  double high = most;
  if (!(low < high)) return std::nullopt;  // it is perfect already
  auto best = fill(costs, cuttable, limits, low);
  if (best) return best;
  constexpr int halvings = 30;
  for (int i = 0; i < halvings; ++i) {
    const double level = (low + high) / 2;
    if (auto found = fill(costs, cuttable, limits, level)) {
      best = std::move(found);
      high = level;
    } else {
      low = level;
    }
  }
  return best;
}

}  // namespace detail
}  // namespace kvpolicy
