// SPDX-License-Identifier: Apache-2.0
//
// Reads with a bound on a device (Read::bounded). Attention in double over all rows says how much attention the rows
// that were not read hold, which must be no more than the call says; and over the rows that were read, what the call
// must give.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include <kvpolicy/cuda/bounded_call.hpp>

#include "cuda/support/device_cache.hpp"
#include "cuda/support/host_pair.hpp"
#include "support/oracle.hpp"
#include "support/plans.hpp"
#include "support/repeats.hpp"

using kvpolicy::AttendOptions;
using kvpolicy::Certainty;
using kvpolicy::float16;
using kvpolicy::ModelShape;
using kvpolicy::Read;
using kvpolicy::gpu::CachedRows;
using kvpolicy::gpu::CacheOptions;
using test::DeviceArray;
using test::DeviceCache;
using test::DeviceChunk;
using test::HeadSpec;
using test::Kind;

namespace {

constexpr std::size_t head_dim = 64;
constexpr std::size_t tile = 16;

/// Heads whose rows are bounded, in every grouping, and heads that read all rows.
std::vector<HeadSpec> bounded_heads() {
  return {{.bits = 8, .key_group = 32, .residual = 20, .per_channel = true, .halves = true},
          {.sinks = 5, .bits = 8, .key_group = 16, .residual = 9, .per_channel = true, .halves = true},
          {.sinks = 4,
           .bits = 8,
           .value_bits = 4,
           .key_group = 64,
           .value_group = 32,
           .per_channel = true,
           .value_hadamard = true,
           .halves = true},
          {.bits = 8, .key_group = 64, .residual = 11, .key_hadamard = true, .halves = true},
          {.sinks = 1, .bits = 8, .value_bits = 3, .key_group = 16, .residual = 3, .halves = true},
          {.bits = 8, .key_group = 8, .value_group = 8, .halves = true},
          {.kind = Kind::retrieval, .budget = 48, .chunk = 16, .bits = 8, .residual = 10, .halves = true}};
}
std::vector<HeadSpec> other_heads() {
  return {{.bits = 8, .residual = 13},
          {.bits = 4, .value_bits = 8, .residual = 13, .halves = true},
          {.kind = Kind::window, .sinks = 3, .recent = 90, .bits = 8, .residual = 12, .halves = true},
          {.kind = Kind::window, .sinks = 2, .recent = 40},
          {}};
}

/// What a call with a bound came to.
struct Outcome {
  std::vector<float16> out;  ///< [tokens, q_heads, head_dim]
  std::vector<float> log_sum_exp, unread;
  std::vector<std::size_t> rows_read;
};

Outcome attend(DeviceCache& cache, const DeviceChunk<>& chunk, AttendOptions options, bool with_lse = true) {
  const ModelShape& shape = cache.plan().shape();
  const std::size_t queries = chunk.tokens * shape.q_heads;
  const DeviceArray<float> unread{queries};
  const DeviceArray<std::size_t> rows_read{shape.kv_heads};
  unread.upload(std::vector<float>(queries, -1.0F));
  rows_read.upload(std::vector<std::size_t>(shape.kv_heads, 1000));
  options.read = Read::bounded;
  options.bound.unread = {unread.data(), queries};
  options.bound.rows_read = {rows_read.data(), shape.kv_heads};
  if (with_lse) options.log_sum_exp = {chunk.log_sum_exp.data(), chunk.log_sum_exp.size()};
  cache.attend(0, chunk.rows<const float16>(chunk.q.data(), shape.q_heads, 0, chunk.tokens),
               chunk.rows<float16>(chunk.out.data(), shape.q_heads, 0, chunk.tokens), options);
  return {chunk.out.download(), chunk.log_sum_exp.download(), unread.download(), rows_read.download()};
}

std::vector<oracle::Row> all_rows(const DeviceCache& cache, std::size_t head, std::size_t queries) {
  const CachedRows rows = cache.rows(0, head, Read::all, queries);
  std::vector<oracle::Row> all(rows.positions.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i].position = rows.positions[i];
    const auto first = static_cast<std::ptrdiff_t>(i * head_dim),
               last = first + static_cast<std::ptrdiff_t>(head_dim);
    all[i].key.assign(rows.keys.begin() + first, rows.keys.begin() + last);
    all[i].value.assign(rows.values.begin() + first, rows.values.begin() + last);
  }
  return all;
}

