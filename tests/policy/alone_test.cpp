// SPDX-License-Identifier: Apache-2.0
//
// Each policy without a cache, as a program would use it: rows_of, commit, segments, an engine. What it
// holds, shows and weighs must be what its model says.
#include <doctest/doctest.h>

#include <cmath>
#include <set>
#include <utility>
#include <vector>

#include <kvpolicy/core/scalar_engine.hpp>

#include "support/compare.hpp"
#include "support/memory.hpp"
#include "support/oracle.hpp"
#include "support/plans.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;

namespace {

using oracle::HeadSpec;
using oracle::Kind;

constexpr std::size_t head_dim = 80;

// Feeds random pieces of text, and after each reads with the query at the last row.
template <class P>
void alone(const HeadSpec& spec, std::uint64_t seed) {
  using E = typename P::element_type;
  static_assert(KvPolicy<P>);
  test::Random random{seed};
  test::CountingResource memory;
  {
    PagePool pool{&memory, {.max_slab_bytes = 0}};
    const StorageContext context{head_dim, 16, &pool};
    const auto config = test::policy_config<P>(spec);
    P policy{config, context};
    oracle::HeadModel model{spec};
    ScalarEngine engine;
    std::size_t tokens = 0;
    for (int round = 0; round < 30; ++round) {
      const std::size_t count = test::one_of(random, std::vector<std::size_t>{1, 1, 3, 16, 33});
      test::Tensor<E> keys{count, 1, head_dim}, values{count, 1, head_dim};
      keys.randomize(random);
      values.randomize(random);
      policy.commit(rows_of(std::as_const(keys).view().data, std::as_const(values).view().data, count,
                            head_dim, static_cast<std::int64_t>(tokens)));
      tokens += count;
      model.commit(tokens);
      CHECK(policy.rows() == model.kept().size());
      CHECK(memory.live_bytes() == policy.bytes());
      CHECK(policy.bytes() == P::bytes_of_tokens(config, context, tokens));
      CHECK(policy.bytes() <= P::max_bytes(config, context, tokens));

      SegmentList list;
      const auto t = static_cast<std::int64_t>(tokens);
      policy.segments({.first_position = t}, list);
      std::set<std::int64_t> expected;
      for (std::int64_t p = 0; p < t; ++p) {
        if (model.reads(p, t, t, false)) expected.insert(p);
      }
      std::vector<oracle::Row> rows;
      std::vector<float> row(head_dim);
      std::set<std::int64_t> shown;
      for (const Segment& segment : list) {
        for (std::size_t i = 0; i < segment.rows; ++i) {
          if (!is_visible(segment.position_of(i), t, segment.window)) continue;
          shown.insert(segment.position_of(i));
          rows.push_back({segment.position_of(i), {}, {}});
          load_row(segment.keys, i, row);
          rows.back().key.assign(row.begin(), row.end());
          load_row(segment.values, i, row);
          rows.back().value.assign(row.begin(), row.end());
        }
      }
      CHECK(shown == expected);
      CHECK(rows.size() == expected.size());
      test::Tensor<float> q{1, 1, head_dim}, out{1, 1, head_dim};
      q.randomize(random);
      const std::span<const Segment> head{list};
      engine.attend({ConstTensor{std::as_const(q).view()}, MutableTensor{out.view()}, t, {&head, 1}, {}});
      std::vector<const oracle::Row*> read;
      for (const auto& one : rows) read.push_back(&one);
      const auto result = oracle::attend(q.row_of_doubles(0, 0), read,
                                         {1.0 / std::sqrt(static_cast<double>(head_dim)), 0.0, {}});
      CHECK(test::largest_difference(result.out, out.row(0, 0)) <= 1e-5);
    }
    P fork{policy};
    CHECK(memory.live_bytes() == policy.bytes() + fork.bytes() - policy.shared_bytes());
  }
  CHECK(memory.live_blocks() == 0);
  CHECK(memory.faults() == 0);
}

using PerToken = ResidualStorage<float16, Granularity::per_token>;
using PerChannel = ResidualStorage<float16, Granularity::per_channel>;

// Rows [count, head_dim] of one head; all channels of a row have the same number.
Segment level_rows(const std::vector<float>& numbers, std::size_t first, std::size_t count) {
  return rows_of(numbers.data() + first * head_dim, numbers.data() + first * head_dim, count, head_dim,
                 static_cast<std::int64_t>(first));
}

}  // namespace

