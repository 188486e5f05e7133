// SPDX-License-Identifier: Apache-2.0
//
// KV heads divided among ranks by what they cost (docs/distributed.md). One head reads the whole text, three read a
// window, so three ranks with a head or two each would wait for the one with the long head. That head is cut by rows
// instead. The ranks are played by one process here: what they would send is copied, and the merged outputs are those
// of one cache.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <limits>
#include <span>
#include <vector>

#include <kvpolicy/core/attention_state.hpp>
#include <kvpolicy/kvpolicy.hpp>

namespace {

using kvpolicy::HeadPart;
using kvpolicy::TensorView;

constexpr std::size_t q_heads = 8, kv_heads = 4, head_dim = 64, group = q_heads / kv_heads;
constexpr std::size_t tokens = 2000;

// Numbers that any model could have made: [heads, head_dim] of token t.
std::vector<float> numbers(std::size_t t, std::size_t heads, double frequency) {
  std::vector<float> made(heads * head_dim);
  for (std::size_t i = 0; i < made.size(); ++i) {
    made[i] = static_cast<float>(std::sin(static_cast<double>(t * made.size() + i) * frequency));
  }
  return made;
}

// What a rank keeps of one part: a cache of one KV head, which it gives the rows that are the part's.
struct PartCache {
  HeadPart part;
  kvpolicy::KvCache<float> cache;

  // The output [group, head_dim] of the head's queries over the part's rows, and their log-sum-exps.
  void step(std::size_t t, const float* q, const float* k, const float* v, std::vector<float>& out,
            std::vector<float>& log_sum_exp) {
    out.assign(group * head_dim, 0.0F);
    log_sum_exp.assign(group, -std::numeric_limits<float>::infinity());
    const TensorView queries{q, 1, group, head_dim};
    const TensorView outputs{out.data(), 1, group, head_dim};
    const kvpolicy::AttendOptions options{.log_sum_exp = log_sum_exp};
    if (part.rows.has(t)) {
      cache.step(0, queries, TensorView{k, 1, 1, head_dim}, TensorView{v, 1, 1, head_dim}, outputs, options);
    } else if (cache.tokens() > 0) {
      cache.attend(0, queries, outputs, options);
    }
  }
};

}  // namespace

int main() {
  const kvpolicy::ModelShape shape{
      .layers = 1, .q_heads = q_heads, .kv_heads = kv_heads, .head_dim = head_dim};
  using Window = kvpolicy::SinkRecentCache<kvpolicy::DenseStorage<float>>;
  kvpolicy::HeadPlan<float> plan{shape, Window::Config{.sinks = 4, .recent = 124}};
  plan.set(/*layer=*/0, /*head=*/2, kvpolicy::FullCache<kvpolicy::DenseStorage<float>>::Config{});

  const auto shards = kvpolicy::balance(plan, tokens, {.ranks = 3});
  for (std::size_t rank = 0; rank < shards.ranks(); ++rank) {
    std::printf("rank %zu:", rank);
    for (const HeadPart& part : shards.parts(0, rank)) {
      std::printf("  head %zu, %.0f %% of its rows", part.head, 100 * part.rows.share());
    }
    std::printf("\n");
  }
  const auto whole = kvpolicy::balance(plan, tokens, {.ranks = 3, .cut_rows = false});
  std::printf("slowest rank over the mean: %.3f with whole heads, %.3f with cut ones\n", whole.imbalance(),
              shards.imbalance());

  std::vector<std::vector<PartCache>> ranks(shards.ranks());
  const kvpolicy::ModelShape one{.layers = 1, .q_heads = group, .kv_heads = 1, .head_dim = head_dim};
  for (std::size_t rank = 0; rank < shards.ranks(); ++rank) {
    for (const HeadPart& part : shards.parts(0, rank)) {
      const kvpolicy::HeadPlan<float> own{one, plan.at(0, part.head)};
      // A query attends as the latest row that can be taken back, so one can.
      ranks[rank].push_back({part, kvpolicy::KvCache{own, {.max_rollback = 1}}});
    }
  }

  kvpolicy::KvCache cache{plan};  // what all ranks together must equal
  bool ok = shards.merges(0).size() == 1 && shards.imbalance() < 1.05;
  double off = 0;
  for (std::size_t t = 0; t < tokens; ++t) {
    const auto q = numbers(t, q_heads, 0.7);
    const auto k = numbers(t, kv_heads, 0.3);
    const auto v = numbers(t, kv_heads, 0.9);
    std::vector<float> out(q_heads * head_dim, 0.0F);
    std::vector<float> log_sum_exp(q_heads, -std::numeric_limits<float>::infinity());
    for (auto& parts : ranks) {
      for (PartCache& own : parts) {
        const std::size_t head = own.part.head;
        std::vector<float> part, part_log_sum_exp;
        own.step(t, q.data() + head * group * head_dim, k.data() + head * head_dim,
                 v.data() + head * head_dim, part, part_log_sum_exp);
        // Here a rank would send its part to the first one that has the head.
        for (std::size_t i = 0; i < group; ++i) {
          const std::size_t query = head * group + i;
          log_sum_exp[query] =
              kvpolicy::merge_outputs(std::span{out}.subspan(query * head_dim, head_dim), log_sum_exp[query],
                                      std::span{part}.subspan(i * head_dim, head_dim), part_log_sum_exp[i]);
        }
      }
    }
    std::vector<float> expected(out.size());
    cache.step(0, TensorView{q.data(), 1, q_heads, head_dim}, TensorView{k.data(), 1, kv_heads, head_dim},
               TensorView{v.data(), 1, kv_heads, head_dim},
               TensorView{expected.data(), 1, q_heads, head_dim});
    for (std::size_t i = 0; i < out.size(); ++i) {
      const double difference = std::abs(static_cast<double>(out[i]) - static_cast<double>(expected[i]));
      ok = ok && difference < 1e-5;  // NaN is not
      off = std::max(off, difference);
    }
  }
  std::printf("%s: the ranks' merged outputs are those of one cache, but for %.1g\n",
              ok ? "as it should be" : "WRONG", off);
  return ok ? 0 : 1;
}
