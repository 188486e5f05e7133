// SPDX-License-Identifier: Apache-2.0
//
// Products of weights in every format with few and many rows, compared with sums in double over the weights
// as they are stored, with bounds that follow from the roundings.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/error.hpp>
#include <reference_model/library_product.hpp>
#include <reference_model/linear.hpp>
#include <reference_model/parallel.hpp>
#include <reference_model/row_product.hpp>

#include "model/random_weights.hpp"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace kvpolicy::reference::linear_test {
namespace {

Linear random_layer(std::size_t inputs, std::size_t outputs, WeightFormat format, bool biased) {
  return Linear{WeightMatrix{outputs, inputs, normal_floats(inputs * outputs, 3), format},
                biased ? normal_floats(outputs, 4) : std::vector<float>{}};
}

/// Whether y is `start` + x Wᵀ + b. Activations may lose all but 16 bits, or `kept`, and float sums round.
bool is_product(const Linear& layer, const std::vector<float>& x, std::size_t rows,
                const std::vector<float>& start, const std::vector<float>& y, double kept = 0x1p-16) {
  const std::vector<float> weight = layer.weight.to_floats();
  const std::size_t inputs = layer.inputs();
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t o = 0; o < layer.outputs(); ++o) {
      const std::size_t at = row * layer.outputs() + o;
      double sum = start.empty() ? 0.0 : static_cast<double>(start[at]);
      if (!layer.bias.empty()) sum += static_cast<double>(layer.bias[o]);
      double size = std::fabs(sum);
      for (std::size_t i = 0; i < inputs; ++i) {
        const double term =
            static_cast<double>(x[row * inputs + i]) * static_cast<double>(weight[o * inputs + i]);
        sum += term;
        size += std::fabs(term);
      }
      const double bound = size * (kept + static_cast<double>(inputs + 4) * 0x1p-24) + 1e-37;
      if (!(std::fabs(static_cast<double>(y[at]) - sum) <= bound)) return false;
    }
  }
  return true;
}

TEST_CASE("forward products of every format and size") {
  struct Size {
    std::size_t inputs, outputs;
  };
  // Primes, less than a vector, either side of a slice, and several slices that threads share.
  for (const Size size :
       {Size{3, 1}, Size{1, 3}, Size{37, 63}, Size{64, 65}, Size{131, 257}, Size{576, 520}}) {
    const std::size_t inputs = size.inputs;
    const std::size_t outputs = size.outputs;
    for (const WeightFormat format : weight_formats) {
      for (const std::size_t rows : {1, 2, 5, 8, 9, 31, 67, 257}) {
        CAPTURE(inputs);
        CAPTURE(outputs);
        CAPTURE(name_of(format));
        CAPTURE(rows);
        const Linear layer = random_layer(inputs, outputs, format, rows % 2 == 1);
        const std::vector<float> x = normal_floats(rows * inputs, 5);
        std::vector<float> y(rows * outputs + 1, NAN);
        y.back() = 42.0F;
        layer.apply(x.data(), rows, y.data());
        CHECK(y.back() == 42.0F);
        CHECK(is_product(layer, x, rows, {}, y));
        const std::vector<float> start = normal_floats(rows * outputs, 6);
        y = start;
        layer.add_to(x.data(), rows, y.data());
        CHECK(is_product(layer, x, rows, start, y));
      }
    }
  }
}

TEST_CASE(
    "activations are rounded to bfloat16 where that is asked for and multiplied faster, and nowhere else") {
  for (const WeightFormat format : weight_formats) {
    for (const std::size_t rows : {1, 9, 67, 257}) {
      CAPTURE(name_of(format));
      CAPTURE(rows);
      Linear layer = random_layer(131, 257, format, rows % 2 == 1);
      const std::vector<float> x = normal_floats(rows * 131, 12);
      std::vector<float> exact(rows * 257);
      layer.apply(x.data(), rows, exact.data());
      layer.round_activations = true;
      std::vector<float> y(rows * 257, NAN);
      layer.apply(x.data(), rows, y.data());
      CHECK(is_product(layer, x, rows, {}, y, 0x1p-8));
      const bool narrow = format == WeightFormat::bfloat16 || format == WeightFormat::int8;
      const bool rounds = narrow && multiplies_bfloat16() && !(has_row_product() && rows <= most_few_rows);
      CHECK(rounds == (y != exact));
      // Where nothing is left to round off, nothing changes.
      std::vector<float> few_bits = x;
      for (float& number : few_bits) number = static_cast<float>(bfloat16{number});
      layer.apply(few_bits.data(), rows, y.data());
      CHECK(is_product(layer, few_bits, rows, {}, y));
    }
  }
}

TEST_CASE("no rows are no work") {
  for (const WeightFormat format : weight_formats) {
    const Linear layer = random_layer(5, 3, format, true);
    float y = 7.0F;
    layer.apply(nullptr, 0, &y);
    layer.add_to(nullptr, 0, &y);
    layer.back(nullptr, 0, &y);
    CHECK(y == 7.0F);
  }
}

