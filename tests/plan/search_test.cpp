// SPDX-License-Identifier: Apache-2.0
//
// Compares plan search with all possible plans or, if there are too many, with a bound.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <limits>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/plan/low_bits.hpp>
#include <kvpolicy/plan/search.hpp>
#include <kvpolicy/plan/search_menu.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>

#include "plan/random_plan.hpp"

using namespace kvpolicy;
using namespace kvpolicy::testing;

namespace {

using Plan = HeadPlan<bfloat16>;
using Dense = DenseStorage<bfloat16>;
using Choices = std::vector<HeadChoice<bfloat16>>;
using Full = FullCache<Dense>::Config;
using Window = SinkRecentCache<Dense>::Config;
using Budget = HeadBudgetCache<Dense>::Config;
using Codes = QuantizedResidualCache<bfloat16>::Config;

HeadDamage random_damage(const ModelShape& shape, Random& random) {
  HeadDamage damage{shape.layers, shape.kv_heads};
  for (double& one : damage.values()) {
    // Includes zeros and ties on purpose.
    one = pick(random, 0, 3) == 0 ? 0.0 : static_cast<double>(pick(random, 1, 40)) / 8.0;
  }
  return damage;
}

Choices random_choices(const ModelShape& shape, Random& random, std::size_t count, bool budgets) {
  Choices choices;
  for (std::size_t i = 0; i < count; ++i) {
    HeadSettings<bfloat16> settings = Full{};
    switch (pick(random, 0, budgets ? 3 : 2)) {
      case 0: settings = Window{.sinks = pick(random, 0, 40), .recent = pick(random, 1, 400)}; break;
      case 1: settings = Codes{.storage = {.bits = 4, .residual = pick(random, 0, 200)}}; break;
      case 2: break;
      default: settings = Budget{.budget = pick(random, 0, 300), .scorer = {.observation_window = 4}};
    }
    choices.push_back({settings, random_damage(shape, random)});
  }
  return choices;
}

bool keeps_queries(const Plan& plan) { return plan.memory(0).queries > 0; }

struct Cost {
  std::size_t bytes = 0;
  double damage = 0;
};

// The cost of the plan that gives head i choice numbers[i]. Either no layer keeps queries or all do.
Cost cost_of(const ModelShape& shape, const Choices& choices, const std::vector<std::size_t>& numbers,
             std::size_t context) {
  Plan plan{shape, choices[numbers[0]].settings};
  Cost cost;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    plan.set(i / shape.kv_heads, i % shape.kv_heads, choices[numbers[i]].settings);
    cost.damage += choices[numbers[i]].damage(i / shape.kv_heads, i % shape.kv_heads);
  }
  const MemoryEstimate memory = plan.memory(context, {}, true);
  cost.bytes = memory.heads + memory.tail;
  if (keeps_queries(plan)) {
    std::size_t most = 0;
    for (const auto& choice : choices) {
      most = std::max(most, Plan{shape, choice.settings}.memory(context, {}, true).queries);
    }
    cost.bytes += most;
  }
  return cost;
}

// The largest difference that the choice of one head can make.
double largest_step(const Choices& choices) {
  double largest = 0;
  for (std::size_t i = 0; i < choices.front().damage.values().size(); ++i) {
    double least = std::numeric_limits<double>::infinity();
    double most = 0;
    for (const auto& choice : choices) {
      least = std::min(least, choice.damage.values()[i]);
      most = std::max(most, choice.damage.values()[i]);
    }
    largest = std::max(largest, most - least);
  }
  return largest;
}

double damage_of(const ModelShape& shape, const Choices& choices, const Plan& plan) {
  double damage = 0;
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    for (std::size_t head = 0; head < shape.kv_heads; ++head) {
      // If two choices have the same settings, the search must have used the smaller damage.
      double own = std::numeric_limits<double>::infinity();
      for (const auto& choice : choices) {
        if (choice.settings == plan.at(layer, head)) own = std::min(own, choice.damage(layer, head));
      }
      damage += own;
    }
  }
  return damage;
}

}  // namespace

