// SPDX-License-Identifier: Apache-2.0
//
// Attention of many queries in every unit that can multiply bfloat16, compared with attention in
// double, within the bounds that cpu::Bfloat16Products states. Tiles are emulated; if the processor has
// them, the real ones run too.
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/scalar_engine.hpp>
#include <kvpolicy/cpu/engine.hpp>

#include "cache/read_oracle.hpp"
#include "cpu/emulated_tiles.hpp"
#include "cpu/random_layer.hpp"
#include "support/compare.hpp"

namespace {
using namespace kvpolicy;
using cpu::Bfloat16Products;
using cpu::MatrixUnit;
using test::below;
using test::Random;
using test::Tensor;

// As in engine_test.cpp: the error of both kinds of products in float.
constexpr double tolerance_to_double = 1.5e-5;
constexpr double tolerance_of_log_sum_exp = 6e-6;

template <MatrixUnit Unit, Bfloat16Products Allowed, class TileRegisters = test::EmulatedTiles>
struct Forced : cpu::DefaultTuning {
  static constexpr std::size_t stream_queries = 1;
  static constexpr std::size_t task_weight = 1;
  static constexpr Bfloat16Products bfloat16_products = Allowed;
  using Tiles = TileRegisters;
  static MatrixUnit matrix_unit() { return Unit; }
};
template <class Base>
struct OddSizes : Base {
  static constexpr std::size_t tile_rows = 7;
  static constexpr std::size_t tile_queries = 42;
  static constexpr std::size_t paired_queries = 106;  // strips of 64 and 48
};

constexpr auto where_exact = Bfloat16Products::where_exact;
constexpr auto always = Bfloat16Products::always;
using TilesExactly = Forced<MatrixUnit::tiles, where_exact>;
using TilesAlways = Forced<MatrixUnit::tiles, always>;
using VectorsExactly = Forced<MatrixUnit::bfloat16_vectors, where_exact>;
using VectorsAlways = Forced<MatrixUnit::bfloat16_vectors, always>;
using InFloat = Forced<MatrixUnit::float_vectors, always>;

// Calls visit.operator()<Tuning>() for each way of computing products that this processor has.
template <class Visit>
void for_each_unit(Visit visit) {
  visit.template operator()<InFloat>();
  visit.template operator()<TilesExactly>();
  visit.template operator()<TilesAlways>();
  visit.template operator()<OddSizes<TilesAlways>>();
  if (cpu::x86::BFloat16Vectors::available()) {
    visit.template operator()<VectorsExactly>();
    visit.template operator()<VectorsAlways>();
    visit.template operator()<OddSizes<VectorsAlways>>();
  }
  if (cpu::x86::AmxTiles::available()) {
    visit.template operator()<Forced<MatrixUnit::tiles, where_exact, cpu::x86::AmxTiles>>();
    visit.template operator()<Forced<MatrixUnit::tiles, always, cpu::x86::AmxTiles>>();
  }
}

constexpr RowFormat bfloat16_rows{.encoding = Encoding::bfloat16};

// Heads mostly of bfloat16 rows.
template <class Q>
test::RandomCall<Q> random_prefill(Random& random, std::size_t kv_heads, std::size_t group,
                                   std::size_t head_dim, std::size_t tokens) {
  test::RandomCall<Q> call{random, kv_heads, group, head_dim, tokens};
  auto formats = test::all_formats(head_dim);
  std::erase_if(formats,
                [&](const RowFormat& format) { return format.group == head_dim || format.hadamard; });
  call.heads.clear();
  for (std::size_t i = 0; i < kv_heads; ++i) {
    auto& head = call.heads.emplace_back(head_dim);
    const std::size_t segments = 1 + below(random, 3);
    for (std::size_t j = 0; j < segments; ++j) {
      const auto format = [&] {
        return below(random, 6) == 0 ? test::one_of(random, formats) : bfloat16_rows;
      };
      const std::size_t rows = test::one_of(random, test::hard_sizes);
      const auto start = std::max<std::int64_t>(0, call.first_position +
                                                       static_cast<std::int64_t>(below(random, tokens + 4)) -
                                                       static_cast<std::int64_t>(rows));
      const RowFormat keys = format();
      head.add(random, keys, format(), rows, start, call.first_position, {});
    }
  }
  call.bind();
  return call;
}

struct Result {
  std::vector<float> out;  // [tokens, q_heads, head_dim]
  std::vector<float> log_sum_exp;
};

template <class Tuning, class Out, class Call>
Result attend(Call& call, std::size_t head_dim) {
  const std::size_t q_heads = call.heads.size() * call.group;
  Tensor<Out> out{call.queries.tokens(), q_heads, head_dim, test::Layout::padded};
  Result result{{}, std::vector<float>(call.queries.tokens() * q_heads)};
  cpu::Engine<cpu::SerialFor, Tuning> engine;
  call.attend(engine, out, result.log_sum_exp);
  REQUIRE(out.guards_intact());
  for (std::size_t token = 0; token < call.queries.tokens(); ++token) {
    for (std::size_t head = 0; head < q_heads; ++head) {
      const auto row = out.row(token, head);
      result.out.insert(result.out.end(), row.begin(), row.end());
    }
  }
  return result;
}

// Formats of quantised rows that the units multiply: with one scale, and others, which are decoded before.
template <class Number>
RowFormat random_codes(Random& random, std::size_t channels, Number several) {
  const Encoding encoding = code_encoding(test::one_of(random, std::vector<std::size_t>{2, 3, 4, 5, 6, 8}));
  if (below(random, 2) == 0) return {encoding, Granularity::per_token, channels, below(random, 4) == 0};
  return several(encoding);
}

// A layer of quantised rows.
template <class Q>
test::RandomCall<Q> random_quantized(Random& random, std::size_t group, std::size_t head_dim,
                                     std::size_t tokens) {
  test::RandomCall<Q> call{random, 1, group, head_dim, tokens};
  call.heads.clear();
  auto& head = call.heads.emplace_back(head_dim);
  const auto in_groups = [&](Encoding encoding) {
    return RowFormat{encoding, Granularity::per_token, head_dim % 32 == 0 ? 32UL : 16UL};
  };
  for (int i = 0; i < 3; ++i) {
    const RowFormat keys = random_codes(random, head_dim, [&](Encoding encoding) {
      RowFormat format =
          below(random, 2) == 0 ? RowFormat{encoding, Granularity::per_channel, 16} : in_groups(encoding);
      format.hadamard = below(random, 2) == 0;
      return format;
    });
    const RowFormat values = random_codes(random, head_dim, in_groups);
    const std::size_t rows = test::one_of(random, test::hard_sizes);
    head.add(random, keys, values, rows, std::max<std::int64_t>(0, call.first_position - 100),
             call.first_position, {});
  }
  call.bind();
  return call;
}

// The largest share of the bounds that was needed.
double worst_share = 0;
double worst_exact = 0;

// An upper bound of the range of a row's numbers and of its codes, counted from their middle.
double range_of(const std::vector<double>& row) {
  const auto [least, largest] = std::ranges::minmax(row);
  return 1.4 * (largest - least);  // with 2 bits the middle of the 4 codes is 2 from the smallest
}

// A row rotated, or rotated back.
std::vector<double> turned(std::vector<double> row) {
  test::turn(row);
  return row;
}

// The sum of the magnitudes of the products of a query with a key, or with its codes counted from their middle.
double magnitude_of(const std::vector<double>& query, const std::vector<double>& key, bool codes) {
  const double range = codes ? range_of(key) : 0.0;
  double sum = 0;
  for (std::size_t i = 0; i < key.size(); ++i) sum += std::abs(query[i]) * std::max(range, std::abs(key[i]));
  return sum;
}

// Checks one query's outputs and log-sum-exp against the bounds of `allowed`.
template <class Out, class Call>
void check_query(const Call& call, const Result& result, std::size_t head_dim, std::size_t token,
                 std::size_t head, bool narrow, Bfloat16Products allowed, bool bfloat16_queries,
                 bool quantized) {
  const std::size_t q_heads = call.heads.size() * call.group;
  oracle::Options options;
  options.scale =
      static_cast<double>(call.options.scale.value_or(1.0F / std::sqrt(static_cast<float>(head_dim))));
  options.softcap = static_cast<double>(call.options.softcap);
  if (!call.attention_sink_bias.empty())
    options.sink_logit = static_cast<double>(call.attention_sink_bias[head]);
  const auto query = call.queries.row_of_doubles(token, head);
  const auto rows =
      call.heads[head / call.group].seen_from(call.first_position + static_cast<std::int64_t>(token));
  std::vector<const oracle::Row*> list;
  for (const auto& row : rows) list.push_back(&row);
  const auto truth = oracle::attend(query, list, options);
  const auto shares = oracle::probabilities(query, list, options);

  double logit_error = 0;
  const auto& rows_of_head = call.heads[head / call.group];
  const bool exact_queries = !narrow || (bfloat16_queries && !rows_of_head.is_rotated());
  const bool exact_keys = !narrow || !rows_of_head.is_quantized();
  const bool two_terms = rows_of_head.is_quantized() || rows_of_head.is_in_half();
  if (!exact_queries || !exact_keys) {
    const std::vector<double> turned_query = turned(query);
    for (const auto& row : rows) {
      double magnitude = magnitude_of(query, row.key, !exact_keys);
      // Rotated keys are multiplied as they are, or rotated back.
      if (!exact_keys) magnitude = std::max(magnitude, magnitude_of(turned_query, turned(row.key), true));
      double share = allowed == always && !exact_queries ? 0x1p-8 : 0x1p-16;
      if (!exact_queries && !exact_keys) share += 0x1p-16;
      logit_error = std::max(logit_error, share * std::abs(options.scale) * magnitude);
    }
  }
  const bool rounded_weights = narrow && (allowed == always || std::is_same_v<Out, bfloat16>);
  double ranges = 0;
  for (std::size_t row = 0; quantized && row < rows.size(); ++row)
    ranges += shares[row] * range_of(rows[row].value);
  for (std::size_t i = 0; i < head_dim; ++i) {
    double magnitude = ranges;
    for (std::size_t row = 0; !quantized && row < rows.size(); ++row)
      magnitude += shares[row] * std::abs(rows[row].value[i]);
    // Values of two terms leave out their product with the weights' second terms.
    const double weight_error = (rounded_weights ? 0x1p-8
                                 : narrow        ? (two_terms ? 0x1p-15 : 0x1p-16)
                                                 : 0.0) +
                                std::expm1(2 * logit_error);
    const double rounding =
        std::is_same_v<Out, bfloat16> ? 0x1p-8 * (std::abs(truth.out[i]) + magnitude * weight_error) : 0.0;
    const double bound = tolerance_to_double + magnitude * weight_error + rounding;
    const double error =
        std::abs(static_cast<double>(result.out[(token * q_heads + head) * head_dim + i]) - truth.out[i]);
    REQUIRE(error <= bound);
    worst_share = std::max(worst_share, error / bound);
    if (!rounded_weights && !std::is_same_v<Out, bfloat16>) worst_exact = std::max(worst_exact, error);
  }
  const double lse = static_cast<double>(result.log_sum_exp[token * q_heads + head]);
  const double off = lse == truth.log_sum_exp ? 0.0 : std::abs(lse - truth.log_sum_exp);
  REQUIRE(off <= logit_error + tolerance_of_log_sum_exp * std::max(1.0, std::abs(truth.log_sum_exp)));
}

template <class Q, class Out>
void check_prefill(Random& random, std::size_t group, std::size_t head_dim, std::size_t tokens,
                   bool quantized = false) {
  CAPTURE(group);
  CAPTURE(head_dim);
  CAPTURE(tokens);
  auto call = quantized ? random_quantized<Q>(random, group, head_dim, tokens)
                        : random_prefill<Q>(random, 1 + below(random, 2), group, head_dim, tokens);
  const std::size_t q_heads = call.heads.size() * group;
  std::vector<std::pair<std::size_t, std::size_t>> samples{{0, 0}, {tokens - 1, q_heads - 1}};
  for (int i = 0; i < 3; ++i) samples.emplace_back(below(random, tokens), below(random, q_heads));
  for_each_unit([&]<class Tuning>() {
    CAPTURE(cpu::name_of(Tuning::matrix_unit()));
    const Result result = attend<Tuning, Out>(call, head_dim);
    const bool narrow = Tuning::matrix_unit() != MatrixUnit::float_vectors;
    for (const auto& sample : samples) {
      check_query<Out>(call, result, head_dim, sample.first, sample.second, narrow, Tuning::bfloat16_products,
                       std::is_same_v<Q, bfloat16>, quantized);
    }
    const Result again = attend<Tuning, Out>(call, head_dim);
    REQUIRE(test::same_bits(result.out, again.out));
    REQUIRE(test::same_bits(result.log_sum_exp, again.log_sum_exp));
  });
}

TEST_CASE("prefill in every unit is attention in double within the stated bounds") {
  Random random{61};
  test::EmulatedTiles::products = 0;
  const std::vector<std::size_t> token_counts{2, 3, 7, 13, 16, 17, 31, 33, 64, 65, 101};
  for (int round = 0; round < 60; ++round) {
    CAPTURE(round);
    const std::size_t group = 1 + below(random, 8);
    const std::size_t head_dim = 16 * (1 + below(random, round % 4 == 0 ? 16 : 8));
    const std::size_t tokens = test::one_of(random, token_counts);
    switch (below(random, 4)) {
      case 0: check_prefill<float, float>(random, group, head_dim, tokens); break;
      case 1: check_prefill<bfloat16, float>(random, group, head_dim, tokens); break;
      case 2: check_prefill<float, bfloat16>(random, group, head_dim, tokens); break;
      default: check_prefill<bfloat16, bfloat16>(random, group, head_dim, tokens);
    }
  }
  MESSAGE("of the bounds ", worst_share, " is used; largest error where nothing is rounded ", worst_exact);
  CHECK(test::EmulatedTiles::products > 10000);
}

TEST_CASE("the same for quantised rows") {
  Random random{68};
  for (int round = 0; round < 40; ++round) {
    CAPTURE(round);
    const std::size_t group = 1 + below(random, 8);
    const std::size_t head_dim = 16 * (1 + below(random, 16));
    const std::size_t tokens = 2 + below(random, 60);
    if (round % 2 == 0) {
      check_prefill<bfloat16, bfloat16>(random, group, head_dim, tokens, true);
    } else {
      check_prefill<float, float>(random, group, head_dim, tokens, true);
    }
  }
}

TEST_CASE("a call with 512 tokens") {
  Random random{62};
  check_prefill<bfloat16, bfloat16>(random, 4, 128, 512);
  check_prefill<float, float>(random, 1, 64, 509);
}

TEST_CASE("a call is computed in bfloat16 only if its numbers allow it") {
  Random random{63};
  const auto products_of = [&]<class Tuning, class Q, class Out>(const RowFormat& keys,
                                                                 const RowFormat& values) {
    test::RandomCall<Q> call{random, 1, 4, 64, 20};
    call.first_position = 100;
    call.heads.clear();
    call.heads.emplace_back(64).add(random, keys, values, 100, 0, 100,
                                    {.runs = false, .positions = false, .window = false, .rotation = false});
    call.bind();
    test::EmulatedTiles::products = 0;
    (void)attend<Tuning, Out>(call, 64);
    return test::EmulatedTiles::products;
  };
  const RowFormat in_float{};
  const RowFormat in_half{.encoding = Encoding::float16};
  // 80 queries are 5 tiles. Rows come in row tiles of 64 and 36, which are 4 and 3 AMX tiles. 64
  // channels are 2 AMX tiles of pairs or 4 of columns; both row tiles are 2 AMX tiles of pairs of rows.
  constexpr std::size_t keys = 5 * (4 + 3) * 2;
  constexpr std::size_t values = 5 * 4 * (2 + 2);
  CHECK(products_of.operator()<TilesExactly, bfloat16, bfloat16>(bfloat16_rows, bfloat16_rows) ==
        keys + values);
  CHECK(products_of.operator()<TilesExactly, bfloat16, float>(bfloat16_rows, bfloat16_rows) ==
        keys + 2 * values);
  CHECK(products_of.operator()<TilesExactly, float, bfloat16>(bfloat16_rows, bfloat16_rows) ==
        2 * keys + values);
  CHECK(products_of.operator()<TilesExactly, float16, float16>(bfloat16_rows, bfloat16_rows) ==
        2 * (keys + values));
  CHECK(products_of.operator()<TilesAlways, float, float>(bfloat16_rows, bfloat16_rows) == keys + values);
  CHECK(products_of.operator()<TilesExactly, bfloat16, bfloat16>(in_float, bfloat16_rows) == values);
  CHECK(products_of.operator()<TilesAlways, bfloat16, bfloat16>(in_float, in_float) == 0);
  // Rows in half are two terms, and keys leave no product out.
  CHECK(products_of.operator()<TilesExactly, bfloat16, bfloat16>(in_half, in_half) == 2 * keys + 2 * values);
  CHECK(products_of.operator()<TilesExactly, float16, float16>(in_half, in_half) == 4 * keys + 3 * values);
  CHECK(products_of.operator()<TilesAlways, bfloat16, bfloat16>(in_half, in_float) == 2 * keys);
  const RowFormat codes{Encoding::uint4, Granularity::per_token, 64};
  const RowFormat grouped{Encoding::uint4, Granularity::per_token, 32};
  CHECK(products_of.operator()<TilesExactly, bfloat16, bfloat16>(codes, codes) == keys + values);
  const RowFormat channels{Encoding::uint3, Granularity::per_channel, 16};
  // Keys with several scales are split into two terms. Of two terms on both sides, three products count.
  CHECK(products_of.operator()<TilesExactly, bfloat16, bfloat16>(grouped, codes) == 2 * keys + values);
  CHECK(products_of.operator()<TilesExactly, bfloat16, bfloat16>(channels, codes) == 2 * keys + values);
  CHECK(products_of.operator()<TilesExactly, float, bfloat16>(channels, codes) == 3 * keys + values);
  // Rotated keys are rotated back where that leaves queries exact; their codes are not, nor where queries have two
  // terms anyway.
  RowFormat turned = channels;
  turned.hadamard = true;
  CHECK(products_of.operator()<TilesExactly, bfloat16, bfloat16>(turned, codes) == 2 * keys + values);
  CHECK(products_of.operator()<TilesExactly, float, bfloat16>(turned, codes) == 3 * keys + values);
  turned = codes;
  turned.hadamard = true;
  CHECK(products_of.operator()<TilesExactly, bfloat16, bfloat16>(turned, codes) == 2 * keys + values);
  CHECK(products_of.operator()<TilesAlways, float, float>(channels, codes) == 2 * keys + values);
  // Values with several scales are rounded where weights are, and split where those are.
  CHECK(products_of.operator()<TilesExactly, bfloat16, bfloat16>(codes, grouped) == keys + values);
  CHECK(products_of.operator()<TilesExactly, bfloat16, float>(codes, grouped) == keys + 3 * values);
  CHECK(products_of.operator()<TilesAlways, float, float>(codes, grouped) == keys + values);
  using TilesNever = Forced<MatrixUnit::tiles, Bfloat16Products::never>;
  CHECK(products_of.operator()<TilesNever, bfloat16, bfloat16>(bfloat16_rows, bfloat16_rows) == 0);

  constexpr auto vectors = MatrixUnit::bfloat16_vectors;
  constexpr auto narrow = Encoding::bfloat16;
  CHECK(cpu::ProductPlan{where_exact, vectors, narrow, narrow}.is_narrow());
  CHECK_FALSE(cpu::ProductPlan{where_exact, vectors, narrow, Encoding::float32}.is_narrow());
  CHECK_FALSE(cpu::ProductPlan{where_exact, vectors, Encoding::float16, narrow}.is_narrow());
  CHECK(cpu::ProductPlan{always, vectors, Encoding::float16, Encoding::float32}.is_narrow());
  CHECK_FALSE(cpu::ProductPlan{where_exact, vectors, narrow, narrow}.pays(2));  // rotated queries
}

TEST_CASE("the unit that is in use") {
  const MatrixUnit unit = cpu::matrix_unit();
  MESSAGE("this machine multiplies bfloat16 in ", cpu::name_of(unit));
  CHECK(unit == cpu::matrix_unit());
  CHECK((unit == MatrixUnit::tiles) == cpu::x86::AmxTiles::available());
  if (unit == MatrixUnit::bfloat16_vectors) CHECK(cpu::x86::BFloat16Vectors::available());
  CHECK(cpu::name_of(MatrixUnit::float_vectors) == "float vectors");
  CHECK(cpu::name_of(MatrixUnit::bfloat16_vectors) == "bfloat16 vectors");
  CHECK(cpu::name_of(MatrixUnit::tiles) == "tiles");
}

// bfloat16 rows at consecutive positions, some of whose numbers are special.
template <class Tuning, class Change>
void compare_special(std::size_t tokens, std::int64_t window, Change change) {
  Random random{64};
  test::RandomCall<float> call{random, 1, 4, 64, tokens};
  call.attention_sink_bias.clear();
  call.options = {};
  call.first_position = 100;
  call.heads.clear();
  auto& head = call.heads.emplace_back(64);
  head.add(random, bfloat16_rows, bfloat16_rows, 150, 0, 0,
           {.runs = false, .positions = false, .window = false, .rotation = false});
  head.segment(0).window = window;
  change(call, head);
  call.bind();
  const Result result = attend<Tuning, float>(call, 64);
  Tensor<float> expected{tokens, 4, 64};
  std::vector<float> log_sum_exp(tokens * 4);
  ScalarEngine scalar;
  call.attend(scalar, expected, log_sum_exp);
  const double bound = Tuning::bfloat16_products == always ? 5e-2 : 1e-4;
  for (std::size_t token = 0; token < tokens; ++token) {
    for (std::size_t q_head = 0; q_head < 4; ++q_head) {
      for (std::size_t i = 0; i < 64; ++i) {
        const float x = result.out[(token * 4 + q_head) * 64 + i];
        const float y = expected.number(token, q_head, i);
        REQUIRE(std::isnan(x) == std::isnan(y));
        if (!std::isnan(x)) REQUIRE((x == y || std::abs(static_cast<double>(x - y)) <= bound));
      }
      const float x = result.log_sum_exp[token * 4 + q_head];
      const float y = log_sum_exp[token * 4 + q_head];
      REQUIRE(std::isnan(x) == std::isnan(y));
      if (!std::isnan(x)) REQUIRE((x == y || std::abs(static_cast<double>(x - y)) <= bound));
    }
  }
}

TEST_CASE("logits far beyond what weights can bear choose the row with the largest one") {
  for_each_unit([&]<class Tuning>() {
    CAPTURE(cpu::name_of(Tuning::matrix_unit()));
    for (const float number : {300.0F, 24576.0F, 40960.0F, 65280.0F, 1e9F, -40960.0F}) {
      CAPTURE(number);
      Random random{67};
      test::RandomCall<float> call{random, 1, 4, 64, 30};
      call.attention_sink_bias.clear();
      call.options = {};
      call.first_position = 100;
      call.heads.clear();
      auto& head = call.heads.emplace_back(64);
      head.add(random, bfloat16_rows, bfloat16_rows, 100, 0, 0,
               {.runs = false, .positions = false, .window = false, .rotation = false});
      head.keys(0).overwrite(57, 64, number);
      call.queries.fill([&](auto...) { return number; });
      call.bind();
      const Result result = attend<Tuning, float>(call, 64);
      const auto rows = head.seen_from(129);
      const double logit = 8.0 * static_cast<double>(number) * static_cast<double>(number);
      for (std::size_t query = 0; query < 30 * 4; ++query) {
        for (std::size_t i = 0; i < 64; ++i) {
          REQUIRE(static_cast<double>(result.out[query * 64 + i]) ==
                  doctest::Approx(rows[57].value[i]).epsilon(0.01));
        }
        REQUIRE(static_cast<double>(result.log_sum_exp[query]) == doctest::Approx(logit).epsilon(0.01));
      }
    }
  });
}

TEST_CASE("NaN and infinity in bfloat16 rows affect the queries that see them, and no others") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  for_each_unit([&]<class Tuning>() {
    CAPTURE(cpu::name_of(Tuning::matrix_unit()));
    for (const std::size_t tokens : std::initializer_list<std::size_t>{3, 30}) {
      for (const std::int64_t window : {unlimited_window, std::int64_t{10}, std::int64_t{70}}) {
        CAPTURE(tokens);
        CAPTURE(window);
        const auto compare = [&](auto change) { compare_special<Tuning>(tokens, window, change); };
        for (const std::size_t row : std::initializer_list<std::size_t>{0, 97, 100, 101, 149}) {
          CAPTURE(row);
          for (const float number : {nan, infinity, -infinity}) {
            compare([&](auto&, auto& head) { head.values(0).overwrite(row, 64, number); });
          }
          compare([&](auto&, auto& head) { head.keys(0).overwrite(row, 64, nan); });
          compare([&](auto& call, auto& head) {  // logits of +infinity or -infinity
            call.queries.fill([](std::size_t token, std::size_t q_head, std::size_t) {
              return (token + q_head) % 2 == 0 ? 0.5F : -0.5F;
            });
            head.keys(0).overwrite(row, 64, infinity);
          });
        }
        compare([&](auto& call, auto&) { call.queries.at(0, 1, 5) = nan; });
        compare([&](auto& call, auto&) { call.queries.at(1, 2, 63) = infinity; });
        compare([&](auto& call, auto&) { call.attention_sink_bias.assign(4, nan); });
      }
    }
  });
}

