// SPDX-License-Identifier: Apache-2.0
//
// Calls and settings that a device cache cannot serve: a named error that carries the value and what
// would fit, and a cache that is as it was.
#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvpolicy/cuda/packed_pages.hpp>
#include <kvpolicy/policy/kvzip_scorer.hpp>

#include "cuda/support/device_cache.hpp"

using namespace kvpolicy;
using test::contains;
using test::DeviceChunk;
using test::thrown;

namespace {

using E = float16;
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr float inf = std::numeric_limits<float>::infinity();

using PerToken = ResidualStorage<E, Granularity::per_token>;
using PerChannel = ResidualStorage<E, Granularity::per_channel>;
using Full = FullCache<DenseStorage<E>>;
using Quantized = QuantizedResidualCache<E>;
using Kivi = QuantizedResidualCache<E, Granularity::per_channel>;
using Window = SinkRecentCache<DenseStorage<E>>;
using Budget = HeadBudgetCache<DenseStorage<E>>;
using Retrieval = ChunkRetrievalCache<PerToken>;
using QuantizedBudget = HeadBudgetCache<PerToken>;
using Plan = HeadPlan<E>;
using Cache = gpu::KvCache<E>;

constexpr ModelShape shape{2, 6, 3, 64};

// A scorer of one's own, which no kernel knows.
struct ByPosition {
  struct Config {
    friend bool operator==(const Config&, const Config&) = default;
    void fields(FieldVisitor&) {}
  };
  static constexpr std::string_view name = "by_position";
  static void validate(const Config&) {}
  static std::size_t kept_rows(const Config&) { return 1; }
  static float score_key(const Config&, std::span<const float> key) { return key[0]; }
};

struct Fixture {
  test::SmallDevice device;
  test::CountingDeviceMemory memory;
  Cache cache;
  Cache control;

  static Plan make_plan() {
    Plan plan{shape};
    plan.set(0, 1, Quantized::Config{.storage = {.bits = 4, .residual = 5}});
    plan.set(1, 2, Window::Config{.sinks = 2, .recent = 9});
    return plan;
  }
  gpu::CacheOptions options() {
    return {.max_rollback = 4, .max_append = 5, .max_tokens = 60, .memory = &memory};
  }
  Fixture() : cache{make_plan(), options()}, control{make_plan(), options()} {
    for (Cache* each : {&cache, &control}) test::feed_device(*each, 1, {21, 3});
  }

  // The call throws an Expected whose text has all these parts, and changes nothing.
  template <class Expected, class Call>
  void refuses(Call call, const std::vector<std::string>& parts) {
    const auto before = test::dump_device(cache);
    const std::size_t live = memory.live_bytes();
    const std::string text = thrown<Expected>(call);
    CAPTURE(text);
    CHECK(!text.empty());
    for (const std::string& part : parts) {
      CAPTURE(part);
      CHECK(contains(text, part));
    }
    CHECK(test::dump_device(cache) == before);
    CHECK(memory.live_bytes() == live);
  }
  // And the next step is the next step of a cache that never saw the bad call.
  void goes_on() {
    CHECK(test::same_bits(test::next_step(cache, 2, 5), test::next_step(control, 2, 5)));
    CHECK(test::dump_device(cache) == test::dump_device(control));
  }
};

// A step with views that a test may spoil.
struct Step {
  test::Random random{5};
  DeviceChunk<> chunk{random, shape, 3};
  TensorView<const E> q = chunk.rows<const E>(chunk.q.data(), shape.q_heads, 0, 3);
  TensorView<const E> k = chunk.rows<const E>(chunk.k.data(), shape.kv_heads, 0, 3);
  TensorView<const E> v = chunk.rows<const E>(chunk.v.data(), shape.kv_heads, 0, 3);
  TensorView<E> out = chunk.rows<E>(chunk.out.data(), shape.q_heads, 0, 3);
  AttendOptions options = {};
  std::size_t layer = 0;
};

template <class Config>
std::string plan_error(const ModelShape& model, const Config& config, const gpu::CacheOptions& options = {}) {
  Plan plan{model};
  plan.set(0, 0, config);
  const std::string said = thrown<ConfigError>([&] { const Cache cache{plan, options}; });
  CHECK(thrown<ConfigError>([&] { static_cast<void>(gpu::memory_of(plan, 9, options)); }).empty() ==
        (said.empty() || contains(said, "max_rollback is")));
  return said;
}

}  // namespace