std::vector<double> query_of(const std::vector<float16>& q, std::size_t q_heads, std::size_t token,
                             std::size_t q_head) {
  std::vector<double> query;
  for (std::size_t c = 0; c < head_dim; ++c) {
    query.push_back(static_cast<float>(q[(token * q_heads + q_head) * head_dim + c]));
  }
  return query;
}

/// What is true of any call: the output is off by no more than the bound allows, what was not read was counted.
/// Returns the largest `unread`.
double check_outcome(const DeviceCache& cache, const std::vector<HeadSpec>& heads, const DeviceChunk<>& chunk,
                     const Outcome& got, const AttendOptions& options,
                     std::span<const float> sink_logits = {}) {
  const ModelShape& shape = cache.plan().shape();
  const std::vector<float16> q = chunk.q.download();
  double largest = 0;
  for (std::size_t head = 0; head < shape.kv_heads; ++head) {
    CAPTURE(head);
    const std::vector<oracle::Row> rows = all_rows(cache, head, chunk.tokens);
    REQUIRE(got.rows_read[head] >= 1000);
    const std::size_t rows_read = got.rows_read[head] - 1000;
    CHECK(rows_read <= rows.size());
    for (std::size_t token = 0; token < chunk.tokens; ++token) {
      const auto t = static_cast<std::int64_t>(cache.tokens() - chunk.tokens + token);
      for (std::size_t q_head = head * shape.queries_per_kv(); q_head < (head + 1) * shape.queries_per_kv();
           ++q_head) {
        CAPTURE(q_head);
        std::vector<const oracle::Row*> seen;
        for (const oracle::Row& row : rows) {
          const bool in_window = heads[head].kind != Kind::window ||
                                 row.position < static_cast<std::int64_t>(heads[head].sinks) ||
                                 row.position > t - static_cast<std::int64_t>(heads[head].recent);
          if (row.position <= t && in_window) seen.push_back(&row);
        }
        oracle::Options how{
            .scale = options.scale ? static_cast<double>(*options.scale) : 1 / std::sqrt(64.0),
            .softcap = static_cast<double>(options.softcap)};
        if (!sink_logits.empty()) how.sink_logit = static_cast<double>(sink_logits[q_head]);
        const auto expected = oracle::attend(query_of(q, shape.q_heads, token, q_head), seen, how);
        const std::size_t row = token * shape.q_heads + q_head;
        const double unread = got.unread[row];
        REQUIRE(unread >= 0);
        REQUIRE(unread <= 1);
        if (rows_read == rows.size()) CHECK(unread == 0);
        largest = std::max(largest, unread);
        // Queries, and their products with scales, are rounded to half.
        const double rounding = 2e-3 + 0x1p-10 * std::abs(expected.log_sum_exp);
        for (std::size_t c = 0; c < head_dim; ++c) {
          double least = sink_logits.empty() ? seen[0]->value[c] : 0.0, most = least;
          for (const oracle::Row* one : seen) {
            least = std::min(least, one->value[c]);
            most = std::max(most, one->value[c]);
          }
          const double error = std::abs(static_cast<float>(got.out[row * head_dim + c]) - expected.out[c]);
          REQUIRE(error <= (unread + rounding) * (most - least) + 4e-3);
        }
        // The weights that were read are at least the rest of all weights.
        REQUIRE(std::exp(got.log_sum_exp[row] - expected.log_sum_exp) >= 1 - unread - rounding);
        REQUIRE(got.log_sum_exp[row] <= expected.log_sum_exp + rounding);
      }
    }
  }
  return largest;
}

DeviceCache cache_of(const ModelShape& shape, const std::vector<HeadSpec>& heads) {
  return DeviceCache{test::plan_of<float16>(shape, heads), {.max_rollback = 4, .max_append = 600}};
}

/// Queries that pay their attention to few rows, or to many.
void make_queries(const DeviceChunk<>& chunk, float loudness) {
  auto q = chunk.q.download();
  for (float16& number : q) number = float16{loudness * static_cast<float>(number)};
  chunk.q.upload(q);
}

}  // namespace

