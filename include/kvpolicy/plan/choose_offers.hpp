// SPDX-License-Identifier: Apache-2.0
//
// The inner part of plan search (plan/search.hpp): each head has offers, which take bytes of memory and bytes that a
// step reads, and do damage; one offer a head, so that the damage is small within a limit of one kind of bytes or of
// both.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include <kvpolicy/plan/saturating.hpp>

namespace kvpolicy::detail {

/// One choice for one head: the index of the choice, its bytes and its damage, and the bytes that a step reads of it.
struct Offer {
  std::size_t choice = 0;
  std::size_t bytes = 0;
  double damage = 0;
  double read = 0;
};

/// One head's offers in ascending bytes, without those that another offer beats in both bytes and damage.
[[nodiscard]] inline std::vector<Offer> worthwhile(std::vector<Offer> offers) {
  // If two are equal in both, the first choice stays.
  std::ranges::sort(offers, {},
                    [](const Offer& offer) { return std::tuple{offer.bytes, offer.damage, offer.choice}; });
  std::vector<Offer> kept;
  for (const Offer& offer : offers) {
    if (kept.empty() || offer.damage < kept.back().damage) kept.push_back(offer);
  }
  return kept;
}

/// The index of the offer that costs least if a byte costs `price`; the smaller offer if two cost the same.
[[nodiscard]] inline std::size_t cheapest(std::span<const Offer> offers, double price) {
  const auto cost = [&](const Offer& offer) {
    return offer.damage + price * static_cast<double>(offer.bytes);
  };
  return static_cast<std::size_t>(std::ranges::min_element(offers, {}, cost) - offers.begin());
}

/// One offer index for each head, with at most `budget` bytes in total. The damage exceeds the minimum by
/// at most the difference between two choices of one head. Every head must have an offer. Returns nothing
/// if even the smallest offers do not fit.
[[nodiscard]] inline std::optional<std::vector<std::size_t>> choose_offers(
    std::span<const std::vector<Offer>> heads, std::size_t budget) {
  std::vector<std::size_t> chosen(heads.size(), 0);
  std::size_t used = 0;
  for (const auto& offers : heads) {
    if (offers.front().bytes > budget - used) return std::nullopt;
    used += offers.front().bytes;
  }
  const auto at_price = [&](double price) {
    std::vector<std::size_t> indices;
    for (const auto& offers : heads) indices.push_back(cheapest(offers, price));
    return indices;
  };
  const auto bytes_of = [&](const std::vector<std::size_t>& indices) {
    std::size_t sum = 0;
    for (std::size_t i = 0; i < heads.size(); ++i) {
      sum = saturating_sum(sum, heads[i][indices[i]].bytes);
    }
    return sum;
  };
  // The price is found by bisection of its logarithm. At the highest price every head takes its smallest
  // offer.
  double low = 1e-30;
  double high = 0;
  for (const auto& offers : heads) high = std::max(high, offers.front().damage + 1.0);
  if (const auto free = at_price(0.0); bytes_of(free) <= budget) {
    chosen = free;
  } else {
    for (int step = 0; step < 200 && high > low * (1 + 1e-12); ++step) {
      const double price = std::sqrt(low * high);
      auto indices = at_price(price);
      if (bytes_of(indices) <= budget) {
        chosen = std::move(indices);
        high = price;
      } else {
        low = price;
      }
    }
  }
  // The remaining bytes go to single changes: each time to the one that avoids the most damage per byte.
  used = bytes_of(chosen);
  for (;;) {
    std::size_t best_head = heads.size();
    std::size_t best_index = 0;
    double best_gain = 0;
    for (std::size_t i = 0; i < heads.size(); ++i) {
      const Offer& now = heads[i][chosen[i]];
      for (std::size_t index = chosen[i] + 1; index < heads[i].size(); ++index) {
        const std::size_t more = heads[i][index].bytes - now.bytes;
        if (more > budget - used) break;
        const double gain = (now.damage - heads[i][index].damage) / static_cast<double>(more);
        if (gain > best_gain) {
          best_gain = gain;
          best_head = i;
          best_index = index;
        }
      }
    }
    if (best_head == heads.size()) return chosen;
    used += heads[best_head][best_index].bytes - heads[best_head][chosen[best_head]].bytes;
    chosen[best_head] = best_index;
  }
}

/// One head's offers in ascending bytes, without those that another one beats in bytes, in what is read, and in damage.
[[nodiscard]] inline std::vector<Offer> worthwhile_in_both(std::vector<Offer> offers) {
  std::ranges::sort(offers, {}, [](const Offer& offer) {
    return std::tuple{offer.bytes, offer.read, offer.damage, offer.choice};
  });
  std::vector<Offer> kept;
  for (const Offer& offer : offers) {
    const bool beaten = std::ranges::any_of(
        kept, [&](const Offer& other) { return other.read <= offer.read && other.damage <= offer.damage; });
    if (!beaten) kept.push_back(offer);
  }
  return kept;
}

/// Chooses within a limit of bytes and a limit of what is read. Two limits have two prices. Their ratio goes through a
/// list of values; for each, a price per share of the limits is found as for one limit, at which both hold. What is
/// left of both goes to single heads, and the ratio with the least damage counts.
class TwoLimits {
 public:
  TwoLimits(std::span<const std::vector<Offer>> heads, std::size_t bytes, double read)
      : heads_{heads}, bytes_{std::max(static_cast<double>(bytes), 1.0)}, read_{std::max(read, 1.0)} {}

