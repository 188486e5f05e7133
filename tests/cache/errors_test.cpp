// SPDX-License-Identifier: Apache-2.0
//
// Invalid calls and settings: the error has a named type and carries the value and what would fit, and the
// cache is unchanged.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/cache/saved_cache.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/quantized_residual_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>

#include "cache/dump.hpp"
#include "support/memory.hpp"

using namespace kvpolicy;
using test::contains;
using test::thrown;

namespace {

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr float inf = std::numeric_limits<float>::infinity();

using Quantized = QuantizedResidualCache<float, Granularity::per_channel>;
using Window = SinkRecentCache<DenseStorage<float>>;
using Budget = HeadBudgetCache<DenseStorage<float>>;
using Full = FullCache<DenseStorage<float>>;
using Plan = HeadPlan<float>;
using Cache = KvCache<float>;

constexpr ModelShape shape{2, 6, 3, 64};

struct Fixture {
  test::CountingResource memory;
  Cache cache;
  Cache control;

  static Plan make_plan() {
    Plan plan{shape};
    plan.set(0, 1, Quantized::Config{.storage = {.bits = 4, .key_group = 8, .residual = 5}});
    plan.set(1, 2, Window::Config{.sinks = 2, .recent = 9});
    return plan;
  }
  CacheOptions options() {
    CacheOptions options;
    options.max_rollback = 4;
    options.max_append = 5;
    options.max_tokens = 60;
    options.page_rows = 16;
    options.memory = &memory;
    return options;
  }
  Fixture() : cache{make_plan(), options()}, control{make_plan(), options()} {
    test::Random random{1}, same{1};
    test::feed(cache, random, {21, 3});
    test::feed(control, same, {21, 3});
  }

  // Checks that the call throws an E whose text has all these parts, and changes nothing.
  template <class E, class Call>
  void refuses(Call call, const std::vector<std::string>& parts) {
    const auto before = test::dump(cache);
    const std::size_t live = memory.live_bytes();
    const std::string text = thrown<E>(call);
    CAPTURE(text);
    CHECK(!text.empty());
    for (const std::string& part : parts) {
      CAPTURE(part);
      CHECK(contains(text, part));
    }
    CHECK(test::dump(cache) == before);
    CHECK(memory.live_bytes() == live);
  }

  // Checks that the next step equals that of a cache that never saw the bad call.
  void goes_on() {
    for (std::size_t layer = 0; layer < shape.layers; ++layer) {
      test::Random random{2}, same{2};
      test::Chunk<> chunk{random, shape, 5}, control_chunk{same, shape, 5};
      chunk.step(cache, layer);
      control_chunk.step(control, layer);
      CHECK(test::same_bits(chunk.out.numbers(), control_chunk.out.numbers()));
      CHECK(test::same_bits(chunk.log_sum_exp, control_chunk.log_sum_exp));
    }
    CHECK(test::dump(cache) == test::dump(control));
  }
};

// A step with views that a test may make invalid.
struct Step {
  test::Random random{5};
  test::Chunk<> chunk{random, shape, 3};
  TensorView<const float> q = std::as_const(chunk.q).view();
  TensorView<const float> k = std::as_const(chunk.k).view();
  TensorView<const float> v = std::as_const(chunk.v).view();
  TensorView<float> out = chunk.out.view();
  AttendOptions options = {};
  std::size_t layer = 0;
};

}  // namespace