TEST_CASE("a device reads with a bound, and the bound holds") {
  const test::SmallDevice device;
  std::vector<HeadSpec> heads = bounded_heads();
  for (const HeadSpec& head : other_heads()) heads.push_back(head);
  test::Random random{41};
  for (const std::size_t group : {1U, 5U}) {
    const ModelShape shape{1, group * heads.size(), heads.size(), head_dim};
    DeviceCache cache = cache_of(shape, heads);
    for (const std::size_t tokens : {1U, 90U, 200U}) {
      test::feed_device(cache, random(), {tokens});
      for (int round = 0; round < 2 + test::repeats(9); ++round) {
        const float loudness = test::one_of(random, std::vector<float>{1.0F, 4.0F, 12.0F});
        const float epsilon = round == 0 ? 0.0F : test::one_of(random, std::vector<float>{0.01F, 0.2F, 1.0F});
        CAPTURE(group);
        CAPTURE(tokens);
        CAPTURE(loudness);
        CAPTURE(epsilon);
        const bool two = test::below(random, 2) == 0 && tokens > 1;
        const DeviceChunk<> chunk{random, shape, two ? 2U : 1U};
        make_queries(chunk, loudness);
        AttendOptions options{.softcap = test::below(random, 3) == 0 ? 15.0F : 0.0F};
        if (test::below(random, 4) == 0) options.scale = -0.1F;
        options.bound = {.epsilon = epsilon, .certainty = round == 1 ? Certainty::none : Certainty::sure};
        const Outcome got = attend(cache, chunk, options);
        if (round == 1) continue;  // which is no bound
        const double unread = check_outcome(cache, heads, chunk, got, options);
        CHECK(unread <= static_cast<double>(epsilon) * (1 + 1e-5));
      }
    }
  }
}

TEST_CASE("a device reads few rows where few matter, and as many as it may") {
  const test::SmallDevice device;
  const std::vector<HeadSpec> heads = bounded_heads();
  const ModelShape shape{1, 2 * heads.size(), heads.size(), head_dim};
  test::HostPair pair{test::plan_of<float16>(shape, heads), {.max_rollback = 4, .max_append = 600}};
  for (const std::size_t tokens : {400U, 200U}) pair.step(tokens);
  DeviceCache& cache = pair.there;
  test::Random random{6};
  const DeviceChunk<> chunk{random, shape, 1};
  make_queries(chunk, 10.0F);
  // The host's units are half as large, so of rows that are drawn at random it reads half as many at least.
  std::size_t before = heads.size() * 600;
  for (const float epsilon : {0.0F, 0.01F, 0.05F, 0.5F}) {
    CAPTURE(epsilon);
    AttendOptions options{.bound = {.epsilon = epsilon}};
    const Outcome got = attend(cache, chunk, options);
    check_outcome(cache, heads, chunk, got, options);
    std::size_t rows = 0;
    for (const std::size_t own : got.rows_read) rows += own - 1000;
    std::vector<std::size_t> on_host(heads.size());
    std::vector<float> out(shape.q_heads * head_dim);
    const auto q = chunk.q.download();
    options.read = Read::bounded;
    options.bound.rows_read = on_host;
    pair.here.attend(0, kvpolicy::TensorView{q.data(), std::size_t{1}, shape.q_heads, head_dim},
                     kvpolicy::TensorView{out.data(), std::size_t{1}, shape.q_heads, head_dim}, options);
    std::size_t host_rows = 0;
    for (const std::size_t own : on_host) host_rows += own;
    MESSAGE("at ", epsilon, ": ", rows, " rows, on the host ", host_rows);
    CHECK(rows <= before);
    CHECK(rows <= 2 * host_rows);
    before = rows;
  }
  CHECK(before < heads.size() * 600 * 3 / 4);
  const Outcome none = attend(cache, chunk, {.bound = {.epsilon = 0.01F, .most_rows = 0}});
  for (const std::size_t most : {1U, 33U, 160U}) {
    CAPTURE(most);
    const AttendOptions options{.bound = {.epsilon = 0.01F, .most_rows = most}};
    const Outcome got = attend(cache, chunk, options);
    check_outcome(cache, heads, chunk, got, options);
    for (std::size_t head = 0; head < heads.size(); ++head) {
      CHECK(got.rows_read[head] >= none.rows_read[head]);
      CHECK(got.rows_read[head] <= none.rows_read[head] + most / tile * tile);
    }
  }
}

