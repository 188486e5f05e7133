// SPDX-License-Identifier: Apache-2.0
//
// Slow memory under keys and values of different widths, whose pages have different sizes.
#include <doctest/doctest.h>

#include <utility>
#include <vector>

#include <kvpolicy/kvpolicy.hpp>

#include "support/compare.hpp"
#include "support/slow_memory.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;

TEST_CASE("slow memory: keys and values of different widths") {
  constexpr std::size_t heads = 4, key_dim = 24, value_dim = 40;
  constexpr ModelShape shape{
      .layers = 1, .q_heads = heads, .kv_heads = heads, .head_dim = key_dim, .value_dim = value_dim};
  HeadPlan<float> plan{shape};
  plan.set(0, 1, QuantizedResidualCache<float>::Config{.storage = {.bits = 4, .residual = 20}});
  plan.set(0, 2, ChunkRetrievalCache<DenseStorage<float>>::Config{.chunk = 8, .budget = 32});
  plan.set(0, 3,
           ChunkRetrievalCache<PerChannelStorage<float>>::Config{
               .chunk = 16, .budget = 32, .storage = {.bits = 8, .key_group = 16, .residual = 16}});
  test::Random random{17};
  test::CountingResource memory;
  test::FailingSlowMemory slow;
  CacheOptions options{.page_rows = 16};
  KvCache<float> fast{plan, options};
  options.memory = &memory;
  options.slow_memory = &slow;
  KvCache<float> own{plan, options};
  for (int i = 0; i < 40; ++i) {
    CAPTURE(i);
    const std::size_t tokens = 1 + test::below(random, 12);
    test::Tensor<float> q{tokens, heads, key_dim}, k{tokens, heads, key_dim}, v{tokens, heads, value_dim};
    test::Tensor<float> out{tokens, heads, value_dim}, other{tokens, heads, value_dim};
    for (test::Tensor<float>* tensor : {&q, &k, &v}) tensor->randomize(random);
    const bool is_last = i == 39;  // a choice among all rows
    const AttendOptions call{.read = is_last || i % 3 == 2 ? Read::selected : Read::all,
                             .refresh_selection = is_last || (i > 20 && i % 5 == 0)};
    const auto step = [&](KvCache<float>& cache, test::Tensor<float>& to) {
      cache.step(0, std::as_const(q).view(), std::as_const(k).view(), std::as_const(v).view(), to.view(),
                 call);
    };
    step(fast, out);
    step(own, other);
    REQUIRE(test::same_bits(out.numbers(), other.numbers()));
    CHECK(own.slow_bytes() == slow.live_bytes());
    CHECK(own.bytes() - own.slow_bytes() == memory.live_bytes());
    if (i < 2) CHECK(own.slow_bytes() == plan.memory(own.tokens(), options).slow);
    for (std::size_t head = 2; head < heads && i > 2; ++head) {
      std::vector<PageProvider::Range> ranges;
      for (const Segment& segment : own.segments(0, head, Read::selected)) {
        list_ranges(slow, segment, key_dim, value_dim, ranges);
      }
      CHECK(ranges.empty());
    }
  }
  // By hand, before anything is chosen: full pages of heads 0 and 1, of 4 bytes and half a byte a channel.
  KvCache<float> fresh{plan, options};
  test::Tensor<float> q{100, heads, key_dim}, k{100, heads, key_dim}, v{100, heads, value_dim};
  test::Tensor<float> out{100, heads, value_dim};
  for (test::Tensor<float>* tensor : {&q, &k, &v}) tensor->randomize(random);
  const std::size_t before = slow.live_bytes();
  fresh.step(0, std::as_const(q).view(), std::as_const(k).view(), std::as_const(v).view(), out.view());
  const std::size_t dense = 6 * 16 * (key_dim + value_dim) * 4;                       // 96 of 100 rows, twice
  const std::size_t four_bits = 5 * 16 * ((key_dim + value_dim) / 2 + 8);             // 80 quantised rows
  const std::size_t eight_bits = 5 * (16 * (key_dim + value_dim + 4) + 4 * key_dim);  // 80 of 84
  CHECK(fresh.slow_bytes() == 2 * dense + four_bits + eight_bits);
  CHECK(slow.live_bytes() - before == fresh.slow_bytes());
  CHECK(plan.memory(100, options).slow == fresh.slow_bytes());
}