TEST_CASE_FIXTURE(Fixture, "step refuses shapes, strides and null") {
  const auto refused = [&](auto spoil, const std::vector<std::string>& parts) {
    Step s;
    spoil(s);
    refuses<ShapeError>([&] { cache.step(s.layer, s.q, s.k, s.v, s.out, s.options); }, parts);
  };
  refused([](Step& s) { s.layer = 2; }, {"layer 2", "has 2"});
  refused([](Step& s) { s.q.heads = 5; }, {"q is [3, 5, 64]", "[3, 6, 64]"});
  refused([](Step& s) { s.q.head_dim = 80; }, {"q is [3, 6, 80]", "[3, 6, 64]"});
  refused([](Step& s) { s.k.tokens = 2; }, {"k is [2, 3, 64]", "[3, 3, 64]"});
  refused([](Step& s) { s.k.heads = 6; }, {"k is [3, 6, 64]", "[3, 3, 64]"});
  refused([](Step& s) { s.v.tokens = 4; }, {"v is [4, 3, 64]", "[3, 3, 64]"});
  refused([](Step& s) { s.out.tokens = 0; }, {"out is [0, 6, 64]", "[3, 6, 64]"});
  refused([](Step& s) { s.q.data = nullptr; }, {"q is null"});
  refused([](Step& s) { s.k.data = nullptr; }, {"k is null"});
  refused([](Step& s) { s.v.data = nullptr; }, {"v is null"});
  refused([](Step& s) { s.out.data = nullptr; }, {"out is null"});
  refused([](Step& s) { s.k.token_stride = 63; }, {"k has", "63", "at least head_dim = 64"});
  refused([](Step& s) { s.v.head_stride = 0; }, {"v has", "0", "64"});
  refused([](Step& s) { s.out.token_stride = 64; }, {"out has", "overlap", "384"});
  goes_on();
}

TEST_CASE_FIXTURE(Fixture, "strides and counts whose product overflows an address are refused") {
  constexpr std::size_t huge = std::numeric_limits<std::size_t>::max();
  const auto refused = [&](auto spoil, const std::vector<std::string>& parts) {
    Step s;
    spoil(s);
    refuses<ShapeError>([&] { cache.step(s.layer, s.q, s.k, s.v, s.out, s.options); }, parts);
  };
  for (const std::size_t stride : {huge, huge / 2 + 1, huge / 4, huge / 8 + 64}) {
    CAPTURE(stride);
    refused([&](Step& s) { s.q.token_stride = stride; },
            {"q has 3 tokens", message(stride), "beyond all memory"});
    refused([&](Step& s) { s.k.head_stride = stride; },
            {"k has 3 tokens", message("head stride of ", stride)});
    refused([&](Step& s) { s.v.token_stride = stride; }, {"v has", "beyond all memory"});
    refused([&](Step& s) { s.out.head_stride = stride; }, {"out has", "beyond all memory"});
  }
  // Each stride by itself would fit, but the last row of the last head does not.
  refused([](Step& s) { s.k.token_stride = s.k.head_stride = huge / 32; }, {"k has", "beyond all memory"});
  // Token counts whose size in bytes wraps around to 0.
  for (const std::size_t tokens : {huge / 2 + 1, huge / 64 + 1, huge}) {
    CAPTURE(tokens);
    refused([&](Step& s) { s.q.tokens = s.k.tokens = s.v.tokens = s.out.tokens = tokens; },
            {message("q has ", tokens, " tokens"), "beyond all memory"});
    Step s;
    s.k.tokens = s.v.tokens = tokens;
    refuses<ShapeError>([&] { cache.append(0, s.k, s.v); }, {"k has", "beyond all memory"});
  }
  // With one token and one head the strides are never used.
  Step s;
  s.q.tokens = s.k.tokens = s.v.tokens = s.out.tokens = 1;
  s.q.token_stride = s.k.token_stride = s.v.token_stride = s.out.token_stride = huge;
  CHECK_NOTHROW(cache.step(0, s.q, s.k, s.v, s.out));
}

TEST_CASE_FIXTURE(Fixture, "more queries are asked for than any memory holds: as many as are known answer") {
  CacheOptions keeping = options();
  keeping.kept_queries = 4;
  Cache own{make_plan(), keeping};
  test::Random random{1};
  test::feed(own, random, {21, 3});
  std::vector<std::vector<float>> sums, expected;
  CHECK(own.observe(1, 4, expected) == 4);
  for (const std::size_t queries : {std::size_t{5}, std::size_t{1} << 55, std::size_t{1} << 57,
                                    std::numeric_limits<std::size_t>::max()}) {
    CHECK(own.observe(1, queries, sums) == 4);
    CHECK(sums == expected);
  }
}

