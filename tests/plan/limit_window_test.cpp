// SPDX-License-Identifier: Apache-2.0
//
// A sliding window of the model replaces a head's settings if they keep more rows than the window.
#include <cstddef>

#include <doctest/doctest.h>

#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>

using namespace kvpolicy;

namespace {

using Plan = HeadPlan<float>;
using Window = SinkRecentCache<DenseStorage<float>>;
using CodedWindow = SinkRecentCache<PerTokenStorage<float>>;
constexpr ModelShape shape{.layers = 2, .q_heads = 6, .kv_heads = 6, .head_dim = 64};

}  // namespace

TEST_CASE("heads become sliding windows unless they keep no more than that") {
  Plan plan{shape};
  const Window::Config narrow{.sinks = 10, .recent = 90};
  const Window::Config wide{.sinks = 11, .recent = 90};
  const CodedWindow::Config coded{.sinks = 0, .recent = 100};
  plan.set(0, 1, narrow);
  plan.set(0, 2, wide);
  plan.set(0, 3, coded);
  plan.set(0, 4, HeadBudgetCache<DenseStorage<float>>::Config{.budget = 5});
  plan.set(0, 5, Window::Config{.sinks = 0, .recent = 5000});
  plan.set(1, 0, Window::Config{.sinks = 0, .recent = 90, .mask = Mask::prefill_chunk});
  const Plan before = plan;
  plan.limit_window(0, 100);
  const HeadSettings<float> limited = Window::Config{.sinks = 0, .recent = 100};
  CHECK(plan.at(0, 0) == limited);
  CHECK(plan.at(0, 1) == HeadSettings<float>{narrow});  // 10 + 90 rows: no more than the window
  CHECK(plan.at(0, 2) == limited);
  CHECK(plan.at(0, 3) == HeadSettings<float>{coded});
  CHECK(plan.at(0, 4) == limited);
  CHECK(plan.at(0, 5) == limited);
  for (std::size_t head = 0; head < shape.kv_heads; ++head) {
    CHECK(plan.at(1, head) == before.at(1, head));  // another layer does not change
  }
  // With a mask for a whole call, its later queries would see more than the window.
  Plan masked = plan;
  masked.limit_window(1, 100);
  CHECK(masked.at(1, 0) == limited);
  const Plan once = plan;
  plan.limit_window(0, 100);
  CHECK(plan == once);
  plan.limit_window(0, 101);
  CHECK(plan == once);
}

TEST_CASE("a window of 0 and a layer that does not exist are refused") {
  Plan plan{shape};
  const Plan before = plan;
  CHECK_THROWS_AS(plan.limit_window(0, 0), ConfigError);
  CHECK_THROWS_AS(plan.limit_window(2, 100), ConfigError);
  CHECK(plan == before);
}

TEST_CASE("plans refuse heads that do not exist and settings that do not work, and do not change") {
  Plan plan{shape};
  const Plan before = plan;
  CHECK_THROWS_AS((void)plan.at(2, 0), ConfigError);
  CHECK_THROWS_AS((void)plan.at(0, 6), ConfigError);
  CHECK_THROWS_AS(plan.set(0, 6, Window::Config{}), ConfigError);
  CHECK_THROWS_AS(plan.set(0, 0, Window::Config{.recent = 0}), ConfigError);
  CHECK_THROWS_AS((Plan{{.layers = 0, .q_heads = 1, .kv_heads = 1, .head_dim = 64}}), ConfigError);
  CHECK_THROWS_AS((Plan{{.layers = 1, .q_heads = 3, .kv_heads = 2, .head_dim = 64}}), ConfigError);
  CHECK_THROWS_AS((Plan{{.layers = 1, .q_heads = 2, .kv_heads = 2, .head_dim = 12}}), ConfigError);
  CHECK(plan == before);
}
