// SPDX-License-Identifier: Apache-2.0
//
// Compares the compiled engine with ScalarEngine, for every instruction set of this machine, within the
// bounds of tests/cpu/engine_test.cpp.
#include <kvpolicy/compiled/engine.hpp>

#ifdef HIGHWAY_HWY_BASE_H_
#error "compiled/engine.hpp reads Highway"
#endif

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <vector>

#include <kvpolicy/core/scalar_engine.hpp>
#include <kvpolicy/cpu/parallel_for.hpp>

#include "cpu/random_layer.hpp"
#include "support/compare.hpp"
#include "support/repeats.hpp"

namespace {
using kvpolicy::bfloat16;
using kvpolicy::float16;
using kvpolicy::compiled::Engine;
using test::below;
using test::Random;
using test::Tensor;

constexpr double tolerance = 5e-5;
constexpr double tolerance_of_log_sum_exp = 6e-6;
// The bound for outputs rounded to T.
template <class T>
constexpr double rounding = std::is_same_v<T, float> ? 0.0 : 4 * 0x1p-7;

const std::vector<std::size_t> head_dims{16, 64, 80, 96, 128, 256};
const std::vector<std::size_t> groups{1, 3, 4, 7, 8, 16};

template <class Run>
void for_each_instruction_set(Run run) {
  for (const std::string_view name : kvpolicy::compiled::instruction_sets()) {
    CAPTURE(std::string{name});
    run(name);
  }
}

template <class Out>
std::vector<float> numbers(const Tensor<Out>& tensor) {
  std::vector<float> result;
  for (const Out& number : tensor.numbers()) result.push_back(static_cast<float>(number));
  return result;
}

template <class Q, class Out>
void compare_attend(Random& random, Engine& engine) {
  const std::size_t group = test::one_of(random, groups);
  const std::size_t head_dim = test::one_of(random, head_dims);
  // A few queries are streamed, many are computed in tiles.
  const std::size_t tokens = test::one_of(random, std::vector<std::size_t>{1, 2, 3, 15, 33});
  const std::size_t kv_heads = 1 + below(random, 3);
  CAPTURE(group);
  CAPTURE(head_dim);
  CAPTURE(tokens);
  test::RandomCall<Q> call{random, kv_heads, group, head_dim, tokens};
  Tensor<Out> out{tokens, kv_heads * group, head_dim};
  Tensor<Out> expected{tokens, kv_heads * group, head_dim};
  std::vector<float> lse(tokens * kv_heads * group);
  std::vector<float> expected_lse(lse.size());
  kvpolicy::ScalarEngine scalar;
  call.attend(engine, out, lse);
  call.attend(scalar, expected, expected_lse);
  REQUIRE(test::largest_difference(numbers(out), numbers(expected)) <=
          call.tolerance(tolerance) + rounding<Out>);
  for (std::size_t i = 0; i < lse.size(); ++i) {
    const double size = std::max(1.0, std::abs(static_cast<double>(expected_lse[i])));
    const double bound = call.tolerance(tolerance_of_log_sum_exp) * (std::isinf(size) ? 1.0 : size);
    REQUIRE(test::largest_difference(std::vector{lse[i]}, std::vector{expected_lse[i]}) <= bound);
  }
}

TEST_CASE("attend equals ScalarEngine on every instruction set") {
  for_each_instruction_set([](std::string_view name) {
    Random random{2024};
    Engine engine{kvpolicy::cpu::SerialFor{}, name};
    REQUIRE(engine.instruction_set() == name);
    for (int round = 0; round < test::repeats(30); ++round) {
      CAPTURE(round);
      compare_attend<float, float>(random, engine);
      compare_attend<bfloat16, float>(random, engine);
      compare_attend<float16, bfloat16>(random, engine);
    }
  });
}

TEST_CASE("observe equals ScalarEngine on every instruction set") {
  for_each_instruction_set([](std::string_view name) {
    Random random{11};
    Engine engine{kvpolicy::cpu::SerialFor{}, name};
    for (int round = 0; round < 20; ++round) {
      CAPTURE(round);
      const std::size_t group = test::one_of(random, groups);
      const std::size_t kv_heads = 1 + below(random, 3);
      test::RandomCall<bfloat16> call{random, kv_heads, group, test::one_of(random, head_dims),
                                      1 + below(random, 30)};
      std::vector<std::span<float>> views(kv_heads);
      const auto observe = [&](auto& by) {
        std::vector<std::vector<float>> sums(kv_heads);
        for (std::size_t head = 0; head < kv_heads; ++head) {
          sums[head].assign((call.heads[head].rows_shown() + 1) * group, 5.0F);
          views[head] = sums[head];
        }
        by.observe({kvpolicy::ConstTensor{call.queries.view()}, call.first_position, call.segments, views,
                    call.options});
        return sums;
      };
      kvpolicy::ScalarEngine scalar;
      const auto expected = observe(scalar);
      const auto sums = observe(engine);
      for (std::size_t head = 0; head < kv_heads; ++head) {
        const double logit_error = call.error_of_logits(head, 0.0);
        for (std::size_t i = 0; i < sums[head].size(); ++i) {
          const auto sum = static_cast<double>(expected[head][i]);
          const double off = std::abs(static_cast<double>(sums[head][i]) - sum);
          REQUIRE(off <= 2e-5 + sum * std::expm1(2 * logit_error));
        }
      }
    }
  });
}

TEST_CASE("score equals ScalarEngine on every instruction set") {
  for_each_instruction_set([](std::string_view name) {
    Random random{13};
    Engine engine{kvpolicy::cpu::SerialFor{}, name};
    for (const std::size_t head_dim : head_dims) {
      for (const std::size_t rows : {std::size_t{1}, std::size_t{31}, std::size_t{33}, std::size_t{1000}}) {
        const test::RandomPlane plane{random, {.encoding = kvpolicy::Encoding::bfloat16}, rows, head_dim};
        std::vector<float> query(head_dim);
        for (float& number : query) number = test::normal(random);
        std::vector<float> out(rows);
        std::vector<float> expected(rows);
        kvpolicy::ScalarEngine{}.score(plane.plane(), query, expected);
        engine.score(plane.plane(), query, out);
        REQUIRE(test::largest_difference(out, expected) <= 2e-4);
      }
    }
  });
}

// Starts threads for each call, and counts what it ran.
struct CountingPool {
  std::shared_ptr<std::atomic<std::size_t>> calls = std::make_shared<std::atomic<std::size_t>>(0);