TEST_CASE_FIXTURE(Fixture,
                  "a cache that was moved from refuses every call for its rows, and can be assigned to") {
  const auto before = test::dump(cache);
  Cache other = std::move(cache);
  Step s;
  test::Random random{1};
  test::Chunk<> chunk{random, shape, 2};
  const std::vector<std::size_t> path{0};
  std::vector<std::vector<float>> sums;
  std::ostringstream out;
  std::istringstream in{[&] {
    std::ostringstream stream;
    save(other, stream);
    return stream.str();
  }()};
  const auto refused = [](auto call) { CHECK(contains(thrown<ConfigError>(call), "moved from")); };
  // NOLINTBEGIN(bugprone-use-after-move)
  refused([&] { chunk.step(cache, 0); });
  refused([&] { chunk.append(cache, 0); });
  refused([&] { chunk.attend(cache, 0); });
  refused([&] { static_cast<void>(cache.tokens()); });
  refused([&] { static_cast<void>(cache.tokens(0)); });
  refused([&] { static_cast<void>(cache.commit_point()); });
  refused([&] { static_cast<void>(cache.policy<Full>(0, 0)); });
  refused([&] { static_cast<void>(cache.head(0, 0)); });
  refused([&] { static_cast<void>(cache.segments(0, 0)); });
  refused([&] { static_cast<void>(cache.observe(0, 1, sums)); });
  refused([&] { static_cast<void>(cache.fork()); });
  refused([&] { static_cast<void>(cache.fork_as(make_plan())); });
  refused([&] { static_cast<void>(cache.plan().at(0, 0)); });
  refused([&] { cache.truncate(0); });
  refused([&] { cache.accept(path); });
  refused([&] { cache.clear(); });
  refused([&] { cache.commit(); });
  refused([&] { cache.compress(); });
  refused([&] { cache.compress(0); });
  refused([&] { save(cache, out); });
  refused([&] { load(cache, in); });
  CHECK(cache.bytes() == 0);
  CHECK(cache.slow_bytes() == 0);
  CHECK(cache.shared_bytes() == 0);
  // NOLINTEND(bugprone-use-after-move)
  cache = std::move(other);
  CHECK(test::dump(cache) == before);
  goes_on();
}

TEST_CASE_FIXTURE(Fixture, "step refuses options that are not numbers") {
  const auto refused = [&](auto spoil, const std::vector<std::string>& parts) {
    Step s;
    spoil(s);
    refuses<ShapeError>([&] { cache.step(0, s.q, s.k, s.v, s.out, s.options); }, parts);
  };
  refused([](Step& s) { s.options.softcap = not_a_number; }, {"softcap is nan"});
  refused([](Step& s) { s.options.softcap = -1.5F; }, {"softcap is -1.5"});
  refused([](Step& s) { s.options.softcap = inf; }, {"softcap is inf"});
  refused([](Step& s) { s.options.scale = not_a_number; }, {"scale is nan"});
  refused([](Step& s) { s.options.scale = -inf; }, {"scale is -inf"});
  std::vector<float> sinks(5, 0.0F);
  refused([&](Step& s) { s.options.attention_sink_bias = sinks; },
          {"attention_sink_bias has 5", "q_heads = 6"});
  sinks.assign(6, 0.0F);
  sinks[4] = not_a_number;
  refused([&](Step& s) { s.options.attention_sink_bias = sinks; }, {"sink logit is NaN"});
  std::vector<float> lse(17);
  refused([&](Step& s) { s.options.log_sum_exp = lse; }, {"log_sum_exp has 17", "= 18"});
  goes_on();
}

