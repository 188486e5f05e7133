// SPDX-License-Identifier: Apache-2.0
//
// Trees of guesses in the device cache: each node reads what a fork reads that decodes the node's path,
// and what is accepted is as if nothing else had ever been guessed. (Against the oracle in double:
// random operations, cache_random_*_test.cpp.)
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "cuda/support/device_cache.hpp"
#include "cuda/support/tree_mask.hpp"

using namespace kvpolicy;
using test::contains;
using test::DeviceCache;
using test::DeviceChunk;
using test::DevicePlan;
using test::some_tree;
using test::thrown;

namespace {

using E = float16;
using Path = std::vector<std::size_t>;
constexpr double rounding = test::DeviceBackend<kvpolicy::float16>::out_error;
const ModelShape shape{2, 8, 8, 64};

Path path_to(const TokenTree& tree, std::size_t node) {
  Path path;
  for (; node != TokenTree::text; node = tree.parent(node)) path.insert(path.begin(), node);
  return path;
}

/// One tensor set for each layer; node i is token i.
struct Nodes {
  std::vector<DeviceChunk<>> layers;

  Nodes(std::uint64_t seed, std::size_t count) {
    test::Random random{seed};
    for (std::size_t l = 0; l < shape.layers; ++l) layers.emplace_back(random, shape, count);
  }
  /// Nodes [first, first + count) of a tree, of which they are the last, or of the text.
  void step(DeviceCache& cache, std::size_t first, std::size_t count, const TokenTree* tree = nullptr,
            Read read = Read::all, cudaStream_t stream = nullptr) const {
    for (std::size_t l = 0; l < shape.layers; ++l) {
      layers[l].step_part(cache, l, first, count, {.read = read, .tree = tree}, stream);
    }
  }
  void append_and_attend(DeviceCache& cache, std::size_t first, std::size_t count, const TokenTree* tree,
                         Read read = Read::all) const {
    for (std::size_t l = 0; l < shape.layers; ++l) {
      const AttendOptions options{.read = read, .tree = tree};
      layers[l].append_part(cache, l, first, count, options);
      layers[l].attend_part(cache, l, first, count, options);
    }
  }
  /// Those of a path, one after another, as text.
  [[nodiscard]] Nodes along(const Path& path) const {
    Nodes chosen{1, path.size()};
    for (std::size_t l = 0; l < shape.layers; ++l) {
      const auto copy = [&](const test::DeviceArray<E>& from, const test::DeviceArray<E>& to,
                            std::size_t heads) {
        const auto all = from.download();
        std::vector<E> some;
        const auto row = static_cast<std::ptrdiff_t>(heads * shape.head_dim);
        for (const std::size_t node : path) {
          const auto at = all.begin() + static_cast<std::ptrdiff_t>(node) * row;
          some.insert(some.end(), at, at + row);
        }
        to.upload(some);
      };
      copy(layers[l].q, chosen.layers[l].q, shape.q_heads);
      copy(layers[l].k, chosen.layers[l].k, shape.kv_heads);
      copy(layers[l].v, chosen.layers[l].v, shape.kv_heads);
    }
    return chosen;
  }
  /// Outputs and log-sum-exps of one token, of all layers.
  [[nodiscard]] std::vector<float> of(std::size_t token) const {
    std::vector<float> all;
    for (const DeviceChunk<>& layer : layers) {
      const std::size_t numbers = shape.q_heads * shape.head_dim;
      const auto out = layer.out.download();
      for (std::size_t i = 0; i < numbers; ++i) all.push_back(static_cast<float>(out[token * numbers + i]));
      const auto lse = layer.log_sum_exp.download();
      for (std::size_t h = 0; h < shape.q_heads; ++h) all.push_back(lse[token * shape.q_heads + h]);
    }
    return all;
  }
};

DeviceCache cache_of(std::size_t text, std::size_t max_rollback, std::size_t max_append = 1) {
  DeviceCache cache{test::mixed_device_plan(shape), {.max_rollback = max_rollback, .max_append = max_append}};
  if (text > 0) test::feed_device(cache, text, {text}, {.refresh_selection = true});
  return cache;
}

}  // namespace

