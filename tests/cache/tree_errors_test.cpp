// SPDX-License-Identifier: Apache-2.0
//
// Invalid calls with trees: the error has a named type and carries the value and what would fit, and the
// cache is unchanged and continues with its tree.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/policy/chunk_retrieval_cache.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>

#include "cache/dump.hpp"
#include "support/memory.hpp"

using namespace kvpolicy;
using test::contains;
using test::thrown;

namespace {

using Window = SinkRecentCache<DenseStorage<float>>;
using Budget = HeadBudgetCache<DenseStorage<float>>;
using Retrieval = ChunkRetrievalCache<DenseStorage<float>>;
using Plan = HeadPlan<float>;
using Cache = KvCache<float>;

constexpr ModelShape shape{2, 3, 3, 64};
constexpr std::size_t text = TokenTree::text;

TokenTree tree_of(const std::vector<std::size_t>& parents) { return TokenTree{parents}; }

struct Fixture {
  test::CountingResource memory;
  test::Random random{1};
  Cache cache{make_plan(), options()};
  //   text - 0 - 1 - 4
  //        \     \ 3
  //          2
  const TokenTree tree = tree_of({text, 0, text, 0, 1});

  static Plan make_plan() {
    Plan plan{shape};
    for (std::size_t l = 0; l < shape.layers; ++l) {
      plan.set(l, 0, Window::Config{.sinks = 2, .recent = 9});
      plan.set(l, 1, Budget::Config{.budget = 6, .scorer = {.observation_window = 2}});
      plan.set(l, 2, Retrieval::Config{.chunk = 4, .budget = 8});
    }
    return plan;
  }
  CacheOptions options() {
    return {.max_rollback = 6, .max_append = 5, .max_tokens = 30, .page_rows = 16, .memory = &memory};
  }
  Fixture() { test::feed(cache, random, {19, 2}); }

  void step(std::size_t layer, const TokenTree& own, std::size_t tokens, AttendOptions how = {}) {
    test::Chunk<> chunk{random, shape, tokens};
    how.tree = &own;
    chunk.step(cache, layer, how);
  }
  void hold() {  // Adds the first three nodes in both layers.
    for (std::size_t l = 0; l < 2; ++l) step(l, tree.first(3), 3);
  }

  // Checks that the call throws an E whose text has all these parts, and changes nothing.
  template <class E, class Call>
  void refuses(Call call, const std::vector<std::string>& parts) {
    const auto before = test::dump(cache);
    const std::size_t live = memory.live_bytes();
    const std::string said = thrown<E>(call);
    CAPTURE(said);
    CHECK(!said.empty());
    for (const std::string& part : parts) {
      CAPTURE(part);
      CHECK(contains(said, part));
    }
    CHECK(test::dump(cache) == before);
    CHECK(memory.live_bytes() == live);
  }
};

}  // namespace

TEST_CASE_FIXTURE(Fixture, "a tree must begin with the nodes that the cache holds") {
  refuses<ShapeError>([&] { step(0, tree, 2); },
                      {"2 tokens are to be the last of a tree of 5 nodes", "holds 0"});
  refuses<ShapeError>([&] { step(0, tree, 6); }, {"6 tokens", "tree of 5 nodes"});
  refuses<ShapeError>([&] { step(0, TokenTree{}, 1); }, {"1 tokens", "tree of 0 nodes"});
  hold();
  refuses<ShapeError>([&] { step(0, tree, 5); }, {"5 tokens", "tree of 5 nodes", "holds 3"});
  refuses<ShapeError>([&] { step(0, tree.first(4), 2); }, {"2 tokens", "tree of 4 nodes", "holds 3"});
  refuses<ShapeError>([&] { step(0, tree_of({text, 0, 0, 0, 1}), 2); },
                      {"the first 3 of the tree's 5 nodes are not those"});
  test::Chunk<> chunk{random, shape, 2};
  const TokenTree other = tree_of({text, text, text, 0, 1});
  refuses<ShapeError>([&] { chunk.append(cache, 0, {.tree = &other}); }, {"the first 3 of the tree's 5"});
  refuses<ShapeError>([&] { chunk.attend(cache, 0, {.tree = &tree}); },
                      {"a tree of 5 nodes", "the one of 3"});
  refuses<ShapeError>([&] { test::Chunk<>{random, shape, 4}.attend(cache, 0, {.tree = &tree}); },
                      {"5 nodes"});
  const TokenTree three = tree.first(3);
  refuses<ShapeError>([&] { test::Chunk<>{random, shape, 4}.attend(cache, 0, {.tree = &three}); },
                      {"4 queries", "3 nodes"});
  // The right tree is accepted afterwards.
  for (std::size_t l = 0; l < 2; ++l) step(l, tree, 2);
  cache.accept(std::vector<std::size_t>{0, 1, 4});
  CHECK(cache.tokens() == 24);
  refuses<ShapeError>([&] { chunk.attend(cache, 0, {.tree = &tree}); }, {"5 nodes", "the one of 0"});
}