TEST_CASE_FIXTURE(Fixture, "a device step refuses shapes, strides, null and what is not aligned") {
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
  refused([](Step& s) { s.k.token_stride = 56; }, {"k has", "56", "at least head_dim = 64"});
  refused([](Step& s) { s.v.head_stride = 0; }, {"v has", "0", "64"});
  refused([](Step& s) { s.out.token_stride = 64; }, {"out has", "overlap", "384"});
  // The kernels read 16 bytes at a time.
  refused([](Step& s) { s.q.data += 1; }, {"q has", "aligned to 16 bytes (8 elements)"});
  refused([](Step& s) { s.k.data += 4; }, {"k has", "aligned to 16 bytes"});
  refused([](Step& s) { s.v.token_stride = 196; }, {"v has a token stride of 196", "aligned to 16 bytes"});
  refused([](Step& s) { s.q.head_stride = 65; }, {"q has", "head stride of 65"});
  refused([](Step& s) { s.out.data += 2; }, {"out has", "aligned to 16 bytes"});
  refused([](Step& s) { s.out.tokens = s.v.tokens = s.k.tokens = s.q.tokens = (std::size_t{1} << 24) + 1; },
          {"q has 16777217 tokens", "2^24"});
  goes_on();
}

TEST_CASE_FIXTURE(Fixture, "a cleared device cache reads a new text as a new one does") {
  const std::size_t before = memory.live_bytes();
  {
    Cache fresh{make_plan(), options()};
    const std::size_t own = memory.live_bytes() - before;
    test::feed_device(fresh, 7, {9, 1, 14});
    const auto expected = test::dump_device(fresh);
    for (int text = 0; text < 2; ++text) {
      cache.clear();
      CHECK(cache.tokens() == 0);
      CHECK(cache.reserved() == 0);
      if (text == 0) CHECK(memory.live_bytes() <= before + own + own);
      test::feed_device(cache, 7, {9, 1, 14});
      CHECK(test::dump_device(cache) == expected);
    }
    CHECK(test::same_bits(test::next_step(cache, 2, 5), test::next_step(fresh, 2, 5)));
  }
  cache.clear();
  test::feed_device(cache, 1, {21, 3});
  goes_on();
}

TEST_CASE_FIXTURE(Fixture, "a device cache that was moved from refuses every call for its rows") {
  Cache other = std::move(cache);
  const auto refused = [](auto call) { CHECK(contains(thrown<ConfigError>(call), "moved from")); };
  const std::vector<std::size_t> path{0};
  Step s;
  refused([&] { cache.step(0, s.q, s.k, s.v, s.out); });
  refused([&] { cache.append(0, s.k, s.v); });
  refused([&] { cache.attend(0, s.q, s.out); });
  refused([&] { static_cast<void>(cache.tokens()); });
  refused([&] { static_cast<void>(cache.tokens(0)); });
  refused([&] { static_cast<void>(cache.commit_point()); });
  refused([&] { static_cast<void>(cache.reserved()); });
  refused([&] { static_cast<void>(cache.fork()); });
  refused([&] { static_cast<void>(cache.rows(0, 0)); });
  refused([&] { static_cast<void>(cache.device_heads(0)); });
  refused([&] { static_cast<void>(cache.device_state(0)); });
  refused([&] { static_cast<void>(cache.clamped_numbers()); });
  refused([&] { static_cast<void>(cache.overhead_bytes()); });
  refused([&] { cache.reserve(10); });
  refused([&] { cache.replayed(); });
  refused([&] { cache.truncate(0); });
  refused([&] { cache.accept(path); });
  refused([&] { cache.commit(); });
  refused([&] { cache.compress(); });
  refused([&] { cache.compress(std::size_t{0}); });
  refused([&] { cache.clear(); });
  CHECK(cache.bytes() == 0);
  CHECK(cache.slow_bytes() == 0);
  CHECK(cache.shared_bytes() == 0);
  cache = std::move(other);
  goes_on();
}

