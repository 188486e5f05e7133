// SPDX-License-Identifier: Apache-2.0
//
// Reads with a bound (Read::bounded): what is left unread never holds more than the call says.
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/kvpolicy.hpp>

#include "cache/bounded_text.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;
using test::Format;

namespace {

using Text = test::BoundedText<ScalarEngine>;
using Cache = KvCache<float, test::NotingEngine<ScalarEngine>>;

const ModelShape small{.layers = 1, .q_heads = 4, .kv_heads = 2, .head_dim = 32};
const std::vector<Format> formats{
    Format{}, Format{.key_group = 16, .residual = 0, .sinks = 0}, Format{.hadamard = true},
    Format{.keys = Granularity::per_token, .key_group = 0},
    Format{.keys = Granularity::per_token, .key_group = 8, .value_group = 16, .hadamard = true}};

Text text_of(std::size_t tokens, std::uint64_t seed, const Format& format = {},
             const ModelShape& shape = small) {
  Text text{shape, test::settings<float>(format), seed};
  text.append(tokens);
  return text;
}

}  // namespace

TEST_CASE("what a bounded read leaves holds no more attention than it says") {
  std::uint64_t seed = 1;
  for (const Format& format : formats) {
    for (const std::size_t tokens : std::initializer_list<std::size_t>{1, 31, 65, 301}) {
      Text text = text_of(tokens, seed++, format);
      for (const float size : {0.3F, 1.0F, 4.0F}) {
        for (const float epsilon : {1.0F, 0.3F, 0.05F, 0.001F}) {
          text.check(text.queries(1, size), {.bound = {.epsilon = epsilon}});
        }
      }
    }
  }
}

TEST_CASE("bounds hold for random texts, and for those made to break them") {
  std::size_t rows = 0;
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    CAPTURE(seed);
    rows += test::check_random_bounds<ScalarEngine>(seed);
  }
  CHECK(rows > 50'000);
}

TEST_CASE(
    "bounds hold with caps, sink logits, scales, windows, values of another width and several queries") {
  const std::vector<float> biases{2.0F, -1.0F, 8.0F, 0.0F};
  std::uint64_t seed = 50;
  for (const Format& format : formats) {
    ModelShape shape = small;
    shape.value_dim = 16;
    if (format.hadamard || format.value_group != 0) shape.value_dim = 0;
    for (const std::size_t window : std::initializer_list<std::size_t>{0, 100}) {
      Text text{shape, test::settings<float>(format), seed++};
      if (window > 0) {
        HeadPlan<float> plan{shape, test::settings<float>(format)};
        plan.limit_window(0, window);
        text.cache = Cache{std::move(plan), {.max_rollback = 4, .max_append = 4096}};
      }
      text.append(250);
      for (const std::size_t tokens : std::initializer_list<std::size_t>{1, 4}) {
        text.check(text.queries(tokens, 1.0F), {.softcap = 20.0F, .bound = {.epsilon = 0.1F}});
        text.check(text.queries(tokens, 1.0F), {.attention_sink_bias = biases, .bound = {.epsilon = 0.1F}});
        text.check(text.queries(tokens, 0.1F), {.scale = -1.5F, .bound = {.epsilon = 0.1F}});
        text.check(text.queries(tokens, 1.0F), {.scale = 0.0F, .bound = {.epsilon = 0.4F}});
      }
    }
  }
}

TEST_CASE("a smaller epsilon reads more, and most rows stay unread where few matter") {
  Text text = text_of(600, 7);
  const test::Tensor<float> q = text.queries(1, 3.0F);
  double before = 0;
  for (const float epsilon : {0.5F, 0.2F, 0.05F, 0.01F, 0.001F}) {
    const auto share = text.check(q, {.bound = {.epsilon = epsilon}});
    CHECK(share.mean >= before);
    CHECK(share.unread <= static_cast<double>(epsilon));
    before = share.mean;
  }
  double read = 0;
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    Text other = text_of(600, seed);
    const auto share = other.check(other.queries(1, 4.0F), {.bound = {.epsilon = 0.05F}});
    CHECK(share.unread > 0);
    read += share.mean / 10;
  }
  CHECK(read < 0.4);
  // Estimates read less, and top-p least.
  const auto mean = [&](Certainty certainty) {
    return text.check(q, {.bound = {.epsilon = 0.05F, .certainty = certainty}}).mean;
  };
  CHECK(mean(Certainty::four_sigma) < mean(Certainty::sure));
  CHECK(mean(Certainty::none) < mean(Certainty::four_sigma));
}

