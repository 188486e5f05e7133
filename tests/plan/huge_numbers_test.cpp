// SPDX-License-Identifier: Apache-2.0
//
// Texts and plans too large for any machine must give a named error, never a number that wrapped
// around.
#include <doctest/doctest.h>

#include <cstddef>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>

#include <kvpolicy/plan/search.hpp>
#include <kvpolicy/plan/search_menu.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>

#include "support/compare.hpp"

using namespace kvpolicy;
using ::test::contains;
using ::test::thrown;

namespace {

using Plan = HeadPlan<bfloat16>;
constexpr std::size_t huge = std::numeric_limits<std::size_t>::max();
constexpr std::size_t longest = std::size_t{1} << 40;
constexpr ModelShape small{.layers = 2, .q_heads = 2, .kv_heads = 2, .head_dim = 128};
// With 2^40 tokens its rows take more than 2^59 bytes.
constexpr ModelShape large{.layers = 1024, .q_heads = 128, .kv_heads = 128, .head_dim = 256};

}  // namespace

TEST_CASE("memory is exact up to the longest text, and refused for longer ones") {
  const Plan plan{small};
  // 4 heads, keys and values of 128 numbers of 2 bytes; the tail has one row of each head.
  CHECK(plan.memory(longest).heads == longest * 4 * 512);
  CHECK(plan.memory(longest).total() == longest * 4 * 512 + 4 * 512);
  for (const std::size_t tokens : {longest + 1, std::size_t{1} << 47, std::size_t{1} << 55, huge}) {
    CAPTURE(tokens);
    for (const bool compressed : {false, true}) {
      const std::string said =
          thrown<CapacityError>([&] { static_cast<void>(plan.memory(tokens, {}, compressed)); });
      CHECK(contains(said, message(tokens, " tokens, must be at most 2^40")));
    }
  }
}

TEST_CASE("a plan whose bytes exceed a std::size_t is refused, and one just below is not") {
  const Plan plan{large};
  // 2^17 heads of 2^10 bytes a row: 2^27 bytes a token.
  const std::size_t most = std::size_t{1} << 36;
  CHECK(plan.memory(most).heads == most << 27);
  CHECK(contains(thrown<CapacityError>([&] { static_cast<void>(plan.memory(most * 2)); }),
                 "137438953472 tokens take more bytes than a std::size_t holds"));
  CHECK(!thrown<CapacityError>([&] { static_cast<void>(plan.memory(longest)); }).empty());
  // The longest context is found nevertheless.
  CHECK(plan.max_context(std::size_t{1} << 40) < (std::size_t{1} << 13));
  CHECK(plan.max_context(std::size_t{1} << 40) > (std::size_t{1} << 13) - 128);
  CHECK(plan.max_context(huge / 2) <= std::optional{most});
  CHECK(plan.max_context(huge / 2) >= std::optional{most - 128});
  CHECK(plan.max_context(huge - 1) <= std::optional{2 * most});
  CHECK(plan.max_context(huge - 1) >= std::optional{2 * most - 128});
}

TEST_CASE(
    "plan search refuses a context that no text has, and finds a plan where most choices are too large") {
  const HeadGates gates{small.layers, small.kv_heads, 0.5};
  for (const std::size_t context : {longest + 1, huge / 2 + 2, huge}) {
    CAPTURE(context);
    CHECK(contains(thrown<CapacityError>(
                       [&] { static_cast<void>(choices_by_importance<bfloat16>(small, gates, context)); }),
                   message("choices_by_importance: ", context, " tokens, must be at most 2^40")));
    const auto choices = choices_by_importance<bfloat16>(small, gates, 4096);
    CHECK(contains(thrown<CapacityError>([&] {
                     static_cast<void>(search_plan<bfloat16>(
                         small, choices, {.bytes = std::size_t{1} << 40, .context = context}));
                   }),
                   message("search_plan: ", context, " tokens")));
  }
  // All rows of all heads exceed any number of bytes; a window does not.
  constexpr ModelShape wide{.layers = 64, .q_heads = 512, .kv_heads = 512, .head_dim = 256};
  const std::vector<HeadChoice<bfloat16>> choices{
      {FullCache<DenseStorage<bfloat16>>::Config{}, HeadDamage{wide.layers, wide.kv_heads, 0.0}},
      {SinkRecentCache<DenseStorage<bfloat16>>::Config{.sinks = 4, .recent = 60},
       HeadDamage{wide.layers, wide.kv_heads, 1.0}}};
  const std::size_t bytes = std::size_t{1} << 40;
  const auto found = search_plan<bfloat16>(wide, choices, {.bytes = bytes, .context = longest});
  CHECK(found.bytes <= bytes);
  CHECK(found.bytes == found.plan.memory(longest, {}, true).total());
}