TEST_CASE_FIXTURE(Fixture,
                  "numbers that cannot be quantised are refused, in the layer that would quantise them") {
  for (const float bad : {not_a_number, inf, -inf, 1e6F, -65505.0F}) {
    for (const bool is_key : {true, false}) {
      test::Random random{5};
      test::Chunk<> chunk{random, shape, 3};
      (is_key ? chunk.k : chunk.v).at(2, 1, 17) = bad;
      refuses<ShapeError>([&] { chunk.step(cache, 0); },
                          {is_key ? "key" : "value", "position 26", "channel 17", message(bad), "65504"});
      refuses<ShapeError>([&] { chunk.append(cache, 0); }, {is_key ? "key" : "value"});
    }
  }
  // On a dense head such numbers are allowed, also if another head of this layer or another layer quantises.
  test::Random random{5};
  test::Chunk<> chunk{random, shape, 1};
  chunk.k.at(0, 0, 0) = 1e6F;
  CHECK_NOTHROW(chunk.step(cache, 0));
  chunk.k.at(0, 1, 0) = 1e6F;
  CHECK_NOTHROW(chunk.step(cache, 1));
}

TEST_CASE("finite numbers beyond the cache's element type are refused, not rounded to infinity") {
  KvCache<float16> cache{HeadPlan<float16>{ModelShape{1, 1, 1, 64}}};
  test::Random random{5};
  test::Chunk<> chunk{random, ModelShape{1, 1, 1, 64}, 2};
  chunk.v.at(1, 0, 3) = -70000.0F;
  CHECK(contains(thrown<ShapeError>([&] { chunk.step(cache, 0); }), "v holds -70000 at token 1, head 0"));
  CHECK(cache.tokens() == 0);
  chunk.v.at(1, 0, 3) = 65519.0F;  // rounds to the largest half
  CHECK_NOTHROW(chunk.step(cache, 0));
}

TEST_CASE_FIXTURE(Fixture, "capacity, append and attend") {
  test::Random random{5};
  test::Chunk<> six{random, shape, 6};
  refuses<CapacityError>([&] { six.append(cache, 0); }, {"6 rows", "max_append = 5"});
  test::Chunk<> many{random, shape, 37};
  refuses<CapacityError>([&] { many.step(cache, 0); }, {"37 more", "after 24", "max_tokens = 60"});
  refuses<ShapeError>([&] { six.attend(cache, 0); }, {"6 queries", "latest 4"});
  test::Chunk<> three{random, shape, 3};
  refuses<ShapeError>([&] { cache.append(0, std::as_const(three.k).view(), std::as_const(six.v).view()); },
                      {"v is [6, 3, 64]"});
  refuses<ShapeError>([&] { cache.attend(0, std::as_const(three.q).view(), six.out.view()); }, {"out is [6"});
  refuses<ShapeError>([&] { three.append(cache, 9); }, {"layer 9"});
  refuses<ShapeError>([&] { three.attend(cache, 9); }, {"layer 9"});
  refuses<ShapeError>([&] { static_cast<void>(cache.head(9, 0)); }, {"layer 9"});
  refuses<ShapeError>([&] { static_cast<void>(cache.head(0, 9)); }, {"no KV head 9, layer 0 has 3"});
  goes_on();
  test::Chunk<> rest{random, shape, 31};
  CHECK_NOTHROW(rest.step(cache, 0));  // now the cache is exactly full
  test::Chunk<> one{random, shape, 1};
  refuses<CapacityError>([&] { one.append(cache, 0); }, {"1 more", "after 60"});
}

TEST_CASE_FIXTURE(Fixture, "rollback that is too far, and to tokens that do not exist") {
  refuses<RollbackError>([&] { cache.truncate(19); }, {"19", "20 to 24", "max_rollback is 4"});
  refuses<RollbackError>([&] { cache.truncate(25); }, {"25", "20 to 24"});
  goes_on();
  // A rollback from between two layers, to the tokens that all layers have.
  test::Random random{5};
  test::Chunk<> chunk{random, shape, 3};
  chunk.step(cache, 0);
  CHECK(cache.tokens() == 29);
  CHECK(cache.tokens(0) == 32);
  refuses<RollbackError>([&] { cache.truncate(32); }, {"layer 1", "25 to 29"});
  cache.truncate(29);
  CHECK(cache.tokens(0) == 29);
  cache.commit();
  refuses<RollbackError>([&] { cache.truncate(28); }, {"29 to 29"});
}

