// SPDX-License-Identifier: Apache-2.0
//
// One layer's attention over a prompt by all ranks, on random numbers: outputs are those of one cache that reads the
// prompt in one call, and the rows that stay are, bit for bit, those of ranks that read it together.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <exception>
#include <new>
#include <numeric>
#include <span>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/plan/prompt_moves.hpp>
#include <kvpolicy/plan/shards.hpp>
#include <kvpolicy/policy/chunk_retrieval_cache.hpp>
#include <kvpolicy/policy/quantized_residual_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>
#include <kvpolicy/storage/residual_storage.hpp>
#include <reference_model/parallel/prefill_over_ranks.hpp>
#include <reference_model/parallel/rank_cache.hpp>

#include "parallel/communicator_trial.hpp"
#include "parallel/thread_ranks.hpp"
#include "support/compare.hpp"
#include "support/repeats.hpp"
#include "support/tensors.hpp"

namespace kvpolicy::reference::prompt_attention_test {

using test::below;
using test::Random;

constexpr std::size_t head_dim = 16;

// Numbers [tokens, heads, head_dim].
struct Numbers {
  std::size_t tokens = 0, heads = 0;
  std::vector<float> all = {};

  Numbers(std::size_t tokens_, std::size_t heads_)
      : tokens{tokens_}, heads{heads_}, all(tokens * heads * head_dim) {}
  // From -1 to 1, each a bfloat16.
  Numbers& randomize(Random& random) {
    for (float& number : all) number = static_cast<float>(below(random, 257)) / 128.0F - 1.0F;
    return *this;
  }
  [[nodiscard]] TensorView<const float> view() const { return {all.data(), tokens, heads, head_dim}; }
  [[nodiscard]] TensorView<float> out() { return {all.data(), tokens, heads, head_dim}; }
  [[nodiscard]] std::span<const float> row(std::size_t token, std::size_t head) const {
    return std::span{all}.subspan((token * heads + head) * head_dim, head_dim);
  }
  // Some tokens, and some heads of each, in groups.
  [[nodiscard]] Numbers some(const std::vector<std::size_t>& of_tokens,
                             const std::vector<std::size_t>& of_heads, std::size_t group) const {
    Numbers part{0, of_heads.size() * group};
    part.tokens = of_tokens.size();
    for (const std::size_t token : of_tokens) {
      for (const std::size_t head : of_heads) {
        for (std::size_t g = 0; g < group; ++g) {
          const auto from = row(token, head * group + g);
          part.all.insert(part.all.end(), from.begin(), from.end());
        }
      }
    }
    return part;
  }
};

std::vector<std::size_t> counted(std::size_t first, std::size_t last) {
  std::vector<std::size_t> numbers(last - first);
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

// Counts the bytes of messages.
class Counting final : public Communicator {
 public:
  explicit Counting(Communicator& ranks) : ranks_{&ranks} {}
  [[nodiscard]] std::size_t rank() const override { return ranks_->rank(); }
  [[nodiscard]] std::size_t size() const override { return ranks_->size(); }
  void sum(std::span<float> numbers) override { ranks_->sum(numbers); }
  void gather(std::span<const float> own, std::span<float> all) override { ranks_->gather(own, all); }
  void exchange(std::span<const Outgoing> sent, std::span<const Incoming> received) override {
    for (const Outgoing& message : sent) sent_bytes += message.bytes.size();
    ranks_->exchange(sent, received);
  }
  std::size_t sent_bytes = 0;

 private:
  Communicator* ranks_;
};

template <Element E>
HeadSettings<E> random_settings(Random& random, bool quantized) {
  using Window = SinkRecentCache<DenseStorage<E>>;
  const std::size_t sinks = below(random, 7);
  const std::size_t recent = 1 + below(random, 50);
  switch (below(random, quantized ? 8 : 5)) {
    case 0: return typename Window::Config{.sinks = sinks, .recent = recent};
    case 1: return typename Window::Config{.sinks = sinks, .recent = recent, .mask = Mask::prefill_chunk};
    case 2:
      return typename Window::Config{.sinks = sinks, .recent = recent, .rotary_in_cache = RotaryConfig{}};
    case 3: return typename ChunkRetrievalCache<DenseStorage<E>>::Config{.chunk = 8, .budget = 32};
    case 5:
      return typename SinkRecentCache<PerTokenStorage<E>>::Config{
          .sinks = sinks, .recent = recent, .storage = {.bits = 8, .residual = below(random, 5)}};
    case 6:
      return typename QuantizedResidualCache<E, Granularity::per_token>::Config{
          .sinks = sinks, .storage = {.bits = 4, .residual = 10}};
    case 7:
      return typename QuantizedResidualCache<E, Granularity::per_channel>::Config{
          .storage = {.bits = 8, .key_group = 16, .residual = 20}};
    default: return typename FullCache<DenseStorage<E>>::Config{};
  }
}

// Two caches that should be the same read some tokens more; returns whether all they say is the same.
template <Element E>
bool say_the_same(RankCache<E>& a, RankCache<E>& b, Random random, const std::vector<std::size_t>& heads,
                  std::size_t group) {
  bool same = a.tokens() == b.tokens() && a.bytes() == b.bytes();
  for (const std::size_t tokens : {1U, 3U, 1U, 30U}) {
    const std::size_t all_heads = a.plan().shape().layer(0).kv_heads;
    const auto every = counted(0, tokens);
    const Numbers q = Numbers{tokens, all_heads * group}.randomize(random).some(every, heads, group);
    const Numbers k = Numbers{tokens, all_heads}.randomize(random).some(every, heads, 1);
    const Numbers v = Numbers{tokens, all_heads}.randomize(random).some(every, heads, 1);
    Numbers first = q;
    Numbers second = q;
    a.step(0, q.view(), k.view(), v.view(), first.out());
    b.step(0, q.view(), k.view(), v.view(), second.out());
    same = same && test::same_bits(first.all, second.all) && a.bytes() == b.bytes();
  }
  return same;
}

template <Element E>
void try_prompts(std::uint64_t seed, std::size_t trials) {
  Random random{seed};
  std::size_t cut = 0;
  for (std::size_t trial = 0; trial < trials; ++trial) {
    CAPTURE(trial);
    const std::size_t kv_heads = 1 + below(random, 3);
    const std::size_t group = 1 + below(random, 2);
    const std::size_t size = 1 + below(random, 4);
    const std::size_t tokens = test::one_of(random, std::vector<std::size_t>{1, 2, 3, 5, 7, 31, 64, 97, 150});
    HeadPlan<E> plan{ModelShape{1, kv_heads * group, kv_heads, head_dim}};
    for (std::size_t head = 0; head < kv_heads; ++head) plan.set(0, head, random_settings<E>(random, true));
    const CacheOptions options{.max_rollback = below(random, 2) * 9, .max_append = 1 + below(random, 3)};
    const Shards shards = balance(plan, 1000, {.ranks = size});
    cut += shards.merges(0).size();
    CAPTURE(size);
    CAPTURE(tokens);

    const Numbers q = Numbers{tokens, kv_heads * group}.randomize(random);
    const Numbers k = Numbers{tokens, kv_heads}.randomize(random);
    const Numbers v = Numbers{tokens, kv_heads}.randomize(random);
    Numbers expected = q;
    KvCache<E> whole{plan, options};
    whole.step(0, q.view(), k.view(), v.view(), expected.out());
    Numbers found{tokens, kv_heads * group};
    std::ranges::fill(found.all, NAN);
    std::vector<std::size_t> sent(size, 0);
    const PromptBlocks blocks{tokens, size};
    const Random later = random;
    const auto thrown = test::run_ranks(size, [&](Communicator& ranks) {
      std::vector<std::size_t> own;
      for (const auto& block : blocks.of_rank(ranks.rank())) {
        for (std::size_t at = block.begin; at < block.end; ++at) own.push_back(at);
      }
      const auto heads = counted(0, kv_heads);
      Counting counting{ranks};
      RankCache<E> read{plan, shards, counting, options};
      PromptAttention<E, ScalarEngine> attention{read, tokens};
      const Numbers own_q = q.some(own, heads, group);
      Numbers out = own_q;
      attention(0, own_q.view(), k.some(own, heads, 1).view(), v.some(own, heads, 1).view(), out.out());
      sent[ranks.rank()] = counting.sent_bytes;
      for (std::size_t i = 0; i < own.size(); ++i) {
        std::copy_n(out.all.begin() + static_cast<std::ptrdiff_t>(i * out.heads * head_dim),
                    out.heads * head_dim,
                    found.all.begin() + static_cast<std::ptrdiff_t>(own[i] * out.heads * head_dim));
      }
      // The same ranks, each with all tokens of the heads that it holds.
      std::vector<std::size_t> held;
      for (const HeadPart& part : parts_in_order(shards, 0, ranks.rank())) held.push_back(part.head);
      RankCache<E> together{plan, shards, ranks, options};
      const auto all = counted(0, tokens);
      const Numbers held_q = q.some(all, held, group);
      Numbers ignored = held_q;
      together.step(0, held_q.view(), k.some(all, held, 1).view(), v.some(all, held, 1).view(),
                    ignored.out());
      if (options.max_rollback > 0) {
        const std::size_t to = tokens - std::min<std::size_t>(tokens, 9);
        read.truncate(to);
        together.truncate(to);
      }
      CHECK(say_the_same(read, together, later, held, group));
    });
    for (const std::exception_ptr& one : thrown) {
      if (one) std::rethrow_exception(one);
    }
    // Outputs lie between -1 and 1. A sum of `tokens` weights and one of as many products are off by at most so many
    // half units in the last place each, a logit of 16 products of numbers up to 1, at most 4, by 16 half units
    // of 16; both results are.
    const float bound = (2 * static_cast<float>(tokens) + 2 * 16 * 16 + 16) * 0x1p-23F;
    float worst = 0;
    for (std::size_t i = 0; i < found.all.size(); ++i) {
      const float error = std::fabs(found.all[i] - expected.all[i]);
      if (!(error <= worst)) worst = error;
    }
    CHECK(worst <= bound);
    const auto moves = prompt_moves(plan, blocks, 0, &shards, options.max_rollback);
    CHECK(std::accumulate(sent.begin(), sent.end(), std::size_t{0}) ==
          bytes_moved(moves, plan.shape().layer(0), sizeof(E)));
  }
  CHECK(cut > 0);
}

TEST_CASE("a prompt's attention over ranks, and the rows that stay") {
  try_prompts<float>(1, test::repeats(120U));
  try_prompts<bfloat16>(2, test::repeats(60U));
}

TEST_CASE("rows of other heads than a rank's are refused") {
  const HeadPlan<float> plan{ModelShape{1, 2, 2, head_dim}};
  const Shards shards = balance(plan, 1000, {.ranks = 1});
  for (const std::exception_ptr& one : test::run_ranks(1, [&](Communicator& ranks) {
         RankCache<float> cache{plan, shards, ranks};
         const Numbers three{4, 3};
         const Numbers two{4, 2};
         const Numbers fewer{3, 2};
         CHECK_THROWS_AS(cache.add(0, three.view(), three.view()), ShapeError);
         CHECK_THROWS_AS(cache.add(0, two.view(), fewer.view()), ShapeError);
         CHECK_THROWS_AS(cache.add(1, two.view(), two.view()), ShapeError);
         CHECK(cache.tokens() == 0);
         PromptAttention<float, ScalarEngine> attention{cache, 5};  // the call brings 4
         Numbers out = two;
         CHECK_THROWS_AS(attention.run([&] { attention(0, two.view(), two.view(), two.view(), out.out()); }),
                         ShapeError);
       })) {
    CHECK(!one);
  }
}

TEST_CASE("what fails on one rank in the middle of a prompt fails on all, and nobody waits") {
  using Plan = HeadPlan<float16>;
  constexpr std::size_t layers = 3;
  constexpr std::size_t tokens = 31;
  const Plan plan{ModelShape{layers, 2, 2, head_dim}};
  const Shards shards = balance(plan, 1000, {.ranks = 3});
  const PromptBlocks blocks{tokens, 3};
  const auto read = [&](Communicator& ranks, std::size_t layer_that_fails, bool before_attention) {
    RankCache<float16> cache{plan, shards, ranks};
    PromptAttention<float16, ScalarEngine> attention{cache, tokens};
    std::size_t own = 0;
    for (const auto& block : blocks.of_rank(ranks.rank())) own += block.rows();
    try {
      attention.run([&] {
        for (std::size_t layer = 0; layer < layers; ++layer) {
          Random random{layer};
          const Numbers q = Numbers{own, 2}.randomize(random);
          Numbers k = Numbers{own, 2}.randomize(random);
          Numbers out = q;
          if (ranks.rank() == 1 && layer == layer_that_fails) {
            if (before_attention) throw std::bad_alloc{};
            k.all.back() = 1e5F;  // no half is as large
          }
          attention(layer, q.view(), k.view(), k.view(), out.out());
        }
      });
    } catch (...) {
      try_communicator(ranks);  // no message is left over
      throw;
    }
  };
  for (std::size_t layer = 0; layer < layers; ++layer) {
    for (const bool before_attention : {false, true}) {
      CAPTURE(layer);
      CAPTURE(before_attention);
      const auto thrown =
          test::run_ranks(3, [&](Communicator& ranks) { read(ranks, layer, before_attention); });
      for (std::size_t rank = 0; rank < 3; ++rank) {
        CAPTURE(rank);
        REQUIRE(thrown[rank]);
        if (rank != 1) {
          CHECK_THROWS_WITH_AS(std::rethrow_exception(thrown[rank]), doctest::Contains("rank 1: "),
                               RankError);
        } else if (before_attention) {
          CHECK_THROWS_AS(std::rethrow_exception(thrown[rank]), std::bad_alloc);
        } else {
          CHECK_THROWS_AS(std::rethrow_exception(thrown[rank]), ShapeError);
        }
      }
    }
  }
}

}  // namespace kvpolicy::reference::prompt_attention_test
