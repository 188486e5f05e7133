// SPDX-License-Identifier: Apache-2.0
//
// One side of a head whose latest rows are exact and whose other rows are quantised
// (residual_storage.hpp): how rows pass from the one part to the other. When they do is not decided here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/storage/plane_store.hpp>
#include <kvpolicy/storage/storage_context.hpp>

namespace kvpolicy::detail {

/// The keys or the values of a head: quantised rows [begin, boundary), then exact rows [boundary, end).
/// Copying makes a fork. Not synchronised.
class ResidualSide {
 public:
  /// Exact rows are kept as `exact`, quantised ones in `format`.
  ResidualSide(const RowFormat& format, Encoding exact, const StorageContext& context)
      : quantized_{format, context, exact}, exact_{{.encoding = exact}, context} {}

  [[nodiscard]] std::size_t begin() const {
    return quantized_.rows() > 0 ? quantized_.begin() : exact_.begin();
  }
  [[nodiscard]] std::size_t end() const { return exact_.end(); }
  [[nodiscard]] std::size_t boundary() const { return exact_.begin(); }
  [[nodiscard]] std::size_t bytes() const { return quantized_.bytes() + exact_.bytes(); }
  [[nodiscard]] std::size_t shared_bytes() const { return quantized_.shared_bytes() + exact_.shared_bytes(); }
  [[nodiscard]] std::size_t overhead_bytes() const {
    return quantized_.overhead_bytes() + exact_.overhead_bytes();
  }
  [[nodiscard]] StorageContext context() const { return quantized_.context(); }
  [[nodiscard]] RowFormat format() const { return quantized_.format(); }
  [[nodiscard]] PlaneStore& quantized() { return quantized_; }
  [[nodiscard]] const PlaneStore& quantized() const { return quantized_; }
  [[nodiscard]] Plane plane(std::size_t row) const {
    return row < boundary() ? quantized_.plane(row) : exact_.plane(row);
  }

  /// Obtains the pages for appending rows up to number `to`, of which those before `new_boundary` are then
  /// quantised, if at most `window` rows and at most `exact_rows` exact ones are held at any time.
  /// @throws std::bad_alloc, or what the pool throws
  void reserve(std::size_t to, std::size_t new_boundary, std::size_t window, std::size_t exact_rows) {
    quantized_.reserve(boundary(), new_boundary, window);
    exact_.reserve(end(), to, exact_rows);
  }
  void release_unused() noexcept {
    quantized_.release_unused();
    exact_.release_unused();
  }

  /// `rows` begins at row number end(); afterwards the side holds [front, to), of which the rows before
  /// `new_boundary` are quantised. Rows go before others come, so that their pages can serve again.
  void append(const Plane& rows, std::size_t to, std::size_t front, std::size_t new_boundary) {
    const std::size_t old_end = end();
    const std::size_t next = std::max(front, boundary());
    if (front < quantized_.end()) {
      quantized_.drop_front(std::max(front, quantized_.begin()));
    } else {
      quantized_.skip_to(new_boundary > next ? next : quantized_.end());
    }
    if (new_boundary > next) {
      if (quantized_.rows() == 0) quantized_.skip_to(next);
      // Rows that leave the residual, then rows that never enter it.
      const std::size_t leaving = std::min(new_boundary, std::max(next, old_end)) - next;
      const std::size_t passing = new_boundary - next - leaving;
      quantized_.append(leaving > 0 ? exact_.plane(next) : Plane{}, leaving,
                        passing > 0 ? rows.from(new_boundary - passing - old_end) : Plane{}, passing);
    }
    if (quantized_.rows() == 0) quantized_.drop_front(quantized_.end());
    const std::size_t first = std::max({front, new_boundary, exact_.begin()});
    const std::size_t first_new = std::max(first, old_end);
    first < old_end ? exact_.drop_front(first) : exact_.skip_to(first);
    exact_.append(rows.from(first_new - old_end), to - first_new);
    if (exact_.rows() == 0) exact_.drop_front(exact_.end());
  }

  /// Appends `count` rows in the form in which another side keeps them, the first as row number `first`:
  /// quantised rows before exact ones.
  void take(const Plane& rows, std::size_t count, std::size_t first) {
    const std::size_t unit = this->unit();
    if (quantized_.rows() == 0 && exact_.end() == 0) {
      quantized_.skip_to(is_quantized(rows.format.encoding) ? first / unit * unit : 0);
      exact_.skip_to(first / unit * unit);
    }
    if (!is_quantized(rows.format.encoding)) return exact_.append(rows, count);
    KVPOLICY_ASSERT(rows.format == format() && exact_.rows() == 0);
    // A part may end inside a group of rows, because the other side's does: then the next one takes it.
    const std::size_t open = first - quantized_.end();
    Plane all = rows;
    all.first_row -= open;
    quantized_.append(all, (open + count) / unit * unit);
    exact_.skip_to(quantized_.end());
  }

  /// Copies the rows of these ascending numbers into an empty side, each in the form that it has.
  void select(std::span<const std::size_t> numbers, ResidualSide& kept) const {
    const auto exact = std::ranges::lower_bound(numbers, boundary());
    const auto quantized_count = static_cast<std::size_t>(exact - numbers.begin());
    for (const std::size_t number : numbers.first(quantized_count)) {
      kept.quantized_.append(quantized_.plane(number), 1);
    }
    kept.exact_.skip_to(quantized_count);
    for (const std::size_t number : numbers.subspan(quantized_count)) {
      kept.exact_.append(exact_.plane(number), 1);
    }
  }

  template <class Archive>
  void serialize(Archive& archive) {
    archive(quantized_, exact_);
    archive.check(
        quantized_.rows() == 0 ? quantized_.end() <= exact_.begin() : quantized_.end() == exact_.begin(),
        "exact rows right after the quantised ones");
    archive.check(exact_.begin() % unit() == 0, "rows quantised in groups of ", unit());
  }

 private:
  // Rows that are quantised together.
  [[nodiscard]] std::size_t unit() const {
    const RowFormat own = format();
    return own.granularity == Granularity::per_channel ? own.group : 1;
  }

  PlaneStore quantized_;
  PlaneStore exact_;
};

}  // namespace kvpolicy::detail
