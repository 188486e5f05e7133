// SPDX-License-Identifier: Apache-2.0
//
// An engine that fails in the middle of a batch's call: the error names the sequence, or the sequence is left out, and
// the rows of all others are as they were.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/cache/batch.hpp>
#include <kvpolicy/core/scalar_engine.hpp>
#include <kvpolicy/policy/h2o_scorer.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>

#include "cache/dump.hpp"
#include "support/compare.hpp"

using namespace kvpolicy;
using test::contains;
using test::thrown;

namespace {

constexpr ModelShape shape{1, 2, 2, 16};

// When the engine fails, and how.
struct Fault {
  std::int64_t position = -1;           // of the first query of the call that fails; -1: none does
  std::function<void()> raise = [] {};  // throws
  bool in_observe = false;              // while attention is added up, not while it is computed
  std::size_t together = 0;             // a call of all sequences fails if it has more than so many; 0: never
  std::size_t attends = 0, attends_all = 0;

  void meet(std::int64_t first, bool observes) const {
    if (first == position && observes == in_observe) raise();
  }
};

// One call at a time.
class SingleEngine {
 public:
  explicit SingleEngine(std::shared_ptr<Fault> fault = std::make_shared<Fault>())
      : fault_{std::move(fault)} {}
  void attend(const LayerAttention& work) {
    ++fault_->attends;
    fault_->meet(work.first_position, false);
    engine_.attend(work);
  }
  void observe(const LayerObservation& work) {
    fault_->meet(work.first_position, true);
    engine_.observe(work);
  }
  void score(const Plane& rows, std::span<const float> query, std::span<float> out) {
    engine_.score(rows, query, out);
  }

 protected:
  std::shared_ptr<Fault> fault_;
  ScalarEngine engine_;
};

// All calls at once. It writes outputs before it fails.
class TogetherEngine : public SingleEngine {
 public:
  using SingleEngine::SingleEngine;
  void attend_all(std::span<const LayerAttention> works) {
    ++fault_->attends_all;
    if (fault_->together > 0 && works.size() > fault_->together) throw std::bad_alloc{};
    for (const LayerAttention& work : works) {
      fault_->meet(work.first_position, false);
      engine_.attend(work);
    }
  }
};

// Sequences of 3, 5, 7 and 9 tokens, so that a call's first position says whose it is, and twins of them.
template <class Engine>
struct Four {
  using Cache = KvCache<float, Engine>;
  using Sequence = BatchSequence<Cache>;

  std::shared_ptr<Fault> fault = std::make_shared<Fault>();
  Batch<float, Engine> batch{Engine{fault}};
  std::vector<Cache> caches;
  std::vector<KvCache<float>> twins;
  std::vector<Sequence> sequences;
  std::vector<std::int32_t> indptr{0, 2, 3, 4, 6};
  test::Random random{11};
  test::Chunk<float> chunk{random, shape, 6};

  Four() {
    HeadPlan<float> plan{shape};
    // A head that adds attention up, so that there is something to observe.
    plan.set(0, 1, HeadBudgetCache<DenseStorage<float>, H2oScorer>::Config{.budget = 40});
    for (const std::size_t tokens : {3U, 5U, 7U, 9U}) {
      caches.emplace_back(plan, CacheOptions{}, Engine{fault});
      twins.emplace_back(plan);
      test::Chunk<float> text{random, shape, tokens};
      text.step(caches.back(), 0);
      text.step(twins.back(), 0);
    }
    for (Cache& cache : caches) sequences.push_back({&cache});
    fault->attends = 0;
  }

