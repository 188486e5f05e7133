// SPDX-License-Identifier: Apache-2.0
//
// Which units of a KV head's rows are read, by the bounds of their logits (core/bounded_attention.hpp): those with
// the largest bounds, until the others can hold no more than each query allows. The units are not sorted: an eighth
// of a power of two decides between them, which costs a pass and reads hardly more.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvpolicy/core/attention.hpp>

namespace kvpolicy::detail {

/// e^x, or up to 6.2 % more: the chord above 2^x between whole powers, which compilers can turn into vectors. Below -87
/// it is 2^-126, from 88.8 on infinite.
[[nodiscard]] inline float exp_at_least(float x) {
  constexpr float log2_e = 1.442695F;
  constexpr float bias = 127.0F + 0x1p-14F;  // more than rounding can take away
  const float power = std::min(std::max(x * log2_e + bias, 1.0F), 255.0F);
  return std::bit_cast<float>(static_cast<std::int32_t>(power * 0x1p23F));
}

/// The units of one KV head that were chosen, for all its queries together. Not synchronised.
class UnitChoice {
 public:
  /// Begins with none of `units` chosen.
  /// @throws std::bad_alloc
  void begin(std::size_t queries, std::size_t units) {
    queries_ = queries;
    units_ = units;
    rows_ = 0;
    chosen_.assign(units, 0);
    bins_of_.resize(units);
    shares_.resize(queries * units);
    left_.resize(queries);
    in_bins_.resize(bins * queries);
  }

  [[nodiscard]] bool is_chosen(std::size_t unit) const { return chosen_[unit] != 0; }
  /// Rows of the chosen units.
  [[nodiscard]] std::size_t rows() const { return rows_; }
  /// For each query: what the units that are left can hold, in parts of exp(allowed), as the last `add` was told.
  [[nodiscard]] std::span<const float> left() const { return left_; }

  /// Chooses further units until those that are left can hold exp(allowed[q]) at most for each query q, or until
  /// `most_rows` rows are chosen. `bounds` [queries, units] are finite; unit u has `rows_of(u)` rows. Returns whether
  /// it chose any.
  template <class RowsOf>
  bool add(std::span<const UnitBound> bounds, std::span<const float> allowed, std::size_t most_rows,
           RowsOf rows_of) {
    weigh(bounds, allowed);
    if (sum_left()) return false;
    const std::size_t before = rows_;
    take(lowest_bin_to_read(), most_rows, rows_of);
    static_cast<void>(sum_left());
    return rows_ != before;
  }

  /// Chooses all units, or as many of the first as `most_rows` allows.
  template <class RowsOf>
  void add_all(std::size_t most_rows, RowsOf rows_of) {
    for (std::size_t u = 0; u < units_; ++u) choose(u, most_rows, rows_of);
  }

 private:
  // Bins of what a unit can hold for the query that allows it least, in parts of what that allows: eight for each
  // power of two, from 2^-32 on. What alone is too much is in the last one.
  static constexpr std::size_t bins = 32 * 8 + 1;
  [[nodiscard]] static std::size_t bin_of(float share) {
    constexpr std::int32_t first = (127 - 32) * 8;
    const std::int32_t eighths = std::bit_cast<std::int32_t>(share) >> 20;
    return static_cast<std::size_t>(std::clamp<std::int32_t>(eighths - first, 0, bins - 1));
  }

  void weigh(std::span<const UnitBound> bounds, std::span<const float> allowed) {
    for (std::size_t q = 0; q < queries_; ++q) {
      const UnitBound* own = bounds.data() + q * units_;
      float* shares = shares_.data() + q * units_;
      const float base = allowed[q];
      for (std::size_t u = 0; u < units_; ++u) {
        shares[u] = chosen_[u] != 0 ? 0.0F : own[u].mass * exp_at_least(own[u].highest - base);
      }
    }
  }

  // What is left for each query; returns whether that is no more than each allows.
  [[nodiscard]] bool sum_left() {
    bool fits = true;
    for (std::size_t q = 0; q < queries_; ++q) {
      const float* shares = shares_.data() + q * units_;
      float sum[8] = {};  // apart, so that they are added in vectors
      std::size_t u = 0;
      for (; u + 8 <= units_; u += 8) {
        for (std::size_t i = 0; i < 8; ++i) sum[i] += chosen_[u + i] != 0 ? 0.0F : shares[u + i];
      }
      for (; u < units_; ++u) sum[0] += chosen_[u] != 0 ? 0.0F : shares[u];
      left_[q] = ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
      fits = fits && left_[q] <= 1.0F;
    }
    return fits;
  }

  // Units of lower bins together hold what each query allows, those of this one do not. Some query allows less than
  // all units hold.
  [[nodiscard]] std::size_t lowest_bin_to_read() {
    largest_.assign(units_, 0.0F);
    for (std::size_t q = 0; q < queries_; ++q) {
      const float* shares = shares_.data() + q * units_;
      for (std::size_t u = 0; u < units_; ++u) largest_[u] = std::max(largest_[u], shares[u]);
    }
    for (std::size_t u = 0; u < units_; ++u) bins_of_[u] = static_cast<std::uint16_t>(bin_of(largest_[u]));
    std::ranges::fill(in_bins_, 0.0F);
    for (std::size_t q = 0; q < queries_; ++q) {
      const float* shares = shares_.data() + q * units_;
      float* sums = in_bins_.data() + q * bins;
      for (std::size_t u = 0; u < units_; ++u) sums[bins_of_[u]] += shares[u];
    }
    std::size_t lowest = bins - 1;
    for (std::size_t q = 0; q < queries_; ++q) {
      float sum = 0.0F;
      for (std::size_t bin = 0; bin < lowest; ++bin) {
        sum += in_bins_[q * bins + bin];
        if (!(sum <= 1.0F)) lowest = bin;
      }
    }
    return lowest;
  }

  template <class RowsOf>
  void choose(std::size_t unit, std::size_t most_rows, RowsOf rows_of) {
    const std::size_t rows = rows_of(unit);
    if (chosen_[unit] != 0 || rows > most_rows - rows_) return;
    chosen_[unit] = 1;
    rows_ += rows;
  }

  // Chooses the units from bin `lowest` on; where there are too many, those of the highest bins.
  template <class RowsOf>
  void take(std::size_t lowest, std::size_t most_rows, RowsOf rows_of) {
    std::array<std::size_t, bins> rows_in = {};
    for (std::size_t u = 0; u < units_; ++u) {
      if (chosen_[u] == 0) rows_in[bins_of_[u]] += rows_of(u);
    }
    std::size_t room = most_rows - std::min(most_rows, rows_);
    std::size_t whole = bins;  // bins from here on are taken as a whole
    while (whole > lowest && rows_in[whole - 1] <= room) room -= rows_in[--whole];
    for (std::size_t u = 0; u < units_; ++u) {
      if (bins_of_[u] >= whole) choose(u, most_rows, rows_of);
    }
    for (std::size_t u = 0; u < units_ && whole > lowest && rows_ < most_rows; ++u) {
      if (bins_of_[u] + std::size_t{1} == whole) choose(u, most_rows, rows_of);
    }
  }

  std::size_t queries_ = 0;
  std::size_t units_ = 0;
  std::size_t rows_ = 0;
  std::vector<std::uint8_t> chosen_;    // [units]
  std::vector<float> shares_;           // [queries, units]
  std::vector<float> largest_;          // [units], of all queries
  std::vector<std::uint16_t> bins_of_;  // [units]
  std::vector<float> in_bins_;          // [queries, bins]
  std::vector<float> left_;             // [queries]
};

}  // namespace kvpolicy::detail