  [[nodiscard]] std::size_t threads() const { return 3; }
  void operator()(std::size_t count, const std::function<void(std::size_t)>& body) const {
    std::vector<std::thread> team;
    for (std::size_t i = 0; i < count; ++i) team.emplace_back(body, i);
    for (std::thread& member : team) member.join();
    *calls += count;
  }
};

TEST_CASE("a pool's threads do the work, and a copy has the same pool") {
  Random random{5};
  // Large enough that more than one thread is worth waking, whatever rows are drawn.
  test::RandomCall<float> call{random, 16, 4, 256, 3};
  std::vector<float> lse(3 * 64);
  Tensor<float> expected{3, 64, 256};
  kvpolicy::ScalarEngine scalar;
  call.attend(scalar, expected, lse);
  const CountingPool pool;
  Engine engine{pool};
  for (int round = 0; round < 2; ++round) {
    const std::size_t before = *pool.calls;
    Tensor<float> out{3, 64, 256};
    call.attend(engine, out, lse);
    CHECK(test::largest_difference(out.numbers(), expected.numbers()) <= call.tolerance(tolerance));
    CHECK(*pool.calls > before + 1);
    Engine other = engine;
    engine = other;
    CHECK(engine.instruction_set() == kvpolicy::compiled::instruction_sets().front());
  }
}

TEST_CASE("errors: an unknown instruction set, a head_dim that does not fit vectors") {
  CHECK(kvpolicy::compiled::instruction_sets().back() == "baseline");
  const auto unknown =
      test::thrown<kvpolicy::ConfigError>([] { (void)Engine{kvpolicy::cpu::SerialFor{}, "AVX9"}; });
  CHECK(test::contains(unknown, "'AVX9'"));
  CHECK(test::contains(unknown, "baseline"));
  std::vector<float> query(20);
  std::vector<float> out(1);
  const kvpolicy::Plane plane{.base = reinterpret_cast<const std::byte*>(query.data()), .row_stride = 80};
  for_each_instruction_set([&](std::string_view name) {
    Engine engine{kvpolicy::cpu::SerialFor{}, name};
    CHECK(test::contains(test::thrown<kvpolicy::ShapeError>([&] { engine.score(plane, query, out); }),
                         "head_dim is 20"));
  });
}

}  // namespace
