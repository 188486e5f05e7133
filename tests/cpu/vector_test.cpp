// SPDX-License-Identifier: Apache-2.0
//
// Compares the engine's small functions with the standard library's, over all or very many inputs.
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/cpu/vector-inl.hpp>

namespace {
namespace vec = kvpolicy::cpu::HWY_NAMESPACE;
namespace hn = hwy::HWY_NAMESPACE;

template <class F>
float apply(F function, float x) {
  float out[vec::lanes];
  hn::StoreU(function(hn::Set(vec::floats, x)), vec::floats, out);
  return out[vec::lanes - 1];
}

TEST_CASE("the target that the engine was compiled for") {
  MESSAGE("CPU engine for ", std::string{hwy::TargetName(HWY_TARGET)}, ", ", vec::lanes,
          " floats in a vector");
  CHECK(vec::lanes == hn::Lanes(vec::floats));
}

TEST_CASE("exp_nonpositive is exp to 3e-7 relative, and exact for results of 0 and for NaN") {
  const auto exp = [](auto x) { return vec::exp_nonpositive(x); };
  double worst = 0;
  for (double x = 0; x > -87; x -= 3.7e-5) {
    const auto argument = static_cast<float>(x);
    const double expected = std::exp(static_cast<double>(argument));
    const double error = std::abs(static_cast<double>(apply(exp, argument)) - expected) / expected;
    worst = error <= worst ? worst : error;
  }
  MESSAGE("largest relative error ", worst);
  CHECK(worst <= 3e-7);
  CHECK(apply(exp, 0.0F) == 1.0F);
  CHECK(apply(exp, 1e-6F) == doctest::Approx(1.000001F));
  CHECK(apply(exp, -87.5F) == 0.0F);
  CHECK(apply(exp, -1e30F) == 0.0F);
  CHECK(apply(exp, -std::numeric_limits<float>::infinity()) == 0.0F);
  CHECK(std::isnan(apply(exp, std::numeric_limits<float>::quiet_NaN())));
}

TEST_CASE("tanh to 3e-7 relative") {
  const auto tanh = [](auto x) { return vec::tanh(x); };
  double worst = 0;
  for (double x = 1e-20; x < 60; x = x * 1.00007 + 1e-12) {
    for (const double sign : {1.0, -1.0}) {
      const auto argument = static_cast<float>(sign * x);
      const double expected = std::tanh(static_cast<double>(argument));
      const double error = std::abs(static_cast<double>(apply(tanh, argument)) / expected - 1);
      worst = error <= worst ? worst : error;
    }
  }
  MESSAGE("largest relative error ", worst);
  CHECK(worst <= 3e-7);
  CHECK(apply(tanh, 0.0F) == 0.0F);
  CHECK(apply(tanh, std::numeric_limits<float>::infinity()) == 1.0F);
  CHECK(apply(tanh, -std::numeric_limits<float>::infinity()) == -1.0F);
  CHECK(std::isnan(apply(tanh, std::numeric_limits<float>::quiet_NaN())));
}

TEST_CASE("every float16 and bfloat16 loads as the scalar conversions say") {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    kvpolicy::float16 h;
    kvpolicy::bfloat16 b;
    h.bits = b.bits = static_cast<std::uint16_t>(bits);
    const std::vector<kvpolicy::float16> halves(vec::lanes, h);
    const std::vector<kvpolicy::bfloat16> shorts(vec::lanes, b);
    const auto same = [](float x, float y) { return x == y || (std::isnan(x) && std::isnan(y)); };
    const float from_half = hn::GetLane(vec::load_half(halves.data()));
    const float from_bfloat16 = hn::GetLane(vec::load_numbers<kvpolicy::Encoding::bfloat16>(
        reinterpret_cast<const std::byte*>(shorts.data()), 0));
    if (!same(from_half, static_cast<float>(h)) || !same(from_bfloat16, static_cast<float>(b))) {
      FAIL("bits " << bits);
    }
  }
}

TEST_CASE("store_sums adds up each vector's lanes") {
  float numbers[4][vec::lanes];
  float expected[4] = {};
  for (std::size_t v = 0; v < 4; ++v) {
    for (std::size_t i = 0; i < vec::lanes; ++i) {
      expected[v] += numbers[v][i] = static_cast<float>((v + 1) * 100 + i * i);
    }
  }
  float sums[6] = {-1, -1, -1, -1, -1, -1};
  vec::store_sums(hn::LoadU(vec::floats, numbers[0]), hn::LoadU(vec::floats, numbers[1]),
                  hn::LoadU(vec::floats, numbers[2]), hn::LoadU(vec::floats, numbers[3]), sums + 1);
  CHECK(sums[0] == -1);
  CHECK(sums[5] == -1);
  for (std::size_t v = 0; v < 4; ++v) CHECK(sums[v + 1] == expected[v]);
}

}  // namespace