TEST_CASE("keys that are as far from their upper halves as can be are bounded on a device") {
  const test::SmallDevice device;
  const std::vector<HeadSpec> heads = bounded_heads();
  const ModelShape shape{1, 2 * heads.size(), heads.size(), head_dim};
  test::Random random{91};
  for (int round = 0; round < 4; ++round) {
    CAPTURE(round);
    DeviceCache cache = cache_of(shape, heads);
    // The same signs in every row and query: lower halves lift every logit, or lower it.
    std::vector<float> sign(head_dim);
    for (float& one : sign) one = test::below(random, 2) == 0 ? 1.0F : -1.0F;
    const DeviceChunk<> text{random, shape, 400};
    auto k = text.k.download();
    for (std::size_t i = 0; i < k.size(); ++i) {
      // Codes of 8 bits over [0, 255 / 256]: the ends come often enough that every group has them.
      const std::size_t row = i / (shape.kv_heads * head_dim);
      const std::size_t upper = row % 8 == 0 ? 0 : row % 8 == 1 ? 15 : test::below(random, 16);
      const bool up = (sign[i % head_dim] > 0) == (round % 2 == 0);
      const std::size_t code = row % 8 == 0 ? 0 : row % 8 == 1 ? 255 : upper * 16 + (up ? 15 : 0);
      k[i] = float16{static_cast<float>(code) / 256.0F};
    }
    text.k.upload(k);
    text.step(cache, 0);
    const DeviceChunk<> chunk{random, shape, 1};
    auto q = chunk.q.download();
    for (std::size_t i = 0; i < q.size(); ++i) {
      q[i] = float16{sign[i % head_dim] * std::abs(static_cast<float>(q[i])) * (round < 2 ? 1.0F : 6.0F)};
    }
    chunk.q.upload(q);
    test::feed_device(cache, random(), {1});
    for (const float epsilon : {0.02F, 0.3F}) {
      const AttendOptions options{.bound = {.epsilon = epsilon}};
      CHECK(check_outcome(cache, heads, chunk, attend(cache, chunk, options), options) <=
            static_cast<double>(epsilon) * (1 + 1e-5));
    }
  }
}

TEST_CASE("numbers that are not finite, sink logits, and keys that are all alike") {
  const test::SmallDevice device;
  const std::vector<HeadSpec> heads = bounded_heads();
  const ModelShape shape{1, heads.size(), heads.size(), head_dim};
  test::Random random{77};
  DeviceCache cache = cache_of(shape, heads);
  test::feed_device(cache, 8, {300, 1});
  std::vector<float> sinks;
  for (std::size_t head = 0; head < heads.size(); ++head) sinks.push_back(test::normal(random) * 3.0F);
  sinks[1] = -std::numeric_limits<float>::infinity();
  const DeviceArray<float> on_device{sinks.size()};
  on_device.upload(sinks);
  DeviceChunk<> chunk{random, shape, 1};
  make_queries(chunk, 5.0F);
  AttendOptions options{.attention_sink_bias = {on_device.data(), sinks.size()}, .bound = {.epsilon = 0.1F}};
  CHECK(check_outcome(cache, heads, chunk, attend(cache, chunk, options), options, sinks) <=
        0.1 * (1 + 1e-5));

  // A query that is not finite knows no bound: all rows are read.
  auto q = chunk.q.download();
  q[3] = float16{std::numeric_limits<float>::infinity()};
  q[head_dim + 2] = float16{std::numeric_limits<float>::quiet_NaN()};
  chunk.q.upload(q);
  const Outcome got = attend(cache, chunk, {.bound = {.epsilon = 0.1F}});
  for (const std::size_t head : {0U, 1U}) {
    CHECK(got.rows_read[head] == 1301);
    CHECK(got.unread[head] == 0.0F);
  }
  const Outcome less = attend(cache, chunk, {.bound = {.epsilon = 0.1F, .most_rows = 32}});
  for (const std::size_t head : {0U, 1U}) CHECK(less.unread[head] == 1.0F);
  CHECK(less.unread[3] < 1.0F);

  DeviceCache alike = cache_of(shape, heads);
  const DeviceChunk<> text{random, shape, 320};
  text.k.upload(std::vector<float16>(text.k.size(), float16{0.25F}));
  text.step(alike, 0);
  const DeviceChunk<> next{random, shape, 1};
  next.k.upload(std::vector<float16>(next.k.size(), float16{0.25F}));
  next.append(alike, 0);
  const AttendOptions half_of_it{.bound = {.epsilon = 0.5F}};
  CHECK(check_outcome(alike, heads, next, attend(alike, next, half_of_it), half_of_it) <= 0.5 * (1 + 1e-5));
}

