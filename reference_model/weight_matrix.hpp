// SPDX-License-Identifier: Apache-2.0
//
// The weights of one linear layer or embedding, in the type in which a checkpoint stores them. They are
// never changed, so copies of a matrix share one memory: often the mapping of the checkpoint's file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <kvpolicy/core/dtype.hpp>

namespace kvpolicy::reference {

/// How a weight is stored. `int8` has one float scale for each row: weight = code * scale, with codes from
/// -127 to 127 and scale = largest magnitude of the row / 127.
enum class WeightFormat : std::uint8_t { float32, float16, bfloat16, int8 };

[[nodiscard]] std::string_view name_of(WeightFormat format) noexcept;
/// Bytes of one number, without scales.
[[nodiscard]] std::size_t bytes_of(WeightFormat format) noexcept;

/// Rounds a row to int8 codes, to nearest, and returns its scale: 0 if all weights are zeros or below 1e-36.
float quantize_row(std::span<const float> row, std::int8_t* codes);

class WeightMatrix {
 public:
  WeightMatrix() = default;

  /// Rounds `numbers` [rows, columns] to `format`. @throws ShapeError if the count differs
  WeightMatrix(std::size_t rows, std::size_t columns, std::vector<float> numbers,
               WeightFormat format = WeightFormat::float32);

  /// Uses the memory of `owner`, where `numbers` [rows, columns] are stored in `format` (not int8).
  /// Numbers that are not aligned as their type needs are copied.
  /// @throws ShapeError if the count of bytes differs
  WeightMatrix(std::size_t rows, std::size_t columns, WeightFormat format, std::span<const std::byte> numbers,
               std::shared_ptr<const void> owner);

  /// The matrix rounded to another format; itself if it has the format.
  [[nodiscard]] WeightMatrix as(WeightFormat format) const;

  [[nodiscard]] std::size_t rows() const noexcept { return rows_; }
  [[nodiscard]] std::size_t columns() const noexcept { return columns_; }
  [[nodiscard]] std::size_t size() const noexcept { return rows_ * columns_; }
  [[nodiscard]] WeightFormat format() const noexcept { return format_; }
  /// Bytes of numbers and scales, mapped or not.
  [[nodiscard]] std::size_t bytes() const noexcept {
    return size() * bytes_of(format_) + scales().size_bytes();
  }

  /// The stored number of a row: float, float16, bfloat16 or std::int8_t, as the format says.
  template <class Number>
  [[nodiscard]] const Number* row(std::size_t row) const noexcept {
    return static_cast<const Number*>(numbers_) + row * columns_;
  }
  /// All of them as they are stored, without scales.
  [[nodiscard]] std::span<const std::byte> numbers() const noexcept {
    return {static_cast<const std::byte*>(numbers_), size() * bytes_of(format_)};
  }
  /// [rows] if the format is int8, else empty.
  [[nodiscard]] std::span<const float> scales() const noexcept {
    return scales_ ? std::span<const float>{*scales_} : std::span<const float>{};
  }

  /// Writes `count` rows as float. Exact.
  void copy_rows(std::size_t first, std::size_t count, float* out) const noexcept;
  [[nodiscard]] std::vector<float> to_floats() const;

  /// The matrix whose weights are these after `change(std::span<float>)`, rounded to the same format.
  template <class Change>
  [[nodiscard]] WeightMatrix changed(Change&& change) const {
    std::vector<float> numbers = to_floats();
    change(std::span<float>{numbers});
    return {rows_, columns_, std::move(numbers), format_};
  }

  /// Whether shapes and weights are the same, in whatever format.
  [[nodiscard]] friend bool operator==(const WeightMatrix& a, const WeightMatrix& b) { return a.equals(b); }

 private:
  [[nodiscard]] bool equals(const WeightMatrix& other) const;

  std::size_t rows_ = 0;
  std::size_t columns_ = 0;
  WeightFormat format_ = WeightFormat::float32;
  const void* numbers_ = nullptr;  // [rows, columns], in memory of owner_
  std::shared_ptr<const void> owner_;
  std::shared_ptr<const std::vector<float>> scales_;  // [rows] for int8
};

}  // namespace kvpolicy::reference
