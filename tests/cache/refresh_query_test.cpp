// SPDX-License-Identifier: Apache-2.0
//
// The query of a call that selects chunks: the selection equals that of a call which ends at this query, and
// is dropped when its token is.
#include <doctest/doctest.h>

#include <cstddef>
#include <optional>
#include <random>
#include <vector>

#include <kvpolicy/kvpolicy.hpp>
#include <kvpolicy/policy/chunk_retrieval_cache.hpp>

namespace {
using namespace kvpolicy;

using Policy = ChunkRetrievalCache<DenseStorage<float>>;
using Cache = KvCache<float>;
constexpr ModelShape shape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 64};

struct Call {
  std::vector<float> q, k, v;
  std::size_t tokens;

  Call(std::mt19937& random, std::size_t count)
      : q(count * shape.q_heads * shape.head_dim),
        k(count * shape.kv_heads * shape.head_dim),
        v(k.size()),
        tokens{count} {
    for (auto* numbers : {&q, &k, &v}) {
      for (float& number : *numbers) number = static_cast<float>(random()) * 0x1p-31F - 1.0F;
    }
  }
  void step(Cache& cache, std::size_t count, const AttendOptions& options) const {
    std::vector<float> out(count * shape.q_heads * shape.head_dim);
    for (std::size_t layer = 0; layer < shape.layers; ++layer) {
      cache.step(layer, TensorView<const float>{q.data(), count, shape.q_heads, shape.head_dim},
                 TensorView<const float>{k.data(), count, shape.kv_heads, shape.head_dim},
                 TensorView<const float>{v.data(), count, shape.kv_heads, shape.head_dim},
                 TensorView<float>{out.data(), count, shape.q_heads, shape.head_dim}, options);
    }
  }
};

std::vector<std::size_t> chosen(const Cache& cache) {
  std::vector<std::size_t> rows;
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    for (std::size_t head = 0; head < shape.kv_heads; ++head) {
      for (const RowRun& run : cache.policy<Policy>(layer, head).selection()) {
        rows.push_back(run.first);
        rows.push_back(run.rows);
      }
    }
  }
  return rows;
}

struct Setup {
  std::mt19937 random{7};
  Cache cache{HeadPlan<Policy>{shape, Policy::Config{.chunk = 4, .budget = 16}},
              {.max_rollback = 24, .max_append = 24}};
  Setup() { Call{random, 150}.step(cache, 150, {}); }
};

TEST_CASE("a query within a call selects the same chunks as at the end of a call") {
  for (const Read read : {Read::all, Read::selected}) {
    for (const std::size_t chooser : {0UL, 1UL, 5UL, 8UL}) {
      CAPTURE(chooser);
      Setup setup;
      Cache other = setup.cache.fork();
      const Call call{setup.random, 9};
      call.step(setup.cache, 9, {.read = read, .refresh_selection = true, .selection_query = chooser});
      call.step(other, chooser + 1, {.read = read, .refresh_selection = true});
      CHECK(!chosen(other).empty());
      CHECK(chosen(setup.cache) == chosen(other));
    }
  }
}

TEST_CASE("a selection survives a rollback that keeps its token, and no longer one") {
  Setup setup;
  const Call first{setup.random, 1};
  first.step(setup.cache, 1, {.refresh_selection = true});
  const auto before = chosen(setup.cache);
  Call{setup.random, 6}.step(setup.cache, 6, {.refresh_selection = true, .selection_query = 2});
  const auto after = chosen(setup.cache);
  REQUIRE(after != before);
  setup.cache.truncate(151 + 3);
  CHECK(chosen(setup.cache) == after);
  setup.cache.truncate(151 + 2);
  CHECK(chosen(setup.cache) == before);
}

TEST_CASE("in a tree a node on all paths selects, and its selection is kept with it") {
  Setup setup;
  TokenTree tree;
  for (const std::size_t parent :
       {TokenTree::text, std::size_t{0}, std::size_t{1}, std::size_t{1}, std::size_t{2}}) {
    tree.add(parent);
  }
  const Call call{setup.random, 5};
  Cache other = setup.cache.fork();
  call.step(other, 2, {.refresh_selection = true});
  CHECK_THROWS_AS(call.step(setup.cache, 5, {.refresh_selection = true, .tree = &tree}), ShapeError);
  CHECK_THROWS_AS(call.step(setup.cache, 5, {.refresh_selection = true, .selection_query = 2, .tree = &tree}),
                  ShapeError);
  CHECK(setup.cache.tokens() == 150);
  call.step(setup.cache, 5, {.refresh_selection = true, .selection_query = 1, .tree = &tree});
  CHECK(chosen(setup.cache) == chosen(other));
  Cache dropped = setup.cache.fork();
  setup.cache.accept(std::vector<std::size_t>{0, 1, 3});
  CHECK(chosen(setup.cache) == chosen(other));
  dropped.accept(std::vector<std::size_t>{0});
  CHECK(chosen(dropped).empty());
}

TEST_CASE("a selection query outside the call is refused") {
  Setup setup;
  const Call call{setup.random, 3};
  CHECK_THROWS_AS(call.step(setup.cache, 3, {.refresh_selection = true, .selection_query = 3}), ShapeError);
  CHECK(setup.cache.tokens() == 150);
}

}  // namespace
