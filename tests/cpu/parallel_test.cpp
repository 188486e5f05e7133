// SPDX-License-Identifier: Apache-2.0
//
// Threads: any pool and any number of threads give the same bits each time, and nothing is lost when
// memory runs out.
#include <cstddef>
#include <functional>
#include <initializer_list>
#include <memory>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/cpu.hpp>
#include <kvpolicy/cpu/engine.hpp>
#include <kvpolicy/plan/head_plan.hpp>

#include "cpu/random_layer.hpp"
#include "support/compare.hpp"

namespace {
using namespace kvpolicy;
using test::Random;
using test::Tensor;

// A caller's own threads, called through a std::function as in many pools; a new thread for each call.
class ThreadPerCall {
 public:
  explicit ThreadPerCall(std::size_t threads) : threads_{threads} {}
  [[nodiscard]] std::size_t threads() const { return threads_; }
  void operator()(std::size_t count, const std::function<void(std::size_t)>& body) const {
    std::vector<std::jthread> threads;
    // Starts with the last one, because nothing may depend on the order.
    for (std::size_t i = count; i > 0; --i) threads.emplace_back([&body, i] { body(i - 1); });
  }

 private:
  std::size_t threads_;
};
static_assert(cpu::ParallelFor<ThreadPerCall>);

// Claims several threads and has one.
struct Pretender {
  [[nodiscard]] std::size_t threads() const { return 5; }
  template <class Body>
  void operator()(std::size_t count, const Body& body) const {
    for (std::size_t i = count; i > 0; --i) body(i - 1);
  }
};

// Notes how many calls it was asked for.
struct Recording {
  std::size_t* latest;
  [[nodiscard]] std::size_t threads() const { return 3; }
  template <class Body>
  void operator()(std::size_t count, const Body& body) const {
    *latest = count;
    for (std::size_t i = 0; i < count; ++i) body(i);
  }
};

// Compiled here, as the others are: which products a compiler fuses with sums, and so the last bits, may
// differ from those of the engine that the build's programs share.
struct OwnTuning : cpu::DefaultTuning {};
// Cuts even the smallest parts off a tile.
struct SmallParts : cpu::DefaultTuning {
  static constexpr std::size_t task_weight = 1;
};
struct OneRowParts : SmallParts {
  static constexpr std::size_t tasks_per_thread = 1000;
};
struct OddSizes : SmallParts {
  static constexpr std::size_t stream_rows = 5;
  static constexpr std::size_t tile_rows = 7;
  static constexpr std::size_t stream_queries = 3;
  static constexpr std::size_t tile_queries = 10;
};

struct Result {
  std::vector<float> out;
  std::vector<float> log_sum_exp;
};

template <class Engine, class Call>
Result attend(Engine engine, Call& call, std::size_t head_dim) {
  const std::size_t q_heads = call.heads.size() * call.group;
  Tensor<float> out{call.queries.tokens(), q_heads, head_dim};
  Result result{{}, std::vector<float>(call.queries.tokens() * q_heads)};
  call.attend(engine, out, result.log_sum_exp);
  CHECK(out.guards_intact());
  result.out = out.numbers();
  return result;
}

template <class Tuning, class Pool, class Call>
Result with_pool(const Pool& pool, Call& call, std::size_t head_dim) {
  return attend(cpu::Engine<Pool, Tuning>{pool}, call, head_dim);
}

TEST_CASE("any number of threads and any cut: equal up to rounding, and bit-equal when repeated") {
  Random random{31};
  for (int round = 0; round < 40; ++round) {
    CAPTURE(round);
    const std::size_t head_dim = round % 2 == 0 ? 64 : 80;
    const std::size_t tokens = round % 3 == 0 ? 1 : 1 + test::below(random, 20);
    test::RandomCall<float> call{random, 2, round % 5 == 0 ? 7UL : 4UL, head_dim, tokens};
    const Result one = with_pool<OwnTuning>(cpu::SerialFor{}, call, head_dim);
    const auto check = [&](const Result& other) {
      REQUIRE(test::largest_difference(other.out, one.out) <= call.tolerance(3e-5));
      REQUIRE(test::largest_difference(other.log_sum_exp, one.log_sum_exp) <= call.tolerance(5e-5));
    };
    for (const std::size_t threads : std::initializer_list<std::size_t>{1, 2, 3, 4}) {
      CAPTURE(threads);
      const ThreadPerCall pool{threads};
      const Result many = with_pool<SmallParts>(pool, call, head_dim);
      check(many);
      const Result again = with_pool<SmallParts>(pool, call, head_dim);
      REQUIRE(test::same_bits(many.out, again.out));
      REQUIRE(test::same_bits(many.log_sum_exp, again.log_sum_exp));
      if (threads == 1) REQUIRE(test::same_bits(many.out, one.out));
    }
    check(with_pool<OneRowParts>(ThreadPerCall{2}, call, head_dim));
    check(with_pool<OddSizes>(ThreadPerCall{3}, call, head_dim));
    check(with_pool<OneRowParts>(Pretender{}, call, head_dim));
  }
}

TEST_CASE("an engine may be reused for calls of any size, and copied in between") {
  Random random{37};
  cpu::Engine<ThreadPerCall, SmallParts> engine{ThreadPerCall{2}};
  for (int round = 0; round < 30; ++round) {
    CAPTURE(round);
    const std::size_t head_dim = 16 * (1 + test::below(random, 8));
    test::RandomCall<float> call{random, 1 + test::below(random, 3), 1 + test::below(random, 9), head_dim,
                                 1 + test::below(random, 30)};
    const auto attend_with = [&](auto& own) {
      Tensor<float> out{call.queries.tokens(), call.heads.size() * call.group, head_dim};
      std::vector<float> lse(call.queries.tokens() * call.heads.size() * call.group);
      call.attend(own, out, lse);
      return out.numbers();
    };
    auto fresh = cpu::Engine<ThreadPerCall, SmallParts>{ThreadPerCall{2}};
    auto copy = engine;
    const auto expected = attend_with(fresh);
    REQUIRE(test::same_bits(attend_with(engine), expected));
    REQUIRE(test::same_bits(attend_with(copy), expected));
    engine = copy;
  }
}

TEST_CASE("a decode step of few rows wakes no thread, one of many rows wakes all") {
  const ModelShape shape{.layers = 1, .q_heads = 4, .kv_heads = 4, .head_dim = 64};
  std::size_t calls = 0;
  cpu::KvCache<float, cpu::Engine<Recording>> cache{
      HeadPlan<float>{shape}, {}, cpu::Engine<Recording>{Recording{&calls}}};
  const std::size_t tokens = 1000;
  std::vector<float> rows(tokens * 4 * 64, 0.5F);
  std::vector<float> out(rows.size());
  const auto step = [&](std::size_t count) {
    const TensorView own{rows.data(), count, 4, 64};
    cache.step(0, own, own, own, TensorView{out.data(), count, 4, 64});
  };
  step(1);
  CHECK(calls == 1);
  step(1);
  CHECK(calls == 1);
  step(tokens);  // a prompt: work grows with the queries as well
  CHECK(calls == 3);
  step(1);
  CHECK(calls == 3);
}

TEST_CASE("observe gives the same bits with any number of threads") {
  Random random{41};
  test::RandomCall<float16> call{random, 5, 4, 64, 24};
  const auto observe = [&](std::size_t threads) {
    std::vector<std::vector<float>> sums;
    for (const auto& head : call.heads) sums.emplace_back(head.rows_shown() * 4);
    std::vector<std::span<float>> views{sums.begin(), sums.end()};
    cpu::Engine<ThreadPerCall> engine{ThreadPerCall{threads}};
    engine.observe(
        {ConstTensor{call.queries.view()}, call.first_position, call.segments, views, call.options});
    return sums;
  };
  const auto one = observe(1);
  for (const std::size_t threads : std::initializer_list<std::size_t>{2, 3, 8}) {
    const auto many = observe(threads);
    for (std::size_t head = 0; head < one.size(); ++head) {
      REQUIRE(test::same_bits(one[head], many[head]));
    }
  }
}

}  // namespace

#ifdef _OPENMP
TEST_CASE("inside a region that OpenMP does not nest, its default has one thread") {
  const int levels = omp_get_max_active_levels();
  const cpu::OpenMpFor all;
  const cpu::OpenMpFor three{.count = 3};
  for (const int allowed : {1, 2}) {
    omp_set_max_active_levels(allowed);
    CHECK(all.threads() == static_cast<std::size_t>(omp_get_max_threads()));
    std::vector<std::size_t> inside(2, 0);
    std::size_t asked = 0;
    // A team of two: a team of one is no active region.
#pragma omp parallel num_threads(2)
    {
      inside[static_cast<std::size_t>(omp_get_thread_num())] = all.threads();
#pragma omp single
      asked = three.threads();
    }
    for (const std::size_t threads : inside) {
      CHECK(threads == (allowed == 1 ? 1 : static_cast<std::size_t>(omp_get_max_threads())));
    }
    CHECK(asked == 3);
  }
  omp_set_max_active_levels(levels);
}
#endif
