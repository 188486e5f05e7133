// SPDX-License-Identifier: Apache-2.0
//
// Weights in every format: what they are as float, what rounding to a format costs, and who owns them.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/error.hpp>
#include <reference_model/weight_matrix.hpp>

#include "model/random_weights.hpp"

namespace kvpolicy::reference::weight_matrix_test {
namespace {

TEST_CASE("each format keeps the numbers that it can represent, and rounds the others to nearest") {
  constexpr std::size_t rows = 7, columns = 13;
  const std::vector<float> numbers = normal_floats(rows * columns, 1);
  for (const WeightFormat format : weight_formats) {
    CAPTURE(name_of(format));
    const WeightMatrix matrix{rows, columns, numbers, format};
    CHECK(matrix.rows() == rows);
    CHECK(matrix.columns() == columns);
    CHECK(matrix.format() == format);
    CHECK(matrix.bytes() ==
          rows * columns * bytes_of(format) + (format == WeightFormat::int8 ? rows * sizeof(float) : 0));
    const std::vector<float> stored = matrix.to_floats();
    for (std::size_t row = 0; row < rows; ++row) {
      float largest = 0;
      for (std::size_t c = 0; c < columns; ++c) {
        largest = std::max(largest, std::fabs(numbers[row * columns + c]));
      }
      for (std::size_t c = 0; c < columns; ++c) {
        const float wanted = numbers[row * columns + c];
        const float half_step = format == WeightFormat::float32    ? 0.0F
                                : format == WeightFormat::float16  ? std::fabs(wanted) * 0x1p-11F
                                : format == WeightFormat::bfloat16 ? std::fabs(wanted) * 0x1p-8F
                                                                   : largest / 254.0F * 1.0001F;
        CHECK(std::fabs(stored[row * columns + c] - wanted) <= half_step);
      }
    }
    // A second rounding changes nothing, and a row is the same as in the whole.
    CHECK(WeightMatrix{rows, columns, stored, format} == matrix);
    CHECK(matrix.as(format) == matrix);
    CHECK(matrix.as(WeightFormat::float32) == matrix);
    std::vector<float> two(2 * columns);
    matrix.copy_rows(3, 2, two.data());
    CHECK(std::memcmp(two.data(), stored.data() + 3 * columns, two.size() * sizeof(float)) == 0);
  }
}

TEST_CASE("int8 rows of zeros, of minus zero, of the largest and of the smallest numbers") {
  constexpr float largest = std::numeric_limits<float>::max();
  constexpr float smallest = std::numeric_limits<float>::denorm_min();
  const std::vector<std::vector<float>> rows{{0.0F, 0.0F, 0.0F},          {-0.0F, -0.0F, 0.0F},
                                             {largest, -largest, 0.0F},   {-largest, largest / 2, 1.0F},
                                             {smallest, -smallest, 0.0F}, {1e-38F, -1e-38F, 1e-39F},
                                             {1e-30F, -1e-30F, 0.5e-30F}, {-1.0F, 127.0F, 0.49F}};
  for (const auto& row : rows) {
    CAPTURE(row[0]);
    const WeightMatrix matrix{1, row.size(), row, WeightFormat::int8};
    const std::vector<float> stored = matrix.to_floats();
    float magnitude = 0;
    for (const float x : row) magnitude = std::max(magnitude, std::fabs(x));
    for (std::size_t i = 0; i < row.size(); ++i) {
      CHECK(std::isfinite(stored[i]));
      CHECK(std::abs(int{matrix.row<std::int8_t>(0)[i]}) <= 127);
      CHECK(std::fabs(stored[i] - row[i]) <= std::max(magnitude / 254.0F * 1.0001F, 1e-36F));
    }
  }
}

TEST_CASE("a matrix in memory that somebody else owns keeps it alive, and copies odd addresses") {
  const std::vector<float> numbers = normal_floats(6, 2);
  for (const std::size_t shift : {0, 1, 2, 3}) {
    CAPTURE(shift);
    auto memory = std::make_shared<std::vector<std::byte>>(shift + 6 * sizeof(float));
    std::memcpy(memory->data() + shift, numbers.data(), 6 * sizeof(float));
    const std::weak_ptr<void> watch = memory;
    const std::byte* address = memory->data() + shift;
    WeightMatrix matrix{2, 3, WeightFormat::float32, std::span{*memory}.subspan(shift), memory};
    memory.reset();
    CHECK(watch.expired() == (shift != 0));  // a copy needs the owner no more
    CHECK((static_cast<const void*>(matrix.row<float>(0)) == address) == (shift == 0));
    CHECK(matrix.to_floats() == numbers);
    const WeightMatrix copy = matrix;
    CHECK(copy.row<float>(0) == matrix.row<float>(0));
    matrix = {};
    CHECK(copy.to_floats() == numbers);
  }
}

TEST_CASE("a changed matrix leaves its copies as they were") {
  const WeightMatrix one{2, 2, {1, 2, 3, 4}, WeightFormat::bfloat16};
  const WeightMatrix other = one.changed([](std::span<float> numbers) { numbers[3] = 5.0F; });
  CHECK(other.format() == WeightFormat::bfloat16);
  CHECK(other.to_floats() == std::vector<float>{1, 2, 3, 5});
  CHECK(one.to_floats() == std::vector<float>{1, 2, 3, 4});
  CHECK(one != other);
  CHECK(one != WeightMatrix{1, 4, {1, 2, 3, 4}});
  CHECK(one == WeightMatrix{2, 2, {1, 2, 3, 4}});
}

TEST_CASE("sizes that do not fit are refused, empty ones are not") {
  CHECK_THROWS_AS((WeightMatrix{2, 3, std::vector<float>(5)}), ShapeError);
  const std::vector<std::byte> bytes(12);
  CHECK_THROWS_AS((WeightMatrix{2, 3, WeightFormat::float32, bytes, nullptr}), ShapeError);
  CHECK_THROWS_AS((WeightMatrix{2, 6, WeightFormat::int8, bytes, nullptr}), ShapeError);
  CHECK_NOTHROW((WeightMatrix{2, 3, WeightFormat::float16, bytes, nullptr}));
  for (const WeightFormat format : weight_formats) {
    CHECK(WeightMatrix{0, 5, {}, format}.to_floats().empty());
    CHECK(WeightMatrix{5, 0, {}, format}.to_floats().empty());
  }
}

}  // namespace
}  // namespace kvpolicy::reference::weight_matrix_test
