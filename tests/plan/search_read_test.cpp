// SPDX-License-Identifier: Apache-2.0
//
// Compares plan search within a limit of what a step reads with all possible plans, whose bytes are counted here by
// each policy's definition.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/plan/low_bits.hpp>
#include <kvpolicy/plan/search.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>
#include <kvpolicy/policy/key_diff_scorer.hpp>

#include "plan/random_plan.hpp"

using namespace kvpolicy;
using namespace kvpolicy::testing;

namespace {

using Plan = HeadPlan<bfloat16>;
using Dense = DenseStorage<bfloat16>;
using Choice = HeadChoice<bfloat16>;
constexpr std::size_t dim = 64;
constexpr double exact_row = 2 * dim * 2;  // a key and a value in bfloat16

// A choice, and what a step reads of each head under it, counted by hand.
struct Counted {
  Choice choice;
  std::vector<double> read;
};

double share(Random& random) { return static_cast<double>(pick(random, 0, 64)) / 64; }

HeadDamage random_damage(const ModelShape& shape, Random& random) {
  HeadDamage damage{shape.layers, shape.kv_heads};
  for (double& one : damage.values()) {
    one = pick(random, 0, 3) == 0 ? 0.0 : static_cast<double>(pick(random, 1, 40)) / 8.0;
  }
  return damage;
}

Counted random_choice(const ModelShape& shape, Random& random, std::size_t context) {
  Counted made{{FullCache<Dense>::Config{}, random_damage(shape, random)}, {}};
  const auto rows = static_cast<double>(context);
  double all = exact_row * rows;
  switch (pick(random, 0, 4)) {
    case 0: {
      const std::size_t sinks = pick(random, 0, 40), recent = pick(random, 1, 400);
      made.choice.settings = SinkRecentCache<Dense>::Config{.sinks = sinks, .recent = recent};
      all = exact_row * static_cast<double>(std::min(context, sinks + recent));
      break;
    }
    case 1: {  // a scale and a zero of 2 bytes for each 32 channels of a key and of a value
      const std::size_t residual = pick(random, 0, 200);
      made.choice.settings = QuantizedResidualCache<bfloat16>::Config{
          .storage = {.bits = 4, .key_group = 32, .value_group = 32, .residual = residual}};
      const double packed = rows - static_cast<double>(std::min(context, residual));
      all = exact_row * (rows - packed) + 2 * (dim / 2.0 + 4 * dim / 32.0) * packed;
      break;
    }
    case 2: {
      const std::size_t budget = pick(random, 1, 300);
      made.choice.settings = HeadBudgetCache<Dense, KeyDiffScorer>::Config{.budget = budget};
      all = exact_row * static_cast<double>(std::min(context, budget));
      break;
    }
    case 3: {  // 4 first rows are exact; scales and zeros are of 64 rows of a channel, and of 64 channels of a value
      const std::size_t residual = pick(random, 0, 200);
      made.choice.settings = LowBitFormat::of_bounded(shape, 4, residual).head<bfloat16>();
      made.choice.rows_read = HeadTable<double>{shape.layers, shape.kv_heads};
      const double packed = rows - static_cast<double>(std::min(context, residual + 4));
      const double scales = 4 * dim / 64.0;
      for (double& own : made.choice.rows_read.values()) {
        own = share(random);
        made.read.push_back(exact_row * (rows - packed) +
                            packed * (dim / 2.0 + scales + own * (dim + scales + dim / 2.0 + scales)));
      }
      break;
    }
    default: break;
  }
  if (made.read.empty()) made.read.assign(shape.kv_head_count(), all);
  return made;
}

struct Cost {
  std::size_t bytes = 0;
  double read = 0;
  double damage = 0;
};

Cost cost_of(const ModelShape& shape, const std::vector<Counted>& choices,
             const std::vector<std::size_t>& numbers, std::size_t context) {
  Plan plan{shape};
  Cost cost;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const Counted& own = choices[numbers[i]];
    plan.set(i / shape.kv_heads, i % shape.kv_heads, own.choice.settings);
    cost.read += own.read[i];
    cost.damage += own.choice.damage.values()[i];
  }
  cost.bytes = plan.memory(context, {}, true).total();
  return cost;
}

