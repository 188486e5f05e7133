// SPDX-License-Identifier: Apache-2.0
//
// Whole caches under every policy: the same random calls through the CPU engine and ScalarEngine must
// agree.
#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <memory_resource>
#include <span>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/cpu.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>

#include "cache/bounded_text.hpp"
#include "support/compare.hpp"
#include "support/random_tree.hpp"
#include "support/shipped_plan.hpp"
#include "support/tensors.hpp"

namespace {
using namespace kvpolicy;
using test::below;
using test::Random;
using test::Tensor;

// Random settings of each shipped policy. A policy that cannot roll back gets, in a cache that rolls
// back, the settings of a policy that keeps everything.
template <KvPolicy P>
HeadSettings<typename P::element_type> random_settings(Random& random, std::size_t head_dim,
                                                       bool rolls_back) {
  const std::vector<std::size_t> bit_counts{2, 4, 8};
  const auto residual = [&](auto& storage) {
    if constexpr (requires { storage.bits; }) {
      storage.bits = test::one_of(random, bit_counts);
      storage.residual = below(random, 40);
      if (storage.bits < 8 && below(random, 3) == 0) storage.value_codebook = Codebook::normal;
      if (below(random, 2) == 0) storage.key_group = 16;
      if (below(random, 2) == 0) storage.value_group = head_dim / 2;
    }
  };
  typename P::Config own;
  if constexpr (requires { own.mask; }) {
    own.sinks = below(random, 20);
    own.recent = 1 + below(random, 90);
    own.mask = below(random, 2) == 0 ? Mask::exact : Mask::prefill_chunk;
    if (below(random, 2) == 0) own.rotary_in_cache = RotaryConfig{};
  }
  if constexpr (requires {
                  own.chunk;
                  own.refresh_every;
                }) {
    own.chunk = 32;
    own.budget = 64;
    own.refresh_every = 20;
  }
  if constexpr (requires { own.storage; }) {
    residual(own.storage);
  } else {
    residual(own);
  }
  if (rolls_back && AccumulatingPolicy<P>) {
    return typename FullCache<DenseStorage<typename P::element_type>>::Config{};
  }
  return own;
}

// Gives KV head i of a layer the settings of the i-th shipped policy.
template <KvPolicy... P>
auto settings_of_each(std::type_identity<HeadPlan<P...>>, Random& random, std::size_t head_dim,
                      bool rolls_back) {
  return std::array{random_settings<P>(random, head_dim, rolls_back)...};
}
template <KvPolicy... P>
constexpr std::size_t count(std::type_identity<HeadPlan<P...>>) {
  return sizeof...(P);
}

// A pool that claims so many threads and runs on one, whatever the machine has.
struct Serially {
  std::size_t count;
  [[nodiscard]] std::size_t threads() const { return count; }
  template <class Body>
  void operator()(std::size_t workers, const Body& body) const {
    for (std::size_t i = workers; i > 0; --i) body(i - 1);
  }
};

// For 16-bit factors: about twice the largest difference seen.
constexpr double tolerance_of_quantized = 2.5e-4;

// The largest norm of the keys and the largest number among the values that a KV head got.
struct Largest {
  double key_norm = 0;
  double value = 0;
};

double norm(std::span<const float> row) {
  double sum = 0;
  for (const float x : row) sum += static_cast<double>(x) * static_cast<double>(x);
  return std::sqrt(sum);
}

// The error that cpu::Bfloat16Products allows in addition to those of float if queries and weights are
// split into two bfloat16 numbers each: 2^-16 of every product of a logit, and 2^-16 of every weight.
// Norms bound the sum of the products' magnitudes, also of queries that a segment rotates.
double error_of_two_terms(std::span<const float> query, const Largest& rows) {
  const double scale = 1.0 / std::sqrt(static_cast<double>(query.size()));
  const double logit_error = 0x1p-16 * scale * norm(query) * rows.key_norm;
  return rows.value * (0x1p-16 + std::expm1(2 * logit_error));
}

template <class E, class Q>
void run(std::uint64_t seed, double tolerance) {
  Random random{seed};
  const std::vector<std::size_t> head_dims{64, 80, 96, 128};
  const std::vector<std::size_t> groups{1, 2, 4, 7};
  constexpr std::type_identity<test::ShippedPlan<E>> shipped;
  constexpr std::size_t policies = count(shipped);
  ModelShape shape;
  shape.layers = 2;
  shape.kv_heads = policies;
  shape.q_heads = policies * test::one_of(random, groups);
  shape.head_dim = test::one_of(random, head_dims);
  CacheOptions options;
  options.max_rollback = seed % 2 == 0 ? 0 : 25;
  options.page_rows = 32;
  if (seed % 3 == 0) options.slow_memory = std::pmr::new_delete_resource();  // copies of chosen rows
  HeadPlan<E> plan{shape};
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    const auto settings = settings_of_each(shipped, random, shape.head_dim, options.max_rollback > 0);
    for (std::size_t head = 0; head < policies; ++head) plan.set(layer, head, settings[head]);
  }
  KvCache<E> scalar{plan, options};
  cpu::KvCache<E, cpu::Engine<Serially>> fast{plan, options, cpu::Engine<Serially>{{1 + seed / 100 % 2}}};

