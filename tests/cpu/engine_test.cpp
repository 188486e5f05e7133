// SPDX-License-Identifier: Apache-2.0
//
// Compares the CPU engine with its definition (ScalarEngine) and with attention in double.
#include <cmath>
#include <initializer_list>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/scalar_engine.hpp>
#include <kvpolicy/cpu/engine.hpp>

#include "cpu/random_layer.hpp"
#include "support/compare.hpp"

namespace {
using kvpolicy::bfloat16;
using kvpolicy::float16;
using test::below;
using test::Random;
using test::Tensor;

const std::vector<std::size_t> head_dims{16, 32, 48, 64, 80, 96, 112, 128, 256};
const std::vector<std::size_t> groups{1, 2, 3, 4, 5, 7, 8, 12, 13, 16, 24, 70};

// Outputs are about 1, logits at most some tens, and both engines compute in float. Over 3,000 calls
// the largest error against double was 6.4e-6 (ScalarEngine's: 6.7e-6); the largest difference between
// the two was 2.4e-5, over many more outputs; the largest relative error of log-sum-exps was 2.7e-6.
// The bounds are about twice that.
constexpr double tolerance = 5e-5;
constexpr double tolerance_to_double = 1.5e-5;
constexpr double tolerance_of_log_sum_exp = 6e-6;

template <class T>
constexpr double rounding = std::is_same_v<T, float>     ? 0.0
                            : std::is_same_v<T, float16> ? 0x1p-10
                                                         : 0x1p-7;

template <class T>
std::vector<float> numbers(const Tensor<T>& tensor) {
  std::vector<float> result;
  for (const T& number : tensor.numbers()) result.push_back(static_cast<float>(number));
  return result;
}

// The difference is relative for numbers above 1; NaN, and an infinity on one side only, count as
// infinite.
double largest_relative(const std::vector<float>& a, const std::vector<float>& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double size = std::max(1.0, std::abs(static_cast<double>(b[i])));
    const double difference = test::largest_difference(std::vector{a[i]}, std::vector{b[i]});
    largest = std::max(largest, std::isinf(size) ? difference : difference / size);
  }
  return largest;
}

double worst_scalar = 0;
double worst_double = 0;

template <class Q, class Out>
void compare_attend(Random& random, std::size_t group, std::size_t head_dim, std::size_t tokens,
                    std::size_t kv_heads) {
  CAPTURE(group);
  CAPTURE(head_dim);
  CAPTURE(tokens);
  test::RandomCall<Q> call{random, kv_heads, group, head_dim, tokens};
  const std::size_t q_heads = kv_heads * group;
  const auto layout = static_cast<test::Layout>(below(random, 3));
  Tensor<Out> out{tokens, q_heads, head_dim, layout};
  Tensor<Out> expected{tokens, q_heads, head_dim, layout};
  std::vector<float> lse(tokens * q_heads);
  std::vector<float> expected_lse(tokens * q_heads);
  kvpolicy::cpu::Engine<kvpolicy::cpu::SerialFor> engine;
  kvpolicy::ScalarEngine scalar;
  call.attend(engine, out, lse);
  call.attend(scalar, expected, expected_lse);
  REQUIRE(out.guards_intact());
  const double bound = call.tolerance(tolerance) + 4 * rounding<Out>;
  const double difference = test::largest_difference(numbers(out), numbers(expected));
  REQUIRE(difference <= bound);
  REQUIRE(largest_relative(lse, expected_lse) <= call.tolerance(tolerance_of_log_sum_exp));
  if (std::is_same_v<Out, float>) worst_scalar = std::max(worst_scalar, difference);

  for (int sample = 0; sample < 3 && tokens > 0; ++sample) {
    const std::size_t token = below(random, tokens);
    const std::size_t head = below(random, q_heads);
    oracle::Options options;
    options.scale = call.options.scale.value_or(1.0F / std::sqrt(static_cast<float>(head_dim)));
    options.softcap = call.options.softcap;
    if (!call.attention_sink_bias.empty()) options.sink_logit = call.attention_sink_bias[head];
    const auto truth =
        call.heads[head / group].attend(call.queries.row_of_doubles(token, head),
                                        call.first_position + static_cast<std::int64_t>(token), options);
    const double off = test::largest_difference(out.row(token, head), truth.out);
    REQUIRE(off <= call.tolerance(tolerance_to_double) + 4 * rounding<Out>);
    if (std::is_same_v<Out, float>) worst_double = std::max(worst_double, off);
    REQUIRE(largest_relative({lse[token * q_heads + head]}, {static_cast<float>(truth.log_sum_exp)}) <=
            call.tolerance(tolerance_of_log_sum_exp));
  }
}