TEST_CASE("full, without a cache") {
  alone<FullCache<DenseStorage<bfloat16>>>({}, 1);
  alone<QuantizedResidualCache<float>>({.bits = 8, .residual = 5}, 2);
  alone<QuantizedResidualCache<float, Granularity::per_channel>>(
      {.bits = 4, .key_group = 16, .residual = 40, .per_channel = true}, 3);
}

TEST_CASE("sinks and a window, without a cache") {
  alone<SinkRecentCache<DenseStorage<float>>>({.kind = Kind::window, .sinks = 5, .recent = 30}, 1);
  alone<SinkRecentCache<PerToken>>(
      {.kind = Kind::window, .sinks = 17, .recent = 16, .bits = 4, .residual = 7}, 2);
}

TEST_CASE("retrieval, without a cache") {
  alone<ChunkRetrievalCache<DenseStorage<float>>>({.kind = Kind::retrieval, .budget = 16, .chunk = 8}, 1);
  alone<ChunkRetrievalCache<PerChannel, MinMaxKey>>({.kind = Kind::retrieval,
                                                     .budget = 16,
                                                     .chunk = 8,
                                                     .min_max = true,
                                                     .bits = 8,
                                                     .key_group = 4,
                                                     .residual = 9,
                                                     .per_channel = true},
                                                    2);

  using Retrieval = ChunkRetrievalCache<DenseStorage<float>>;
  Retrieval policy{{.chunk = 4, .budget = 8}, {head_dim, 16}};
  std::vector<float> numbers(22 * head_dim);
  const std::vector<float> level{0, 1, 5, 2, 5};  // one number for each chunk; the sixth chunk is not full
  for (std::size_t i = 0; i < numbers.size(); ++i)
    numbers[i] = i / head_dim < 20 ? level[i / head_dim / 4] : 9.0F;
  policy.commit(level_rows(numbers, 0, 22));
  CHECK(policy.selection_is_stale());
  CHECK(policy.selection().empty());
  ScalarEngine engine;
  policy.refresh(std::vector<float>(2 * head_dim, 1.0F), engine);  // two query heads
  CHECK(!policy.selection_is_stale());
  REQUIRE(policy.selection().size() == 2);
  CHECK(policy.selection()[0].first == 0);
  CHECK(policy.selection()[1].first == 8);  // of equal chunks, the earlier one
  CHECK(policy.selection()[1].rows == 4);
  CHECK(policy.selected_until() == 20);
  policy.refresh(std::vector<float>(head_dim, -1.0F), engine);
  REQUIRE(policy.selection().size() == 1);  // chunks 0 and 1, merged
  CHECK(policy.selection()[0].rows == 8);
}

TEST_CASE("a budget, without a cache") {
  using Budget = HeadBudgetCache<DenseStorage<float>>;
  const Budget::Config config{.budget = 2, .scorer = {.observation_window = 2, .kernel = 1}};
  Budget policy{config, {head_dim, 16}};
  std::vector<float> numbers(8 * head_dim, 1.0F);
  policy.commit(level_rows(numbers, 0, 4));
  CHECK(!policy.is_compressible());
  policy.commit(level_rows(numbers, 4, 4));
  REQUIRE(policy.is_compressible());
  const std::vector<float> sums{0.1F, 0.5F, 0.2F, 0.1F, 0.5F, 0.1F, 3, 3};
  policy.prepare_compress(sums, 1, 2);
  policy.abandon_compress();
  CHECK(policy.rows() == 8);
  policy.prepare_compress(sums, 1, 2);
  CHECK(policy.rows() == 8);  // nothing changes before the compression is finished
  policy.finish_compress();
  CHECK(policy.rows() == 4);
  const auto positions = [&] {
    SegmentList list;
    policy.segments({}, list);
    std::vector<std::int64_t> all;
    for (const Segment& s : list) {
      for (std::size_t i = 0; i < s.rows; ++i) all.push_back(s.position_of(i));
    }
    return all;
  };
  CHECK(positions() == std::vector<std::int64_t>{1, 4, 6, 7});
  std::vector<float> more(10 * head_dim, 2.0F);
  policy.commit(level_rows(more, 8, 2));
  CHECK(positions() == std::vector<std::int64_t>{1, 4, 6, 7, 8, 9});
  // A second compression, over the survivors.
  policy.prepare_compress(std::vector<float>{0.0F, 0.3F, 0.0F, 0.1F, 1, 1}, 1, 2);
  policy.finish_compress();
  CHECK(positions() == std::vector<std::int64_t>{4, 7, 8, 9});
  CHECK(Budget::bytes_compressed(config, {head_dim, 16}, 100) == policy.bytes());
}