TEST_CASE("layers side by side, in different formats, give what each gives alone") {
  for (const std::size_t rows : {1, 8, 40}) {
    const Linear one = random_layer(67, 33, WeightFormat::bfloat16, true);
    const Linear two = random_layer(67, 300, WeightFormat::float32, false);
    const Linear three = random_layer(67, 1, WeightFormat::int8, true);
    const std::vector<float> x = normal_floats(rows * 67, 7);
    std::vector<float> a(rows * 33), b(rows * 300), c(rows), alone(rows * 33);
    apply_all({{&one, a.data()}, {&two, b.data()}, {&three, c.data()}}, x.data(), rows);
    one.apply(x.data(), rows, alone.data());
    CHECK(a == alone);
    CHECK(is_product(two, x, rows, {}, b));
    CHECK(is_product(three, x, rows, {}, c));
  }
}

TEST_CASE("few rows are the same, bit for bit, alone, together, and on any number of threads") {
  if (!has_row_product()) return;
  constexpr std::size_t inputs = 576, outputs = 600;  // enough weights for several threads
  for (const WeightFormat format : weight_formats) {
    const Linear layer = random_layer(inputs, outputs, format, false);
    const std::vector<float> x = normal_floats(most_few_rows * inputs, 8);
    std::vector<float> alone(most_few_rows * outputs);
    for (std::size_t row = 0; row < most_few_rows; ++row) {
      layer.apply(x.data() + row * inputs, 1, alone.data() + row * outputs);
    }
    for (const int threads : {1, 2, 5}) {
#ifdef _OPENMP
      omp_set_num_threads(threads);
#endif
      CAPTURE(threads);
      for (std::size_t rows = 1; rows <= most_few_rows; ++rows) {
        std::vector<float> y(rows * outputs);
        layer.apply(x.data(), rows, y.data());
        CHECK(std::equal(y.begin(), y.end(), alone.begin()));
      }
    }
  }
}

TEST_CASE("many rows do not depend on the number of threads, nor on who calls") {
  const Linear layer = random_layer(576, 600, WeightFormat::bfloat16, false);
  const std::vector<float> x = normal_floats(64 * 576, 9);
  std::vector<float> once(64 * 600);
  layer.apply(x.data(), 64, once.data());
  std::vector<float> y(256 * 600);
  for_each_block(4, 1, true,
                 [&](std::size_t i, std::size_t) { layer.apply(x.data(), 64, y.data() + i * once.size()); });
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(std::equal(once.begin(), once.end(), y.begin() + static_cast<std::ptrdiff_t>(i * once.size())));
  }
}

TEST_CASE("activations of any size: zeros, the smallest, the largest, NaN and infinity") {
  for (const WeightFormat format : weight_formats) {
    for (const std::size_t rows : {1, 16}) {
      CAPTURE(name_of(format));
      CAPTURE(rows);
      const Linear layer{WeightMatrix{2, 4, {1, 0, 0, 0, 0, 1, 0, 0}, format}};
      const auto product = [&](float first) {
        std::vector<float> x(rows * 4, 1.0F);
        for (std::size_t row = 0; row < rows; ++row) x[row * 4] = first;
        std::vector<float> y(rows * 2);
        layer.apply(x.data(), rows, y.data());
        CHECK((y[1] == 1.0F || std::isnan(first) || std::isinf(first)));
        return y[2 * rows - 2];
      };
      CHECK(product(0.0F) == 0.0F);
      CHECK(product(1e36F) == doctest::Approx(1e36));
      CHECK(std::fabs(product(std::numeric_limits<float>::denorm_min())) <= 1e-37F);
      CHECK(std::isnan(product(NAN)));
      CHECK(std::isinf(product(INFINITY)));
    }
  }
}

TEST_CASE("backward products of every format") {
  for (const WeightFormat format : weight_formats) {
    for (const std::size_t rows : {1, 9, 65}) {
      // More numbers than are converted at once.
      for (const std::size_t inputs : {13, 1031}) {
        CAPTURE(name_of(format));
        constexpr std::size_t outputs = 131;
        const Linear layer = random_layer(inputs, outputs, format, true);
        const std::vector<float> weight = layer.weight.to_floats();
        std::vector<float> turned(weight.size());
        for (std::size_t o = 0; o < outputs; ++o) {
          for (std::size_t i = 0; i < inputs; ++i) turned[i * outputs + o] = weight[o * inputs + i];
        }
        const Linear back{outputs, inputs, turned, {}};  // only the oracle reads it
        const std::vector<float> dy = normal_floats(rows * outputs, 10);
        std::vector<float> dx(rows * inputs, NAN);
        layer.back(dy.data(), rows, dx.data());
        CHECK(is_product(back, dy, rows, {}, dx));
        const std::vector<float> start = normal_floats(rows * inputs, 11);
        dx = start;
        layer.add_back(dy.data(), rows, dx.data());
        CHECK(is_product(back, dy, rows, start, dx));
      }
    }
  }
}

TEST_CASE("more layers than one product joins are refused") {
  const Linear layer = random_layer(3, 2, WeightFormat::float32, false);
  float y[2];
  const LinearResult one{&layer, y};
  CHECK_THROWS_AS(apply_all({one, one, one, one, one}, y, 0), ShapeError);
}

}  // namespace
}  // namespace kvpolicy::reference::linear_test
