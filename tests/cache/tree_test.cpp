// SPDX-License-Identifier: Apache-2.0
//
// Trees of draft tokens, compared with caches that never had one: a chain equals a plain chunk, a node is
// read as if its path were the text, and an accepted path leaves what plain decoding would have left. The
// random operations (random_operations.hpp) compare the same calls with attention in double.
#include <doctest/doctest.h>

#include <algorithm>
#include <initializer_list>
#include <utility>
#include <vector>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/policy/chunk_retrieval_cache.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/quantized_residual_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>

#include "cache/dump.hpp"
#include "support/random_tree.hpp"

using namespace kvpolicy;
using test::below;
using test::Random;

namespace {

using E = float16;
using PerToken = ResidualStorage<E, Granularity::per_token>;
using Full = FullCache<DenseStorage<E>>;
using Kivi = QuantizedResidualCache<E, Granularity::per_channel>;
using Window = SinkRecentCache<DenseStorage<E>>;
using QuantizedWindow = SinkRecentCache<PerToken>;
using Budget = HeadBudgetCache<PerToken>;
using Retrieval = ChunkRetrievalCache<PerToken>;
using Plan = HeadPlan<E>;
using Cache = KvCache<E>;

constexpr ModelShape shape{2, 14, 7, 64};

// Windows are shorter than trees are deep, and nodes can be sinks. `linear`: only heads whose attention does
// not depend on how a text is divided into calls.
Plan mixed_plan(bool linear) {
  Plan plan{shape};
  for (std::size_t l = 0; l < shape.layers; ++l) {
    plan.set(
        l, 1,
        Kivi::Config{
            .storage = {
                .bits = 2, .key_group = 8, .residual = 16, .flush = l == 0 ? Flush::steady : Flush::kivi}});
    plan.set(l, 2, Window::Config{.sinks = 4, .recent = 5});
    plan.set(l, 3,
             Window::Config{.sinks = 9,
                            .recent = 3,
                            .mask = linear ? Mask::exact : Mask::prefill_chunk,
                            .rotary_in_cache = RotaryConfig{}});
    plan.set(l, 4, QuantizedWindow::Config{.sinks = 1, .recent = 30, .storage = {.bits = 4, .residual = 3}});
    plan.set(l, 5,
             Budget::Config{
                 .budget = 17, .scorer = {.observation_window = 5}, .storage = {.bits = 8, .residual = 6}});
    plan.set(l, 6, Retrieval::Config{.chunk = 6, .budget = 18, .storage = {.bits = 8, .residual = 2}});
  }
  return plan;
}

// A model's call for some tokens in every layer, in the cache's own type.
struct Tokens {
  std::vector<test::Chunk<E>> layers;
  std::size_t count;

  Tokens(Random& random, std::size_t tokens) : count{tokens} {
    for (std::size_t l = 0; l < shape.layers; ++l) layers.emplace_back(random, shape, tokens);
  }
  Tokens(const Tokens& all, const std::vector<std::size_t>& chosen) : count{chosen.size()} {
    Random random{1};
    for (const auto& from : all.layers) {
      auto& to = layers.emplace_back(random, shape, chosen.size());
      for (std::size_t i = 0; i < chosen.size(); ++i) {
        copy_row(from.q, chosen[i], to.q, i, shape.q_heads);
        copy_row(from.k, chosen[i], to.k, i, shape.kv_heads);
        copy_row(from.v, chosen[i], to.v, i, shape.kv_heads);
      }
    }
  }