TEST_CASE_FIXTURE(Fixture, "a whole tree must fit into the tail and the cache") {
  const TokenTree seven = tree_of({text, 0, text, 0, 1, 1, 1});
  refuses<CapacityError>([&] { step(0, seven, 7); }, {"a tree of 7 nodes", "max_rollback = 6"});
  hold();
  refuses<CapacityError>([&] { step(0, seven, 4); }, {"a tree of 7 nodes", "max_rollback = 6"});
  test::Chunk<> six{random, shape, 6};
  const TokenTree nine = tree_of({text, 0, text, 0, 1, 1, 1, 1, 1});
  refuses<CapacityError>([&] { six.append(cache, 0, {.tree = &nine}); }, {"6 rows", "max_append = 5"});
  cache.truncate(21);
  test::feed(cache, random, {5});
  refuses<CapacityError>([&] { step(1, tree, 5); }, {"5 more tokens after 26", "max_tokens = 30"});
  for (std::size_t l = 0; l < 2; ++l) step(l, tree.first(4), 4);
  CHECK(cache.tokens() == 30);

  Cache committed{make_plan(), {}};
  test::Chunk<> one{random, shape, 1};
  const TokenTree node = tree.first(1);
  CHECK(
      contains(thrown<CapacityError>([&] { one.step(committed, 0, {.tree = &node}); }), "max_rollback = 0"));
}

TEST_CASE_FIXTURE(Fixture, "while a tree is pending, nothing else adds, reads or commits rows") {
  hold();
  test::Chunk<> chunk{random, shape, 2};
  const std::string waits = "a tree of 3 nodes waits for accept or truncate";
  refuses<RollbackError>([&] { chunk.step(cache, 0); }, {"KvCache::step", waits});
  refuses<RollbackError>([&] { chunk.append(cache, 1); }, {"KvCache::append", waits});
  refuses<RollbackError>([&] { chunk.attend(cache, 0); }, {"KvCache::attend", waits});
  refuses<RollbackError>([&] { cache.commit(); }, {"KvCache::commit", waits});
  refuses<RollbackError>([&] { cache.compress(); }, {"KvCache::compress", waits});
  refuses<RollbackError>([&] { cache.compress(1); }, {"KvCache::compress", waits});
  refuses<RollbackError>([&] { cache.truncate(25); }, {"to 25 tokens", "18 to 24"});
  refuses<RollbackError>([&] { cache.truncate(14); }, {"to 14 tokens"});
  Cache fork = cache.fork();
  CHECK(contains(thrown<RollbackError>([&] { fork.commit(); }), waits));
  cache.accept({});
  CHECK_NOTHROW(chunk.step(cache, 0));
}

TEST_CASE_FIXTURE(Fixture, "a call with a branching tree must name the query that selects") {
  refuses<ShapeError>([&] { step(0, tree, 5, {.refresh_selection = true}); },
                      {"refresh_selection with a tree"});
  refuses<ShapeError>([&] { step(0, tree, 5, {.read = Read::selected, .refresh_selection = true}); },
                      {"refresh_selection with a tree"});
}

TEST_CASE_FIXTURE(Fixture, "accept requires a path of a tree that every layer holds") {
  using Path = std::vector<std::size_t>;
  refuses<RollbackError>([&] { cache.accept({}); }, {"KvCache::accept", "no tree is pending"});
  refuses<RollbackError>([&] { cache.accept(Path{0}); }, {"no tree is pending"});
  hold();
  for (const Path& path : {Path{1}, Path{0, 2}, Path{0, 0}, Path{1, 0}, Path{3}, Path{0, 1, 4}, Path{text}}) {
    refuses<ShapeError>([&] { cache.accept(path); }, {"no path", "tree of 3 nodes"});
  }
  // The call reached one layer and not the other.
  step(0, tree, 2);
  refuses<RollbackError>([&] { cache.accept(Path{0, 1}); },
                         {"layer 1 holds 3 nodes at 24 tokens", "layer 0 5 at 26"});
  cache.truncate(24);
  // A tree with as many nodes, but others.
  step(0, tree_of({text, 0, text, 2, 1}), 2);
  step(1, tree, 2);
  refuses<RollbackError>([&] { cache.accept(Path{0, 1}); }, {"layer 1 holds 5 nodes", "layer 0 5"});
  cache.truncate(24);
  for (std::size_t l = 0; l < 2; ++l) step(l, tree, 2);
  cache.accept(Path{0, 1, 4});
  CHECK(cache.tokens() == 24);
  CHECK(cache.commit_point() == 20);
  cache.truncate(22);
  CHECK(cache.tokens() == 22);
}