TEST_CASE_FIXTURE(Fixture, "a device step refuses strides whose product is no address") {
  constexpr std::size_t huge = std::numeric_limits<std::size_t>::max() / 16 * 16;
  const auto refused = [&](auto spoil, const std::vector<std::string>& parts) {
    Step s;
    spoil(s);
    refuses<ShapeError>([&] { cache.step(s.layer, s.q, s.k, s.v, s.out, s.options); }, parts);
  };
  refused([](Step& s) { s.q.token_stride = huge; }, {"q has 3 tokens", "beyond all memory"});
  refused([](Step& s) { s.k.head_stride = huge / 4; }, {"k has", "beyond all memory"});
  refused([](Step& s) { s.out.token_stride = huge / 2; }, {"out has", "beyond all memory"});
  CHECK(contains(
      thrown<CapacityError>([&] { static_cast<void>(gpu::memory_of(make_plan(), std::size_t{1} << 30)); }),
      "1073741824 tokens, must be fewer than 2^30"));
}

TEST_CASE_FIXTURE(Fixture, "a device refuses bounds that it cannot keep") {
  const auto refused = [&]<class Error>(auto spoil, const std::vector<std::string>& parts) {
    Step s;
    s.options.read = Read::bounded;
    spoil(s.options.bound);
    refuses<Error>([&] { cache.step(0, s.q, s.k, s.v, s.out, s.options); }, parts);
    refuses<Error>([&] { cache.attend(0, s.q, s.out, s.options); }, parts);
  };
  using kvpolicy::ReadBound;
  refused.operator()<ConfigError>([](ReadBound& b) { b.certainty = kvpolicy::Certainty::four_sigma; },
                                  {"bound.certainty is 'four_sigma'", "a device has 'sure' and 'none'"});
  refused.operator()<ShapeError>([](ReadBound& b) { b.epsilon = not_a_number; }, {"bound.epsilon is nan"});
  refused.operator()<ShapeError>([](ReadBound& b) { b.epsilon = 1.5F; }, {"bound.epsilon is 1.5"});
  float one = 0;
  refused.operator()<ShapeError>([&](ReadBound& b) { b.unread = {&one, 1}; }, {"bound.unread has 1 places"});
  std::size_t rows = 0;
  refused.operator()<ShapeError>([&](ReadBound& b) { b.rows_read = {&rows, 1}; },
                                 {"bound.rows_read has 1 places"});
}

TEST_CASE_FIXTURE(Fixture, "a device step refuses options that are not numbers") {
  const test::DeviceArray<float> numbers{40};
  const auto refused = [&](auto spoil, const std::vector<std::string>& parts) {
    Step s;
    spoil(s);
    refuses<ShapeError>([&] { cache.step(0, s.q, s.k, s.v, s.out, s.options); }, parts);
    refuses<ShapeError>([&] { cache.attend(0, s.q, s.out, s.options); }, parts);
  };
  refused([](Step& s) { s.options.softcap = not_a_number; }, {"softcap is nan"});
  refused([](Step& s) { s.options.softcap = -1.5F; }, {"softcap is -1.5"});
  refused([](Step& s) { s.options.softcap = inf; }, {"softcap is inf"});
  refused([](Step& s) { s.options.scale = not_a_number; }, {"scale is nan"});
  refused([](Step& s) { s.options.scale = -inf; }, {"scale is -inf"});
  refused([&](Step& s) { s.options.attention_sink_bias = {numbers.data(), 5}; },
          {"attention_sink_bias has 5", "q_heads = 6"});
  refused([&](Step& s) { s.options.log_sum_exp = {numbers.data(), 17}; }, {"log_sum_exp has 17", "= 18"});
  goes_on();
}