TEST_CASE("steps, forks and rollbacks go on after reads with a bound on a device") {
  const test::SmallDevice device;
  std::vector<HeadSpec> heads = bounded_heads();
  for (const HeadSpec& head : other_heads()) heads.push_back(head);
  const ModelShape shape{1, 2 * heads.size(), heads.size(), head_dim};
  DeviceCache cache = cache_of(shape, heads), twin = cache_of(shape, heads);
  for (DeviceCache* each : {&cache, &twin}) test::feed_device(*each, 3, {200, 70});
  const AttendOptions bounded{.read = Read::bounded, .bound = {.epsilon = 0.1F}, .refresh_selection = true};
  test::feed_device(cache, 4, {1, 2, 40, 1}, bounded);
  test::feed_device(twin, 4, {1, 2, 40, 1}, {.refresh_selection = true});
  CHECK(test::dump_device(cache) == test::dump_device(twin));
  DeviceCache fork = cache.fork(), other = twin.fork();
  test::feed_device(fork, 5, {1}, bounded);
  test::feed_device(other, 5, {1}, {.refresh_selection = true});
  fork.truncate(fork.tokens() - 1);
  other.truncate(other.tokens() - 1);
  CHECK(test::dump_device(fork, false) == test::dump_device(other, false));
  test::Random random{9};
  const DeviceChunk<> chunk{random, shape, 1};
  DeviceCache again = fork.fork();
  const Outcome one = attend(again, chunk, bounded), two = attend(fork, chunk, bounded);
  CHECK(std::ranges::equal(one.out, two.out));
  CHECK(one.unread == two.unread);
  // Without the log-sum-exp the bound is the same.
  const Outcome three = attend(fork, chunk, bounded, false);
  CHECK(one.unread == three.unread);
  CHECK(std::ranges::equal(one.out, three.out));
}

namespace {

/// A cache of two layers, what its steps read and write, and a step with a bound that says what it read.
struct Stepper {
  DeviceCache cache;
  std::vector<DeviceChunk<>> chunks;  // of each layer
  std::vector<DeviceArray<float>> unread;
  std::vector<DeviceArray<std::size_t>> rows_read;
  float epsilon;

  Stepper(const ModelShape& shape, const std::vector<HeadSpec>& heads, std::size_t tokens, float bound)
      : cache{cache_of(shape, heads)}, epsilon{bound} {
    for (std::size_t l = 0; l < shape.layers; ++l) {
      chunks.emplace_back(shape, tokens);
      unread.emplace_back(tokens * shape.q_heads);
      rows_read.emplace_back(shape.kv_heads);
    }
  }
  void put_step(const test::Stream& stream) {
    for (std::size_t l = 0; l < chunks.size(); ++l) {
      const AttendOptions options{.read = Read::bounded,
                                  .bound = {.epsilon = epsilon,
                                            .unread = {unread[l].data(), unread[l].size()},
                                            .rows_read = {rows_read[l].data(), rows_read[l].size()}}};
      chunks[l].step(cache, l, options, stream);
    }
  }
  /// New numbers, and queries that pay their attention to few rows.
  void randomize(std::uint64_t seed, const test::Stream& stream) const {
    test::Random random{seed};
    for (std::size_t l = 0; l < chunks.size(); ++l) {
      chunks[l].randomize(random, stream);
      auto q = chunks[l].q.download(stream);
      for (float16& number : q) number = float16{8.0F * static_cast<float>(number)};
      chunks[l].q.upload(q, stream);
      rows_read[l].upload(std::vector<std::size_t>(rows_read[l].size(), 0), stream);
    }
  }
  [[nodiscard]] std::vector<float> results(const test::Stream& stream) const {
    std::vector<float> all;
    for (std::size_t l = 0; l < chunks.size(); ++l) {
      for (const float number : chunks[l].results(stream)) all.push_back(number);
      for (const float number : unread[l].download(stream)) all.push_back(number);
      for (const std::size_t rows : rows_read[l].download(stream)) all.push_back(static_cast<float>(rows));
    }
    return all;
  }
};

}  // namespace