TEST_CASE("epsilon 0 reads all rows and gives the bits of a read of all") {
  for (const Format& format : formats) {
    Text text = text_of(200, 9, format);
    const test::Tensor<float> q = text.queries(2, 1.0F);
    test::Tensor<float> all{2, small.q_heads, small.head_dim};
    text.cache.attend(0, q.view(), all.view());
    const auto result = text.read(q, {.bound = {.epsilon = 0.0F}});
    CHECK(result.out.numbers() == all.numbers());
    for (const float unread : result.unread) CHECK(unread == 0.0F);
    for (const std::size_t rows : result.rows) CHECK(rows == 200);
  }
}

TEST_CASE("most_rows ends a read early, and the bound says so") {
  Text text = text_of(400, 21);
  const test::Tensor<float> q = text.queries(1, 0.3F);  // attention that is spread over many rows
  const auto free = text.read(q, {.bound = {.epsilon = 0.01F}});
  const std::size_t exact = 2 + 16 + 16 + 31;  // sinks, residual, tail and a group that is not full, at most
  std::vector<float> before(small.q_heads, 1.0F);
  for (const std::size_t most : std::initializer_list<std::size_t>{0, 1, 7, 8, 40, 100}) {
    AttendOptions options{.bound = {.epsilon = 0.01F, .most_rows = most}};
    text.check(q, options);
    const auto limited = text.read(q, options);
    for (std::size_t h = 0; h < small.kv_heads; ++h) {
      CHECK(limited.rows[h] <= exact + most);
      CHECK(limited.rows[h] < free.rows[h]);
    }
    for (std::size_t h = 0; h < small.q_heads; ++h) {
      CHECK(limited.unread[h] > 0.01F);
      CHECK(limited.unread[h] < 1.0F);
      CHECK(limited.unread[h] <= before[h]);
    }
    before = limited.unread;
  }
}

TEST_CASE("heads without codes in halves read all rows") {
  HeadPlan<float> plan{small};
  plan.set(0, 1, test::settings<float>(Format{}));
  Text text{small, FullCache<DenseStorage<float>>::Config{}, 3};
  text.cache = Cache{std::move(plan), {.max_rollback = 4, .max_append = 4096}};
  text.append(300);
  const test::Tensor<float> q = text.queries(1, 3.0F);
  text.check(q, {.bound = {.epsilon = 0.1F}});
  const auto result = text.read(q, {.bound = {.epsilon = 0.1F}});
  CHECK(result.rows[0] == 300);
  CHECK(result.rows[1] < 300);
  CHECK(result.unread[0] == 0.0F);
  CHECK(result.unread[1] == 0.0F);
  CHECK(result.unread[3] > 0.0F);
}

TEST_CASE("calls of many queries read all rows") {
  Text text{small, test::settings<float>(Format{}), 5};
  text.cache = Cache{HeadPlan<float>{small, test::settings<float>(Format{})},
                     {.max_rollback = 64, .max_append = 4096}};
  text.append(300);
  const std::size_t fits = most_bounded_queries / 2;  // of a group of two
  const auto few = text.read(text.queries(fits, 4.0F), {.bound = {.epsilon = 0.9F, .most_rows = 8}});
  const auto many = text.read(text.queries(fits + 1, 4.0F), {.bound = {.epsilon = 0.9F, .most_rows = 8}});
  CHECK(few.rows[0] < 300);
  CHECK(few.unread.back() > 0.0F);
  CHECK(many.rows[0] == 300);
  CHECK(many.unread.back() == 0.0F);
}

TEST_CASE("keys that are all equal, and texts of one row") {
  Text text{small, test::settings<float>(Format{.residual = 0, .sinks = 0}), 13};
  test::Tensor<float> rows{256, small.kv_heads, small.head_dim};
  rows.fill([](auto...) { return 2.5F; });
  text.cache.append(0, std::as_const(rows).view(), std::as_const(rows).view());
  text.append(1);
  for (const float epsilon : {0.9F, 0.5F, 0.05F}) {
    // Each of 256 rows has the same share, so a share of the rows is what may be left.
    const auto share = text.check(text.queries(1, 1.0F), {.bound = {.epsilon = epsilon}});
    CHECK(share.mean >= 1.0 - static_cast<double>(epsilon));
  }
}

TEST_CASE("numbers that are not finite: such a read leaves nothing") {
  Text text = text_of(200, 17);
  test::Tensor<float> q = text.queries(1, 1.0F);
  q.at(0, 0, 3) = std::numeric_limits<float>::infinity();
  const auto result = text.read(q, {.bound = {.epsilon = 0.5F}});
  CHECK(result.rows[0] == 200);  // of the KV head whose first query it is
  CHECK(result.unread[0] == 0.0F);
  CHECK(result.rows[1] < 200);
}

