// SPDX-License-Identifier: Apache-2.0
//
// Tests of the test helpers: the oracle, comparisons, guard zones and the counting resource, on cases
// that are small enough to work out by hand, and on wrong ones.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "support/compare.hpp"
#include "support/memory.hpp"
#include "support/oracle.hpp"
#include "support/policy_model.hpp"
#include "support/tensors.hpp"

using test::largest_difference;

TEST_CASE("the oracle's attention by hand") {
  const oracle::Row a{0, {1, 0}, {10, 0}};
  const oracle::Row b{1, {0, 0}, {0, 20}};
  oracle::Options options;
  options.scale = std::log(3.0);  // weights 3 and 1
  const auto result = oracle::attend({1, 5}, {&a, &b}, options);
  CHECK(largest_difference(result.out, std::vector<double>{7.5, 5.0}) < 1e-12);
  CHECK(result.log_sum_exp == doctest::Approx(std::log(4.0)));

  options.sink_logit = std::log(4.0);  // takes half of the attention and has no value
  const auto with_sink = oracle::attend({1, 5}, {&a, &b}, options);
  CHECK(largest_difference(with_sink.out, std::vector<double>{3.75, 2.5}) < 1e-12);
  CHECK(with_sink.log_sum_exp == doctest::Approx(std::log(8.0)));

  options.sink_logit.reset();
  options.softcap = 0.5;
  const double capped = 0.5 * std::tanh(std::log(3.0) / 0.5);
  CHECK(oracle::logit({1, 5}, a.key, options) == doctest::Approx(capped));

  const auto nothing = oracle::attend({1, 5}, {}, options);
  CHECK(nothing.out == std::vector<double>{0, 0});
  CHECK(nothing.log_sum_exp == -std::numeric_limits<double>::infinity());
}

TEST_CASE("the oracle rotates pairs of channels that are half a row apart") {
  const auto turned = oracle::turn({1, 0, 0, 0}, 1.0, 10000.0);
  CHECK(largest_difference(turned, std::vector<double>{std::cos(1.0), 0, std::sin(1.0), 0}) < 1e-12);
  const auto slow = oracle::turn({0, 1, 0, 0}, 1.0, 10000.0);
  CHECK(largest_difference(slow, std::vector<double>{0, std::cos(0.01), 0, std::sin(0.01)}) < 1e-12);
  // Only distances matter.
  const auto q = oracle::turn({0.3, -2, 1, 4}, 12, 10000.0);
  const auto k = oracle::turn({1, 2, -3, 0.5}, 10, 10000.0);
  const auto near = oracle::turn({0.3, -2, 1, 4}, 2, 10000.0);
  double far_dot = 0, near_dot = 0;
  const std::vector<double> flat{1, 2, -3, 0.5};
  for (std::size_t i = 0; i < 4; ++i) far_dot += q[i] * k[i], near_dot += near[i] * flat[i];
  CHECK(far_dot == doctest::Approx(near_dot));
}

TEST_CASE("comparisons: NaN and missing numbers fail") {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  constexpr double inf = std::numeric_limits<double>::infinity();
  using Numbers = std::vector<double>;
  CHECK(largest_difference(Numbers{1, 2}, Numbers{1, 2.5}) == 0.5);
  CHECK(largest_difference(Numbers{1, nan}, Numbers{1, 2}) == inf);
  CHECK(largest_difference(Numbers{nan, 2}, Numbers{nan, 2}) == inf);
  CHECK(largest_difference(Numbers{nan, 2}, Numbers{1, 9}) == inf);
  CHECK(largest_difference(Numbers{inf}, Numbers{inf}) == 0);
  CHECK(largest_difference(Numbers{inf}, Numbers{-inf}) == inf);
  CHECK(largest_difference(Numbers{1}, Numbers{1, 2}) == inf);
  CHECK(test::same_bits(Numbers{nan}, Numbers{nan}));
  CHECK(!test::same_bits(Numbers{0.0}, Numbers{-0.0}));
  CHECK(test::same_bits(Numbers{}, Numbers{}));
  CHECK(test::thrown<std::bad_alloc>([] {}).empty());
}

TEST_CASE("the counting resource counts, fails on demand and detects stray writes") {
  test::CountingResource memory;
  void* a = memory.allocate(100, 64);
  void* b = memory.allocate(28, 8);
  CHECK(reinterpret_cast<std::uintptr_t>(a) % 64 == 0);
  CHECK(memory.live_bytes() == 128);
  CHECK(memory.live_blocks() == 2);
  memory.fail_after(1);
  void* c = memory.allocate(1);
  CHECK_THROWS_AS(static_cast<void>(memory.allocate(1)), std::bad_alloc);
  CHECK_THROWS_AS(static_cast<void>(memory.allocate(1)), std::bad_alloc);
  CHECK(memory.failures() == 2);
  memory.fail_after(test::never);
  memory.deallocate(c, 1);
  memory.deallocate(a, 100, 64);
  CHECK(memory.live_bytes() == 28);
  CHECK(memory.peak_bytes() == 129);
  CHECK(memory.faults() == 0);
  static_cast<std::byte*>(b)[28] = std::byte{1};  // inside the guard zone, which the resource owns
  CHECK(memory.faults() == 1);
  memory.deallocate(b, 28, 8);
  CHECK(memory.faults() == 1);
  int other = 0;
  memory.deallocate(&other, sizeof other);
  CHECK(memory.faults() == 2);
}