TEST_CASE("attend over random segments equals ScalarEngine and attention in double") {
  Random random{2024};
  const std::vector<std::size_t> token_counts{1, 1, 1, 2, 3, 5, 15, 16, 17, 33, 65, 101};
  for (int round = 0; round < 150; ++round) {
    CAPTURE(round);
    const std::size_t group = test::one_of(random, groups);
    const std::size_t head_dim = test::one_of(random, head_dims);
    std::size_t tokens = test::one_of(random, token_counts);
    if (group * tokens > 300) tokens = 3;
    const std::size_t kv_heads = 1 + below(random, 3);
    switch (below(random, 5)) {
      case 0: compare_attend<float, float>(random, group, head_dim, tokens, kv_heads); break;
      case 1: compare_attend<float16, float>(random, group, head_dim, tokens, kv_heads); break;
      case 2: compare_attend<bfloat16, float>(random, group, head_dim, tokens, kv_heads); break;
      case 3: compare_attend<float, float16>(random, group, head_dim, tokens, kv_heads); break;
      default: compare_attend<bfloat16, bfloat16>(random, group, head_dim, tokens, kv_heads);
    }
  }
  MESSAGE("largest difference to ScalarEngine ", worst_scalar, ", to double ", worst_double);
}

TEST_CASE("every format of keys and of values, in both kernels") {
  Random random{7};
  for (const std::size_t head_dim : std::initializer_list<std::size_t>{64, 80, 96, 128, 256}) {
    for (const auto& format : test::all_formats(head_dim)) {
      CAPTURE(head_dim);
      CAPTURE(name_of(format.encoding));
      CAPTURE(format.group);
      for (const std::size_t tokens : std::initializer_list<std::size_t>{1, 9}) {
        test::RandomCall<float> call{random, 1, 4, head_dim, tokens};
        call.first_position = 40;
        call.heads.clear();
        auto& head = call.heads.emplace_back(head_dim);
        head.add(random, format, {.encoding = kvpolicy::Encoding::bfloat16}, 67, 0, 40, {});
        head.add(random, {.encoding = kvpolicy::Encoding::float16}, format, 35, 3, 40, {});
        call.bind();
        Tensor<float> out{tokens, 4, head_dim};
        Tensor<float> expected{tokens, 4, head_dim};
        std::vector<float> lse(tokens * 4);
        std::vector<float> expected_lse(tokens * 4);
        kvpolicy::cpu::Engine<kvpolicy::cpu::SerialFor> engine;
        kvpolicy::ScalarEngine scalar;
        call.attend(engine, out, lse);
        call.attend(scalar, expected, expected_lse);
        REQUIRE(test::largest_difference(out.numbers(), expected.numbers()) <= call.tolerance(tolerance));
        REQUIRE(largest_relative(lse, expected_lse) <= call.tolerance(tolerance_of_log_sum_exp));
        worst_scalar = std::max(worst_scalar, test::largest_difference(out.numbers(), expected.numbers()));
      }
    }
  }
}

// What a number is off by that cpu::Bfloat16Products splits into two terms, where tiles multiply.
double error_of_two_terms() {
  return kvpolicy::cpu::matrix_unit() == kvpolicy::cpu::MatrixUnit::tiles ? 0x1p-16 : 0.0;
}