  static void copy_row(const test::Tensor<E>& from, std::size_t a, test::Tensor<E>& to, std::size_t b,
                       std::size_t heads) {
    for (std::size_t h = 0; h < heads; ++h) {
      for (std::size_t c = 0; c < shape.head_dim; ++c) to.at(b, h, c) = E{from.number(a, h, c)};
    }
  }
};

// Outputs and log-sum-exps of each token, of all layers one after another.
using Outputs = std::vector<std::vector<float>>;

// Makes a call for the tokens [first, last), with `tree` if it is not null.
void run(Cache& cache, const Tokens& tokens, std::size_t first, std::size_t last, AttendOptions options,
         bool apart, Outputs& outputs) {
  const std::size_t count = last - first;
  outputs.resize(std::max(outputs.size(), last));
  for (std::size_t i = first; i < last; ++i) outputs[i].clear();
  for (std::size_t l = 0; l < shape.layers; ++l) {
    const auto& chunk = tokens.layers[l];
    const auto q = chunk.q.view().slice(first, count);
    const auto k = chunk.k.view().slice(first, count);
    const auto v = chunk.v.view().slice(first, count);
    test::Tensor<float> out{count, shape.q_heads, shape.head_dim};
    std::vector<float> log_sum_exp(count * shape.q_heads);
    options.log_sum_exp = log_sum_exp;
    if (apart) {
      cache.append(l, k, v, options);
      cache.attend(l, q, out.view(), options);
    } else {
      cache.step(l, q, k, v, out.view(), options);
    }
    for (std::size_t i = 0; i < count; ++i) {
      for (std::size_t h = 0; h < shape.q_heads; ++h) {
        const auto row = out.row(i, h);
        outputs[first + i].insert(outputs[first + i].end(), row.begin(), row.end());
        outputs[first + i].push_back(log_sum_exp[i * shape.q_heads + h]);
      }
    }
  }
}

Outputs run_tree(Cache& cache, const Tokens& tokens, const TokenTree& tree,
                 const std::vector<std::size_t>& cuts, bool apart, const AttendOptions& options = {}) {
  Outputs outputs;
  std::size_t done = 0;
  for (const std::size_t end : cuts) {
    const TokenTree part = tree.first(end);
    AttendOptions with_tree = options;
    with_tree.tree = &part;
    run(cache, tokens, done, end, with_tree, apart, outputs);
    done = end;
  }
  return outputs;
}

std::vector<std::size_t> random_cuts(Random& random, std::size_t nodes) {
  std::vector<std::size_t> cuts;
  for (std::size_t done = 0; done < nodes; cuts.push_back(done)) done += 1 + below(random, nodes - done);
  return cuts;
}

std::vector<std::size_t> path_to(const TokenTree& tree, std::size_t node) {
  std::vector<std::size_t> path;
  for (; node != TokenTree::text; node = tree.parent(node)) path.insert(path.begin(), node);
  return path;
}

constexpr std::size_t most = 20;

Cache make_cache(bool linear, std::size_t text, std::size_t max_rollback = most) {
  Cache cache{mixed_plan(linear), {.max_rollback = max_rollback, .max_append = most, .page_rows = 16}};
  Random random{77};
  // A selection for the selected reads that follow.
  if (text > 3) test::feed(cache, random, {text - 3});
  if (text > 0) test::feed(cache, random, {std::min<std::size_t>(text, 3)}, {.refresh_selection = true});
  return cache;
}

Outputs next_step(Cache& cache, Read read) {
  Random random{5};
  Outputs outputs;
  run(cache, Tokens{random, 7}, 0, 7, {.read = read}, false, outputs);
  return outputs;
}

void check_same(const Outputs& a, const Outputs& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    CAPTURE(i);
    REQUIRE(!a[i].empty());
    REQUIRE(test::same_bits(a[i], b[i]));
  }
}

const std::vector<std::size_t> texts{0, 1, 3, 8, 16, 47, 90};

}  // namespace

TEST_CASE("a chain gives the bits of a plain chunk") {
  Random random{1};
  for (const std::size_t text : texts) {
    for (const bool apart : {false, true}) {
      for (const std::size_t nodes : std::initializer_list<std::size_t>{1, 2, 13, most}) {
        CAPTURE(text);
        CAPTURE(apart);
        CAPTURE(nodes);
        Cache cache = make_cache(false, text);
        Cache control = make_cache(false, text);
        TokenTree chain;
        for (std::size_t i = 0; i < nodes; ++i) chain.add(i == 0 ? TokenTree::text : i - 1);
        const Tokens tokens{random, nodes};
        const auto cuts = random_cuts(random, nodes);
        const Outputs outputs = run_tree(cache, tokens, chain, cuts, apart);
        Outputs expected;
        std::size_t done = 0;
        for (const std::size_t end : cuts) {
          run(control, tokens, done, end, {}, apart, expected);
          done = end;
        }
        check_same(outputs, expected);
        CHECK(cache.tokens() == text + nodes);
        cache.accept(path_to(chain, nodes - 1));
        CHECK(test::dump(cache) == test::dump(control));
        cache.compress();
        control.compress();
        CHECK(test::dump(cache) == test::dump(control));
        check_same(next_step(cache, Read::selected), next_step(control, Read::selected));
      }
    }
  }
}