// Calls f(numbers) for each way to give each head one of `choices`.
template <class F>
void for_each_way(std::size_t heads, std::size_t choices, F f) {
  std::vector<std::size_t> numbers(heads, 0);
  for (;;) {
    f(numbers);
    std::size_t place = 0;
    while (place < heads && ++numbers[place] == choices) numbers[place++] = 0;
    if (place == heads) return;
  }
}

double largest_step(const std::vector<Counted>& choices, std::size_t heads) {
  double largest = 0;
  for (std::size_t i = 0; i < heads; ++i) {
    double least = std::numeric_limits<double>::infinity(), most = 0;
    for (const Counted& one : choices) {
      least = std::min(least, one.choice.damage.values()[i]);
      most = std::max(most, one.choice.damage.values()[i]);
    }
    largest = std::max(largest, most - least);
  }
  return largest;
}

constexpr std::size_t any = std::numeric_limits<std::size_t>::max() / 4;

}  // namespace

TEST_CASE(
    "within a limit of bytes and one of what is read, the plan found is near the best, and mostly the best") {
  const ModelShape shape{2, 4, 2, dim};
  Random random{21};
  std::size_t searched = 0, best_found = 0, not_found = 0;
  for (std::size_t round = 0; round < 400; ++round) {
    CAPTURE(round);
    const std::size_t context = pick(random, 1, 700);
    std::vector<Counted> counted;
    std::vector<Choice> choices;
    for (std::size_t i = pick(random, 1, 5); i > 0; --i) {
      counted.push_back(random_choice(shape, random, context));
      choices.push_back(counted.back().choice);
    }
    std::vector<Cost> all;
    for_each_way(4, choices.size(),
                 [&](const auto& numbers) { all.push_back(cost_of(shape, counted, numbers, context)); });
    // Limits of a plan that is drawn and a little more, so that some plan fits; sometimes of one kind of bytes alone.
    const Cost& one = all[pick(random, 0, all.size() - 1)];
    const Cost& other = round % 3 == 0 ? all[pick(random, 0, all.size() - 1)] : one;
    const std::size_t bytes = round % 5 == 1 ? any : std::max(one.bytes, other.bytes) + pick(random, 0, 2000);
    const auto read =
        static_cast<std::size_t>(std::ceil(std::max(one.read, other.read))) + pick(random, 0, 500);
    double best = std::numeric_limits<double>::infinity();
    for (const Cost& cost : all) {
      if (cost.bytes <= bytes && cost.read <= static_cast<double>(read)) best = std::min(best, cost.damage);
    }
    REQUIRE(std::isfinite(best));
    ++searched;
    std::optional<FoundPlan<bfloat16>> found;
    try {
      found = search_plan<bfloat16>(shape, choices, {.bytes = bytes, .context = context, .bytes_read = read});
    } catch (const ConfigError&) {
      ++not_found;
      continue;
    }
    CHECK(found->bytes <= bytes);
    CHECK(found->bytes == found->plan.memory(context, {}, true).total());
    REQUIRE(found->bytes_read.has_value());
    CHECK(*found->bytes_read <= static_cast<double>(read) * (1 + 1e-9));
    CHECK(found->damage >= best - 1e-9);
    CHECK(found->damage <= best + 2 * largest_step(counted, 4) + 1e-9);
    best_found += found->damage <= best + 1e-9 ? 1 : 0;
    // Some way to give each head a choice has the plan, its damage and its bytes.
    bool is_one = false;
    for (const Cost& cost : all) {
      is_one = is_one || (cost.bytes == found->bytes && std::abs(cost.damage - found->damage) <= 1e-9 &&
                          std::abs(cost.read - *found->bytes_read) <= 1e-6 * cost.read);
    }
    CHECK(is_one);
  }
  MESSAGE("the best of all plans: " << best_found << " of " << searched << "; none found: " << not_found);
  CHECK(best_found >= searched * 8 / 10);
  CHECK(not_found == 0);
}