TEST_CASE("the plan found is within one head's step of the best plan, and mostly the best") {
  const ModelShape shape{2, 4, 2, 64};
  Random random{11};
  std::size_t best_found = 0;
  constexpr std::size_t rounds = 120;
  for (std::size_t round = 0; round < rounds; ++round) {
    CAPTURE(round);
    const Choices choices = random_choices(shape, random, pick(random, 1, 5), round % 2 == 0);
    const std::size_t context = pick(random, 1, 700);
    std::vector<Cost> all;
    std::vector<std::size_t> numbers(4, 0);
    for (bool more = true; more;) {
      all.push_back(cost_of(shape, choices, numbers, context));
      std::size_t place = 0;
      while (place < 4 && ++numbers[place] == choices.size()) numbers[place++] = 0;
      more = place < 4;
    }
    const auto [smallest, largest] = std::ranges::minmax(all, {}, &Cost::bytes);
    const std::size_t bytes = pick(random, smallest.bytes, largest.bytes + 1);
    double best = std::numeric_limits<double>::infinity();
    for (const Cost& cost : all) {
      if (cost.bytes <= bytes) best = std::min(best, cost.damage);
    }
    const auto found = search_plan<bfloat16>(shape, choices, {.bytes = bytes, .context = context});
    CHECK(found.bytes <= bytes);
    CHECK(found.bytes == found.plan.memory(context, {}, true).total());
    CHECK(found.damage == doctest::Approx(damage_of(shape, choices, found.plan)));
    CHECK(found.damage >= best - 1e-9);
    CHECK(found.damage <= best + largest_step(choices) + 1e-9);
    best_found += found.damage <= best + 1e-9 ? 1 : 0;
  }
  CHECK(best_found >= rounds * 8 / 10);
}

TEST_CASE("a large model's plan is within one head's step of a bound that no plan can beat") {
  const ModelShape shape{32, 32, 8, 128};
  Random random{12};
  for (int round = 0; round < 6; ++round) {
    CAPTURE(round);
    const Choices choices = random_choices(shape, random, 10, false);
    const std::size_t context = pick(random, 1000, 5000);
    std::vector<double> size;
    for (const auto& choice : choices) {
      size.push_back(static_cast<double>(
          Plan{ModelShape{1, 1, 1, 128}, choice.settings}.memory(context, {}, true).heads));
    }
    const double least = *std::ranges::min_element(size) * 256;
    const double most = *std::ranges::max_element(size) * 256;
    const double bytes = least + (most - least) * (round + 1) / 8;
    const auto found =
        search_plan<bfloat16>(shape, choices, {.bytes = static_cast<std::size_t>(bytes), .context = context});
    CHECK(static_cast<double>(found.bytes) <= bytes);
    // For any price per byte, no plan within the bytes has less damage than this (weak duality).
    double bound = 0;
    for (double price = 1e-9; price < 1.0; price *= 1.02) {
      double value = -price * bytes;
      for (std::size_t i = 0; i < 256; ++i) {
        double cheapest = std::numeric_limits<double>::infinity();
        for (std::size_t c = 0; c < choices.size(); ++c) {
          cheapest = std::min(cheapest, choices[c].damage.values()[i] + price * size[c]);
        }
        value += cheapest;
      }
      bound = std::max(bound, value);
    }
    CHECK(found.damage >= bound - 1e-6);
    CHECK(found.damage <= bound * 1.02 + largest_step(choices));
  }
}

TEST_CASE("enough bytes give no damage and use no byte too much; too few bytes are refused") {
  const ModelShape shape{2, 4, 2, 64};
  HeadDamage none{2, 2};
  HeadDamage some{2, 2, 1.0};
  some(1, 0) = 0.0;
  const Choices choices{{Full{}, none}, {Window{.sinks = 4, .recent = 60}, some}};
  const std::size_t full = Plan{shape}.memory(1000).total();
  const auto found = search_plan<bfloat16>(shape, choices, {.bytes = full, .context = 1000});
  CHECK(found.damage == 0.0);
  CHECK(found.plan.has<SinkRecentCache<Dense>>(1, 0));  // it does no damage there
  CHECK(found.plan.has<FullCache<Dense>>(0, 0));
  CHECK(found.bytes < full);

  const std::size_t least = Plan{shape, choices[1].settings}.memory(1000).total();
  CHECK(search_plan<bfloat16>(shape, choices, {.bytes = least, .context = 1000}).bytes == least);
  CHECK_THROWS_WITH_AS((void)search_plan<bfloat16>(shape, choices, {.bytes = least - 1, .context = 1000}),
                       doctest::Contains(std::to_string(least).c_str()), ConfigError);
}