TEST_CASE("a node gives the bits of a text that ends with its path") {
  Random random{2};
  for (const std::size_t text : texts) {
    for (const bool committed : {true, false}) {
      for (int round = 0; round < 4; ++round) {
        CAPTURE(text);
        CAPTURE(committed);
        CAPTURE(round);
        Cache cache = make_cache(true, text, committed ? most : text + most);
        if (committed) cache.commit();
        const Cache before = cache.fork();
        const Read read = round % 2 == 0 && text > 0 ? Read::selected : Read::all;
        const std::size_t nodes = round == 0 ? most : 1 + below(random, most);
        const TokenTree tree = test::random_tree(random, nodes);
        const Tokens tokens{random, nodes};
        const Outputs outputs =
            run_tree(cache, tokens, tree, random_cuts(random, nodes), below(random, 2) == 0, {.read = read});
        for (std::size_t node = 0; node < nodes; ++node) {
          CAPTURE(node);
          Cache alone = before.fork();
          const auto path = path_to(tree, node);
          const Tokens own{tokens, path};
          Outputs expected;
          for (std::size_t i = 0; i < path.size(); ++i)
            run(alone, own, i, i + 1, {.read = read}, false, expected);
          REQUIRE(test::same_bits(outputs[node], expected.back()));
        }
        // Forks have the tree as well, and continue it.
        const auto path = test::random_path(random, tree);
        Cache other = cache.fork();
        CHECK(test::dump(other) == test::dump(cache));
        cache.accept(path);
        other.truncate(text);
        CHECK(test::dump(other) == test::dump(before));
        check_same(run_tree(other, tokens, tree, {nodes}, true, {.read = read}), outputs);
        other.accept(path);
        CHECK(test::dump(other) == test::dump(cache));
        // The result is what decoding the path would have left.
        Cache alone = before.fork();
        const Tokens own{tokens, path};
        Outputs ignored;
        for (std::size_t i = 0; i < path.size(); ++i)
          run(alone, own, i, i + 1, {.read = read}, false, ignored);
        for (const bool compressed : {false, true}) {
          CAPTURE(compressed);
          CHECK(cache.tokens() == text + path.size());
          CHECK(test::dump(cache) == test::dump(alone));
          Cache a = cache.fork();
          Cache b = alone.fork();
          check_same(next_step(a, read), next_step(b, read));
          if (compressed) break;
          cache.compress();
          alone.compress();
        }
      }
    }
  }
}

TEST_CASE("over many rounds the ring wraps and nothing else changes") {
  // The smallest tail that holds the trees.
  for (const std::size_t nodes : std::initializer_list<std::size_t>{1, 3, 7}) {
    CAPTURE(nodes);
    const CacheOptions options{.max_rollback = nodes, .max_append = 1, .page_rows = 16};
    Cache cache{mixed_plan(true), options};
    Cache control{mixed_plan(true), options};
    Random random{nodes};
    Random same{nodes};
    test::feed(cache, random, {11});
    test::feed(control, same, {11});
    std::size_t text = 11;
    for (int round = 0; round < 60; ++round) {
      CAPTURE(round);
      const TokenTree tree = test::random_tree(random, nodes);
      const Tokens tokens{random, nodes};
      // The tree grows in several calls or one, by single rows where rows are appended.
      std::vector<std::size_t> cuts = random_cuts(random, nodes);
      const bool apart = below(random, 2) == 0;
      if (apart) {
        cuts.clear();
        for (std::size_t i = 1; i <= nodes; ++i) cuts.push_back(i);
      }
      run_tree(cache, tokens, tree, cuts, apart);
      const auto path = test::random_path(random, tree);
      cache.accept(path);
      const Tokens own{tokens, path};
      Outputs ignored;
      for (std::size_t i = 0; i < path.size(); ++i) run(control, own, i, i + 1, {}, false, ignored);
      text += path.size();
      REQUIRE(cache.tokens() == text);
      if (round % 10 == 9) {
        cache.commit();
        control.commit();
        REQUIRE(test::dump(cache) == test::dump(control));
      }
    }
    cache.compress();
    control.compress();
    CHECK(test::dump(cache) == test::dump(control));
    check_same(next_step(cache, Read::selected), next_step(control, Read::selected));
  }
}

TEST_CASE("truncate drops a tree, or keeps its first nodes pending") {
  Random random{3};
  Cache cache = make_cache(true, 40);
  cache.commit();
  const auto before = test::dump(cache);
  const TokenTree tree = test::random_tree(random, 12);
  const Tokens tokens{random, 12};
  const Outputs whole = run_tree(cache, tokens, tree, {12}, false);
  cache.truncate(45);
  CHECK(cache.tokens() == 45);
  // It is still the same tree, so the other nodes can be added again.
  const TokenTree five = tree.first(5);
  Outputs again;
  run(cache, tokens, 5, 12, {.tree = &tree}, true, again);
  for (std::size_t i = 5; i < 12; ++i) CHECK(test::same_bits(again[i], whole[i]));
  cache.truncate(45);
  const auto path = path_to(five, 4);
  Cache other = cache.fork();
  other.accept(path);
  CHECK(other.tokens() == 40 + path.size());
  cache.truncate(40);
  CHECK(test::dump(cache) == before);
}

