// SPDX-License-Identifier: Apache-2.0
//
// The CPU engine with different numbers of channels for keys and values, and with channels that do not
// fill its vectors, compared with its definition (ScalarEngine) and with attention in double.
#include <cmath>
#include <cstddef>
#include <initializer_list>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/scalar_engine.hpp>
#include <kvpolicy/cpu/engine.hpp>

#include "cpu/random_layer.hpp"
#include "support/compare.hpp"

namespace {
using kvpolicy::bfloat16;
using test::below;
using test::Random;
using test::Tensor;

// Primes times 8, multiples of 16 near them, and the largest.
const std::vector<std::size_t> channels{8, 16, 24, 40, 56, 64, 88, 104, 128, 136, 184, 256, 512, 568, 576};

// For dense rows: errors grow with the channels of a dot product, and those of engine_test.cpp are for
// up to 256.
constexpr double tolerance = 1e-4;
constexpr double tolerance_to_double = 3e-5;
// For quantised rows, of what engine_test.cpp adds to these: with up to 576 channels and large scales of logits,
// the largest error of 12,000 calls of the first test was 1.6 of it.
constexpr double times_integer_tolerance = 2.5;

template <class Q>
void compare(Random& random, std::size_t head_dim, std::size_t value_dim, std::size_t group,
             std::size_t tokens, bool dense) {
  CAPTURE(head_dim);
  CAPTURE(value_dim);
  CAPTURE(group);
  CAPTURE(tokens);
  CAPTURE(dense);
  test::RandomCall<Q> call{random, 2, group, head_dim, tokens, {}, value_dim};
  for (test::RandomHead& head : call.heads) {
    if (!dense) continue;
    head = test::RandomHead{head_dim, value_dim};
    for (int segment = 0; segment < 2; ++segment) {
      const kvpolicy::RowFormat keys{.encoding = test::one_of(random, test::dense_encodings)};
      const kvpolicy::RowFormat values{.encoding = test::one_of(random, test::dense_encodings)};
      const std::size_t rows = test::one_of(random, test::hard_sizes);
      head.add(random, keys, values, rows, segment * 70, call.first_position, {});
    }
  }
  call.bind();
  const double addition =
      dense ? 0 : times_integer_tolerance * test::integer_tolerance(call.scale(), head_dim);
  const std::size_t q_heads = 2 * group;
  const auto layout = static_cast<test::Layout>(below(random, 3));
  Tensor<float> out{tokens, q_heads, value_dim, layout};
  Tensor<float> expected{tokens, q_heads, value_dim, layout};
  std::vector<float> lse(tokens * q_heads);
  std::vector<float> expected_lse(tokens * q_heads);
  kvpolicy::cpu::Engine<> engine;
  kvpolicy::ScalarEngine scalar;
  call.attend(engine, out, lse);
  call.attend(scalar, expected, expected_lse);
  REQUIRE(out.guards_intact());
  REQUIRE(test::largest_difference(out.numbers(), expected.numbers()) <= tolerance + addition);

  const std::size_t token = below(random, tokens);
  const std::size_t head = below(random, q_heads);
  oracle::Options options;
  options.scale = call.options.scale.value_or(1.0F / std::sqrt(static_cast<float>(head_dim)));
  options.softcap = call.options.softcap;
  if (!call.attention_sink_bias.empty()) options.sink_logit = call.attention_sink_bias[head];
  const auto truth =
      call.heads[head / group].attend(call.queries.row_of_doubles(token, head),
                                      call.first_position + static_cast<std::int64_t>(token), options);
  REQUIRE(test::largest_difference(out.row(token, head), truth.out) <= tolerance_to_double + addition);
  REQUIRE(test::largest_difference(expected.row(token, head), truth.out) <= tolerance_to_double);
}

TEST_CASE("keys and values with different channels, with few queries and with many") {
  Random random{64};
  for (int round = 0; round < 200; ++round) {
    CAPTURE(round);
    const std::size_t head_dim = test::one_of(random, channels);
    const std::size_t value_dim = test::one_of(random, channels);
    const std::size_t group = 1 + below(random, 5);
    const std::size_t tokens = test::one_of(random, std::vector<std::size_t>{1, 2, 3, 17, 40});
    const bool dense = below(random, 2) == 0;
    below(random, 2) == 0 ? compare<float>(random, head_dim, value_dim, group, tokens, dense)
                          : compare<bfloat16>(random, head_dim, value_dim, group, tokens, dense);
  }
}

TEST_CASE("observe and score read only keys") {
  Random random{65};
  for (int round = 0; round < 40; ++round) {
    const std::size_t head_dim = test::one_of(random, channels);
    const std::size_t value_dim = test::one_of(random, channels);
    const std::size_t tokens = 1 + below(random, 20);
    CAPTURE(head_dim);
    CAPTURE(value_dim);
    test::RandomCall<bfloat16> call{random, 1, 3, head_dim, tokens, {}, value_dim};
    std::vector<float> sums((call.heads[0].rows_shown() + 1) * 3, 5.0F);
    std::vector<float> expected = sums;
    const auto observe = [&](auto&& engine, std::vector<float>& into) {
      const std::vector<std::span<float>> views{into};
      engine.observe({kvpolicy::ConstTensor{call.queries.view()}, call.first_position, call.segments, views,
                      call.options});
    };
    observe(kvpolicy::cpu::Engine<>{}, sums);
    observe(kvpolicy::ScalarEngine{}, expected);
    REQUIRE(test::largest_difference(sums, expected) <= 4e-5);

    const test::RandomPlane plane{random, {.encoding = kvpolicy::Encoding::bfloat16}, 77, head_dim};
    std::vector<float> query(head_dim);
    for (float& number : query) number = test::normal(random);
    std::vector<float> scores(77);
    std::vector<float> expected_scores(77);
    kvpolicy::cpu::Engine<>{}.score(plane.plane(), query, scores);
    kvpolicy::ScalarEngine{}.score(plane.plane(), query, expected_scores);
    REQUIRE(test::largest_difference(scores, expected_scores) <= 4e-4);
  }
}

TEST_CASE("channels that 8 does not divide are refused by name") {
  Random random{66};
  kvpolicy::cpu::Engine<> engine;
  const auto refused = [&](std::size_t head_dim, std::size_t value_dim) {
    Tensor<float> q{1, 1, head_dim};
    Tensor<float> out{1, 1, value_dim};
    const std::vector<std::span<const kvpolicy::Segment>> heads(1);
    return test::thrown<kvpolicy::ShapeError>([&] {
      engine.attend({kvpolicy::ConstTensor{q.view()}, kvpolicy::MutableTensor{out.view()}, 0, heads, {}});
    });
  };
  CHECK(test::contains(refused(12, 16), "head_dim is 12, must be a positive multiple of 8"));
  CHECK(test::contains(refused(16, 4), "value_dim is 4, must be a positive multiple of 8"));
  CHECK(refused(8, 576).empty());
}

}  // namespace
