// SPDX-License-Identifier: Apache-2.0
//
// Compares each backward pass with central differences of the operation, which is written out here in double.
#include <reference_model/gradient/operations.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/rotary.hpp>
#include <reference_model/library_product.hpp>
#include <reference_model/linear.hpp>
#include <reference_model/operations.hpp>

#include "gradient/finite_difference.hpp"

namespace kvpolicy::reference::operations_test {
namespace {

constexpr double tolerance = 2e-6;  // relative to the largest gradient: a few roundings of a float

TEST_CASE("RMSNorm") {
  constexpr double eps = 1e-5;
  for (const std::size_t width : {1UL, 2UL, 7UL, 192UL}) {
    for (const double scale : {1e-3, 1.0, 30.0}) {
      CAPTURE(width);
      CAPTURE(scale);
      constexpr std::size_t rows = 3;
      Doubles x = random_numbers(rows * width, 1, scale);
      const Doubles weight = random_numbers(width, 2);
      const Doubles dy = random_numbers(rows * width, 3);
      const auto f = [&] {
        double sum = 0.0;
        for (std::size_t row = 0; row < rows; ++row) {
          double squares = 0.0;
          for (std::size_t i = 0; i < width; ++i) squares += std::pow(x[row * width + i], 2);
          const double length = std::sqrt(squares / static_cast<double>(width) + eps);
          for (std::size_t i = 0; i < width; ++i) {
            sum += dy[row * width + i] * x[row * width + i] / length * weight[i];
          }
        }
        return sum;
      };
      // The gradient is added to the existing values, which residual connections need.
      std::vector<float> dx(x.size(), 0.0F);
      const std::vector<float> xs = to_float(x);
      normalise_back(xs.data(), rows, to_float(weight), static_cast<float>(eps), to_float(dy).data(),
                     dx.data());
      // For a row of one number nearly everything cancels: a number of unit length hardly changes.
      const double allowed = width == 1 ? 1e-2 : 2e-5;
      if (width > 1 || scale < 1.0) CHECK(gradient_error(f, x, dx) <= allowed);
      std::vector<float> twice = dx;
      normalise_back(xs.data(), rows, to_float(weight), static_cast<float>(eps), to_float(dy).data(),
                     twice.data());
      for (std::size_t i = 0; i < dx.size(); ++i) CHECK(twice[i] == doctest::Approx(2.0F * dx[i]));
    }
  }
}

TEST_CASE("SwiGLU, also when written over its gradient") {
  constexpr std::size_t count = 41;
  Doubles gate = random_numbers(count, 4, 3.0);
  Doubles up = random_numbers(count, 5);
  gate[0] = 0.0;
  gate[1] = 40.0;
  gate[2] = -40.0;
  const Doubles dy = random_numbers(count, 6);
  const auto f = [&] {
    double sum = 0.0;
    for (std::size_t i = 0; i < count; ++i) {
      sum += dy[i] * gate[i] / (1.0 + std::exp(-gate[i])) * up[i];
    }
    return sum;
  };
  std::vector<float> dgate = to_float(dy);
  std::vector<float> dup(count);
  swiglu_back(to_float(gate).data(), to_float(up).data(), count, dgate.data(), dgate.data(), dup.data());
  CHECK(gradient_error(f, gate, dgate) <= tolerance);
  CHECK(gradient_error(f, up, dup) <= tolerance);
}

TEST_CASE("rotary positions: the backward pass rotates back") {
  const std::vector<float> frequencies = inverse_frequencies({}, 8);
  const std::vector<std::size_t> positions{0, 5, 1000};
  constexpr std::size_t heads = 2;
  constexpr std::size_t half = 4;
  Doubles x = random_numbers(positions.size() * heads * 8, 7);
  const Doubles dy = random_numbers(x.size(), 8);
  const auto f = [&] {
    double sum = 0.0;
    for (std::size_t row = 0; row < positions.size() * heads; ++row) {
      for (std::size_t i = 0; i < half; ++i) {
        const double angle =
            static_cast<double>(positions[row / heads]) * static_cast<double>(frequencies[i]);
        const double low = x[row * 8 + i];
        const double high = x[row * 8 + half + i];
        sum += dy[row * 8 + i] * (low * std::cos(angle) - high * std::sin(angle));
        sum += dy[row * 8 + half + i] * (high * std::cos(angle) + low * std::sin(angle));
      }
    }
    return sum;
  };
  std::vector<float> dx = to_float(dy);
  const Rotation rotation{positions, frequencies};
  rotation.undo(dx.data(), heads, 0, 1);
  rotation.undo(dx.data(), heads, 1, 2);
  CHECK(gradient_error(f, x, dx) <= tolerance);
}

TEST_CASE("linear layers") {
  for (const std::size_t rows : {1UL, 2UL, 65UL}) {
    CAPTURE(rows);
    constexpr std::size_t inputs = 13;
    constexpr std::size_t outputs = 5;
    const Doubles weight = random_numbers(inputs * outputs, 9);
    const Linear layer{inputs, outputs, to_float(weight), to_float(random_numbers(outputs, 10))};
    Doubles x = random_numbers(rows * inputs, 11);
    const Doubles dy = random_numbers(rows * outputs, 12);
    const auto f = [&] {
      double sum = 0.0;
      for (std::size_t row = 0; row < rows; ++row) {
        for (std::size_t o = 0; o < outputs; ++o) {
          for (std::size_t i = 0; i < inputs; ++i) {
            sum += dy[row * outputs + o] * x[row * inputs + i] * weight[o * inputs + i];
          }
        }
      }
      return sum;
    };
    std::vector<float> dx(x.size(), 7.0F);  // back() overwrites
    layer.back(to_float(dy).data(), rows, dx.data());
    CHECK(gradient_error(f, x, dx) <= tolerance);
    std::vector<float> sum(x.size(), 7.0F);
    layer.add_back(to_float(dy).data(), rows, sum.data());
    for (std::size_t i = 0; i < dx.size(); ++i) CHECK(sum[i] == doctest::Approx(7.0F + dx[i]));
  }
}

TEST_CASE("products of parts of matrices, transposed or not") {
  constexpr std::size_t m = 3, n = 4, k = 5, wide = 11;
  const std::vector<float> a = to_float(random_numbers(wide * wide, 13));
  const std::vector<float> b = to_float(random_numbers(wide * wide, 14));
  for (const bool a_turned : {false, true}) {
    for (const bool b_turned : {false, true}) {
      std::vector<float> out(m * wide, 2.0F);
      multiply({a.data() + 1, a_turned ? k : m, a_turned ? m : k, wide, a_turned},
               {b.data() + 2, b_turned ? n : k, b_turned ? k : n, wide, b_turned}, 0.5F, 3.0F, out.data(),
               wide);
      for (std::size_t row = 0; row < m; ++row) {
        for (std::size_t column = 0; column < wide; ++column) {
          double expected = 2.0;
          if (column < n) {
            expected = 6.0;
            for (std::size_t i = 0; i < k; ++i) {
              expected += 0.5 * static_cast<double>(a[1 + (a_turned ? i * wide + row : row * wide + i)]) *
                          static_cast<double>(b[2 + (b_turned ? column * wide + i : i * wide + column)]);
            }
          }
          CHECK(static_cast<double>(out[row * wide + column]) == doctest::Approx(expected).epsilon(1e-5));
        }
      }
    }
  }
  std::vector<float> out(4);
  CHECK_THROWS_AS(multiply({a.data(), 2, 3, 3, false}, {b.data(), 2, 2, 2, false}, 1.0F, 0.0F, out.data(), 2),
                  ShapeError);
}

}  // namespace
}  // namespace kvpolicy::reference::operations_test
