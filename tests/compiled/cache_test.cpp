// SPDX-License-Identifier: Apache-2.0
//
// A cache on the compiled engine, written as a consumer writes it: this file includes no Highway header.
#include <doctest/doctest.h>

#include <vector>

#include <kvpolicy/compiled/engine.hpp>
#include <kvpolicy/core/scalar_engine.hpp>
#include <kvpolicy/duo.hpp>

#include "support/compare.hpp"
#include "support/tensors.hpp"

#ifdef HIGHWAY_HWY_BASE_H_
#error "a file with the compiled engine reads Highway"
#endif

namespace {

template <class Engine>
std::vector<float> decode() {
  const kvpolicy::ModelShape shape{.layers = 1, .q_heads = 8, .kv_heads = 2, .head_dim = 64};
  const auto plan = kvpolicy::duo_plan<float>(shape, {1, 2, {1.0, 0.0}}, {.sinks = 4, .recent = 16});
  kvpolicy::KvCache<float, Engine> cache{plan};
  test::Random random{3};
  std::vector<float> all;
  for (const std::size_t tokens : {std::size_t{40}, std::size_t{1}, std::size_t{1}}) {
    test::Tensor<float> q{tokens, 8, 64}, k{tokens, 2, 64}, v{tokens, 2, 64}, out{tokens, 8, 64};
    q.randomize(random, 1.0F);
    k.randomize(random, 1.0F);
    v.randomize(random, 1.0F);
    cache.step(0, q.view(), k.view(), v.view(), out.view());
    all.insert(all.end(), out.numbers().begin(), out.numbers().end());
  }
  return all;
}

TEST_CASE("a cache on the compiled engine equals one on ScalarEngine") {
  const auto ours = decode<kvpolicy::compiled::Engine>();
  const auto expected = decode<kvpolicy::ScalarEngine>();
  CHECK(test::largest_difference(ours, expected) <= 5e-5);
}

}  // namespace