TEST_CASE("trees: each node reads what a fork reads that decodes its path") {
  const test::SmallDevice device;
  std::uint32_t seed = 1;
  for (const std::size_t text : std::initializer_list<std::size_t>{3, 150}) {
    for (const bool apart : {false, true}) {
      for (const Read read : {Read::all, Read::selected}) {
        CAPTURE(text);
        CAPTURE(seed);
        ++seed;
        const TokenTree tree = some_tree(seed % 2 == 0 ? 4 : 20, seed, 6);
        DeviceCache run = cache_of(text, 20, 20);
        const DeviceCache before = run.fork();
        const Nodes nodes{seed, tree.size()};
        apart ? nodes.append_and_attend(run, 0, tree.size(), &tree, read)
              : nodes.step(run, 0, tree.size(), &tree, read);
        for (std::size_t node = 0; node < tree.size(); node += 1 + tree.size() / 4) {
          const Path path = path_to(tree, node);
          DeviceCache fork = before.fork();
          const Nodes alone = nodes.along(path);
          alone.step(fork, 0, path.size(), nullptr, read);
          CHECK(test::largest_difference(nodes.of(node), alone.of(path.size() - 1)) <= rounding);
        }
      }
    }
  }
}

TEST_CASE("trees: grown level by level, a fork that accepts goes on alike") {
  const test::SmallDevice device;
  // Three levels of 2, 4 and 6 nodes.
  const std::vector<std::size_t> parents{TokenTree::text, TokenTree::text, 0, 1, 1, 0, 2, 2, 3, 4, 5, 5};
  const TokenTree tree{parents};
  for (const bool apart : {false, true}) {
    DeviceCache run = cache_of(130, 12, 6);
    const Nodes nodes{5, tree.size()};
    std::size_t first = 0;
    for (const std::size_t count : std::initializer_list<std::size_t>{2, 4, 6}) {
      const DeviceCache before = run.fork();
      CHECK(test::dump_device(before, false) == test::dump_device(run, false));
      const TokenTree part = tree.first(first + count);
      apart ? nodes.append_and_attend(run, first, count, &part) : nodes.step(run, first, count, &part);
      for (std::size_t node = first; node < first + count; ++node) {
        Path path = path_to(tree, node);
        path.pop_back();
        DeviceCache fork = before.fork();
        if (first > 0) fork.accept(path);
        const Nodes alone = nodes.along({node});
        alone.step(fork, 0, 1);
        CHECK(test::largest_difference(nodes.of(node), alone.of(0)) <= rounding);
      }
      first += count;
    }
    CHECK(run.tokens() == 130 + 12);
  }
}