TEST_CASE("a call without tokens does nothing and is no error") {
  Fixture f;
  test::Random random{5};
  test::Chunk<> none{random, shape, 0};
  const auto before = test::dump(f.cache);
  none.step(f.cache, 0);
  none.append(f.cache, 0);
  none.attend(f.cache, 0);
  CHECK(test::dump(f.cache) == before);
  f.goes_on();
}

TEST_CASE("compress needs the latest queries") {
  test::CountingResource memory;
  CacheOptions options;
  options.max_append = 8;
  options.max_rollback = 8;
  options.memory = &memory;
  Plan plan{shape, Budget::Config{.budget = 4, .scorer = {.observation_window = 3}}};
  Cache cache{plan, options};
  test::Random random{1};
  test::feed(cache, random, {20});
  for (std::size_t l = 0; l < 2; ++l) test::Chunk<>{random, shape, 2}.append(cache, l);
  const auto before = test::dump(cache);
  const std::string text = thrown<ShapeError>([&] { cache.compress(); });
  CHECK(contains(text, "latest 3"));
  CHECK(contains(text, "token 20 of 22"));
  CHECK(!thrown<ShapeError>([&] { cache.compress(1); }).empty());
  CHECK(test::dump(cache) == before);
  for (std::size_t l = 0; l < 2; ++l) test::Chunk<>{random, shape, 2}.attend(cache, l);
  CHECK_NOTHROW(cache.compress());
  CHECK(cache.policy<Budget>(0, 0).rows() == 7);

  // A head that compresses by itself waits until it has these queries.
  options.max_rollback = 0;
  Cache own{
      Plan{shape, Budget::Config{.budget = 4, .compress_every = 5, .scorer = {.observation_window = 3}}},
      options};
  test::Chunk<>{random, shape, 8}.append(own, 0);
  test::Chunk<>{random, shape, 8}.append(own, 0);
  test::Chunk<>{random, shape, 1}.step(own, 0);
  CHECK(own.policy<Budget>(0, 0).rows() == 17);
  test::Chunk<>{random, shape, 1}.step(own, 0);
  test::Chunk<>{random, shape, 1}.step(own, 0);
  CHECK(own.policy<Budget>(0, 0).rows() == 7);
}

