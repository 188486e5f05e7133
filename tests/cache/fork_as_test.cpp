// SPDX-License-Identifier: Apache-2.0
//
// A fork under another plan must equal, bit for bit, a cache of that plan that read the text in one chunk,
// also in all later calls. What cannot be forked under another plan is refused by name.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <kvpolicy/kvpolicy.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>

#include "cache/dump.hpp"
#include "cache/random_operations.hpp"
#include "support/slow_memory.hpp"

using namespace kvpolicy;

namespace {

using E = float16;
using Full = FullCache<DenseStorage<E>>;
using Window = SinkRecentCache<DenseStorage<E>>;
using Codes = QuantizedResidualCache<E, Granularity::per_token>;
using Budget = HeadBudgetCache<DenseStorage<E>>;
using Retrieval = ChunkRetrievalCache<DenseStorage<E>>;
using Plan = HeadPlan<E>;

constexpr ModelShape shape{2, 12, 12, 64};

// Rows and queries of every layer, so that two caches can get the same ones.
struct Text {
  std::vector<test::Chunk<>> layers;

  Text(std::uint64_t seed, std::size_t tokens) {
    test::Random random{seed};
    for (std::size_t l = 0; l < shape.layers; ++l) layers.emplace_back(random, shape, tokens);
  }

