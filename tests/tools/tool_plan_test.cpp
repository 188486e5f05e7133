// SPDX-License-Identifier: Apache-2.0
//
// The names that --plan takes for heads with a budget.
#include <doctest/doctest.h>

#include <string>

#include "common/plan_view.hpp"
#include "tool_plan.hpp"

using namespace kvpolicy;
using namespace kvpolicy::tools;

namespace {

using Plan = AnyPlan<float>;
using Dense = DenseStorage<float>;
constexpr ModelShape shape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 64};

Plan plan_named(const std::string& name) {
  PlanArguments arguments;
  arguments.plan = name;
  return make_plan<float>(arguments, shape);
}

std::string refusal(const std::string& name) {
  try {
    (void)plan_named(name);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("--plan: so many rows per head in all, ranked by the scorer of the name") {
  const auto same = [](const std::string& name, const Plan::Config& config) {
    return plan_named(name) == Plan{shape, config};
  };
  CHECK(same("snapkv:100", HeadBudgetCache<Dense>::Config{.budget = 92}));
  CHECK(same("snapkv:100,20", HeadBudgetCache<Dense>::Config{.budget = 80, .scorer = {.window = 20}}));
  CHECK(same("snapkv:8", HeadBudgetCache<Dense>::Config{.budget = 0}));
  CHECK(same("adakv:64", HeadBudgetCache<Dense>::Config{.budget = 56, .share_in_layer = true}));
  CHECK(same("tova:64", HeadBudgetCache<Dense, TovaScorer>::Config{
                            .budget = 64, .compress_every = 1, .after_first_compress = true}));
  CHECK(same("h2o:65", HeadBudgetCache<Dense, H2oScorer>::Config{
                           .budget = 33, .compress_every = 1, .after_first_compress = true, .scorer = {.recent = 32}}));
  CHECK(same("keynorm:64", HeadBudgetCache<Dense, KeyNormScorer>::Config{.budget = 64}));
  const auto quantized = plan_named("adakv+int4:64");
  using Codes = HeadBudgetCache<PerTokenStorage<float>>::Config;
  CHECK(std::get<Codes>(quantized.at(1, 1)).storage.bits == 4);
  CHECK(std::get<Codes>(quantized.at(1, 1)).share_in_layer);
  CHECK(refusal("snapkv:7").find("a capacity of 7 rows, must be at least 1 and at least the 8 latest") !=
        std::string::npos);
  CHECK(refusal("tova:0").find("a capacity of 0 rows") != std::string::npos);
  CHECK(refusal("tova+int4:9").find("tova cannot be combined with int4") != std::string::npos);
  CHECK(refusal("h2o:9,3").find("takes at most 1 numbers") != std::string::npos);
  CHECK(needs_of(plan_named("h2o:9")).compress);
}

TEST_CASE("a pattern's view says how many heads tie at the cut") {
  const HeadGates gates{3, 2, {0.2, 1.0, 1.3, 1.0, 1.0, 0.5}};
  CHECK(tie_text(gates, 0.5).starts_with("the cut falls into a tie of 4 heads, 3 of which keep"));
  CHECK(tie_text(gates, 1.0 / 3.0).empty());  // all four
  CHECK(tie_text(gates, 1.0 / 6.0).empty());
  CHECK(tie_text(gates, 0.0).empty());
}