TEST_CASE_FIXTURE(Fixture, "capacity of a device cache, append and attend") {
  test::Random random{5};
  const DeviceChunk<> six{random, shape, 6};
  refuses<CapacityError>([&] { six.append(cache, 0); }, {"6 rows", "max_append = 5"});
  const DeviceChunk<> many{random, shape, 37};
  refuses<CapacityError>([&] { many.step(cache, 0); }, {"37 more", "after 24", "max_tokens = 60"});
  refuses<CapacityError>([&] { cache.reserve(61); }, {"61 tokens", "max_tokens = 60"});
  refuses<ShapeError>([&] { six.attend(cache, 0); }, {"6 queries", "latest 4"});
  const DeviceChunk<> three{random, shape, 3};
  refuses<ShapeError>(
      [&] {
        cache.append(0, three.rows<const E>(three.k.data(), 3, 0, 3),
                     six.rows<const E>(six.v.data(), 3, 0, 6));
      },
      {"v is [6, 3, 64]"});
  refuses<ShapeError>(
      [&] {
        cache.attend(0, three.rows<const E>(three.q.data(), 6, 0, 3), six.rows<E>(six.out.data(), 6, 0, 6));
      },
      {"out is [6"});
  refuses<ShapeError>([&] { three.append(cache, 9); }, {"layer 9"});
  refuses<ShapeError>([&] { three.attend(cache, 9); }, {"layer 9"});
  refuses<ShapeError>([&] { static_cast<void>(cache.rows(7, 0)); }, {"layer 7"});
  refuses<ShapeError>([&] { static_cast<void>(cache.rows(0, 3)); }, {"KV head 3"});
  refuses<ShapeError>([&] { cache.compress(2); }, {"layer 2"});
  goes_on();
  const DeviceChunk<> rest{random, shape, 31};
  CHECK_NOTHROW(rest.step(cache, 0));  // exactly full
  const DeviceChunk<> one{random, shape, 1};
  refuses<CapacityError>([&] { one.append(cache, 0); }, {"1 more", "after 60"});
  Cache endless{Plan{shape}};
  CHECK(contains(thrown<CapacityError>([&] { endless.reserve(std::size_t{1} << 30); }), "1073741824 tokens"));
}

TEST_CASE_FIXTURE(Fixture, "rollback of a device cache: too far, and to what was never seen") {
  refuses<RollbackError>([&] { cache.truncate(19); }, {"19", "20 to 24", "max_rollback is 4"});
  refuses<RollbackError>([&] { cache.truncate(25); }, {"25", "20 to 24"});
  goes_on();
  // Half-way through the layers: back to where all of them were.
  test::Random random{5};
  const DeviceChunk<> chunk{random, shape, 3};
  chunk.step(cache, 0);
  CHECK(cache.tokens() == 29);
  CHECK(cache.tokens(0) == 32);
  refuses<RollbackError>([&] { cache.truncate(32); }, {"layer 1", "25 to 29"});
  cache.truncate(29);
  CHECK(cache.tokens(0) == 29);
  cache.commit();
  refuses<RollbackError>([&] { cache.truncate(28); }, {"29 to 29"});
}

TEST_CASE_FIXTURE(Fixture, "on a device, too, no tokens at all are nothing") {
  const DeviceChunk<> none{shape, 0};
  const auto before = test::dump_device(cache);
  none.step(cache, 0);
  none.append(cache, 0);
  none.attend(cache, 0);
  CHECK(test::dump_device(cache) == before);
  goes_on();
}