TEST_CASE("options of a bounded read that do not fit are refused, and nothing changes") {
  Text text = text_of(100, 19);
  const test::Tensor<float> q = text.queries(1, 1.0F);
  test::Tensor<float> out{1, small.q_heads, small.head_dim};
  const auto before = out.numbers();
  std::vector<float> unread(small.q_heads);
  std::vector<std::size_t> rows(small.kv_heads);
  const auto refused = [&](const AttendOptions& options, const char* said) {
    CHECK_THROWS_WITH_AS(text.cache.attend(0, q.view(), out.view(), options), said, ShapeError);
    CHECK(out.numbers() == before);
  };
  refused({.read = Read::bounded, .bound = {.epsilon = -0.1F}},
          "KvCache: bound.epsilon is -0.1, must be from 0 to 1");
  refused({.read = Read::bounded, .bound = {.epsilon = 1.5F}},
          "KvCache: bound.epsilon is 1.5, must be from 0 to 1");
  CHECK_THROWS_AS(
      text.cache.attend(0, q.view(), out.view(), {.read = Read::bounded, .bound = {.epsilon = NAN}}),
      ShapeError);
  refused({.read = Read::bounded, .bound = {.unread = std::span{unread}.first(3)}},
          "KvCache: bound.unread has 3 places, must have tokens x q_heads = 4 or none");
  refused({.read = Read::bounded, .bound = {.rows_read = std::span{rows}.first(1)}},
          "KvCache: bound.rows_read has 1 places, must have kv_heads = 2 or none");
  refused({.bound = {.unread = unread}},
          "KvCache: bound.unread has 4 and bound.rows_read 0 places, must have none, since the read is not "
          "Read::bounded");
  refused({.bound = {.rows_read = rows}},
          "KvCache: bound.unread has 0 and bound.rows_read 2 places, must have none, since the read is not "
          "Read::bounded");
}

TEST_CASE("a step reads with a bound, and a fork and a batch read the same") {
  Text text = text_of(300, 23);
  Cache fork = text.cache.fork();
  Cache third = text.cache.fork();
  test::Tensor<float> q{1, small.q_heads, small.head_dim};
  test::Tensor<float> k{1, small.kv_heads, small.head_dim};
  test::Tensor<float> v{1, small.kv_heads, small.head_dim};
  q.randomize(text.random, 2.0F);
  k.randomize(text.random);
  v.randomize(text.random);
  const auto step = [&](Cache& cache, std::vector<float>& unread) {
    test::Tensor<float> out{1, small.q_heads, small.head_dim};
    cache.step(0, std::as_const(q).view(), std::as_const(k).view(), std::as_const(v).view(), out.view(),
               {.read = Read::bounded, .bound = {.epsilon = 0.1F, .unread = unread}});
    return out.numbers();
  };
  std::vector<float> unread(small.q_heads, NAN);
  std::vector<float> again(small.q_heads, NAN);
  const auto out = step(text.cache, unread);
  CHECK(step(fork, again) == out);
  CHECK(again == unread);
  for (const float share : unread) CHECK((share > 0.0F && share <= 0.1F));

  // In a batch, beside a call that reads all.
  Text other = text_of(80, 24);
  Batch<float, test::NotingEngine<ScalarEngine>> batch;
  std::vector<float> batched(small.q_heads, NAN);
  const std::vector<BatchSequence<Cache>> sequences{
      {&other.cache, {}}, {&third, {.read = Read::bounded, .bound = {.epsilon = 0.1F, .unread = batched}}}};
  test::Tensor<float> all_q{2, small.q_heads, small.head_dim};
  test::Tensor<float> all_k{2, small.kv_heads, small.head_dim};
  test::Tensor<float> all_v{2, small.kv_heads, small.head_dim};
  test::Tensor<float> all_out{2, small.q_heads, small.head_dim};
  const auto twice = [](test::Tensor<float>& all, const test::Tensor<float>& one) {
    all.fill([&](std::size_t, std::size_t h, std::size_t c) { return one.number(0, h, c); });
  };
  twice(all_q, q);
  twice(all_k, k);
  twice(all_v, v);
  const std::array<std::int32_t, 3> indptr{0, 1, 2};
  CHECK(batch
            .step(0, sequences, indptr, std::as_const(all_q).view(), std::as_const(all_k).view(),
                  std::as_const(all_v).view(), all_out.view())
            .empty());
  CHECK(batched == unread);
  for (std::size_t h = 0; h < small.q_heads; ++h) {
    for (std::size_t c = 0; c < small.head_dim; ++c) {
      CHECK(all_out.number(1, h, c) == out[32 + h * small.head_dim + c]);
    }
  }
}

// An engine that fails at one of its calls.
struct FailingEngine {
  ScalarEngine inner;
  int left = 1000;  // calls until then
  void count() {
    if (left-- == 0) throw std::runtime_error("the engine failed");
  }
  void attend(const LayerAttention& work) {
    count();
    inner.attend(work);
  }
  void observe(const LayerObservation& work) { inner.observe(work); }
  void score(const Plane& rows, std::span<const float> query, std::span<float> out) {
    inner.score(rows, query, out);
  }
  void bound(const LayerBounds& work) {
    count();
    inner.bound(work);
  }
};