  /// Feeds the tokens [first, last) as one step.
  template <class Cache>
  void feed(Cache& cache, std::size_t first, std::size_t last) {
    for (std::size_t l = 0; l < shape.layers; ++l) {
      const auto part = [&]<class T>(const test::Tensor<T>& tensor) {
        auto view = tensor.view();
        view.data += first * view.token_stride;
        view.tokens = last - first;
        return view;
      };
      test::Tensor<float> out{last - first, shape.q_heads, shape.head_dim};
      cache.step(l, part(std::as_const(layers[l].q)), part(std::as_const(layers[l].k)),
                 part(std::as_const(layers[l].v)), out.view());
    }
  }
  /// Feeds all tokens, in pieces of random length.
  template <class Cache>
  void feed_in_pieces(Cache& cache, std::uint64_t seed) {
    test::Random random{seed};
    const std::size_t tokens = layers[0].q.tokens();
    for (std::size_t at = 0; at < tokens;) {
      const std::size_t next = std::min(tokens, at + 1 + test::below(random, 60));
      feed(cache, at, next);
      at = next;
    }
  }
};

// Outputs of the next steps, and the rows that live after them.
template <class Cache>
std::vector<float> go_on(Cache& cache, std::uint64_t seed) {
  std::vector<float> all;
  test::Random random{seed};
  for (const auto& [tokens, read, refresh] : {std::tuple{1, Read::all, false},
                                              {3, Read::selected, false},
                                              {1, Read::selected, true},
                                              {17, Read::all, true},
                                              {2, Read::selected, false}}) {
    for (std::size_t l = 0; l < shape.layers; ++l) {
      test::Chunk<> chunk{random, shape, static_cast<std::size_t>(tokens)};
      chunk.step(cache, l, {.read = read, .refresh_selection = refresh});
      all.insert(all.end(), chunk.out.numbers().begin(), chunk.out.numbers().end());
      all.insert(all.end(), chunk.log_sum_exp.begin(), chunk.log_sum_exp.end());
    }
  }
  return all;
}

template <class One, class Other>
void check_twins(One& one, Other& other) {
  CHECK(test::dump(one) == test::dump(other));
  const std::size_t tokens = one.tokens();
  CHECK(test::same_bits(go_on(one, 7), go_on(other, 7)));
  CHECK(test::dump(one) == test::dump(other));
  const std::size_t back = std::max(tokens, one.commit_point());
  one.truncate(back);
  other.truncate(back);
  CHECK(test::dump(one) == test::dump(other));
  CHECK(test::same_bits(go_on(one, 8), go_on(other, 8)));
  one.compress();
  other.compress();
  CHECK(test::dump(one) == test::dump(other));
  CHECK(test::same_bits(go_on(one, 9), go_on(other, 9)));
}

template <class Act>
std::string refusal(Act act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("fork_as: every policy takes the rows as if it had read them in one chunk") {
  for (const std::size_t max_rollback : std::vector<std::size_t>{0, 5, 70}) {
    const auto heads = test::some_heads(0, shape.kv_head_count(), max_rollback == 0);
    const auto plan = test::plan_of<E>(shape, heads);
    for (const std::size_t tokens : std::vector<std::size_t>{0, 1, 64, 131}) {
      CAPTURE(max_rollback);
      CAPTURE(tokens);
      test::CountingResource memory;
      const CacheOptions options{
          .max_rollback = max_rollback, .kept_queries = 8, .page_rows = 16, .memory = &memory};
      Text text{tokens + 1, tokens};
      KvCache<E> source{Plan{shape}, options};
      text.feed_in_pieces(source, 3);
      const test::Dump before = test::dump(source);
      CHECK(source.bytes() == source.plan().memory(tokens, options).total());
      auto forked = source.fork_as(plan);
      CHECK(forked.plan() == plan);
      CHECK(memory.live_bytes() == source.bytes() + forked.bytes() - forked.shared_bytes());

      KvCache<E> fed{plan, options};
      if (tokens > 0) text.feed(fed, 0, tokens);
      check_twins(forked, fed);
      CHECK(test::dump(source) == before);
      CHECK(memory.faults() == 0);
    }
  }
}

TEST_CASE("fork_as: uncompressed budgets, windows that hold all and retrieval heads give their rows") {
  Plan plan{shape, Budget::Config{.budget = 20}};
  for (std::size_t l = 0; l < shape.layers; ++l) {
    plan.set(l, 1, Retrieval::Config{.budget = 16});
    plan.set(l, 2, Window::Config{.sinks = 3, .recent = 97});  // as many as there are rows
    plan.set(l, 3, Window::Config{.sinks = 200, .recent = 1});
    plan.set(l, 4, Codes::Config{.storage = {.residual = 100}});  // no row has left the residual
  }
  const CacheOptions options{.page_rows = 16};
  Text text{1, 100};
  KvCache<E> source{plan, options};
  text.feed_in_pieces(source, 2);
  const auto heads = test::some_heads(9, shape.kv_head_count(), true);
  const auto other = test::plan_of<E>(shape, heads);
  auto forked = source.fork_as(other);
  KvCache<E> fed{other, options};
  text.feed(fed, 0, 100);
  check_twins(forked, fed);
}

TEST_CASE("fork_as: heads that stay as they are share their pages, quantised and evicted rows too") {
  test::CountingResource memory;
  Plan plan{shape, Window::Config{.sinks = 2, .recent = 20}};
  for (std::size_t l = 0; l < shape.layers; ++l) {
    plan.set(l, 1, Budget::Config{.budget = 20});
    plan.set(l, 2, Codes::Config{.storage = {.residual = 10}});
    plan.set(l, 3, Retrieval::Config{.budget = 16});
    plan.set(l, 4, Full::Config{});
  }
  const CacheOptions options{.max_rollback = 4, .page_rows = 16, .memory = &memory};
  Text text{5, 150};
  KvCache<E> source{plan, options};
  text.feed_in_pieces(source, 2);
  source.compress();
  {
    auto same = source.fork_as(plan);
    auto fork = source.fork();
    CHECK(same.shared_bytes() == fork.shared_bytes());
    CHECK(same.shared_bytes() > 0);
    CHECK(memory.live_bytes() == 3 * source.bytes() - 2 * source.shared_bytes());
    check_twins(same, fork);
  }
  // Only one head changes.
  Plan other = plan;
  other.set(1, 4, Codes::Config{.storage = {.bits = 2, .residual = 0}});
  const auto fork = source.fork();
  const auto forked = source.fork_as(other);
  const auto bytes = [&](std::size_t l, std::size_t h) { return forked.head(l, h).shared_bytes(); };
  CHECK(bytes(1, 4) == 0);
  CHECK(bytes(0, 4) > 0);
  CHECK(forked.shared_bytes() + fork.head(1, 4).shared_bytes() == fork.shared_bytes());
}

TEST_CASE("fork_as: refuses rows that were dropped or quantised, and says where") {
  Plan plan{shape};
  plan.set(0, 3, Window::Config{.sinks = 2, .recent = 20});
  plan.set(1, 5, Codes::Config{.storage = {.residual = 10}});
  plan.set(1, 7, Budget::Config{.budget = 20});
  KvCache<E> source{plan, {.max_rollback = 3}};
  Text text{5, 60};
  text.feed_in_pieces(source, 2);
  source.compress();
  const test::Dump before = test::dump(source);

  auto other = plan;
  other.set(0, 3, Window::Config{.sinks = 2, .recent = 19});
  CHECK(refusal([&] { (void)source.fork_as(other); }).find("KV head 3 of layer 0 holds 22 of 60 rows") !=
        std::string::npos);
  other = plan;
  other.set(1, 5, Full::Config{});
  CHECK(refusal([&] { (void)source.fork_as(other); }).find("KV head 5 of layer 1 holds quantised rows") !=
        std::string::npos);
  other = plan;
  other.set(1, 7, Budget::Config{.budget = 21});
  CHECK(refusal([&] { (void)source.fork_as(other); }).find("KV head 7 of layer 1 holds 28 of 60 rows") !=
        std::string::npos);
  CHECK(refusal([&] { (void)source.fork_as(Plan{{2, 24, 12, 64}}); }).find("different shapes") !=
        std::string::npos);
  CHECK_THROWS_AS((void)source.fork_as(other), ConfigError);
  CHECK(test::dump(source) == before);
  CHECK(test::dump(source.fork_as(plan)) == before);
}

TEST_CASE("fork_as: a new head must be able to hold the rows, tentative ones too") {
  const Plan quantized{shape, Codes::Config{}};
  for (const std::size_t large : std::vector<std::size_t>{3, 19}) {  // committed rows, and rows in the tail
    KvCache<E> source{Plan{shape}, {.max_rollback = 4}};
    Text text{5, 20};
    text.layers[1].v.at(large, 2, 9) = INFINITY;
    text.feed(source, 0, 20);
    CHECK_THROWS_AS((void)source.fork_as(quantized), ShapeError);
  }
}

TEST_CASE("fork_as: a compression by more queries than were kept is refused until enough have come") {
  KvCache<E> source{Plan{shape}, {.kept_queries = 5}};  // and one more, that of the tail
  Text text{5, 60};
  text.feed_in_pieces(source, 2);
  auto forked =
      source.fork_as(Plan{shape, Budget::Config{.budget = 20, .scorer = {.observation_window = 8}}});
  CHECK(refusal([&] { forked.compress(); }).find("of the latest 8 tokens not all queries are known, 6") !=
        std::string::npos);
  Text more{6, 3};
  more.feed_in_pieces(forked, 2);
  forked.compress();
  CHECK(forked.policy<Budget>(0, 0).rows() == 28);
  // A smaller observation window has enough queries at once, and keeps no more than it would have.
  auto small = source.fork_as(Plan{shape, Budget::Config{.budget = 20, .scorer = {.observation_window = 2}}});
  small.compress();
  CHECK(small.policy<Budget>(0, 0).rows() == 22);
}

TEST_CASE("fork_as: a pending tree is copied") {
  TokenTree tree;
  for (const std::size_t parent : {TokenTree::text, std::size_t{0}, std::size_t{0}, TokenTree::text}) {
    tree.add(parent);
  }
  const CacheOptions options{.max_rollback = 6, .page_rows = 16};
  const auto plan = test::plan_of<E>(shape, test::some_heads(0, shape.kv_head_count(), false));
  Text text{5, 40};
  KvCache<E> source{Plan{shape}, options};
  KvCache<E> fed{plan, options};
  text.feed(source, 0, 40);
  text.feed(fed, 0, 40);
  test::Random random{3};
  for (std::size_t l = 0; l < shape.layers; ++l) {
    test::Chunk<> nodes{random, shape, tree.size()};
    nodes.step(source, l, {.tree = &tree});
    nodes.step(fed, l, {.tree = &tree});
  }
  auto forked = source.fork_as(plan);
  const std::vector<std::size_t> path{0, 2};
  forked.accept(path);
  fed.accept(path);
  check_twins(forked, fed);
}

TEST_CASE("fork_as: a failed allocation changes nothing") {
  test::CountingResource memory;
  test::FailingSlowMemory slow;
  const CacheOptions options{
      .max_rollback = 2, .kept_queries = 8, .page_rows = 16, .memory = &memory, .slow_memory = &slow};
  const auto plan = test::plan_of<E>(shape, test::some_heads(0, shape.kv_head_count(), false));
  Text text{5, 90};
  KvCache<E> source{Plan{shape}, options};
  text.feed_in_pieces(source, 2);
  const test::Dump before = test::dump(source);
  const std::size_t live = memory.live_bytes();
  const std::size_t slow_live = slow.live_bytes();
  CHECK(slow_live > 0);
  const auto fails = [&](auto& resource, std::size_t successes) {
    resource.fail_after(successes);
    bool failed = false;
    try {
      (void)source.fork_as(plan);
    } catch (const std::bad_alloc&) {
      failed = true;
    } catch (const StorageError&) {
      failed = true;
    }
    resource.fail_after(test::never);
    CHECK(test::dump(source) == before);
    CHECK(memory.live_bytes() == live);
    CHECK(slow.live_bytes() == slow_live);
    return failed;
  };
  std::size_t failures = 0;
  for (std::size_t i = 0; fails(memory, i); i += 23) ++failures;
  CHECK(failures > 10);
  failures = 0;
  (void)slow.take_fetched_bytes();
  for (std::size_t i = 0; fails(slow, i); i += 5) ++failures;
  CHECK(failures > 5);
  CHECK(slow.take_fetched_bytes() > 0);

  auto forked = source.fork_as(plan);
  KvCache<E> fed{plan, options};
  text.feed(fed, 0, 90);
  CHECK(test::dump(forked) == test::dump(fed));
  CHECK(forked.bytes() == fed.bytes());
}