TEST_CASE("trees: what is accepted is bit for bit what a cache decoded that guessed nothing else") {
  const test::SmallDevice device;
  std::uint32_t seed = 20;
  for (const std::size_t text : std::initializer_list<std::size_t>{0, 2, 150}) {
    for (const std::size_t size : std::initializer_list<std::size_t>{1, 7, 24}) {
      if ((text == 0) != (size == 1)) continue;
      CAPTURE(text);
      CAPTURE(size);
      ++seed;
      CAPTURE(seed);
      const TokenTree tree = some_tree(static_cast<int>(size), seed, 6);
      const Nodes nodes{seed, size};
      DeviceCache run = cache_of(text, 24);
      DeviceCache control = cache_of(text, 24);
      const std::size_t half = size / 2;
      if (half > 0) {
        const TokenTree part = tree.first(half);
        nodes.step(run, 0, half, &part, Read::selected);
      }
      nodes.step(run, half, size - half, &tree, Read::selected);
      const Path path = seed % 4 == 0 ? Path{} : path_to(tree, size - 1 - seed % 3 % size);
      run.accept(path);
      CHECK(run.tokens() == text + path.size());

      // The control commits as far, by guesses that it takes back.
      Nodes{seed + 1, size}.step(control, 0, size);
      control.truncate(text);
      if (!path.empty()) nodes.along(path).step(control, 0, path.size());
      REQUIRE(run.commit_point() == control.commit_point());
      CHECK(run.bytes() == control.bytes());
      CHECK(test::dump_device(run, false) == test::dump_device(control, false));
      CHECK(test::same_bits(
          test::next_step(run, 6, 2, {.read = Read::selected, .refresh_selection = true}),
          test::next_step(control, 6, 2, {.read = Read::selected, .refresh_selection = true})));
      // Heads with a budget choose by the queries that moved with their rows.
      run.compress();
      control.compress();
      CHECK(test::dump_device(run, false) == test::dump_device(control, false));
      CHECK(test::same_bits(test::next_step(run, 7, 9), test::next_step(control, 7, 9)));
      CHECK(test::dump_device(run, false) == test::dump_device(control, false));
    }
  }
}

TEST_CASE("trees: a chain is a chunk, bit for bit; whole levels may be appended before they are read") {
  const test::SmallDevice device;
  const TokenTree chain = some_tree(18, 1, 10);
  REQUIRE(chain.depth(17) == 17);
  const Nodes nodes{3, 18};
  DeviceCache run = cache_of(100, 18, 18);
  DeviceCache control = run.fork();
  nodes.step(control, 0, 18);
  std::vector<std::vector<float>> expected;
  for (const std::size_t node : std::initializer_list<std::size_t>{0, 9, 17})
    expected.push_back(nodes.of(node));
  nodes.step(run, 0, 18, &chain);
  std::size_t i = 0;
  for (const std::size_t node : std::initializer_list<std::size_t>{0, 9, 17}) {
    CHECK(test::same_bits(nodes.of(node), expected[i++]));
  }
  run.accept(path_to(chain, 17));
  CHECK(test::dump_device(run, false) == test::dump_device(control, false));

  // Queries that never came leave nothing to choose by.
  DeviceCache half_read = cache_of(100, 18, 18);
  const TokenTree tree = some_tree(9, 2, 4);
  const TokenTree part = tree.first(5);
  for (std::size_t l = 0; l < shape.layers; ++l) {
    nodes.layers[l].append_part(half_read, l, 0, 5, {.tree = &part});
    nodes.layers[l].append_part(half_read, l, 5, 4, {.tree = &tree});
    nodes.layers[l].attend_part(half_read, l, 7, 2, {.tree = &tree});
  }
  half_read.accept(path_to(tree, 8));
  CHECK(contains(thrown<ShapeError>([&] { half_read.compress(); }), "not all queries are known"));
}

TEST_CASE("trees: truncate drops all of it or keeps the first nodes; forks keep theirs") {
  const test::SmallDevice device;
  const TokenTree tree = some_tree(12, 8, 5);
  const Nodes nodes{4, 12};
  DeviceCache run = cache_of(120, 16);
  DeviceCache plain = run.fork();
  // As far committed as the whole tree makes it.
  Nodes{9, 12}.step(plain, 0, 12);
  plain.truncate(120);
  nodes.step(run, 0, 12, &tree);
  DeviceCache fork = run.fork();
  CHECK(fork.tokens() == 132);

  run.truncate(120 + 7);
  CHECK(run.tokens() == 127);
  CHECK(contains(thrown<RollbackError>([&] { run.commit(); }), "a tree of 7 nodes"));
  const TokenTree seven = tree.first(7);
  const Path path = path_to(seven, 6);
  const TokenTree again = tree.first(9);
  nodes.step(run, 7, 2, &again);
  run.accept(path);
  if (!path.empty()) nodes.along(path).step(plain, 0, path.size());
  CHECK(test::dump_device(run, false) == test::dump_device(plain, false));

  fork.truncate(120);
  CHECK(fork.tokens() == 120);
  nodes.along(path).step(fork, 0, path.size());
  CHECK(test::dump_device(run, false) == test::dump_device(fork, false));
  nodes.step(run, 0, 5);  // no tree is left that would refuse it
  DeviceCache other = fork.fork();
  other.truncate(117);  // before the text that the tree hung on
  CHECK(other.tokens() == 117);
}