TEST_CASE("earlier calls of an engine do not affect later ones") {
  // The next call's keys of 16 channels are padded to whole tiles where the keys of 32 channels had
  // NaN.
  Random random{67};
  const auto call_of = [&](std::size_t head_dim) {
    test::RandomCall<bfloat16> call{random, 1, 2, head_dim, 20};
    call.first_position = 100;
    call.heads.clear();
    call.heads.emplace_back(head_dim).add(
        random, bfloat16_rows, bfloat16_rows, 100, 0, 0,
        {.runs = false, .positions = false, .window = false, .rotation = false});
    return call;
  };
  auto before = call_of(32);
  for (std::size_t row = 0; row < 100; ++row) {
    before.heads[0].keys(0).overwrite(row, 32, std::numeric_limits<float>::quiet_NaN());
  }
  before.bind();
  auto call = call_of(16);
  call.bind();
  for_each_unit([&]<class Tuning>() {
    CAPTURE(cpu::name_of(Tuning::matrix_unit()));
    const Result expected = attend<Tuning, bfloat16>(call, 16);
    cpu::Engine<cpu::SerialFor, Tuning> engine;
    Tensor<bfloat16> out{20, 2, 32};
    std::vector<float> log_sum_exp(40);
    before.attend(engine, out, log_sum_exp);
    Tensor<bfloat16> next{20, 2, 16};
    call.attend(engine, next, log_sum_exp);
    REQUIRE(test::same_bits(log_sum_exp, expected.log_sum_exp));
    for (std::size_t i = 0; i < 40; ++i) {
      const auto row = next.row(i / 2, i % 2);
      REQUIRE(test::same_bits(
          row, std::vector<float>(expected.out.begin() + static_cast<std::ptrdiff_t>(i * 16),
                                  expected.out.begin() + static_cast<std::ptrdiff_t>(i * 16 + 16))));
    }
  });
}