TEST_CASE("a head that is read with a bound is taken where reading is dear, and not where memory is") {
  const ModelShape shape{1, 4, 2, dim};
  constexpr std::size_t context = 4096;
  const HeadDamage none{1, 2}, little{1, 2, 0.25}, much{1, 2, 4.0};
  const std::vector<Choice> choices{
      {FullCache<Dense>::Config{}, none},
      {LowBitFormat::of_bounded(shape).head<bfloat16>(), little, {1, 2, {0.05, 1.0}}},
      {LowBitFormat::of_text({4, 4}, shape).head<bfloat16>(), HeadDamage{1, 2, 0.5}},
      {SinkRecentCache<Dense>::Config{.sinks = 16, .recent = 240}, much}};
  const Plan full{shape};
  const std::size_t whole = full.memory(context).total();
  const auto read_of_full = static_cast<std::size_t>(2 * context * exact_row);
  // A quarter of the reading and all memory: the head that reads a twentieth of its rows takes the bound.
  const auto dear = search_plan<bfloat16>(shape, choices,
                                          {.bytes = any, .context = context, .bytes_read = read_of_full / 4});
  CHECK(dear.plan.at(0, 0) == choices[1].settings);
  CHECK(dear.plan.at(0, 1) == choices[2].settings);  // it would read every row twice in part
  CHECK(dear.damage == 0.75);
  // As little memory: keys of 8 bits are too many.
  const auto small = search_plan<bfloat16>(
      shape, choices, {.bytes = whole * 11 / 32, .context = context, .bytes_read = read_of_full});
  CHECK(small.plan.at(0, 0) == choices[2].settings);
  CHECK(small.plan.at(0, 1) == choices[2].settings);
  // Enough of both: nothing is lost.
  CHECK(search_plan<bfloat16>(shape, choices, {.bytes = any, .context = context, .bytes_read = read_of_full})
            .damage == 0.0);
  // Without a limit of what is read, nothing is said of it.
  CHECK(!search_plan<bfloat16>(shape, choices, {.bytes = whole, .context = context}).bytes_read);
}

TEST_CASE("what a search with a limit of what is read refuses") {
  const ModelShape shape{1, 4, 2, dim};
  const auto search = [&](HeadTable<double> rows_read, const HeadSettings<bfloat16>& settings,
                          std::size_t read) {
    const std::vector<Choice> choices{{settings, HeadDamage{1, 2}, std::move(rows_read)}};
    return search_plan<bfloat16>(shape, choices, {.bytes = any, .context = 1000, .bytes_read = read});
  };
  const auto halves = LowBitFormat::of_bounded(shape).head<bfloat16>();
  CHECK_NOTHROW((void)search({1, 2, 0.5}, halves, any));
  CHECK_THROWS_WITH_AS((void)search({1, 2, 1.5}, halves, any), doctest::Contains("is 1.5"), ConfigError);
  CHECK_THROWS_AS((void)search({1, 2, std::nan("")}, halves, any), ConfigError);
  CHECK_THROWS_AS((void)search({2, 2, 0.5}, halves, any), ConfigError);
  CHECK_THROWS_WITH_AS((void)search({1, 2, 0.5}, FullCache<Dense>::Config{}, any),
                       doctest::Contains("in halves"), ConfigError);
  // 1,000 rows of two heads.
  CHECK_NOTHROW((void)search({}, FullCache<Dense>::Config{}, 512'000));
  CHECK_THROWS_WITH_AS((void)search({}, FullCache<Dense>::Config{}, 511'999),
                       doctest::Contains("adds up to 512000 bytes"), ConfigError);
}