  std::vector<LeftOut> step() {
    const auto out =
        batch.step(0, sequences, indptr, std::as_const(chunk.q).view(), std::as_const(chunk.k).view(),
                   std::as_const(chunk.v).view(), chunk.out.view());
    return {out.begin(), out.end()};
  }
  [[nodiscard]] std::vector<test::Dump> dumps() const {
    std::vector<test::Dump> all;
    for (const Cache& cache : caches) all.push_back(test::dump(cache));
    return all;
  }
  // That these sequences have taken the step, the others not, and that it was the step that each takes alone.
  void check(const std::vector<bool>& stepped) {
    for (std::size_t i = 0; i < caches.size(); ++i) {
      CAPTURE(i);
      if (stepped[i]) {
        const auto first = static_cast<std::size_t>(indptr[i]);
        const auto tokens = static_cast<std::size_t>(indptr[i + 1] - indptr[i]);
        test::Tensor<float> alone{tokens, shape.q_heads, shape.head_dim};
        twins[i].step(0, std::as_const(chunk.q).view().slice(first, tokens),
                      std::as_const(chunk.k).view().slice(first, tokens),
                      std::as_const(chunk.v).view().slice(first, tokens), alone.view());
        for (std::size_t token = 0; token < tokens; ++token) {
          for (std::size_t head = 0; head < shape.q_heads; ++head) {
            CHECK(test::same_bits(chunk.out.row(first + token, head), alone.row(token, head)));
          }
        }
      }
      CHECK(test::dump(caches[i]) == test::dump(twins[i]));
    }
  }
};

template <class Engine>
void check_errors() {
  struct Case {
    std::function<void()> raise;
    const char* text;
  };
  const Case cases[] = {{[] { throw ShapeError("head_dim is 7"); }, "head_dim is 7"},
                        {[] { throw ConfigError("no such unit"); }, "no such unit"},
                        {[] { throw DeviceError("it fell off the bus"); }, "it fell off the bus"},
                        {[] { throw std::out_of_range("far out"); }, "far out"}};
  for (const Case& one : cases) {
    for (const bool in_observe : {false, true}) {
      CAPTURE(one.text);
      CAPTURE(in_observe);
      Four<Engine> four;
      const std::vector<test::Dump> before = four.dumps();
      four.fault->position = 7;  // of sequence 2
      four.fault->in_observe = in_observe;
      four.fault->raise = one.raise;
      const std::string said = thrown<Error>([&] { static_cast<void>(four.step()); });
      CHECK(contains(said, "sequence 2: "));
      CHECK(contains(said, one.text));
      CHECK(four.dumps() == before);
      // The call that failed left nothing behind.
      four.fault->position = -1;
      CHECK(four.step().empty());
      four.check({true, true, true, true});
    }
  }
  Four<Engine> four;
  four.fault->position = 5;
  four.fault->raise = [] { throw ShapeError("of a type of its own"); };
  CHECK(contains(thrown<ShapeError>([&] { static_cast<void>(four.step()); }),
                 "sequence 1: of a type of its own"));
}

template <class Engine>
void check_missing_memory() {
  for (const bool in_observe : {false, true}) {
    for (const bool is_storage : {false, true}) {
      CAPTURE(in_observe);
      CAPTURE(is_storage);
      Four<Engine> four;
      four.fault->position = 5;
      four.fault->in_observe = in_observe;
      four.fault->raise = [is_storage] {
        if (is_storage) throw StorageError("the disk is gone");
        throw std::bad_alloc{};
      };
      const std::vector<LeftOut> out = four.step();
      REQUIRE(out.size() == 1);
      CHECK(out[0].sequence == 1);
      if (is_storage) {
        CHECK_THROWS_AS(std::rethrow_exception(out[0].error), StorageError);
      } else {
        CHECK_THROWS_AS(std::rethrow_exception(out[0].error), std::bad_alloc);
      }
      four.check({true, false, true, true});
    }
  }
}

}  // namespace

TEST_CASE("what the engine throws names the sequence, and all rows are as they were") {
  SUBCASE("one call at a time") { check_errors<SingleEngine>(); }
  SUBCASE("all calls together") { check_errors<TogetherEngine>(); }
}

TEST_CASE("a sequence for which the engine lacks memory is left out, and the others go on") {
  SUBCASE("one call at a time") { check_missing_memory<SingleEngine>(); }
  SUBCASE("all calls together") { check_missing_memory<TogetherEngine>(); }
}

TEST_CASE("memory that only all calls together lack is nobody's fault") {
  Four<TogetherEngine> four;
  four.fault->together = 3;
  CHECK(four.step().empty());
  CHECK(four.fault->attends_all == 1);
  CHECK(four.fault->attends == 4);
  four.check({true, true, true, true});
}