  const bool has_tiles = cpu::matrix_unit() == cpu::MatrixUnit::tiles;
  std::vector<Largest> given(shape.layers * shape.kv_heads);
  double largest = 0;
  TokenTree tree;  // pending
  for (int step = 0; step < 16; ++step) {
    CAPTURE(step);
    const std::size_t action = below(random, 10);
    if (!tree.empty() && (tree.size() == options.max_rollback || below(random, 2) == 0)) {
      const auto path = test::random_path(random, tree);
      scalar.accept(path);
      fast.accept(path);
      tree = {};
    } else if (action == 0 && scalar.tokens() > scalar.commit_point()) {
      const std::size_t to =
          scalar.commit_point() + below(random, scalar.tokens() - scalar.commit_point() + 1);
      const std::size_t text = scalar.tokens() - tree.size();
      scalar.truncate(to);
      fast.truncate(to);
      tree.truncate(to - std::min(to, text));
    } else if (action == 1) {
      fast = fast.fork();
    }
    std::size_t tokens = step % 3 == 0 ? 1 + below(random, 40) : 1;
    AttendOptions attend;
    if (!tree.empty() || (options.max_rollback > 0 && below(random, 2) == 0)) {
      tokens = 1 + below(random, options.max_rollback - tree.size());
      tree = test::grown(random, tree, tokens);
      attend.tree = &tree;
    }
    attend.read = below(random, 3) == 0 ? Read::selected : Read::all;
    if (below(random, 4) == 0) attend.softcap = 20.0F;
    for (std::size_t layer = 0; layer < shape.layers; ++layer) {
      CAPTURE(layer);
      Tensor<Q> q{tokens, shape.q_heads, shape.head_dim};
      Tensor<Q> k{tokens, shape.kv_heads, shape.head_dim, test::Layout::padded};
      Tensor<Q> v{tokens, shape.kv_heads, shape.head_dim, test::Layout::heads_first};
      q.randomize(random);
      k.randomize(random);
      v.randomize(random);
      for (std::size_t head = 0; head < shape.kv_heads; ++head) {
        Largest& rows = given[layer * shape.kv_heads + head];
        for (std::size_t token = 0; token < tokens; ++token) {
          rows.key_norm = std::max(rows.key_norm, norm(k.row(token, head)));
          for (const float x : v.row(token, head)) {
            rows.value = std::max(rows.value, std::abs(static_cast<double>(x)));
          }
        }
      }
      Tensor<float> expected{tokens, shape.q_heads, shape.head_dim};
      Tensor<float> out{tokens, shape.q_heads, shape.head_dim, test::Layout::padded};
      scalar.step(layer, q.view(), k.view(), v.view(), expected.view(), attend);
      fast.step(layer, q.view(), k.view(), v.view(), out.view(), attend);
      REQUIRE(out.guards_intact());
      for (std::size_t token = 0; token < tokens; ++token) {
        for (std::size_t head = 0; head < shape.q_heads; ++head) {
          CAPTURE(head);
          const auto segments = fast.segments(layer, head / shape.queries_per_kv());
          const bool quantized = std::ranges::any_of(segments, [](const Segment& segment) {
            return is_quantized(segment.keys.format.encoding) || is_quantized(segment.values.format.encoding);
          });
          const double difference = test::largest_difference(out.row(token, head), expected.row(token, head));
          double allowed = quantized ? tolerance_of_quantized : tolerance;
          if (has_tiles && tokens * shape.queries_per_kv() > cpu::DefaultTuning::stream_queries) {
            allowed += error_of_two_terms(q.row(token, head),
                                          given[layer * shape.kv_heads + head / shape.queries_per_kv()]);
          }
          REQUIRE(difference <= allowed);
          largest = std::max(largest, difference);
        }
      }
    }
  }
  CHECK(scalar.bytes() == fast.bytes());
  MESSAGE("largest difference ", largest);
}

TEST_CASE("random steps under every policy give what ScalarEngine gives") {
  for (std::uint64_t seed = 1; seed <= 2; ++seed) {
    CAPTURE(seed);
    run<float, float>(seed, 1e-5);
    run<bfloat16, float>(seed + 100, 1e-5);
    run<float16, float16>(seed + 200, 1e-5);
  }
}

TEST_CASE("compressing chooses the same rows") {
  Random random{5};
  const ModelShape shape{.layers = 1, .q_heads = 8, .kv_heads = 2, .head_dim = 64};
  HeadBudgetCache<DenseStorage<float>>::Config config;
  config.budget = 40;
  config.scorer.observation_window = 8;
  KvCache scalar{HeadPlan{shape, config}};
  cpu::KvCache<float> fast{HeadPlan{shape, config}};
  for (const std::size_t tokens : std::initializer_list<std::size_t>{300, 1, 40, 1, 1}) {
    Tensor<float> q{tokens, 8, 64};
    Tensor<float> k{tokens, 2, 64};
    Tensor<float> v{tokens, 2, 64};
    q.randomize(random);
    k.randomize(random);
    v.randomize(random);
    Tensor<float> expected{tokens, 8, 64};
    Tensor<float> out{tokens, 8, 64};
    scalar.step(0, q.view(), k.view(), v.view(), expected.view());
    fast.step(0, q.view(), k.view(), v.view(), out.view());
    REQUIRE(test::largest_difference(out.numbers(), expected.numbers()) <= 1e-5);
    if (tokens > 1) {
      scalar.compress();
      fast.compress();
    }
    REQUIRE(scalar.bytes() == fast.bytes());
  }
}

}  // namespace

TEST_CASE("the CPU engine's bounds hold for random texts, and for those made to break them") {
  std::size_t rows = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    CAPTURE(seed);
    rows += test::check_random_bounds<kvpolicy::cpu::Engine<kvpolicy::cpu::SerialFor>>(seed);
  }
  CHECK(rows > 100'000);
}