TEST_CASE("observe equals ScalarEngine") {
  Random random{11};
  for (int round = 0; round < 80; ++round) {
    CAPTURE(round);
    const std::size_t group = test::one_of(random, groups);
    const std::size_t head_dim = test::one_of(random, head_dims);
    const std::size_t tokens = 1 + below(random, group > 20 ? 3 : 30);
    const std::size_t kv_heads = 1 + below(random, 3);
    test::RandomCall<bfloat16> call{random, kv_heads, group, head_dim, tokens};
    std::vector<std::vector<float>> sums(kv_heads);
    std::vector<std::vector<float>> expected(kv_heads);
    std::vector<std::span<float>> views(kv_heads);
    kvpolicy::LayerObservation work{kvpolicy::ConstTensor{call.queries.view()},
                                    call.first_position,
                                    call.segments,
                                    views,
                                    call.options,
                                    round % 2 == 0 ? kvpolicy::Votes::mean : kvpolicy::Votes::largest};
    const auto observe = [&](auto& engine, auto& into) {
      for (std::size_t head = 0; head < kv_heads; ++head) {
        // There are more entries than rows, and they are not zero.
        into[head].assign((call.heads[head].rows_shown() + 1) * group, 5.0F);
        views[head] = into[head];
      }
      engine.observe(work);
    };
    kvpolicy::ScalarEngine scalar;
    observe(scalar, expected);
    kvpolicy::cpu::Engine<kvpolicy::cpu::SerialFor> engine;
    observe(engine, sums);
    for (std::size_t head = 0; head < kv_heads; ++head) {
      const double logit_error = call.error_of_logits(head, error_of_two_terms());
      for (std::size_t i = 0; i < sums[head].size(); ++i) {
        const auto sum = static_cast<double>(expected[head][i]);
        const double off = std::abs(static_cast<double>(sums[head][i]) - sum);
        REQUIRE(off <= 2e-5 + sum * std::expm1(2 * logit_error));
      }
    }
  }
}

TEST_CASE("score equals ScalarEngine, at any number of rows and threads") {
  Random random{13};
  for (const std::size_t head_dim : head_dims) {
    for (const std::size_t rows : {1UL, 2UL, 31UL, 32UL, 33UL, 1000UL, 5001UL}) {
      for (const auto encoding : test::dense_encodings) {
        const test::RandomPlane plane{random, {.encoding = encoding}, rows, head_dim};
        std::vector<float> query(head_dim);
        for (float& number : query) number = test::normal(random);
        std::vector<float> out(rows);
        std::vector<float> expected(rows);
        kvpolicy::ScalarEngine{}.score(plane.plane(), query, expected);
        kvpolicy::cpu::Engine<kvpolicy::cpu::SerialFor>{}.score(plane.plane(), query, out);
        REQUIRE(test::largest_difference(out, expected) <= 2e-4);
        std::vector<float> shared(rows);
        kvpolicy::cpu::Engine<>{}.score(plane.plane(), query, shared);
        REQUIRE(test::same_bits(shared, out));
      }
    }
  }
}

TEST_CASE("score over quantised rows, rotated ones too, equals ScalarEngine") {
  Random random{14};
  for (const std::size_t head_dim : {24U, 64U, 80U, 128U}) {
    for (const auto& format : test::all_formats(head_dim)) {
      if (!kvpolicy::is_quantized(format.encoding)) continue;
      CAPTURE(head_dim);
      CAPTURE(name_of(format.encoding));
      CAPTURE(format.hadamard);
      const std::size_t rows = 1 + below(random, 130);
      const test::RandomPlane plane{random, format, rows, head_dim};
      std::vector<float> query(head_dim);
      for (float& number : query) number = test::normal(random);
      std::vector<float> out(rows);
      std::vector<float> expected(rows);
      kvpolicy::ScalarEngine{}.score(plane.plane(), query, expected);
      kvpolicy::cpu::Engine<kvpolicy::cpu::SerialFor>{}.score(plane.plane(), query, out);
      // Scores are not scaled by 1 / sqrt(head_dim), and are some tens.
      REQUIRE(test::largest_difference(out, expected) <= 5e-3);
    }
  }
}

TEST_CASE("a query that sees nothing gives zeros and a log-sum-exp of -infinity") {
  Random random{17};
  for (const std::size_t tokens : std::initializer_list<std::size_t>{1, 20}) {
    test::RandomCall<float> call{random, 2, 4, 64, tokens};
    call.attention_sink_bias.clear();
    call.heads.clear();
    call.heads.emplace_back(64);  // no segment at all
    auto& later = call.heads.emplace_back(64);
    later.add(random, {}, {}, 40, 10000, 0,
              {.runs = false, .positions = false, .window = false, .rotation = false});
    call.bind();
    Tensor<float> out{tokens, 8, 64};
    std::vector<float> lse(tokens * 8, 3.0F);
    kvpolicy::cpu::Engine<> engine;
    call.attend(engine, out, lse);
    for (std::size_t token = 0; token < tokens; ++token) {
      for (std::size_t head = 0; head < 8; ++head) {
        REQUIRE(out.row(token, head) == std::vector<float>(64, 0.0F));
        REQUIRE(lse[token * 8 + head] == -std::numeric_limits<float>::infinity());
      }
    }
    // The sink bias takes all the weight and has no value.
    call.attention_sink_bias.assign(8, 0.5F);
    call.bind();
    call.attend(engine, out, lse);
    REQUIRE(out.row(0, 0) == std::vector<float>(64, 0.0F));
    REQUIRE(lse[0] == doctest::Approx(0.5F));
  }
}

