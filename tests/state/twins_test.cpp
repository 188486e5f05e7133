// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include "state/twins.hpp"

using kvpolicy::DenseStorage;
using kvpolicy::HeadBudgetCache;
using kvpolicy::HeadPlan;

namespace {

template <kvpolicy::Element E>
void any_plans(std::uint64_t seed, bool other_options, std::size_t operations) {
  struct Case {
    std::size_t layers, kv_heads, group, max_rollback, max_append, page_rows, kept_queries;
  };
  const std::vector<Case> cases{{1, 16, 1, 0, 1, 32, 0},
                                {2, 6, 2, 0, 20, 64, 0},
                                {1, 14, 1, 7, 3, 32, 5},
                                {2, 5, 3, 40, 1, 64, 0},
                                {1, 9, 1, 90, 33, 128, 30}};
  for (const Case& one : cases) {
    test::RandomRun run{{one.layers, one.kv_heads * one.group, one.kv_heads, 64}, {}, other_options};
    run.options.max_rollback = one.max_rollback;
    run.options.max_append = one.max_append;
    run.options.page_rows = one.page_rows;
    run.options.kept_queries = one.kept_queries;
    ++seed;
    kvpolicy::testing::Random random{static_cast<unsigned>(seed)};
    const auto plan = test::random_saved_plan<E>(run.shape, random, one.max_rollback > 0);
    test::random_twins(seed, plan, run, operations);
  }
}

}  // namespace

TEST_CASE("a cache that is saved and loaded in between continues like one that is not") {
  any_plans<float>(10, false, 60);
}

TEST_CASE("the same in 16 bits") { any_plans<kvpolicy::bfloat16>(20, false, 25); }

TEST_CASE("pages of another size and slow memory change the addresses of rows and nothing else") {
  any_plans<float>(30, true, 40);
}

TEST_CASE("heads that share their layer's budget continue to share it") {
  for (const std::size_t every : {std::size_t{0}, std::size_t{25}}) {
    test::RandomRun run{{2, 4, 4, 64}, {}, false};
    HeadPlan<float> plan{run.shape};
    for (std::size_t head = 0; head < 8; ++head) {
      plan.set(head / 4, head % 4,
               HeadBudgetCache<DenseStorage<float>>::Config{
                   .budget = 10 + 7 * head, .compress_every = every, .adaptive_in_layer = true});
    }
    test::random_twins(40 + every, plan, run, 60);
  }
}