TEST_CASE("invalid settings") {
  const auto shape_error = [](ModelShape s) { return thrown<ConfigError>([&] { Plan{s}; }); };
  CHECK(contains(shape_error({0, 4, 2, 64}), "layers is 0"));
  CHECK(contains(shape_error({1, 4, 0, 64}), "kv_heads is 0"));
  CHECK(contains(shape_error({1, 0, 2, 64}), "q_heads is 0"));
  CHECK(contains(shape_error({1, 5, 2, 64}), "q_heads is 5, must be a positive multiple of kv_heads = 2"));
  CHECK(contains(shape_error({1, 4, 2, 12}), "head_dim is 12, must be a multiple of 8 from 8 to 576"));
  CHECK(contains(shape_error({1, 4, 2, 0}), "head_dim is 0"));
  CHECK(contains(shape_error({1, 4, 2, 584}), "head_dim is 584"));
  CHECK(contains(shape_error({1, 4, 2, 64, 4}), "value_dim is 4"));
  CHECK(contains(shape_error({std::numeric_limits<std::size_t>::max(), 4, 2, 64}),
                 "layers is 18446744073709551615"));

  const auto option_error = [](auto change) {
    CacheOptions options;
    change(options);
    return thrown<ConfigError>([&] { Cache{Plan{shape}, options}; });
  };
  CHECK(option_error([](CacheOptions&) {}).empty());
  CHECK(contains(option_error([](CacheOptions& o) { o.page_rows = 48; }),
                 "page_rows is 48, must be a power of two"));
  CHECK(contains(option_error([](CacheOptions& o) { o.page_rows = 8; }), "page_rows is 8"));
  CHECK(contains(option_error([](CacheOptions& o) { o.page_rows = 8192; }), "page_rows is 8192"));
  CHECK(contains(option_error([](CacheOptions& o) { o.max_append = 0; }), "max_append is 0"));
  CHECK(contains(option_error([](CacheOptions& o) { o.max_rollback = std::size_t{1} << 40; }),
                 "max_rollback is"));
  CHECK(contains(option_error([](CacheOptions& o) { o.memory = nullptr; }), "memory is null"));

  const auto plan_error = [](const HeadSettings<float>& settings) {
    return thrown<ConfigError>([&] { Plan{shape, settings}; });
  };
  const auto residual = [&](ResidualConfig c) { return plan_error(Quantized::Config{.storage = c}); };
  CHECK(residual({}).empty());
  CHECK(contains(residual({.bits = 7}), "bits is 7, must be 2, 3, 4, 5, 6 or 8"));
  CHECK(contains(residual({.key_group = 24}), "key_group is 24"));
  CHECK(contains(residual({.value_group = 48}), "value_group is 48, must divide head_dim = 64"));
  CHECK(contains(residual({.residual = 40, .flush = Flush::kivi}), "multiple of 32, not 40"));
  CHECK(contains(residual({.residual = 0, .flush = Flush::kivi}), "not 0"));
  CHECK(contains(plan_error(Window::Config{.recent = 0}), "recent is 0"));
  CHECK(contains(plan_error(Window::Config{.rotary_in_cache = RotaryConfig{.theta = -1}}), "theta is -1"));
  CHECK(contains(plan_error(Window::Config{.sinks = std::size_t{1} << 60}), "sinks is"));
  CHECK(contains(plan_error(Budget::Config{.budget = std::size_t{1} << 60}), "budget is"));
  CHECK(contains(plan_error(Budget::Config{.compress_every = test::never}), "compress_every is"));
  CHECK(contains(
      plan_error(ChunkRetrievalCache<DenseStorage<float>>::Config{.chunk = 1, .budget = test::never}),
      "budget is 18446744073709551615, must be at most 2^40"));
  CHECK(contains(plan_error(Budget::Config{.scorer = {.observation_window = 0}}), "window is 0"));
  CHECK(contains(plan_error(Budget::Config{.scorer = {.kernel = 4}}), "kernel is 4, must be odd"));

  // Groups of rows that fit the widest page may not fit the pages of this cache.
  CacheOptions small;
  small.page_rows = 16;
  const Plan grouped{shape, Quantized::Config{.storage = {.key_group = 32}}};
  CHECK(contains(thrown<ConfigError>([&] { Cache{grouped, small}; }),
                 "key_group is 32, must divide the rows of a page = 16"));
  CHECK(!thrown<ConfigError>([&] { static_cast<void>(grouped.memory(100, small)); }).empty());
  CHECK(thrown<ConfigError>([&] { Cache{grouped, CacheOptions{}}; }).empty());

  CacheOptions rollback;
  rollback.max_rollback = 1;
  CHECK(contains(
      thrown<ConfigError>([&] { Cache{Plan{shape, Budget::Config{.compress_every = 9}}, rollback}; }),
      "max_rollback is 1, must be 0"));
  Plan left{shape};
  const Plan moved = std::move(left);
  CHECK(contains(thrown<ConfigError>([&] { static_cast<void>(left.memory(100)); }), "moved from"));
  CHECK(contains(thrown<ConfigError>([&] { static_cast<void>(left.max_context(100)); }), "moved from"));
  const Plan plan{shape};
  CHECK(contains(thrown<ConfigError>([&] { static_cast<void>(plan.at(2, 0)); }), "no KV head 0 in layer 2"));
  CHECK(contains(thrown<ConfigError>([&] { static_cast<void>(plan.at(0, 3)); }), "no KV head 3"));
}