TEST_CASE("what plan search refuses") {
  const ModelShape shape{2, 4, 2, 64};
  const auto search = [&](const HeadDamage& damage) {
    const Choices choices{{Full{}, damage}};
    (void)search_plan<bfloat16>(shape, choices, {.bytes = std::size_t{1} << 30, .context = 100});
  };
  CHECK_NOTHROW(search(HeadDamage{2, 2}));
  CHECK_THROWS_AS(search(HeadDamage{2, 3}), ConfigError);
  CHECK_THROWS_AS(search(HeadDamage{2, 2, -1.0}), ConfigError);
  CHECK_THROWS_AS(search(HeadDamage{2, 2, std::nan("")}), ConfigError);
  CHECK_THROWS_AS(search(HeadDamage{2, 2, INFINITY}), ConfigError);
  CHECK_THROWS_AS((void)search_plan<bfloat16>(shape, Choices{}, {.bytes = 1000, .context = 100}),
                  ConfigError);
}

TEST_CASE("the rule of thumb: a head that retrieves keeps more than one that does not") {
  const ModelShape shape{2, 4, 2, 64};
  const HeadGates gates{2, 2, {1.0, 0.0, 0.4, 0.0}};
  const auto choices = choices_by_importance<bfloat16>(shape, gates, 4096);
  const std::size_t full = Plan{shape}.memory(4096).total();
  double before = std::numeric_limits<double>::infinity();
  for (std::size_t share = 32; share >= 1; share /= 2) {
    CAPTURE(share);
    const auto found = search_plan<bfloat16>(shape, choices, {.bytes = full / share, .context = 4096});
    CHECK(found.bytes <= full / share);
    CHECK(found.damage <= before);
    before = found.damage;
    const auto head_bytes = [&](std::size_t layer, std::size_t head) {
      return Plan{ModelShape{1, 1, 1, 64}, found.plan.at(layer, head)}.memory(4096, {}, true).heads;
    };
    CHECK(head_bytes(0, 0) >= head_bytes(1, 0));
    CHECK(head_bytes(1, 0) >= head_bytes(0, 1));
  }
  CHECK(before == 0.0);
  CHECK_THROWS_AS((void)choices_by_importance<bfloat16>(shape, HeadGates{2, 3}, 4096), ConfigError);
  CHECK_THROWS_AS((void)choices_by_importance<bfloat16>(shape, gates, 4096, {.sinks = 64}), ConfigError);
  CHECK(choices.size() == 1 + 2 + 4 + 8 + 3 * 7);
  // The formats are those that names stand for, with as many exact rows as the menu says.
  const auto damage_of_format = [&](LowBits bits, Hadamard rotated) {
    const auto settings = LowBitFormat::of_text(bits, shape, 32).rotated(rotated).head<bfloat16>();
    for (const auto& choice : choices) {
      if (choice.settings == settings) return choice.damage(0, 0);
    }
    FAIL("is not on the menu: ", bits.keys, " and ", bits.values, " bits");
    return 0.0;
  };
  // The same bits lose less if the rows are rotated, and each bit less loses more.
  for (const LowBits bits : {LowBits{4, 4}, LowBits{4, 2}, LowBits{3, 3}, LowBits{2, 2}}) {
    CHECK(damage_of_format(bits, Hadamard::both) < damage_of_format(bits, Hadamard::none));
  }
  constexpr LowBits falling[]{{6, 4}, {5, 3}, {4, 3}, {4, 2}, {3, 2}, {2, 2}};
  for (std::size_t i = 1; i < std::size(falling); ++i) {
    CHECK(damage_of_format(falling[i], Hadamard::both) > damage_of_format(falling[i - 1], Hadamard::both));
  }
  CHECK(damage_of_format({8, 8}, Hadamard::none) < damage_of_format({8, 4}, Hadamard::none));
  CHECK(damage_of_format({4, 4}, Hadamard::both) > damage_of_format({8, 4}, Hadamard::none));
}

TEST_CASE("importance from scores: group means, of which the largest is 1") {
  const ModelShape shape{1, 4, 2, 64};
  const HeadGates importance = importance_of(HeadScores{1, 4, {0.1, 0.3, 0.0, 0.1}}, shape);
  CHECK(importance(0, 0) == doctest::Approx(1.0));
  CHECK(importance(0, 1) == doctest::Approx(0.25));
  CHECK_THROWS_AS((void)importance_of(HeadScores{1, 4}, shape), ConfigError);
}