TEST_CASE("trees: calls that are refused change nothing") {
  const test::SmallDevice device;
  test::CountingDeviceMemory memory;
  DeviceCache cache{test::mixed_device_plan(shape), {.max_rollback = 8, .max_append = 4, .memory = &memory}};
  test::feed_device(cache, 1, {40});
  const std::vector<std::size_t> parents{TokenTree::text, TokenTree::text, 0, 1, 1, 4};
  const TokenTree tree{parents};
  const TokenTree two = tree.first(2);
  const Nodes nodes{2, 9};
  const DeviceChunk<>& own = nodes.layers[0];
  const auto refuses = [&]<class Error>(Error*, auto call, const std::vector<std::string>& parts) {
    const auto before = test::dump_device(cache);
    const std::size_t live = memory.live_bytes();
    const std::string text = thrown<Error>(call);
    CAPTURE(text);
    CHECK(!text.empty());
    for (const std::string& part : parts) {
      CAPTURE(part);
      CHECK(contains(text, part));
    }
    CHECK(test::dump_device(cache) == before);
    CHECK(memory.live_bytes() == live);
  };
  ShapeError* const shape_error = nullptr;
  CapacityError* const capacity = nullptr;
  RollbackError* const rollback = nullptr;

  // Without a pending tree.
  refuses(rollback, [&] { cache.accept({}); }, {"no tree is pending"});
  refuses(shape_error, [&] { own.step_part(cache, 0, 0, 3, {.tree = &tree}); }, {"6 nodes", "holds 0"});
  refuses(shape_error, [&] { own.step_part(cache, 0, 0, 3, {.tree = &two}); }, {"3 tokens", "2 nodes"});
  refuses(shape_error, [&] { own.step_part(cache, 0, 0, 2, {.refresh_selection = true, .tree = &two}); },
          {"selection_query"});
  refuses(
      shape_error,
      [&] { own.step_part(cache, 0, 0, 2, {.refresh_selection = true, .selection_query = 0, .tree = &two}); },
      {"selection_query"});
  refuses(shape_error, [&] { own.attend_part(cache, 0, 0, 2, {.tree = &two}); }, {"2 nodes", "0 nodes"});
  const TokenTree nine = some_tree(9, 1);
  refuses(capacity, [&] { own.step_part(cache, 0, 0, 9, {.tree = &nine}); }, {"9 nodes", "max_rollback = 8"});
  refuses(capacity, [&] { own.append_part(cache, 0, 0, 6, {.tree = &tree}); }, {"6 rows", "max_append = 4"});

  // With one.
  nodes.step(cache, 0, 2, &two);
  const std::string waits = "a tree of 2 nodes waits for accept or truncate";
  refuses(rollback, [&] { own.step_part(cache, 0, 0, 1); }, {"gpu::KvCache::step: ", waits});
  refuses(rollback, [&] { own.append_part(cache, 0, 0, 1, {}); }, {"gpu::KvCache::append: ", waits});
  refuses(rollback, [&] { own.attend_part(cache, 0, 0, 1); }, {"gpu::KvCache::attend: ", waits});
  refuses(rollback, [&] { cache.commit(); }, {"gpu::KvCache::commit: ", waits});
  refuses(rollback, [&] { cache.compress(); }, {"gpu::KvCache::compress: ", waits});
  refuses(rollback, [&] { cache.compress(1); }, {"gpu::KvCache::compress: ", waits});
  refuses(rollback, [&] { cache.replayed(); }, {"gpu::KvCache::replayed: ", waits});
  const TokenTree other{std::vector<std::size_t>{TokenTree::text, 0, 1}};
  refuses(shape_error, [&] { own.step_part(cache, 0, 2, 1, {.tree = &other}); }, {"first 2", "3 nodes"});
  refuses(shape_error, [&] { own.step_part(cache, 0, 2, 2, {.tree = &tree}); },
          {"2 tokens", "6 nodes", "holds 2"});
  refuses(shape_error, [&] { own.attend_part(cache, 0, 0, 3, {.tree = &two}); }, {"3 queries", "2 nodes"});
  refuses(shape_error, [&] { own.attend_part(cache, 0, 0, 2, {.tree = &tree}); }, {"6 nodes"});
  refuses(shape_error, [&] { cache.accept(Path{0, 1}); }, {"2 nodes are no path", "2 nodes"});
  refuses(shape_error, [&] { cache.accept(Path{2}); }, {"no path"});

  // Layers that differ: one has gone on, or has another tree of the same size.
  own.step_part(cache, 0, 2, 4, {.tree = &tree});
  refuses(rollback, [&] { cache.accept(Path{0}); }, {"layer 1 holds 2", "layer 0 6"});
  refuses(rollback, [&] { cache.truncate(43); }, {"43", "layer 1"});
  cache.truncate(41);
  const TokenTree forked{std::vector<std::size_t>{TokenTree::text, TokenTree::text}};
  const TokenTree straight{std::vector<std::size_t>{TokenTree::text, 0}};
  own.step_part(cache, 0, 1, 1, {.tree = &forked});
  nodes.layers[1].step_part(cache, 1, 1, 1, {.tree = &straight});
  refuses(rollback, [&] { cache.accept(Path{0}); }, {"layer 1"});
  cache.truncate(40);

  // Inside a capture.
  {
    const test::Stream stream;
    cache.reserve(100, stream);
    stream.wait();
    const test::Graph graph{
        stream, [&] {
          const auto said = [&](auto call) { return thrown<CaptureError>(call); };
          CHECK(contains(said([&] { own.step_part(cache, 0, 0, 2, {.tree = &two}, stream); }), "graph"));
          CHECK(contains(said([&] { own.append_part(cache, 0, 0, 2, {.tree = &two}, stream); }), "graph"));
        }};
    nodes.step(cache, 0, 2, &two);
    const test::Graph second{
        stream, [&] {
          const auto said = [&](auto call) { return thrown<CaptureError>(call); };
          CHECK(contains(said([&] { own.attend_part(cache, 0, 0, 2, {.tree = &two}, stream); }), "graph"));
          CHECK(contains(said([&] { cache.accept(Path{0}, stream); }), "graph"));
        }};
    cache.accept(Path{1});
    CHECK(cache.tokens() == 41);
  }
}

