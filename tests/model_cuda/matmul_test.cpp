// SPDX-License-Identifier: Apache-2.0
//
// Compares linear layers on a device with plain loops in double, in every format and with every output.
#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <reference_model/cuda/matmul.hpp>

#include "model_cuda/device_numbers.hpp"

namespace kvpolicy::reference::matmul_test {
namespace {

double number(bfloat16 x) { return static_cast<double>(static_cast<float>(x)); }

// Weights and biases that bfloat16 represents exactly.
Linear random_linear(std::size_t inputs, std::size_t outputs, bool biased, unsigned seed) {
  const auto floats = [](const std::vector<bfloat16>& numbers) {
    std::vector<float> out;
    for (const bfloat16 x : numbers) out.push_back(static_cast<float>(x));
    return out;
  };
  Linear linear{inputs, outputs, floats(random_bfloat16(inputs * outputs, seed)), {}};
  if (biased) linear.bias = floats(random_bfloat16(outputs, seed + 1));
  return linear;
}

// x [rows, inputs] through layers side by side, and the sum of the terms' magnitudes for each result.
struct Expected {
  double y;
  double size;
};
std::vector<Expected> expected(const std::vector<const Linear*>& parts, const std::vector<bfloat16>& x,
                               std::size_t rows) {
  std::vector<Expected> out;
  for (std::size_t row = 0; row < rows; ++row) {
    for (const Linear* part : parts) {
      for (std::size_t o = 0; o < part->outputs(); ++o) {
        Expected e{part->bias.empty() ? 0 : static_cast<double>(part->bias[o]), 0};
        for (std::size_t i = 0; i < part->inputs(); ++i) {
          const double term =
              number(x[row * part->inputs() + i]) * static_cast<double>(part->weight.row<float>(o)[i]);
          e.y += term;
          e.size += std::fabs(term);
        }
        out.push_back(e);
      }
    }
  }
  return out;
}

// The device's product of x in floats; an added product is added to 1.
std::vector<float> product(const DeviceLinear& linear, Output output, const std::vector<bfloat16>& x,
                           std::size_t rows) {
  Matmul matmul{gpu::default_memory(), nullptr};
  linear.reserve(matmul, rows, nullptr);
  const DeviceNumbers<bfloat16> in{x};
  const std::size_t count = rows * linear.outputs();
  if (output == Output::bfloat16) {
    const DeviceNumbers<bfloat16> out{count};
    linear.apply(matmul, in.data(), rows, out.data(), nullptr);
    std::vector<float> floats;
    for (const bfloat16 y : out.get()) floats.push_back(static_cast<float>(y));
    return floats;
  }
  const DeviceNumbers<float> out{std::vector<float>(count, output == Output::float32 ? NAN : 1.0F)};
  linear.apply(matmul, in.data(), rows, out.data(), nullptr);
  std::vector<float> floats = out.get();
  if (output == Output::added_float32) {
    for (float& y : floats) y -= 1.0F;
  }
  return floats;
}

constexpr Output outputs[] = {Output::bfloat16, Output::float32, Output::added_float32};

TEST_CASE("bfloat16 products of layers side by side, with biases and without") {
  for (const bool biased : {false, true}) {
    const Linear one = random_linear(35, 9, biased, 20);
    const Linear other = random_linear(35, 4, biased, 30);
    for (const Output output : outputs) {
      const DeviceLinear both{{&one, &other}, output, WeightFormat::bfloat16, gpu::default_memory(), nullptr};
      CHECK(both.inputs() == 35);
      CHECK(both.outputs() == 13);
      CHECK(both.bytes() == 35 * 13 * 2);
      for (const std::size_t rows : {1, 2, 17}) {
        const auto x = random_bfloat16(rows * 35, 40);
        const auto want = expected({&one, &other}, x, rows);
        const auto got = product(both, output, x, rows);
        bool close = true;
        for (std::size_t i = 0; i < want.size(); ++i) {
          const double round = output == Output::bfloat16 ? rounding(want[i].y) : 0;
          close = close &&
                  std::fabs(static_cast<double>(got[i]) - want[i].y) <= round + 1e-5 * (want[i].size + 1);
        }
        CHECK(close);
      }
    }
  }
}

TEST_CASE("8-bit products are off by what two roundings to 8 bits cost, in blocks of rows as well") {
  constexpr std::size_t inputs = 48;
  for (const bool biased : {false, true}) {
    const Linear one = random_linear(inputs, 5, biased, 50);
    const Linear other = random_linear(inputs, 2, biased, 60);
    for (const Output output : outputs) {
      const DeviceLinear both{{&one, &other}, output, WeightFormat::int8, gpu::default_memory(), nullptr};
      CHECK(both.bytes() == inputs * 7 + 7 * sizeof(float));
      for (const std::size_t rows : {1, 31, 33, 1025}) {
        CAPTURE(rows);
        const auto x = random_bfloat16(rows * inputs, 70);
        const auto want = expected({&one, &other}, x, rows);
        const auto got = product(both, output, x, rows);
        // Each number of x and w has an error of half a step of at most 2 / 127.
        const double bound = inputs * 2 * (2.0 * 0.5 * 2 / 127 + 1e-4);
        double squares = 0;
        bool close = true;
        for (std::size_t i = 0; i < want.size(); ++i) {
          const double round = output == Output::bfloat16 ? rounding(want[i].y) : 0;
          const double error = std::fabs(static_cast<double>(got[i]) - want[i].y);
          close = close && error <= round + bound;
          squares += error * error / static_cast<double>(want.size());
        }
        CHECK(close);
        // The errors are independent, so their mean is far below that bound.
        CHECK(std::sqrt(squares) <= 0.2);
      }
    }
  }
}

TEST_CASE("a layer of zeros in 8 bits gives zeros") {
  const Linear zeros{16, 3, std::vector<float>(48), {}};
  const DeviceLinear layer{{&zeros}, Output::float32, WeightFormat::int8, gpu::default_memory(), nullptr};
  CHECK(product(layer, Output::float32, random_bfloat16(32, 80), 2) == std::vector<float>(6));
}

TEST_CASE("8-bit layers need inputs that the library can multiply") {
  const Linear odd = random_linear(40, 3, false, 90);
  CHECK_THROWS_AS((DeviceLinear{{&odd}, Output::float32, WeightFormat::int8, gpu::default_memory(), nullptr}),
                  ConfigError);
}

TEST_CASE("random layers keep the size of activations, in both formats") {
  constexpr std::size_t inputs = 512;
  const auto x = random_bfloat16(4 * inputs, 100, std::sqrt(3.0F));  // with variance 1
  for (const auto format : {WeightFormat::bfloat16, WeightFormat::int8}) {
    const auto layer =
        DeviceLinear::random(inputs, 64, Output::float32, format, 5, gpu::default_memory(), nullptr);
    double squares = 0;
    const auto y = product(layer, Output::float32, x, 4);
    for (const float each : y) {
      squares += static_cast<double>(each) * static_cast<double>(each) / static_cast<double>(y.size());
    }
    CHECK(squares >= 0.7);
    CHECK(squares <= 1.4);
  }
}

}  // namespace
}  // namespace kvpolicy::reference::matmul_test