TEST_CASE("a query that becomes infinite only by rounding stays finite") {
  test::EmulatedTiles::products = 0;
  Random random{65};
  test::RandomCall<float> call{random, 1, 2, 32, 20};
  call.attention_sink_bias.clear();
  call.options = {};
  call.first_position = 100;
  call.heads.clear();
  auto& head = call.heads.emplace_back(32);
  head.add(random, bfloat16_rows, bfloat16_rows, 100, 0, 0,
           {.runs = false, .positions = false, .window = false, .rotation = false});
  for (std::size_t row = 0; row < 100; ++row) head.keys(0).overwrite(row, 32, 0.0F);
  call.queries.at(3, 1, 7) = std::numeric_limits<float>::max();
  call.bind();
  const Result result = attend<TilesAlways, float>(call, 32);
  for (const float x : result.log_sum_exp) REQUIRE(x == doctest::Approx(std::log(100.0F)));
  CHECK(test::EmulatedTiles::products > 0);  // products with the values
}

TEST_CASE("observe in every unit equals ScalarEngine") {
  Random random{66};
  for (int round = 0; round < 20; ++round) {
    CAPTURE(round);
    const std::size_t group = 1 + below(random, 8);
    const std::size_t head_dim = 16 * (1 + below(random, 16));
    auto call = random_prefill<bfloat16>(random, 2, group, head_dim, 1 + below(random, 40));
    for (auto& head : call.heads) {  // rotated queries may be rounded
      for (std::size_t i = 0; i < head.segments().size(); ++i) head.segment(i).rotation = {};
    }
    call.bind();
    std::vector<std::vector<float>> sums(2);
    std::vector<std::vector<float>> expected(2);
    std::vector<std::span<float>> views(2);
    const LayerObservation work{ConstTensor{call.queries.view()}, call.first_position, call.segments, views,
                                call.options};
    const auto observe = [&](auto engine, auto& into) {
      for (std::size_t head = 0; head < 2; ++head) {
        into[head].assign(call.heads[head].rows_shown() * group, 5.0F);
        views[head] = into[head];
      }
      engine.observe(work);
    };
    observe(ScalarEngine{}, expected);
    for_each_unit([&]<class Tuning>() {
      CAPTURE(cpu::name_of(Tuning::matrix_unit()));
      observe(cpu::Engine<cpu::SerialFor, Tuning>{}, sums);
      for (std::size_t head = 0; head < 2; ++head) {
        REQUIRE(test::largest_difference(sums[head], expected[head]) <= 2e-5);
      }
    });
  }
}

}  // namespace