TEST_CASE(
    "a named query of a call chooses chunks as it would at the end of one, in a tree before all branches") {
  const test::SmallDevice device;
  const std::vector<std::size_t> parents{TokenTree::text, 0, 1, 1, 2, 3, 5, 4};
  const TokenTree tree{parents};
  const Nodes nodes{3, tree.size()};
  // The chunks that the retrieval head of each layer reads.
  const auto chosen = [](const DeviceCache& cache) {
    std::vector<std::int64_t> positions;
    for (std::size_t l = 0; l < shape.layers; ++l) {
      for (std::size_t h = 0; h < shape.kv_heads; ++h) {
        if (test::mixed_heads()[(h + 3 * l) % shape.kv_heads].kind != test::Kind::retrieval) continue;
        const auto rows = cache.rows(l, h, Read::selected);
        for (const std::int64_t p : rows.positions) {
          if (p < 128) positions.push_back(p);
        }
      }
    }
    return positions;
  };
  for (const Read read : {Read::all, Read::selected}) {
    for (const bool apart : {false, read == Read::all}) {
      for (const std::size_t chooser : std::initializer_list<std::size_t>{0, 1, 7}) {
        CAPTURE(chooser);
        // Whichever call ends first, the same chunks are closed.
        DeviceCache run = cache_of(200, 41, 12);
        DeviceCache control = run.fork();
        DeviceCache branched = run.fork();
        const auto before = chosen(run);
        const auto call = [&](DeviceCache& cache, std::size_t count, const AttendOptions& options) {
          for (std::size_t l = 0; l < shape.layers; ++l) {
            if (apart) nodes.layers[l].append_part(cache, l, 0, count, options);
            apart ? nodes.layers[l].attend_part(cache, l, 0, count, options)
                  : nodes.layers[l].step_part(cache, l, 0, count, options);
          }
        };
        call(control, chooser + 1, {.read = read, .refresh_selection = true});
        call(run, 8, {.read = read, .refresh_selection = true, .selection_query = chooser});
        const auto after = chosen(control);
        CHECK(after != before);
        CHECK(chosen(run) == after);
        run.truncate(200 + chooser + 1);
        CHECK(chosen(run) == after);
        run.truncate(200 + chooser);
        CHECK(chosen(run) == before);
        if (chooser == 7) continue;
        call(branched, 8,
             {.read = read, .refresh_selection = true, .selection_query = chooser, .tree = &tree});
        CHECK(chosen(branched) == after);
        DeviceCache dropped = branched.fork();
        branched.accept(Path{0, 1, 3});
        CHECK(chosen(branched) == after);
        dropped.accept(chooser == 0 ? Path{} : Path{0});  // and so not the one that chose
        CHECK(chosen(dropped) == before);
      }
    }
  }
  const test::Stream stream;
  DeviceCache cache = cache_of(20, 12);
  cache.reserve(64);
  test::succeed(cudaDeviceSynchronize());
  const test::Graph graph{stream, [&] {
                            const AttendOptions options{.refresh_selection = true, .selection_query = 1};
                            CHECK(contains(thrown<CaptureError>([&] {
                                             nodes.layers[0].step_part(cache, 0, 0, 3, options, stream);
                                           }),
                                           "selection_query is 1"));
                          }};
}