// Dense rows at consecutive positions, in one segment, with the first query at row `at`.
template <class Change>
void compare_special(std::size_t tokens, std::int64_t at, std::int64_t window, Change change,
                     double bound = tolerance) {
  Random random{19};
  test::RandomCall<float> call{random, 1, 4, 64, tokens};
  call.attention_sink_bias.clear();
  call.options = {};
  call.first_position = at;
  call.heads.clear();
  auto& head = call.heads.emplace_back(64);
  head.add(random, {}, {}, 150, 0, 0,
           {.runs = false, .positions = false, .window = false, .rotation = false});
  head.segment(0).window = window;
  change(call, head);
  call.bind();
  Tensor<float> out{tokens, 4, 64};
  Tensor<float> expected{tokens, 4, 64};
  std::vector<float> lse(tokens * 4);
  std::vector<float> expected_lse(tokens * 4);
  kvpolicy::cpu::Engine<> engine;
  kvpolicy::ScalarEngine scalar;
  call.attend(engine, out, lse);
  call.attend(scalar, expected, expected_lse);
  for (std::size_t i = 0; i < out.numbers().size(); ++i) {
    const float x = out.numbers()[i];
    const float y = expected.numbers()[i];
    REQUIRE(std::isnan(x) == std::isnan(y));
    if (!std::isnan(x)) REQUIRE((x == y || std::abs(x - y) <= bound));
  }
  for (std::size_t i = 0; i < lse.size(); ++i) {
    REQUIRE(std::isnan(lse[i]) == std::isnan(expected_lse[i]));
    if (!std::isnan(lse[i])) {
      REQUIRE(largest_relative({lse[i]}, {expected_lse[i]}) <= tolerance_of_log_sum_exp);
    }
  }
}

TEST_CASE("NaN and infinity affect the queries that see them, and no others") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  for (const std::size_t tokens : std::initializer_list<std::size_t>{1, 3, 30}) {
    for (const std::int64_t window : {kvpolicy::unlimited_window, std::int64_t{10}, std::int64_t{70}}) {
      CAPTURE(tokens);
      CAPTURE(window);
      for (const std::size_t row : std::initializer_list<std::size_t>{0, 97, 100, 110, 149}) {
        CAPTURE(row);
        for (const float number : {nan, infinity, -infinity}) {
          compare_special(tokens, 100, window,
                          [&](auto&, auto& head) { head.values(0).overwrite(row, 64, number); });
        }
        compare_special(tokens, 100, window,
                        [&](auto&, auto& head) { head.keys(0).overwrite(row, 64, nan); });
        // Logits become +infinity or -infinity, by the sign of a query's sum.
        compare_special(tokens, 100, window, [&](auto& call, auto& head) {
          call.queries.fill([](std::size_t token, std::size_t q_head, std::size_t) {
            return (token + q_head) % 2 == 0 ? 0.5F : -0.5F;
          });
          head.keys(0).overwrite(row, 64, infinity);
        });
      }
      compare_special(tokens, 100, window, [&](auto& call, auto&) { call.queries.at(0, 1, 5) = nan; });
      for (const float sink : {nan, infinity, -infinity}) {
        compare_special(tokens, 100, window,
                        [&](auto& call, auto&) { call.attention_sink_bias.assign(4, sink); });
      }
    }
  }
}

TEST_CASE("logits with large differences") {
  // Logits differ by hundreds between rows and row tiles, so the running maximum changes late and
  // often. The rounding of such a logit is 1e-4, and so is that of its weight.
  for (const std::size_t tokens : std::initializer_list<std::size_t>{1, 30}) {
    compare_special(
        tokens, 149, kvpolicy::unlimited_window, [&](auto& call, auto&) { call.options.scale = 40.0F; },
        2e-3);
  }
}

TEST_CASE("a head_dim that is not a multiple of 8 is refused") {
  std::vector<float> query(20);
  std::vector<float> out(1);
  const kvpolicy::Plane plane{.base = reinterpret_cast<const std::byte*>(query.data()), .row_stride = 96};
  kvpolicy::cpu::Engine<> engine;
  CHECK(test::contains(test::thrown<kvpolicy::ShapeError>([&] { engine.score(plane, query, out); }),
                       "head_dim is 20"));
}

}  // namespace
