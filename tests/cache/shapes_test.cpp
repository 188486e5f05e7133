// SPDX-License-Identifier: Apache-2.0
//
// Models whose layers differ: in heads, channels of keys and of values, and windows; with layers that have no
// cache or read another layer's.
#include <doctest/doctest.h>

#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include <kvpolicy/cache/saved_cache.hpp>

#include "cache/random_shape.hpp"

using namespace kvpolicy;
using test::contains;
using test::Tensor;
using test::thrown;

namespace {

using Plan = HeadPlan<float>;
using Cache = KvCache<float>;

// Layer 1 has no cache. Layer 3 reads that of layer 2, whose values are wider than its keys.
ModelShape some_shape() {
  ModelShape shape{.layers = 4, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
  shape.change(1) = {};
  shape.change(2) = {.q_heads = 6, .kv_heads = 3, .head_dim = 24, .value_dim = 40};
  shape.change(3) = {.q_heads = 3, .reads = 2};
  return shape;
}

// The numbers of one layer's call.
struct LayerCall {
  Tensor<float> q, k, v, out;
  LayerCall(test::Random& random, const LayerShape& layer, std::size_t tokens)
      : q{tokens, layer.q_heads, layer.head_dim},
        k{tokens, layer.kv_heads, layer.head_dim},
        v{tokens, layer.kv_heads, layer.value_dim},
        out{tokens, layer.q_heads, layer.value_dim} {
    q.randomize(random);
    k.randomize(random);
    v.randomize(random);
  }
  void step(Cache& cache, std::size_t layer) { cache.step(layer, q.view(), k.view(), v.view(), out.view()); }
};

// Makes one call on every layer that takes a step.
void feed(Cache& cache, test::Random& random, std::size_t tokens) {
  const ModelShape& shape = cache.plan().shape();
  for (std::size_t l = 0; l < shape.layers; ++l) {
    if (shape.layer(l).kv_heads > 0) LayerCall{random, shape.layer(l), tokens}.step(cache, l);
  }
}

std::string refused(const ModelShape& shape) {
  return thrown<ConfigError>([&] { shape.validate(); });
}

}  // namespace

TEST_CASE("random operations on random shapes: every policy does what its model says") {
  test::random_shapes<float, float>(1, 8, 40);
}

TEST_CASE("an impossible shape is refused with the value and what would fit") {
  const auto with = [](LayerShape layer) {
    ModelShape shape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
    shape.change(1) = layer;
    return refused(shape);
  };
  CHECK(with({4, 2, 64}).empty());
  CHECK(with({4, 2, 576, 512}).empty());
  CHECK(with({4, 2, 8, 8}).empty());
  CHECK(with({}).empty());
  CHECK(contains(with({4, 2, 12}), "layer 1: head_dim is 12, must be a multiple of 8 from 8 to 576"));
  CHECK(contains(with({4, 2, 0}), "layer 1: head_dim is 0"));
  CHECK(contains(with({4, 2, 584}), "layer 1: head_dim is 584"));
  CHECK(contains(with({4, 2, 64, 4}), "layer 1: value_dim is 4, must be a multiple of 8 from 8 to 576"));
  CHECK(contains(with({5, 2, 64}), "layer 1: q_heads is 5, must be a positive multiple of kv_heads = 2"));
  CHECK(contains(with({.q_heads = 4, .kv_heads = 2, .head_dim = 64, .softcap = -1.0F}), "softcap is -1"));
  CHECK(contains(with({.q_heads = 4, .reads = 1}),
                 "layer 1: reads the cache of layer 1, must be an earlier layer"));
  CHECK(contains(with({.q_heads = 3, .reads = 0}),
                 "q_heads is 3, must be a positive multiple of kv_heads = 2"));
  CHECK(contains(with({.q_heads = 4, .kv_heads = 2, .reads = 0}), "must be 0"));
  CHECK(with({.q_heads = 2, .reads = 0}).empty());

  ModelShape empty{.layers = 2, .per_layer = {{}, {}}};
  CHECK(contains(refused(empty), "none of 2 layers has a KV head"));
  empty.per_layer = {{4, 2, 64}, {.q_heads = 4, .reads = 0}};
  CHECK(refused(empty).empty());
  empty.per_layer = {{}, {.q_heads = 4, .reads = 0}};
  CHECK(contains(refused(empty), "reads the cache of layer 0, which has none of its own"));
  empty.per_layer = {{4, 2, 64}};
  CHECK(contains(refused(empty), "per_layer has 1 entries, must have one for each of 2 layers"));
  CHECK(contains(thrown<ConfigError>([&] { static_cast<void>(empty.change(2)); }), "there is no layer 2"));
}

TEST_CASE("a storage refuses values with channels that it cannot hold") {
  using Dense = DenseStorage<float>;
  using Codes = PerTokenStorage<float>;
  CHECK(contains(thrown<ConfigError>([] { Dense{{}, {.head_dim = 8, .value_dim = 12}}; }),
                 "value_dim is 12, must be 0 or a multiple of 8"));
  CHECK(contains(thrown<ConfigError>(
                     [] { Codes{{.key_group = 8, .value_group = 16}, {.head_dim = 64, .value_dim = 24}}; }),
                 "value_group is 16, must divide value_dim = 24"));
  CHECK(thrown<ConfigError>([] {
          Codes{{.key_group = 32, .value_group = 8}, {.head_dim = 64, .value_dim = 24}};
        }).empty());
}

TEST_CASE("shapes are equal if their layers are, however they are written") {
  const ModelShape shape{.layers = 3, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
  ModelShape same = shape;
  same.change(1).value_dim = 64;
  CHECK(same == shape);
  CHECK(same.is_uniform());
  same.change(2).window = 9;
  CHECK(same != shape);
  CHECK(!same.is_uniform());
  CHECK(shape.layer(2).value_dim == 64);
  CHECK(some_shape().kv_head_count() == 5);
  // Values have as many channels as keys, whether keys are set before or after.
  same.change(0).head_dim = 128;
  CHECK(same.layer(0).value_dim == 128);
}

TEST_CASE("a window of the model bounds every head, whatever its settings") {
  ModelShape shape{.layers = 2, .q_heads = 2, .kv_heads = 2, .head_dim = 64};
  shape.change(1).window = 32;
  using Window = SinkRecentCache<DenseStorage<float>>::Config;
  Plan plan{shape};
  CHECK(plan.has<FullCache<DenseStorage<float>>>(0, 0));
  CHECK(plan.at(1, 1) == HeadSettings<float>{Window{.sinks = 0, .recent = 32}});
  plan.set(1, 0, Window{.sinks = 4, .recent = 28});
  CHECK(plan.at(1, 0) == HeadSettings<float>{Window{.sinks = 4, .recent = 28}});
  plan.set(1, 0, Window{.sinks = 5, .recent = 28});
  CHECK(plan.at(1, 0) == HeadSettings<float>{Window{.sinks = 0, .recent = 32}});
}

TEST_CASE("calls on layers that keep no rows are refused by name") {
  test::Random random{3};
  Cache cache{Plan{some_shape()}, {.max_append = 4}};
  feed(cache, random, 3);
  const LayerShape source = cache.plan().shape().layer(2);
  LayerCall call{random, source, 1};
  const std::size_t bytes = cache.bytes();
  CHECK(
      contains(thrown<ShapeError>([&] { call.step(cache, 1); }), "layer 1 has no cache (its kv_heads is 0)"));
  CHECK(contains(thrown<ShapeError>([&] { static_cast<void>(cache.tokens(1)); }), "layer 1 has no cache"));
  CHECK(contains(thrown<ShapeError>([&] { call.step(cache, 3); }),
                 "layer 3 reads the cache of layer 2 and has no rows of its own; it takes attend alone"));
  CHECK(contains(thrown<ShapeError>([&] { cache.compress(3); }), "layer 3 reads the cache of layer 2"));
  CHECK(contains(thrown<ShapeError>([&] { call.step(cache, 4); }), "there is no layer 4, the plan has 4"));
  CHECK(contains(thrown<ConfigError>([&] { static_cast<void>(cache.plan().at(1, 0)); }),
                 "there is no KV head 0 in layer 1, which has 0, for it has no cache of its own"));
  // The rows of the call are committed, so nothing of it is left to attend to.
  Tensor<float> q{1, 3, 24};
  Tensor<float> out{1, 3, 40};
  CHECK(contains(thrown<ShapeError>([&] { cache.attend(3, q.view(), out.view()); }),
                 "only the latest 0 rows of layer 2 have not been committed"));
  cache.append(2, call.k.view(), call.v.view());
  CHECK(contains(
      thrown<ShapeError>([&] { cache.attend(3, q.view(), out.view(), {.refresh_selection = true}); }),
      "layer 2, whose cache it reads, selects for both"));
  Tensor<float> narrow{1, 3, 24};
  CHECK(contains(thrown<ShapeError>([&] { cache.attend(3, q.view(), narrow.view()); }),
                 "out is [1, 3, 24], must be [1, 3, 40]"));
  CHECK(cache.tokens(3) == 4);
  CHECK(cache.bytes() == bytes);
  CHECK(cache.tokens() == 3);
}

TEST_CASE("a layer that reads another one's cache attends as if it held the same rows itself") {
  test::Random random{4};
  const ModelShape shape = some_shape();
  const LayerShape source = shape.layer(2);
  ModelShape copied = shape;
  copied.change(3) = {.q_heads = 3, .kv_heads = 3, .head_dim = 24, .value_dim = 40};
  const auto set = [](Plan plan, std::size_t layer) {
    plan.set(layer, 0, SinkRecentCache<DenseStorage<float>>::Config{.sinks = 2, .recent = 9});
    plan.set(layer, 1, QuantizedResidualCache<float>::Config{.storage = {.bits = 4, .residual = 5}});
    return plan;
  };
  const CacheOptions options{.max_rollback = 2, .max_append = 7, .page_rows = 16};
  Cache cache{set(Plan{shape}, 2), options};
  Cache twice{set(set(Plan{copied}, 2), 3), options};
  for (const std::size_t tokens : std::vector<std::size_t>{7, 1, 1, 5, 7, 7, 1, 1}) {
    LayerCall call{random, source, tokens};
    LayerCall reading{random, copied.layer(3), tokens};
    Tensor<float> out{tokens, 3, 40};
    cache.append(2, call.k.view(), call.v.view());
    cache.attend(2, call.q.view(), call.out.view());
    cache.attend(3, reading.q.view(), out.view());
    twice.append(3, call.k.view(), call.v.view());
    twice.attend(3, reading.q.view(), reading.out.view());
    CHECK(test::same_bits(out.numbers(), reading.out.numbers()));
  }
  CHECK(cache.tokens(3) == cache.tokens(2));
  CHECK(&cache.head(3, 1) == &cache.head(2, 1));
  CHECK(!cache.segments(3, 0).empty());
  CHECK(contains(thrown<ConfigError>([&] {
                   Plan plan{shape};
                   plan.set(2, 0, HeadBudgetCache<DenseStorage<float>, H2oScorer>::Config{.budget = 8});
                   Cache{plan};
                 }),
                 "layer 3 reads the cache of layer 2, whose heads add up attention"));
  CHECK(contains(thrown<ConfigError>([&] {
                   Plan plan{shape};
                   plan.set(2, 1,
                            HeadBudgetCache<DenseStorage<float>>::Config{.budget = 8, .compress_every = 1});
                   Cache{plan};
                 }),
                 "layer 3 reads the cache of layer 2, whose KV head 1 compresses by itself"));
}

TEST_CASE("bytes are those that the plan predicts, and a saved cache continues bit for bit") {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    CAPTURE(seed);
    test::Random random{seed};
    const ModelShape shape = test::random_shape(random);
    Plan plan = test::plan_of<float>(shape, test::random_heads(random, shape, false));
    const CacheOptions options{.max_rollback = 3, .page_rows = 16};
    Cache cache{plan, options};
    for (std::size_t tokens = 1; tokens <= 70; ++tokens) {
      feed(cache, random, 1);
      const MemoryEstimate estimate = plan.memory(tokens, options);
      CHECK(cache.bytes() == estimate.total());
    }
    const auto most = plan.max_context(cache.bytes(), options);
    CHECK((!most || *most >= 70 || plan.memory(*most + 1, options).total() > 0));

    std::stringstream file;
    save(cache, file, "tag");
    Cache loaded{plan, options};
    load(loaded, file, "tag");
    for (std::size_t l = 0; l < shape.layers; ++l) {
      if (shape.layer(l).kv_heads == 0) continue;
      test::Random again{seed + 100};
      LayerCall one{again, shape.layer(l), 2};
      LayerCall other = one;
      one.step(cache, l);
      other.step(loaded, l);
      CHECK(test::same_bits(one.out.numbers(), other.out.numbers()));
    }

    ModelShape another = shape;
    another.change(0).softcap += 1.0F;
    Cache wrong{test::plan_of<float>(another, test::random_heads(random, another, false)), options};
    std::stringstream copy{file.str()};
    CHECK(contains(thrown<FormatError>([&] { load(wrong, copy, "tag"); }),
                   "layers that differ in another way"));
  }
}

TEST_CASE("the soft cap of a layer applies where the call sets none") {
  test::Random random{9};
  ModelShape shape{.layers = 2, .q_heads = 2, .kv_heads = 1, .head_dim = 16};
  shape.change(1).softcap = 0.5F;
  Cache cache{Plan{shape}};
  LayerCall plain{random, shape.layer(0), 20};
  LayerCall capped = plain;
  capped.step(cache, 1);
  plain.step(cache, 0);
  CHECK(!test::same_bits(plain.out.numbers(), capped.out.numbers()));
  Cache told{Plan{{.layers = 2, .q_heads = 2, .kv_heads = 1, .head_dim = 16}}};
  LayerCall same = plain;
  told.step(1, same.q.view(), same.k.view(), same.v.view(), same.out.view(), {.softcap = 0.5F});
  CHECK(test::same_bits(same.out.numbers(), capped.out.numbers()));
}