#if !defined(__CUDACC__)
TEST_CASE("trees: a late device sees each call's own tree") {
  const test::SmallDevice device;
  std::vector<Nodes> nodes;
  for (std::uint64_t i = 0; i < 4; ++i) nodes.emplace_back(i, 24);
  const std::vector<int> sizes{3, 20, 5, 24};  // the buffer grows, and is written again
  const auto run = [&](bool late) {
    const test::Stream stream;  // outlives the cache, whose memory goes back on it
    DeviceCache cache = cache_of(60, 24);
    gpu::simt::device().late = late;
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      const TokenTree tree = some_tree(sizes[i], static_cast<std::uint32_t>(i), 5);
      const TokenTree part = tree.first(tree.size() / 2);
      nodes[i].step(cache, 0, part.size(), &part, Read::all, stream);
      nodes[i].step(cache, part.size(), tree.size() - part.size(), &tree, Read::all, stream);
      cache.accept(path_to(tree, tree.size() - 1), stream);
    }
    stream.wait();
    gpu::simt::device().late = false;
    std::vector<float> all = test::dump_device(cache, true, stream).numbers;
    for (const Nodes& one : nodes) {
      for (const DeviceChunk<>& layer : one.layers) {
        const auto results = layer.results(stream);
        all.insert(all.end(), results.begin(), results.end());
      }
    }
    return all;
  };
  const auto at_once = run(false);
  CHECK(test::same_bits(at_once, run(true)));
}
#endif
