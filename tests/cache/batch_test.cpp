// SPDX-License-Identifier: Apache-2.0
//
// Many sequences in one call: each gets what it would get alone, and one that fails leaves the others alone.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/cache/batch.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>

#include "cache/dump.hpp"
#include "support/batch_twins.hpp"
#include "support/memory.hpp"

using namespace kvpolicy;
using test::contains;
using test::thrown;

namespace {

using Full = FullCache<DenseStorage<float>>;
using Window = SinkRecentCache<DenseStorage<float>>;
using Cache = KvCache<float>;
using Sequence = BatchSequence<Cache>;
constexpr ModelShape shape{2, 4, 2, 64};

}  // namespace

TEST_CASE("random batches: joins, forks, rollbacks, trees and mixed plans, bit for bit as one by one") {
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    CAPTURE(seed);
    test::BatchOfTwins<float, ScalarEngine>{seed, {1 + seed % 2, 4, 2, 64}}.run(80);
  }
  test::BatchOfTwins<bfloat16, ScalarEngine>{17, {2, 3, 3, 64}}.run(80);
}

TEST_CASE("a batch of one and a batch of none") {
  Batch<float> batch;
  Cache cache{HeadPlan<float>{shape}};
  Cache control{HeadPlan<float>{shape}};
  test::Random random{3};
  test::Chunk<float> chunk{random, shape, 5};
  const std::vector<Sequence> one{{&cache}};
  const std::vector<std::int32_t> all{0, 5};
  const std::vector<float> expected = [&] {
    chunk.step(control, 0);
    return chunk.out.numbers();
  }();
  CHECK(batch.step(0, one, all, chunk.q.view(), chunk.k.view(), chunk.v.view(), chunk.out.view()).empty());
  CHECK(test::same_bits(chunk.out.numbers(), expected));
  test::Chunk<float> empty{random, shape, 0};
  CHECK(batch
            .step(0, {}, std::vector<std::int32_t>{0}, empty.q.view(), empty.k.view(), empty.v.view(),
                  empty.out.view())
            .empty());
  CHECK(batch
            .step(1, one, std::vector<std::int32_t>{0, 0}, empty.q.view(), empty.k.view(), empty.v.view(),
                  empty.out.view())
            .empty());
  CHECK(cache.tokens(0) == 5);
  CHECK(cache.tokens(1) == 0);
}

TEST_CASE("what is wrong with one sequence names it, and changes none") {
  Batch<float> batch;
  test::Random random{5};
  const CacheOptions options{.max_rollback = 4, .max_append = 8, .max_tokens = 20};
  std::vector<Cache> caches;
  for (int i = 0; i < 3; ++i) caches.emplace_back(HeadPlan<float>{shape}, options);
  HeadPlan<float> windows{shape, Window::Config{.sinks = 2, .recent = 6}};
  caches.emplace_back(windows, options);
  for (Cache& cache : caches) test::feed(cache, random, {13});
  std::vector<Sequence> sequences;
  for (Cache& cache : caches) sequences.push_back({&cache});
  const auto dumps = [&] {
    std::vector<test::Dump> all;
    for (const Cache& cache : caches) all.push_back(test::dump(cache));
    return all;
  };
  const auto before = dumps();
  test::Chunk<float> chunk{random, shape, 12};
  const auto step = [&](std::vector<std::int32_t> indptr) {
    static_cast<void>(
        batch.step(1, sequences, indptr, chunk.q.view(), chunk.k.view(), chunk.v.view(), chunk.out.view()));
  };
  const auto refused = [&]<class Error>(const std::vector<std::int32_t>& indptr, const std::string& part) {
    const std::string message = thrown<Error>([&] { step(indptr); });
    CAPTURE(message);
    CHECK(contains(message, part));
    CHECK(dumps() == before);
  };
  refused.operator()<CapacityError>({0, 1, 2, 11, 12}, "sequence 2: ");  // 13 + 9 tokens
  refused.operator()<ShapeError>({0, 1, 2, 3}, "indptr has 4 entries, must have one more than the 4");
  refused.operator()<ShapeError>({0, 3, 6, 9, 11}, "from 0 to 11, must be from 0 to the 12 tokens");
  refused.operator()<ShapeError>({1, 3, 6, 9, 12}, "indptr is from 1 to 12");
  // One token each, so that no sequence's own tokens overlap.
  const auto overlapping = [&] {
    const TensorView<float> out{chunk.out.view().data, 4, shape.q_heads, shape.head_dim, shape.head_dim,
                                shape.head_dim};
    static_cast<void>(batch.step(
        0, sequences, std::vector<std::int32_t>{0, 1, 2, 3, 4}, std::as_const(chunk.q).view().slice(0, 4),
        std::as_const(chunk.k).view().slice(0, 4), std::as_const(chunk.v).view().slice(0, 4), out));
  };
  CHECK(contains(thrown<ShapeError>(overlapping), "which overlap"));
  CHECK(dumps() == before);
  refused.operator()<ShapeError>({0, 5, 2, 9, 12}, "sequence 1: indptr falls from 5 to 2");

  sequences[3].options.softcap = -1.0F;
  refused.operator()<ShapeError>({0, 3, 6, 9, 12}, "sequence 3: KvCache: softcap is -1");
  sequences[3].options = {};
  const TokenTree tree = test::random_tree(random, 2);
  sequences[1].options.tree = &tree;
  refused.operator()<ShapeError>({0, 3, 6, 9, 12},
                                 "sequence 1: KvCache: 3 tokens are to be the last of a tree");
  sequences[1].options = {};
  std::swap(sequences[0].cache, sequences[2].cache);
  sequences[1].cache = sequences[0].cache;
  refused.operator()<ConfigError>({0, 3, 6, 9, 12}, "a cache is listed twice");
  sequences[1].cache = nullptr;
  refused.operator()<ConfigError>({0, 3, 6, 9, 12}, "sequence 1 has no cache");
  std::swap(sequences[0].cache, sequences[2].cache);
  sequences[1].cache = &caches[1];

  const auto layer = [&](std::size_t number) {
    static_cast<void>(batch.attend(number, sequences, std::vector<std::int32_t>{0, 3, 6, 9, 12},
                                   chunk.q.view(), chunk.out.view()));
  };
  CHECK(contains(thrown<ShapeError>([&] { layer(2); }), "sequence 0: KvCache: there is no layer 2"));
  caches[3].commit();
  CHECK(contains(thrown<ShapeError>([&] { layer(1); }),
                 "sequence 3: KvCache::attend: 3 queries, but only the latest 0"));
  test::Chunk<float> other{random, shape, 3};
  CHECK(contains(thrown<ShapeError>([&] {
                   static_cast<void>(batch.append(0, sequences, std::vector<std::int32_t>{0, 3, 6, 9, 12},
                                                  chunk.k.view(), other.v.view()));
                 }),
                 "v has 3 tokens, must have as many as the first tensor, 12"));
}