TEST_CASE("a captured step with a bound, replayed while the text grows, is the step") {
  const test::SmallDevice device;
  const test::Stream stream;
  const std::vector<HeadSpec> heads{
      bounded_heads()[0], bounded_heads()[3], other_heads()[3], bounded_heads()[1], {},
      bounded_heads()[6]};  // three of each layer
  const ModelShape shape{2, 6, 3, head_dim};
  constexpr std::size_t tokens = 3;
  Stepper stepper{shape, heads, tokens, 0.3F}, twin{shape, heads, tokens, 0.3F};
  const auto capture = [&] { return test::Graph{stream, [&] { stepper.put_step(stream); }}; };
  // The text grows past the ends of two units, of which the second is a page's.
  for (Stepper* each : {&stepper, &twin}) test::feed_device(each->cache, 3, {235}, {}, stream);
  {
    // Room for rows is not room for their bounds.
    const std::string why = test::thrown<kvpolicy::CaptureError>([&] { static_cast<void>(capture()); });
    CHECK(test::contains(why, "there is room for 0; reserve first"));
    cudaGraph_t failed = nullptr;
    static_cast<void>(cudaStreamEndCapture(stream, &failed));
    static_cast<void>(cudaGraphDestroy(failed));
  }
  stepper.cache.reserve(280, stream);
  twin.cache.reserve(280, stream);
  const auto replay = [&](const test::Graph& graph, std::uint64_t seed) {
    for (const Stepper* each : {&stepper, &twin}) each->randomize(seed, stream);
    stepper.cache.replayed(1, tokens);
    graph.launch(stream);
    twin.put_step(stream);
    return test::same_bits(stepper.results(stream), twin.results(stream));
  };
  const auto rows_read = [&] {
    std::size_t rows = 0;
    for (const auto& layer : stepper.rows_read) {
      for (const std::size_t own : layer.download(stream)) rows += own;
    }
    return rows;
  };
  const std::size_t window = 2 + 40 + tokens - 1;  // what the head with a window reads of any text
  const test::Graph graph = capture();
  bool equal = true;
  std::size_t read = 0, whole = 0;
  for (std::uint64_t i = 0; i < 8; ++i) {
    equal = replay(graph, i) && equal;
    read += rows_read();
    whole += 5 * stepper.cache.tokens() + window;
  }
  CHECK(equal);
  CHECK(read < whole);
  CHECK(stepper.cache.tokens() == 259);
  CHECK(test::dump_device(stepper.cache, true, stream) == test::dump_device(twin.cache, true, stream));

  // More room keeps the graph valid; beyond the room that it was captured with it reads all rows.
  for (Stepper* each : {&stepper, &twin}) {
    each->cache.reserve(500, stream);
    test::feed_device(each->cache, 5, {150}, {}, stream);
  }
  twin.epsilon = 0.0F;
  CHECK(replay(graph, 50));
  CHECK(rows_read() == 5 * 412 + window);
  const test::Graph again = capture();
  twin.epsilon = 0.3F;
  CHECK(replay(again, 51));
  CHECK(rows_read() < 5 * 415 + window);
}

TEST_CASE("a captured call that chooses no rows needs no room for their bounds") {
  const test::SmallDevice device;
  const test::Stream stream;
  const ModelShape shape{1, 2, 1, head_dim};
  // What reads all rows: no bound to keep, and more queries than rows are chosen for.
  for (const std::size_t tokens : {1, 9}) {
    CAPTURE(tokens);
    const float epsilon = tokens == 1 ? 0.0F : 0.3F;
    Stepper stepper{shape, {bounded_heads()[0]}, tokens, epsilon},
        twin{shape, {bounded_heads()[0]}, tokens, 0.0F};
    for (Stepper* each : {&stepper, &twin}) {
      test::feed_device(each->cache, 3, {100, 40}, {}, stream);
      each->randomize(4, stream);
    }
    const test::Graph graph{stream, [&] { stepper.put_step(stream); }};
    stepper.cache.replayed(1, tokens);
    graph.launch(stream);
    twin.put_step(stream);
    CHECK(test::same_bits(stepper.results(stream), twin.results(stream)));
  }
}

TEST_CASE("room for bounds that grows step by step stays in proportion to the text") {
  const test::SmallDevice device;
  const ModelShape shape{1, 2, 1, head_dim};
  DeviceCache growing = cache_of(shape, {bounded_heads()[0]}),
              at_once = cache_of(shape, {bounded_heads()[0]});
  constexpr std::size_t steps = 100;
  for (std::size_t i = 1; i <= steps; ++i) growing.reserve(64 * i);
  at_once.reserve(64 * steps);
  CHECK(growing.overhead_bytes() < 4 * at_once.overhead_bytes());
}