  /// One offer index for each head, or nothing if no choice was found that fits.
  [[nodiscard]] std::optional<std::vector<std::size_t>> choose() const {
    std::optional<std::vector<std::size_t>> best;
    Totals least;
    constexpr int ratios = 64;
    for (int ratio = 0; ratio <= ratios; ++ratio) {
      auto found = at_ratio(static_cast<double>(ratio) / ratios);
      if (!found) continue;
      fill(*found);
      const Totals own = totals(*found);
      if (!best || std::tuple{own.damage, own.bytes} < std::tuple{least.damage, least.bytes}) {
        best = std::move(found);
        least = own;
      }
    }
    return best;
  }

 private:
  struct Totals {
    double bytes = 0;
    double read = 0;
    double damage = 0;
  };

  [[nodiscard]] Totals totals(std::span<const std::size_t> indices) const {
    Totals sum;
    for (std::size_t i = 0; i < indices.size(); ++i) add(sum, heads_[i][indices[i]], 1.0);
    return sum;
  }
  static void add(Totals& sum, const Offer& offer, double times) {
    sum.bytes += times * static_cast<double>(offer.bytes);
    sum.read += times * offer.read;
    sum.damage += times * offer.damage;
  }
  static Totals swapped(Totals sum, const Offer& from, const Offer& to) {
    add(sum, from, -1.0);
    add(sum, to, 1.0);
    return sum;
  }
  // By how much the limits are exceeded, as shares of them. Bytes are whole numbers; what is read is not, and its sums
  // are rounded.
  [[nodiscard]] double excess(const Totals& sum) const {
    const double bytes = sum.bytes > bytes_ ? (sum.bytes - bytes_) / bytes_ : 0.0;
    const double read = sum.read > read_ * (1.0 + 1e-12) ? (sum.read - read_) / read_ : 0.0;
    return bytes + read;
  }

  [[nodiscard]] std::vector<std::size_t> at_price(double price, double ratio) const {
    std::vector<std::size_t> indices;
    for (const auto& offers : heads_) {
      const auto weight = [&](const Offer& offer) {
        return (1.0 - ratio) * static_cast<double>(offer.bytes) / bytes_ + ratio * offer.read / read_;
      };
      // At an infinite price only the weight counts, and of equal weights the damage.
      const auto cost = [&](const Offer& offer) {
        const double own = weight(offer);
        return std::isinf(price) ? std::pair{own, offer.damage} : std::pair{offer.damage + price * own, own};
      };
      indices.push_back(
          static_cast<std::size_t>(std::ranges::min_element(offers, {}, cost) - offers.begin()));
    }
    return indices;
  }

  [[nodiscard]] std::optional<std::vector<std::size_t>> at_ratio(double ratio) const {
    const auto fits = [&](const std::vector<std::size_t>& indices) { return excess(totals(indices)) == 0.0; };
    std::vector<std::size_t> chosen = at_price(0.0, ratio);
    if (fits(chosen)) return chosen;
    chosen = at_price(std::numeric_limits<double>::infinity(), ratio);
    if (!fits(chosen) && !repair(chosen)) return std::nullopt;
    double most = 0;
    for (const auto& offers : heads_) {
      for (const Offer& offer : offers) most = std::max(most, offer.damage);
    }
    double low = 1e-30;
    double high = (most + 1.0) * std::max(bytes_, read_);
    for (int step = 0; step < 200 && high > low * (1 + 1e-12); ++step) {
      const double price = std::sqrt(low) * std::sqrt(high);
      auto indices = at_price(price, ratio);
      if (fits(indices)) {
        chosen = std::move(indices);
        high = price;
      } else {
        low = price;
      }
    }
    return chosen;
  }

  // Changes single heads until both limits hold, each time the one that exceeds them least then. Returns whether they
  // do.
  [[nodiscard]] bool repair(std::vector<std::size_t>& chosen) const {
    Totals sum = totals(chosen);
    for (double before = excess(sum); before > 0.0;) {
      std::pair least{before, std::numeric_limits<double>::infinity()};
      std::size_t head = heads_.size();
      std::size_t index = 0;
      for (std::size_t i = 0; i < heads_.size(); ++i) {
        for (std::size_t to = 0; to < heads_[i].size(); ++to) {
          const Totals other = swapped(sum, heads_[i][chosen[i]], heads_[i][to]);
          const std::pair own{excess(other), other.damage};
          if (own.first >= before || own >= least) continue;
          least = own;
          head = i;
          index = to;
        }
      }
      if (head == heads_.size()) return false;
      chosen[head] = index;
      sum = totals(chosen);
      before = excess(sum);
    }
    return true;
  }

  // The rest of both limits goes to single changes: each time to the one that avoids the most damage for its share of
  // them. One that takes less of both is free.
  void fill(std::vector<std::size_t>& chosen) const {
    for (;;) {
      const Totals sum = totals(chosen);
      double best = 0;
      std::size_t head = heads_.size();
      std::size_t index = 0;
      for (std::size_t i = 0; i < heads_.size(); ++i) {
        const Offer& now = heads_[i][chosen[i]];
        for (std::size_t to = 0; to < heads_[i].size(); ++to) {
          const Offer& other = heads_[i][to];
          if (!(other.damage < now.damage) || excess(swapped(sum, now, other)) > 0.0) continue;
          const double more =
              std::max(0.0, static_cast<double>(other.bytes) - static_cast<double>(now.bytes)) / bytes_ +
              std::max(0.0, other.read - now.read) / read_;
          const double gain = (now.damage - other.damage) / (more + 1e-12);
          if (gain <= best) continue;
          best = gain;
          head = i;
          index = to;
        }
      }
      if (head == heads_.size()) return;
      chosen[head] = index;
    }
  }

  std::span<const std::vector<Offer>> heads_;
  double bytes_;
  double read_;
};

}  // namespace kvpolicy::detail
