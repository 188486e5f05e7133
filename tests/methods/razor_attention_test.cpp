// SPDX-License-Identifier: Apache-2.0
//
// Compares the choice of heads with sets that are filled one best head at a time.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/plan/shipped_policies.hpp>
#include <kvpolicy/razor_attention.hpp>

using namespace kvpolicy;

namespace {

constexpr ModelShape shape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
const HeadScores echo{2, 4, {0.1, 0.2, 0.0, 0.9, 0.3, 0.3, 0.4, 0.0}};       // KV: .2 .9 .3 .4
const HeadScores induction{2, 4, {0.5, 0.0, 0.1, 0.1, 0.0, 0.6, 0.6, 0.2}};  // KV: .5 .1 .6 .6

// How many heads are chosen: heads x percent / 100, rounded up, computed in whole numbers.
std::size_t chosen_of(std::size_t heads, std::size_t percent) { return (heads * percent + 99) / 100; }

std::vector<double> best_of_groups(const HeadScores& scores, std::size_t group) {
  std::vector<double> best(scores.values().size() / group, -1.0);
  for (std::size_t i = 0; i < scores.values().size(); ++i) {
    best[i / group] = std::max(best[i / group], scores.values()[i]);
  }
  return best;
}

}  // namespace

TEST_CASE("the best heads by either score keep everything") {
  const auto kinds = [](double e, double i) {
    const HeadKinds table =
        razor_attention_kinds(shape, echo, induction, {.echo_share = e, .induction_share = i});
    std::set<std::size_t> kept;
    for (std::size_t head = 0; head < 4; ++head) {
      if (table.values()[head] == HeadKind::retrieval) kept.insert(head);
    }
    return kept;
  };
  using Heads = std::set<std::size_t>;
  CHECK(kinds(0, 0) == Heads{});
  CHECK(kinds(0.01, 0) == Heads{1});
  CHECK(kinds(0.01, 0.14) == Heads{1, 2});  // of two equal scores, the first head
  CHECK(kinds(0.25, 0.5) == Heads{1, 2, 3});
  CHECK(kinds(0, 0.75) == Heads{0, 2, 3});
  CHECK(kinds(1, 0) == Heads{0, 1, 2, 3});
}

TEST_CASE("any scores and any shares") {
  std::mt19937 random{4};
  for (int round = 0; round < 300; ++round) {
    const std::size_t group = 1 + random() % 3;
    const ModelShape drawn{
        .layers = 1 + random() % 10, .q_heads = 0, .kv_heads = 1 + random() % 8, .head_dim = 64};
    ModelShape whole = drawn;
    whole.q_heads = group * drawn.kv_heads;
    HeadScores first{whole.layers, whole.q_heads};
    HeadScores second = first;
    for (double& score : first.values()) score = static_cast<double>(random() % 20);
    for (double& score : second.values()) score = static_cast<double>(random() % 20);
    const std::size_t e = random() % 101;
    const std::size_t i = random() % 101;
    const HeadKinds kinds = razor_attention_kinds(
        whole, first, second,
        {.echo_share = static_cast<double>(e) / 100, .induction_share = static_cast<double>(i) / 100});
    // A head that keeps everything is among the best by at least one score. A head that is better by
    // that score keeps everything too, and a head that is worse than all of these by both scores does
    // not.
    const auto by_first = best_of_groups(first, group);
    const auto by_second = best_of_groups(second, group);
    const std::size_t heads = by_first.size();
    std::size_t kept = 0, wrong = 0;
    for (std::size_t head = 0; head < heads; ++head) {
      std::size_t above[2]{}, at_least[2]{};
      for (std::size_t other = 0; other < heads; ++other) {
        above[0] += by_first[other] > by_first[head];
        above[1] += by_second[other] > by_second[head];
        at_least[0] += by_first[other] >= by_first[head];
        at_least[1] += by_second[other] >= by_second[head];
      }
      const bool may = above[0] < chosen_of(heads, e) || above[1] < chosen_of(heads, i);
      const bool must = at_least[0] <= chosen_of(heads, e) || at_least[1] <= chosen_of(heads, i);
      const bool keeps = kinds.values()[head] == HeadKind::retrieval;
      kept += keeps;
      wrong += (must && !keeps) || (keeps && !may);
    }
    CHECK(wrong == 0);
    CHECK(kept >= std::max(chosen_of(heads, e), chosen_of(heads, i)));
    CHECK(kept <= chosen_of(heads, e) + chosen_of(heads, i));
  }
}

TEST_CASE("of equal scores at the cut, the heads spread over the layers") {
  const ModelShape deep{.layers = 12, .q_heads = 1, .kv_heads = 1, .head_dim = 64};
  const HeadScores equal{12, 1, 1.0};
  const HeadKinds kinds =
      razor_attention_kinds(deep, equal, equal, {.echo_share = 0.0, .induction_share = 0.25});
  for (std::size_t layer = 0; layer < 12; ++layer) {
    CHECK((kinds(layer, 0) == HeadKind::retrieval) == (layer == 1 || layer == 5 || layer == 9));
  }
}

TEST_CASE("the other heads keep the first and the latest rows") {
  using Full = FullCache<DenseStorage<float16>>;
  using Window = SinkRecentCache<DenseStorage<float16>>;
  const auto plan = razor_attention_plan<float16>(shape, echo, induction, {.mask = Mask::prefill_chunk});
  for (std::size_t head = 0; head < 4; ++head) {
    const auto& settings = plan.at(head / 2, head % 2);
    if (head == 1 || head == 2) {
      CHECK(settings.is<Full>());
    } else {
      CHECK(settings.get<Window>() ==
            Window::Config{.sinks = 4, .recent = 4000, .mask = Mask::prefill_chunk});
    }
  }
  CHECK(RazorAttentionConfig{.tokens = 20'000}.recent() == 4000);
  CHECK(RazorAttentionConfig{.tokens = 20'001}.recent() == 4001);
  CHECK(RazorAttentionConfig{.min_recent = 10, .compression = 3.0, .tokens = 100}.recent() == 34);
  // Two heads keep every row, two keep 4 + 4,096, in pages of 64 rows.
  const RazorAttentionConfig long_text{.tokens = 20'480};
  const auto memory = razor_attention_plan<float16>(shape, echo, induction, long_text).memory(20'480);
  constexpr std::size_t row = 2 * 64 * sizeof(float16);
  CHECK(memory.heads >= (2 * 20'480 + 2 * 4100) * row);
  CHECK(memory.heads <= (2 * 20'480 + 2 * (4100 + 3 * 64)) * row);
}

TEST_CASE("settings that do not work are refused") {
  const auto refused = [](const HeadScores& some, const RazorAttentionConfig& config = {}) {
    CHECK_THROWS_AS((void)razor_attention_plan<float>(shape, echo, some, config), ConfigError);
    CHECK_THROWS_AS((void)razor_attention_plan<float>(shape, some, induction, config), ConfigError);
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  refused(HeadScores{2, 2, 1.0});
  refused(HeadScores{2, 4, -1.0});
  refused(HeadScores{2, 4, nan});
  refused(echo, {.echo_share = nan});
  refused(echo, {.induction_share = 1.5});
  refused(echo, {.compression = 0.5});
  refused(echo, {.compression = nan});
  refused(echo, {.min_recent = 0});
}