TEST_CASE("compressing on a device needs the latest queries") {
  const test::SmallDevice device;
  Plan plan{shape, Budget::Config{.budget = 4, .scorer = {.observation_window = 3}}};
  Cache cache{plan, {.max_rollback = 8, .max_append = 8}};
  test::feed_device(cache, 1, {20});
  test::Random random{1};
  std::vector<DeviceChunk<>> chunks;
  for (std::size_t l = 0; l < 2; ++l) chunks.emplace_back(random, shape, 2).append(cache, l);
  const auto before = test::dump_device(cache);
  const std::string text = thrown<ShapeError>([&] { cache.compress(); });
  CHECK(contains(text, "latest 3"));
  CHECK(contains(text, "token 20 of 22"));
  CHECK(!thrown<ShapeError>([&] { cache.compress(1); }).empty());
  CHECK(test::dump_device(cache) == before);
  for (std::size_t l = 0; l < 2; ++l) chunks[l].attend(cache, l);
  CHECK_NOTHROW(cache.compress());
  CHECK(cache.rows(0, 0).positions.size() == 7);
}

TEST_CASE("settings that no device cache can serve") {
  const test::SmallDevice device;
  const auto option_error = [](const gpu::CacheOptions& options) {
    return thrown<ConfigError>([&] { const Cache cache{Plan{shape}, options}; });
  };
  CHECK(option_error({}).empty());
  CHECK(contains(option_error({.page_rows = 96}), "page_rows is 96, must be a power of two from 64"));
  CHECK(contains(option_error({.page_rows = 32}), "page_rows is 32"));
  CHECK(contains(option_error({.page_rows = 8192}), "page_rows is 8192"));
  CHECK(contains(option_error({.max_append = 0}), "max_append is 0"));
  CHECK(contains(option_error({.max_rollback = std::size_t{1} << 40}), "max_rollback is 1099511627776"));
  CHECK(contains(option_error({.memory = nullptr}), "memory is null"));

  // Shapes: what is compiled, and how many query heads a group may have.
  const auto shape_error = [](const ModelShape& model) {
    return thrown<ConfigError>([&] { const Cache cache{Plan{model}}; });
  };
  CHECK(contains(shape_error({1, 17, 1, 64}), "17 query heads share a KV head"));
  CHECK(shape_error({1, 16, 1, 64}).empty());
  CHECK(contains(shape_error({1, 2, 1, 96}), "head_dim is 96, kernels were compiled for 64"));
  CHECK(contains(shape_error({1, 4097, 4097, 64}), "kv_heads is 4097"));

  // Quantised rows.
  const ModelShape one{1, 2, 1, 64};
  const Plan other_dim{{1, 2, 1, 80}, Quantized::Config{}};
  CHECK(contains(thrown<ConfigError>([&] { static_cast<void>(gpu::memory_of(other_dim, 9)); }),
                 "head_dim 64 and 128, not 80"));
  CHECK(!thrown<ConfigError>([&] { const Cache cache{other_dim}; }).empty());
  CHECK(plan_error(one, Quantized::Config{}).empty());
  CHECK(plan_error(one, Quantized::Config{.storage = {.residual = 32, .flush = Flush::kivi}}).empty());
  CHECK(plan_error(one, QuantizedBudget::Config{.storage = {.residual = 32, .flush = Flush::kivi}}).empty());
  CHECK(contains(plan_error(one, Retrieval::Config{.chunk = 32,
                                                   .budget = 32,
                                                   .storage = {.residual = 48, .flush = Flush::kivi}}),
                 "chunks of 32 rows needs a residual that is a multiple of them, not 48"));
  CHECK(contains(plan_error(one, Quantized::Config{.storage = {.key_group = 4}}), "key_group is 4"));
  CHECK(contains(plan_error(one, Quantized::Config{.storage = {.value_group = 2}}), "value_group is 2"));
  CHECK(contains(plan_error(one, Kivi::Config{.storage = {.key_group = 8}}),
                 "key_group is 8, must be 16, 32 or 64 rows"));
  CHECK(plan_error(one, Kivi::Config{.storage = {.key_group = 16}}).empty());
  CHECK(contains(plan_error(one, Retrieval::Config{.chunk = 8, .budget = 16}), "chunk is 8"));
  CHECK(plan_error(one, Retrieval::Config{.chunk = 16, .budget = 16}).empty());

  // Compression.
  CHECK(contains(plan_error(one, Budget::Config{.scorer = {.observation_window = 65}}),
                 "window is 65 queries, must be 1 to 64"));
  CHECK(plan_error(one, Budget::Config{.scorer = {.observation_window = 64}}).empty());
  CHECK(contains(plan_error(one, Budget::Config{.scorer = {.kernel = 67}}), "pooling kernel is 67"));
  CHECK(plan_error(one, Budget::Config{.adaptive_in_layer = true}).empty());
  CHECK(plan_error(one, Budget::Config{.adaptive_in_model = true}).empty());
  CHECK(plan_error(one, Budget::Config{.weigh_values = true}).empty());
  CHECK(plan_error(one, Budget::Config{.weigh_values = true, .unweighed_share = 0.5}).empty());
  CHECK(plan_error(one, Budget::Config{.scorer = {.prior_share = 0.5}}).empty());
  CHECK(plan_error(one, Budget::Config{.scorer = {.votes = kvpolicy::Votes::largest}}).empty());
  CHECK(plan_error(one, HeadBudgetCache<DenseStorage<E>, KvZipScorer>::Config{}).empty());
  CHECK(plan_error(one, Budget::Config{.compress_every = 1, .after_first_compress = true}).empty());
  using H2o = HeadBudgetCache<DenseStorage<E>, H2oScorer>;
  CHECK(plan_error(one, H2o::Config{}).empty());
  const std::string sums = plan_error(one, H2o::Config{}, {.max_rollback = 1});
  CHECK(contains(sums, "KV head 0 of layer 0 adds up attention"));
  CHECK(contains(sums, "max_rollback is 1, must be 0"));
  CHECK(contains(plan_error(one, H2o::Config{.scorer = {.recent = (std::size_t{1} << 30) + 1}}),
                 "1073741825 rows"));
  CHECK(contains(plan_error(one, HeadBudgetCache<DenseStorage<E>, ByPosition>::Config{}),
                 "ranked by by_position have no kernel"));
  const std::string itself = plan_error(one, Budget::Config{.compress_every = 9}, {.max_rollback = 1});
  CHECK(contains(itself, "compresses by itself"));
  CHECK(contains(itself, "max_rollback is 1, must be 0"));
  CHECK(contains(plan_error(one, Window::Config{.recent = (std::size_t{1} << 30) + 1}), "1073741825 rows"));

  // An engine of another shape.
  const auto engine = std::make_shared<gpu::Engine<E>>(ModelShape{1, 4, 2, 64});
  CHECK(contains(thrown<ConfigError>([&] { const Cache cache{Plan{shape}, {}, nullptr, engine}; }),
                 "another model shape"));
  Cache cache{Plan{shape}};
  CHECK(contains(thrown<ConfigError>([&] { static_cast<void>(cache.fork(nullptr, engine)); }),
                 "another model shape"));
}

