// SPDX-License-Identifier: Apache-2.0
//
// Compiled with -ffast-math, as engines may be: numbers that are none are refused all the same.
#include <doctest/doctest.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/core/small_floats.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/quantized_residual_cache.hpp>

#include "support/compare.hpp"

using namespace kvpolicy;
using test::contains;
using test::thrown;

#if !defined(__FAST_MATH__)
#error "this test says nothing without -ffast-math"
#endif

namespace {

// By their bits, which the compiler may not reason about.
float of_bits(std::uint32_t bits) {
  volatile std::uint32_t hidden = bits;
  return std::bit_cast<float>(std::uint32_t{hidden});
}
const std::vector<std::uint32_t> no_numbers{0x7fc00000U, 0xffc00000U, 0x7f800001U, 0x7f800000U, 0xff800000U};

constexpr ModelShape shape{.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 64};
constexpr std::size_t tokens = 3;

template <class Policy>
struct Fixture {
  KvCache<typename Policy::element_type> cache{HeadPlan<Policy>{shape}};
  std::vector<float> q = std::vector<float>(tokens * 64, 0.5F), k = q, v = q, out = q;

  void step(const AttendOptions& options = {}) {
    const auto view = [](std::vector<float>& numbers) { return TensorView{numbers.data(), tokens, 1, 64}; };
    cache.step(0, view(q), view(k), view(v), view(out), options);
  }
};

template <class E>
void refuses_rows() {
  for (const std::uint32_t bits : no_numbers) {
    CAPTURE(bits);
    for (const bool is_key : {true, false}) {
      Fixture<QuantizedResidualCache<E>> f;
      (is_key ? f.k : f.v)[64 + 7] = of_bits(bits);
      const std::string said = thrown<ShapeError>([&] { f.step(); });
      CHECK(contains(said, is_key ? "key at position 1, channel 7" : "value at position 1, channel 7"));
      CHECK(f.cache.tokens() == 0);
    }
  }
}

}  // namespace

TEST_CASE("rows that are no numbers are refused where they would be quantised") {
  refuses_rows<float>();
  refuses_rows<float16>();
  refuses_rows<bfloat16>();
  Fixture<QuantizedResidualCache<bfloat16>> f;
  f.k[70] = -65450.0F;
  CHECK(contains(thrown<ShapeError>([&] { f.step(); }), "kept as -65536 in bfloat16"));
  f.k[70] = -65400.0F;
  CHECK_NOTHROW(f.step());
}

TEST_CASE("finite numbers that the element type cannot hold are refused") {
  Fixture<FullCache<DenseStorage<float16>>> f;
  f.v[2] = 70000.0F;
  CHECK(contains(thrown<ShapeError>([&] { f.step(); }), "v holds 70000 at token 0"));
}

TEST_CASE("numbers of 8 bits: what is none stays none, and what is too large becomes the largest") {
  const auto nan = std::bit_cast<float>(0x7fc00000U);
  const auto infinity = std::bit_cast<float>(0x7f800000U);
  CHECK((E4m3::encode(nan) & 0x7f) == 0x7f);
  CHECK(is_nan(E4m3::decode(0x7f)));
  CHECK(E4m3::encode(infinity) == 0x7e);
  CHECK(E4m3::decode(0x7e) == 448.0F);
  CHECK(E4m3::decode(1) == 0x1p-9F);
  CHECK(E4m3::encode(0x1p-9F) == 1);
}

TEST_CASE("options that are no numbers are refused") {
  for (const std::uint32_t bits : no_numbers) {
    CAPTURE(bits);
    Fixture<FullCache<DenseStorage<float>>> f;
    CHECK(contains(thrown<ShapeError>([&] { f.step({.scale = of_bits(bits)}); }), "scale is"));
    CHECK(contains(thrown<ShapeError>([&] { f.step({.softcap = of_bits(bits)}); }), "softcap is"));
    if ((bits & 0x7fffffU) == 0) continue;  // infinite sinks weigh nothing, or everything
    const std::vector<float> sinks{of_bits(bits)};
    CHECK(contains(thrown<ShapeError>([&] { f.step({.attention_sink_bias = sinks}); }), "sink logit is NaN"));
  }
}