TEST_CASE(
    "an engine that fails at any of a bounded read's calls leaves nothing written, and the cache as it was") {
  test::Random random{31};
  KvCache<float, FailingEngine> cache{HeadPlan<float>{small, test::settings<float>(Format{})},
                                      {.max_append = 512}};
  const auto rows = [&](std::size_t tokens, std::size_t heads) {
    test::Tensor<float> made{tokens, heads, small.head_dim};
    made.randomize(random);
    return made;
  };
  for (const std::size_t tokens : std::initializer_list<std::size_t>{200, 1}) {
    const auto k = rows(tokens, small.kv_heads);
    const auto v = rows(tokens, small.kv_heads);
    cache.append(0, k.view(), v.view());
  }
  const auto q = rows(1, small.q_heads);
  const auto k = rows(1, small.kv_heads);
  const auto v = rows(1, small.kv_heads);
  int failures = 0;
  for (int calls = 0;; ++calls) {
    test::Tensor<float> out{1, small.q_heads, small.head_dim};
    const auto before = out.numbers();
    std::vector<float> unread(small.q_heads, 7.0F);
    cache.engine().left = calls;
    bool failed = false;
    try {
      cache.step(0, q.view(), k.view(), v.view(), out.view(),
                 {.read = Read::bounded, .bound = {.epsilon = 0.1F, .unread = unread}});
    } catch (const std::runtime_error&) {
      failed = true;
    }
    if (!failed) break;
    ++failures;
    CHECK(out.numbers() == before);
    CHECK(unread == std::vector<float>(small.q_heads, 7.0F));
    CHECK(cache.tokens(0) == 201);
  }
  CHECK(failures >= 3);  // attention, bounds, attention
  CHECK(cache.tokens(0) == 202);
}

TEST_CASE(
    "rows_read adds up, and a bounded read that asks for a selection makes it for the reads that follow") {
  using Chunks = ChunkRetrievalCache<PerTokenStorage<float>>;
  const HeadSettings<float> head = Chunks::Config{
      .chunk = 8, .budget = 16, .storage = ResidualConfig{.bits = 8, .residual = 8, .halves = true}};
  Text text{small, head, 37};
  text.append(200);
  const test::Tensor<float> q = text.queries(1, 2.0F);
  std::vector<std::size_t> rows(small.kv_heads);
  test::Tensor<float> out{1, small.q_heads, small.head_dim};
  const AttendOptions choosing{
      .read = Read::bounded, .bound = {.epsilon = 0.2F, .rows_read = rows}, .refresh_selection = true};
  text.cache.attend(0, q.view(), out.view(), choosing);
  const std::vector<std::size_t> once = rows;
  CHECK((once[0] > 0 && once[0] < 200));
  text.cache.attend(0, q.view(), out.view(), choosing);
  CHECK(rows[0] == 2 * once[0]);
  CHECK_FALSE(text.cache.head(0, 0).selection_is_stale());
}

TEST_CASE("a branching tree of guesses reads with a bound") {
  Text text = text_of(300, 29);
  TokenTree tree;
  const std::size_t root = tree.add(no_node);
  static_cast<void>(tree.add(root));
  static_cast<void>(tree.add(root));
  test::Tensor<float> q{3, small.q_heads, small.head_dim};
  test::Tensor<float> k{3, small.kv_heads, small.head_dim};
  test::Tensor<float> v{3, small.kv_heads, small.head_dim};
  q.randomize(text.random, 3.0F);
  k.randomize(text.random);
  v.randomize(text.random);
  const auto step = [&](Cache cache, const AttendOptions& options) {
    test::Tensor<float> out{3, small.q_heads, small.head_dim};
    cache.step(0, std::as_const(q).view(), std::as_const(k).view(), std::as_const(v).view(), out.view(),
               options);
    return out.numbers();
  };
  std::vector<float> unread(3 * small.q_heads, NAN);
  std::vector<std::size_t> rows(small.kv_heads);
  const auto all = step(text.cache.fork(), {.tree = &tree});
  const auto bounded =
      step(text.cache.fork(), {.read = Read::bounded,
                               .bound = {.epsilon = 0.02F, .unread = unread, .rows_read = rows},
                               .tree = &tree});
  CHECK(rows[0] < 303);
  CHECK(rows[1] < 303);
  for (const float share : unread) CHECK((share >= 0.0F && share <= 0.02F));
  for (std::size_t i = 0; i < all.size(); ++i) {
    // Off by at most the share of the distance between two values, which are normal numbers.
    CHECK(std::abs(all[i] - bounded[i]) < 0.02F * 9.0F);
  }
}