TEST_CASE("a device has kernels for keys and values of all widths, whose codes are even") {
  const test::SmallDevice device;
  const ModelShape one{1, 2, 1, 64};
  for (const std::size_t bits : std::initializer_list<std::size_t>{2, 3, 4, 5, 6, 8}) {
    CAPTURE(bits);
    CHECK(plan_error(one, Quantized::Config{.storage = {.bits = bits}}).empty());
    CHECK(plan_error(one, Kivi::Config{.sinks = 4, .storage = {.bits = bits}}).empty());
    CHECK(plan_error(one, Kivi::Config{.storage = {.value_bits = bits}}).empty());
    CHECK(plan_error(one, Retrieval::Config{.chunk = 16, .budget = 16, .storage = {.bits = bits}}).empty());
    CHECK(plan_error(one, QuantizedBudget::Config{.storage = {.bits = bits}}).empty());
  }
  CHECK(plan_error(one, Quantized::Config{.storage = {.bits = 8, .halves = true}}).empty());
  CHECK(contains(plan_error(one, Quantized::Config{.storage = {.key_codebook = Codebook::normal}}),
                 "codes stand for 'normal' numbers, which are read on the host"));
  CHECK(contains(plan_error(one, Quantized::Config{.storage = {.value_codebook = Codebook::mxfp4}}),
                 "codes stand for 'mxfp4' numbers, which are read on the host"));
  CHECK(contains(plan_error(one, Quantized::Config{.storage = {.bits = 8,
                                                               .key_codebook = Codebook::fp8,
                                                               .value_codebook = Codebook::fp8}}),
                 "codes stand for 'fp8' numbers, which are read on the host"));

  // Whatever lays out pages refuses as well, where a check of the plan has been forgotten.
  HeadRule rule;
  Quantized::Config{.storage = {.key_codebook = Codebook::normal}}.storage.describe(rule, 64);
  const gpu::StoreContext context{.head_dim = 64};
  const auto refused = [](auto make) {
    CHECK(contains(thrown<ConfigError>(make), "codes stand for 'normal' numbers"));
  };
  refused([&] { static_cast<void>(gpu::HeadGeometry{rule, context, false}.bytes(500)); });
  refused([&] { const gpu::PackedPages pages{rule, 64, 64}; });
  refused([&] {
    gpu::DeviceWrites writes{nullptr};
    const gpu::HeadStore store{rule, context, nullptr, writes};
  });
}