TEST_CASE("a sequence without memory is left out, and the others go on") {
  const HeadPlan<float> plan{shape};
  bool left_out_once = false;
  for (const bool apart : {false, true}) {
    for (std::size_t allowed = 0; allowed < 12; ++allowed) {
      CAPTURE(allowed);
      test::CountingResource memory;
      CacheOptions options{.max_append = 40, .page_rows = 16, .memory = &memory};
      Cache poor{plan, options};
      options.memory = CacheOptions{}.memory;
      Cache rich{plan, options}, control{plan, options};
      test::Random random{allowed};
      test::feed(poor, random, {15});
      const test::Dump before = test::dump(poor);
      test::Chunk<float> chunk{random, shape, 41};
      const std::vector<std::int32_t> indptr{0, 1, 40, 41};
      Cache third{plan, options};
      const std::vector<Sequence> sequences{{&rich}, {&poor}, {&third}};
      Batch<float> batch;
      memory.fail_after(allowed);
      // Copied at once: the next call overwrites it.
      const auto copied = [](std::span<const LeftOut> found) {
        return std::vector<LeftOut>(found.begin(), found.end());
      };
      const std::vector<LeftOut> out =
          apart ? copied(batch.append(0, sequences, indptr, chunk.k.view(), chunk.v.view()))
                : copied(batch.step(0, sequences, indptr, chunk.q.view(), chunk.k.view(), chunk.v.view(),
                                    chunk.out.view()));
      memory.fail_after(static_cast<std::size_t>(-1));
      CHECK(rich.tokens(0) == 1);
      CHECK(third.tokens(0) == 1);
      if (out.empty()) {
        CHECK(poor.tokens(0) == 15 + 39);
      } else {
        left_out_once = true;
        REQUIRE(out.size() == 1);
        CHECK(out[0].sequence == 1);
        CHECK_THROWS_AS(std::rethrow_exception(out[0].error), std::bad_alloc);
        CHECK(test::dump(poor) == before);
      }
      if (!apart) {
        const auto q = std::as_const(chunk.q).view().slice(0, 1);
        test::Tensor<float> own{1, shape.q_heads, shape.head_dim};
        control.step(0, q, std::as_const(chunk.k).view().slice(0, 1),
                     std::as_const(chunk.v).view().slice(0, 1), own.view());
        CHECK(chunk.out.row(0, 1) == own.row(0, 1));
      }
    }
  }
  CHECK(left_out_once);
}