TEST_CASE(
    "max pooling gives neighbours equal scores: the attended row stays, and its neighbours with the most "
    "attention of their own") {
  using Budget = HeadBudgetCache<DenseStorage<float>>;
  const auto survivors = [](std::size_t budget, const std::vector<float>& sums, std::size_t group) {
    const std::size_t rows = sums.size() / group;
    Budget policy{{.budget = budget, .scorer = {.observation_window = 1, .kernel = 7}}, {head_dim, 16}};
    std::vector<float> numbers(rows * head_dim, 1.0F);
    policy.commit(level_rows(numbers, 0, rows));
    REQUIRE(policy.is_compressible());
    policy.prepare_compress(sums, group, 1);
    policy.finish_compress();
    SegmentList list;
    policy.segments({}, list);
    std::vector<std::int64_t> kept;
    for (const Segment& s : list) {
      for (std::size_t i = 0; i < s.rows; ++i) kept.push_back(s.position_of(i));
    }
    kept.pop_back();  // the observation window
    return kept;
  };
  using Rows = std::vector<std::int64_t>;
  // Row 5 has attention, and pooling gives rows 2 to 8 the same score. Among them, row 7 has the next
  // highest own score.
  const std::vector<float> one{0, 0, 0, 0, 0, 0.8F, 0, 0.1F, 0, 0, 0, 0.05F, 0.05F};
  CHECK(survivors(1, one, 1) == Rows{5});
  CHECK(survivors(2, one, 1) == Rows{5, 7});
  CHECK(survivors(3, one, 1) == Rows{2, 5, 7});  // of those without attention, the earlier row
  // The scores of two query heads are added: of the rows with equal pooled scores, 4 and 6 have
  // attention of their own.
  const std::vector<float> two{0,      0, 0, 0, 0.4F, 0, 0,    0, 0, 0.6F,
                               /**/ 0, 0, 0, 0, 0,    0, 0.5F, 0, 0, 0.5F};
  CHECK(survivors(1, two, 2) == Rows{6});
  CHECK(survivors(2, two, 2) == Rows{4, 6});
}

TEST_CASE("what a policy refuses") {
  using test::contains;
  using test::thrown;
  const StorageContext context{head_dim, 16};
  using Window = SinkRecentCache<DenseStorage<float>>;
  CHECK(contains(thrown<ConfigError>([&] { Window{{.recent = 0}, context}; }), "recent is 0"));
  using Retrieval = ChunkRetrievalCache<ResidualStorage<float, Granularity::per_channel>>;
  const auto error = [&](Retrieval::Config config) {
    return thrown<ConfigError>([&] { Retrieval{config, context}; });
  };
  const ResidualStorage<float, Granularity::per_channel>::Config grouped{.key_group = 16};
  CHECK(error({.chunk = 32, .budget = 64, .storage = grouped}).empty());
  CHECK(contains(error({.chunk = 0, .storage = grouped}), "chunk is 0"));
  CHECK(contains(error({.chunk = 8, .budget = 64, .storage = grouped}),
                 "chunk is 8, must be a multiple of the 16 rows"));
  CHECK(contains(error({.chunk = 16, .budget = 40, .storage = grouped}),
                 "budget is 40, must be a positive multiple of chunk = 16"));
  CHECK(contains(error({.chunk = 16, .budget = 0, .storage = grouped}), "budget is 0"));
}