TEST_CASE("survivors that are rotated leave the residual row by row on a device") {
  const test::SmallDevice device;
  const ModelShape one{1, 2, 1, 64};
  using Survivors = HeadBudgetCache<PerToken>;
  Survivors::Config config{.budget = 9, .storage = {.key_hadamard = true}};
  CHECK(plan_error(one, config).empty());
  config.storage.flush = Flush::kivi;
  CHECK(contains(plan_error(one, config),
                 "survivors of a compression are rotated and leave the residual by KIVI's"));
  config.storage.key_hadamard = false;
  CHECK(plan_error(one, config).empty());
  config.storage.value_hadamard = true;
  CHECK(contains(plan_error(one, config), "use Flush::steady"));
}

#if !defined(__CUDACC__)
TEST_CASE("devices that are missing or too old") {
  const test::SmallDevice device;
  gpu::simt::Device& emulated = gpu::simt::device();
  const auto said = [] { return thrown<DeviceError>([&] { const Cache cache{Plan{shape}}; }); };
  emulated.devices = 0;
  CHECK(contains(said(), "no CUDA device"));
  CHECK(contains(said(), "kvpolicy::cpu"));
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  emulated.devices = 1;
  emulated.major = 7;
  emulated.minor = 5;
  CHECK(contains(said(), "compute capability 7.5"));
  CHECK(contains(said(), "8.0 or newer"));
  emulated.major = 9;
  emulated.minor = 0;
  CHECK(said().empty());
}

TEST_CASE("errors of the runtime have their names; the next call does not find them") {
  Fixture f;
  Step s;
  const auto step = [&] { f.cache.step(0, s.q, s.k, s.v, s.out, s.options); };
  // The calls of a step within the reserve: whether the stream captures, attention, the rows.
  for (const std::uint64_t n : std::initializer_list<std::uint64_t>{1, 2, 3}) {
    CAPTURE(n);
    gpu::simt::fail_after(n, cudaErrorLaunchFailure);
    const std::string text = thrown<DeviceError>(step);
    CHECK(contains(text, "cudaErrorLaunchFailure"));
    CHECK(contains(text, n == 1 ? "cudaStreamIsCapturing" : n == 2 ? "decode_kernel" : "append_kernel"));
    CHECK(cudaPeekAtLastError() == cudaSuccess);
    CHECK(f.cache.tokens(0) == 24);
  }
  gpu::simt::fail_after(0);
  f.goes_on();  // the failed launches did nothing: rows that were not kept are written again
}
#endif