TEST_CASE("truncate to before the root takes back text with the tree") {
  Random random{4};
  Cache cache = make_cache(true, 40);
  Cache control = make_cache(true, 40);
  const TokenTree tree = test::random_tree(random, 6);
  run_tree(cache, Tokens{random, 6}, tree, {2, 6}, true);
  for (Cache* each : {&cache, &control}) {
    each->truncate(33);
    each->commit();
  }
  CHECK(cache.tokens() == 33);
  CHECK(test::dump(cache) == test::dump(control));
}

TEST_CASE("a selection by a draft token is kept if the token is") {
  const Plan plan{{1, 1, 1, 64}, Retrieval::Config{.chunk = 2, .budget = 4}};
  Cache cache{plan, {.max_rollback = 8}};
  Random random{6};
  test::feed(cache, random, {30});
  cache.commit();
  const auto& policy = cache.policy<Retrieval>(0, 0);
  const auto step = [&](const TokenTree& tree, std::size_t tokens) {
    test::Chunk<> chunk{random, plan.shape(), tokens};
    chunk.step(cache, 0, {.read = Read::selected, .tree = &tree});
    CHECK(policy.selected_until() == 30);
    CHECK_FALSE(policy.selection_is_stale());
  };
  using Path = std::vector<std::size_t>;
  constexpr std::size_t text = TokenTree::text;
  // The query of node 1 selects in the first call, and the tree grows after that.
  struct Case {
    Path parents;
    std::size_t first;
    Path path;
    bool stays;
  };
  const std::vector<Case> cases{
      {{text, 0, 1, 2}, 2, {0, 1, 2, 3}, true},  // a chain
      {{text, 0, 1, 2}, 2, {0, 1}, true},
      {{text, 0, 1, 2}, 2, {0}, false},
      {{text, 0, 1, 2}, 4, {0, 1, 2}, false},  // the query of node 3 selects
      {{text, 0, 1, 0, 3}, 2, {0, 1, 2}, true},
      {{text, 0, 1, 0, 3}, 2, {0, 3, 4}, false},  // a path of the same length, but another
      {{text, text, 0, 2}, 2, {0, 2, 3}, false},
      {{text, 0, text, 2}, 2, {2, 3}, false},
      {{text, 0, text, 2}, 2, {}, false},
  };
  for (const Case& one : cases) {
    CAPTURE(one.path.size());
    const TokenTree tree{one.parents};
    step(tree.first(one.first), one.first);
    if (one.first < tree.size()) step(tree, tree.size() - one.first);
    cache.accept(one.path);
    CHECK(policy.selection_is_stale() == !one.stays);
    cache.truncate(30);
    CHECK(policy.selection_is_stale());
  }
  // If the draft token is dropped, the selection from before is used again.
  test::feed(cache, random, {1}, {.refresh_selection = true});
  const TokenTree fork{Path{text, text}};
  test::Chunk<> chunk{random, plan.shape(), 2};
  chunk.step(cache, 0, {.read = Read::selected, .tree = &fork});
  cache.accept(Path{1});
  CHECK_FALSE(policy.selection_is_stale());
}

TEST_CASE("queries of tokens that were only appended are unknown afterwards") {
  // Nodes 0 and 1 are only appended.
  const HeadPlan<float> plan{
      {1, 1, 1, 64},
      HeadBudgetCache<DenseStorage<float>>::Config{.budget = 2, .scorer = {.observation_window = 3}}};
  Random random{8};
  const TokenTree tree{std::vector<std::size_t>{TokenTree::text, 0, TokenTree::text, 0, 2, 4, 3}};
  using Path = std::vector<std::size_t>;
  for (const Path& path :
       {Path{}, Path{0}, Path{0, 1}, Path{2}, Path{0, 3}, Path{2, 4}, Path{0, 3, 6}, Path{2, 4, 5}}) {
    CAPTURE(path.size());
    KvCache<float> cache{plan, {.max_rollback = 8, .max_append = 2}};
    test::feed(cache, random, {12});
    const TokenTree two = tree.first(2);
    test::Chunk<> appended{random, plan.shape(), 2};
    appended.append(cache, 0, {.tree = &two});
    test::Chunk<> stepped{random, plan.shape(), 5};
    stepped.step(cache, 0, {.tree = &tree});
    cache.accept(path);
    // The latest three queries are required; those of the text were forgotten when the gap followed them.
    if (path == Path{2, 4, 5}) {
      CHECK_NOTHROW(cache.compress());
    } else {
      CHECK_THROWS_AS(cache.compress(), ShapeError);
    }
  }
}
