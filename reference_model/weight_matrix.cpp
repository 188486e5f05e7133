// SPDX-License-Identifier: Apache-2.0
#include <reference_model/weight_matrix.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <utility>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy::reference {
namespace {

/// Puts numbers into shared memory.
template <class Number>
std::shared_ptr<const void> shared(std::vector<Number> numbers, const void*& data) {
  auto owner = std::make_shared<const std::vector<Number>>(std::move(numbers));
  data = owner->data();
  return owner;
}

template <class Number>
void to_float(const Number* numbers, std::size_t count, float* out) {
  for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<float>(numbers[i]);
}

}  // namespace

std::string_view name_of(WeightFormat format) noexcept {
  constexpr std::array<std::string_view, 4> format_names{"float32", "float16", "bfloat16", "int8"};
  return format_names[static_cast<std::size_t>(format)];
}

std::size_t bytes_of(WeightFormat format) noexcept {
  constexpr std::array<std::size_t, 4> bytes{4, 2, 2, 1};
  return bytes[static_cast<std::size_t>(format)];
}

float quantize_row(std::span<const float> row, std::int8_t* codes) {
  float largest = 0;
  for (const float weight : row) largest = std::max(largest, std::fabs(weight));
  const float codes_of_one = 127.0F / largest;
  if (!is_finite(codes_of_one)) {  // all zeros, or too small for a scale's inverse
    std::ranges::fill_n(codes, static_cast<std::ptrdiff_t>(row.size()), std::int8_t{0});
    return 0.0F;
  }
  for (std::size_t i = 0; i < row.size(); ++i) {
    const float code = std::clamp(std::nearbyint(row[i] * codes_of_one), -127.0F, 127.0F);
    codes[i] = static_cast<std::int8_t>(code);
  }
  // The quotient may have been rounded up, and 127 times that of the largest float is infinite.
  const float scale = largest / 127.0F;
  return is_finite(127.0F * scale) ? scale : std::nextafter(scale, 0.0F);
}

WeightMatrix::WeightMatrix(std::size_t rows, std::size_t columns, std::vector<float> numbers,
                           WeightFormat format)
    : rows_{rows}, columns_{columns}, format_{WeightFormat::float32} {
  require<ShapeError>(numbers.size() == rows * columns, "WeightMatrix: ", numbers.size(), " numbers for [",
                      rows, ", ", columns, "], expected ", rows * columns);
  owner_ = shared(std::move(numbers), numbers_);
  if (format != format_) *this = as(format);
}

WeightMatrix::WeightMatrix(std::size_t rows, std::size_t columns, WeightFormat format,
                           std::span<const std::byte> numbers, std::shared_ptr<const void> owner)
    : rows_{rows}, columns_{columns}, format_{format}, numbers_{numbers.data()}, owner_{std::move(owner)} {
  require<ShapeError>(format != WeightFormat::int8, "WeightMatrix: stored int8 has no scales");
  require<ShapeError>(numbers.size() == size() * bytes_of(format), "WeightMatrix: ", numbers.size(),
                      " bytes for [", rows, ", ", columns, "] of ", name_of(format), ", expected ",
                      size() * bytes_of(format));
  if (reinterpret_cast<std::uintptr_t>(numbers_) % bytes_of(format) != 0) {
    // Memory from operator new is aligned for every number.
    owner_ = shared(std::vector<std::byte>(numbers.begin(), numbers.end()), numbers_);
  }
}

WeightMatrix WeightMatrix::as(WeightFormat format) const {
  if (format == format_) return *this;
  WeightMatrix result;
  result.rows_ = rows_;
  result.columns_ = columns_;
  result.format_ = format;
  std::vector<float> row(columns_);
  const auto convert = [&]<class Number>(Number, auto&& round) {
    std::vector<Number> numbers(size());
    for (std::size_t i = 0; i < rows_; ++i) {
      copy_rows(i, 1, row.data());
      round(i, numbers.data() + i * columns_);
    }
    result.owner_ = shared(std::move(numbers), result.numbers_);
  };
  const auto each = [&]<class Number>(Number kind) {
    convert(kind, [&](std::size_t, Number* out) {
      std::ranges::transform(row, out, [](float x) { return static_cast<Number>(x); });
    });
  };
  switch (format) {
    case WeightFormat::float32: each(float{}); break;
    case WeightFormat::float16: each(float16{}); break;
    case WeightFormat::bfloat16: each(bfloat16{}); break;
    case WeightFormat::int8: {
      std::vector<float> scales(rows_);
      convert(std::int8_t{}, [&](std::size_t i, std::int8_t* out) { scales[i] = quantize_row(row, out); });
      result.scales_ = std::make_shared<const std::vector<float>>(std::move(scales));
    }
  }
  return result;
}

void WeightMatrix::copy_rows(std::size_t first, std::size_t count, float* out) const noexcept {
  switch (format_) {
    case WeightFormat::float32: return to_float(row<float>(first), count * columns_, out);
    case WeightFormat::float16: return to_float(row<float16>(first), count * columns_, out);
    case WeightFormat::bfloat16: return to_float(row<bfloat16>(first), count * columns_, out);
    case WeightFormat::int8: break;
  }
  for (std::size_t i = first; i < first + count; ++i, out += columns_) {
    const std::int8_t* codes = row<std::int8_t>(i);
    for (std::size_t c = 0; c < columns_; ++c) out[c] = static_cast<float>(codes[c]) * (*scales_)[i];
  }
}

std::vector<float> WeightMatrix::to_floats() const {
  std::vector<float> numbers(size());
  copy_rows(0, rows_, numbers.data());
  return numbers;
}

bool WeightMatrix::equals(const WeightMatrix& other) const {
  if (rows_ != other.rows_ || columns_ != other.columns_) return false;
  std::vector<float> a(columns_);
  std::vector<float> b(columns_);
  for (std::size_t i = 0; i < rows_; ++i) {
    copy_rows(i, 1, a.data());
    other.copy_rows(i, 1, b.data());
    if (a != b) return false;
  }
  return true;
}

}  // namespace kvpolicy::reference