TEST_CASE("tensors: guards detect a write between rows") {
  for (const auto layout : {test::Layout::padded, test::Layout::heads_first}) {
    test::Tensor<float> tensor{3, 2, 8, layout};
    tensor.fill(
        [](std::size_t t, std::size_t h, std::size_t i) { return static_cast<float>(100 * t + 10 * h + i); });
    CHECK(tensor.guards_intact());
    CHECK(tensor.number(2, 1, 7) == 217.0F);
    CHECK(*tensor.view().row(1, 1) == 110.0F);
    tensor.view().row(2, 1)[8] = 0.0F;
    CHECK(!tensor.guards_intact());
  }
}

TEST_CASE("the window model by hand") {
  oracle::HeadModel model{{.kind = oracle::Kind::window, .sinks = 2, .recent = 3}};
  model.commit(9);
  CHECK(model.kept() == std::vector<std::int64_t>{0, 1, 6, 7, 8});
  CHECK(model.reads(6, 8, 8, false));
  CHECK(!model.reads(5, 8, 8, false));
  CHECK(!model.reads(9, 8, 8, false));
  CHECK(model.reads(1, 8, 8, false));
  oracle::HeadModel chunk{
      {.kind = oracle::Kind::window, .sinks = 0, .recent = 3, .prefill_chunk_mask = true}};
  CHECK(chunk.reads(5, 20, 8, false));
  CHECK(!chunk.reads(4, 20, 8, false));
}

TEST_CASE("the residual model by hand") {
  oracle::HeadModel steady{{.bits = 4, .key_group = 4, .residual = 5, .per_channel = true}};
  steady.commit(15);  // 10 more than the residual: 8 keys in whole groups, 10 values
  CHECK(steady.key_is_quantized(7));
  CHECK(!steady.key_is_quantized(8));
  CHECK(steady.value_is_quantized(9));
  CHECK(!steady.value_is_quantized(10));
  oracle::HeadModel kivi{{.bits = 4, .key_group = 4, .residual = 8, .per_channel = true, .kivi = true}};
  kivi.commit(15);
  CHECK(kivi.key_is_quantized(7));
  CHECK(!kivi.key_is_quantized(8));
  kivi.commit(16);  // all keys are quantised at once
  CHECK(kivi.key_is_quantized(15));
  CHECK(!kivi.value_is_quantized(8));
}

TEST_CASE("the budget model by hand") {
  oracle::HeadModel model{{.kind = oracle::Kind::budget, .budget = 2, .window = 1, .kernel = 3}};
  model.commit(6);
  REQUIRE(model.is_compressible());
  // One head and one query: the pooled maxima are .3 .3 .3 .2 .1, and the .9 of the observation window
  // is not pooled.
  const std::vector<std::vector<std::vector<double>>> attention{{{0.1, 0.3, 0.2, 0.1, 0.05, 0.9}}};
  const auto scores = model.scores(attention);
  const auto votes = model.votes(attention);
  CHECK(largest_difference(scores, std::vector<double>{0.3, 0.3, 0.3, 0.2, 0.1}) < 1e-12);
  CHECK(largest_difference(votes, std::vector<double>{0.1, 0.3, 0.2, 0.1, 0.05}) < 1e-12);
  const auto may = [&](const std::vector<std::int64_t>& rows) {
    return model.may_survive(rows, scores, votes, 1e-9);
  };
  CHECK(may({1, 2, 5}));  // of equal pooled scores, those with the highest own scores
  CHECK(!may({0, 1, 5}));
  CHECK(!may({0, 3, 5}));
  CHECK(!may({1, 3, 5}));
  CHECK(!may({1, 2, 3}));  // without its window
  CHECK(!may({1, 2, 2, 5}));
  const std::vector<double> level(5, 0.1);
  CHECK(model.may_survive({0, 1, 5}, level, level, 1e-9));
  CHECK(!model.may_survive({1, 2, 5}, level, level, 1e-9));  // of equal scores, the lower position
  oracle::HeadModel average{
      {.kind = oracle::Kind::budget, .budget = 1, .window = 1, .kernel = 3, .average = true}};
  average.commit(4);
  CHECK(largest_difference(average.scores({{{0.3, 0.6, 0.0, 0.5}}}), std::vector<double>{0.3, 0.3, 0.2}) <
        1e-12);
}

TEST_CASE("the retrieval model by hand") {
  oracle::HeadModel model{{.kind = oracle::Kind::retrieval, .budget = 4, .chunk = 2}};
  model.commit(9);  // chunks 0 to 3 are full
  const std::vector<double> scores{-5, 1, 3, 2};
  CHECK(model.selection_is_stale());
  CHECK(model.may_select({0, 2}, scores, 1e-9));
  CHECK(!model.may_select({0, 3}, scores, 1e-9));
  CHECK(!model.may_select({2, 3}, scores, 1e-9));  // chunk 0 is always chosen
  CHECK(!model.may_select({0}, scores, 1e-9));
  model.select({0, 2}, 9);
  CHECK(model.reads(5, 20, 20, true));
  CHECK(!model.reads(6, 20, 20, true));
  CHECK(model.reads(6, 20, 20, false));
  CHECK(model.reads(8, 20, 20, true));
  model.truncate(8);
  CHECK(model.reads(6, 20, 20, true));
}

TEST_CASE("the quantisation bound is about half a step") {
  CHECK(oracle::quantization_bound({0.0, 3.0}, 2) == doctest::Approx(0.5).epsilon(0.01));
  CHECK(oracle::quantization_bound({-1.0, 1.0}, 8) == doctest::Approx(1.0 / 255).epsilon(0.02));
}
