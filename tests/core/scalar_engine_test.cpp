// SPDX-License-Identifier: Apache-2.0
//
// The scalar engine on segments that no policy would show: windows, positions, runs, pages, formats.
#include <doctest/doctest.h>

#include <cmath>
#include <utility>
#include <vector>

#include <kvpolicy/core/rotary.hpp>
#include <kvpolicy/core/scalar_engine.hpp>

#include "support/compare.hpp"
#include "support/oracle.hpp"
#include "support/tensors.hpp"

using namespace kvpolicy;
using test::Random;
using test::Tensor;

namespace {

constexpr std::size_t head_dim = 64;

// Rows [count, 1, head_dim] as a segment.
template <class T>
Segment segment_of(const Tensor<T>& keys, const Tensor<T>& values, std::int64_t position) {
  const auto plane = [](const Tensor<T>& t) {
    return Plane{.format = {.encoding = encoding_of<T>},
                 .base = reinterpret_cast<const std::byte*>(t.view().data),
                 .row_stride = t.view().token_stride * sizeof(T)};
  };
  return {.keys = plane(keys), .values = plane(values), .rows = keys.tokens(), .position = position};
}

template <class T>
oracle::Row row_of(const Tensor<T>& keys, const Tensor<T>& values, std::size_t i, std::int64_t position) {
  return {position, keys.row_of_doubles(i, 0), values.row_of_doubles(i, 0)};
}

struct Work {
  std::vector<Segment> segments;
  AttendOptions options = {};

  // Attends with one query head at `t`; checks the output, the log-sum-exp and the result of `observe`.
  void check(Random& random, std::int64_t t, const std::vector<oracle::Row>& rows) {
    Tensor<float16> q{1, 1, head_dim, test::Layout::padded};
    q.randomize(random);
    Tensor<float> out{1, 1, head_dim, test::Layout::padded};
    std::vector<float> lse(1, NAN);
    const std::span<const Segment> head{segments};
    LayerAttention work{
        ConstTensor{std::as_const(q).view()}, MutableTensor{out.view()}, t, {&head, 1}, options};
    work.options.log_sum_exp = lse;
    ScalarEngine engine;
    engine.attend(work);
    std::vector<const oracle::Row*> read;
    for (const auto& row : rows) read.push_back(&row);
    oracle::Options expected{static_cast<double>(work.scale()), static_cast<double>(options.softcap), {}};
    if (!options.attention_sink_bias.empty())
      expected.sink_logit = static_cast<double>(options.attention_sink_bias[0]);
    const auto query = q.row_of_doubles(0, 0);
    const auto result = oracle::attend(query, read, expected);
    CHECK(test::largest_difference(result.out, out.row(0, 0)) <= 1e-5);
    CHECK(test::largest_difference(std::vector{result.log_sum_exp}, lse) <= 1e-5);
    CHECK(out.guards_intact());

    // Probabilities in the order of the rows shown; hidden rows get none.
    std::size_t shown = 0;
    for (const Segment& s : segments) s.for_each_run([&](const RowRun& run) { shown += run.rows; });
    std::vector<float> sums(shown, 7.0F);
    const std::span<float> sums_view{sums};
    engine.observe({work.queries, t, {&head, 1}, {&sums_view, 1}, options});
    double total = 0;
    for (const float share : sums) total += static_cast<double>(share);
    const auto shares = oracle::probabilities(query, read, expected);
    double expected_total = 0;
    for (const double share : shares) expected_total += share;
    CHECK(total == doctest::Approx(expected_total).epsilon(1e-5));
    std::vector<float> seen;
    for (const float share : sums) {
      if (share != 0.0F) seen.push_back(share);
    }
    CHECK(test::largest_difference(seen, shares) <= 1e-5);
  }
};

}  // namespace

TEST_CASE("a row at p is visible at t if p <= t and p > t - window") {
  static_assert(is_visible(5, 5, 1) && !is_visible(4, 5, 1) && !is_visible(6, 5, 9));
  static_assert(is_visible(0, 1'000'000, unlimited_window));
  Random random{1};
  Tensor<float> keys{9, 1, head_dim}, values{9, 1, head_dim};
  keys.randomize(random);
  values.randomize(random);
  for (const std::int64_t window : {std::int64_t{1}, std::int64_t{3}, std::int64_t{9}, unlimited_window}) {
    for (const std::int64_t t : {9, 10, 14, 18, 19, 40}) {
      Work work{{segment_of(keys, values, 10)}};
      work.segments[0].window = window;
      std::vector<oracle::Row> rows;
      for (std::size_t i = 0; i < 9; ++i) {
        const auto p = static_cast<std::int64_t>(10 + i);
        if (p <= t && (window == unlimited_window || p > t - window))
          rows.push_back(row_of(keys, values, i, p));
      }
      work.check(random, t, rows);
    }
  }
}

TEST_CASE("several segments: element types, runs, positions, scale, softcap, sink bias") {
  Random random{2};
  Tensor<bfloat16> keys{12, 1, head_dim, test::Layout::padded}, values{12, 1, head_dim, test::Layout::padded};
  Tensor<float16> more_keys{4, 1, head_dim}, more_values{4, 1, head_dim};
  keys.randomize(random);
  values.randomize(random);
  more_keys.randomize(random);
  more_values.randomize(random);
  const std::vector<RowRun> runs{{1, 2}, {7, 1}};
  const std::vector<std::int64_t> positions{3, 100, 7, 200};
  Work work{{segment_of(keys, values, 20), segment_of(more_keys, more_values, 0)}};
  work.segments[0].runs = runs;
  work.segments[0].rows = 3;
  work.segments[1].positions = positions.data();
  const std::vector<oracle::Row> rows{row_of(keys, values, 1, 21), row_of(keys, values, 2, 22),
                                      row_of(keys, values, 7, 27), row_of(more_keys, more_values, 0, 3),
                                      row_of(more_keys, more_values, 2, 7)};
  const std::vector<float> sink{0.75F};
  for (int round = 0; round < 8; ++round) {
    work.options = {};
    if ((round & 1) != 0) work.options.scale = -0.3F;
    if ((round & 2) != 0) work.options.softcap = 1.5F;
    if ((round & 4) != 0) work.options.attention_sink_bias = sink;
    work.check(random, 50, rows);
  }
  // Parts of a segment keep their rows' positions.
  work.segments = {segment_of(more_keys, more_values, 0)};
  work.segments[0].positions = positions.data();
  work.segments = {work.segments[0].part(2, 2), work.segments[0].part(0, 1)};
  work.options = {};
  work.check(random, 50, {row_of(more_keys, more_values, 2, 7), row_of(more_keys, more_values, 0, 3)});
}

TEST_CASE("a query that sees nothing gives zeros, and minus infinity") {
  Random random{3};
  Tensor<float> keys{3, 1, head_dim}, values{3, 1, head_dim};
  keys.randomize(random);
  values.randomize(random);
  Work work{{segment_of(keys, values, 10)}};
  work.check(random, 9, {});
  work.segments.clear();
  work.check(random, 9, {});
  const std::vector<float> sink{-2.0F};
  work.options.attention_sink_bias = sink;
  work.check(random, 9, {});
}

TEST_CASE("a rotation moves queries after its latest position to that position") {
  Random random{4};
  const auto frequencies = inverse_frequencies({}, head_dim);
  Tensor<float> keys{3, 1, head_dim}, values{3, 1, head_dim};
  keys.randomize(random);
  values.randomize(random);
  for (const std::int64_t t : {5, 29, 30, 31, 400}) {
    Work work{{segment_of(keys, values, 0)}};
    work.segments[0].rotation = {frequencies.data(), 30};
    std::vector<oracle::Row> rows;
    for (std::size_t i = 0; i < 3; ++i) {
      rows.push_back(row_of(keys, values, i, static_cast<std::int64_t>(i)));
      rows.back().key =
          oracle::turn(rows.back().key, static_cast<double>(std::max<std::int64_t>(t - 30, 0)), 10000.0);
    }
    work.check(random, t, rows);
  }
}

TEST_CASE("score is the dot product with each row") {
  Random random{5};
  Tensor<bfloat16> rows{5, 1, head_dim};
  rows.randomize(random);
  std::vector<float> query(head_dim);
  for (float& x : query) x = test::normal(random);
  std::vector<float> out(4, NAN);
  ScalarEngine{}.score(segment_of(rows, rows, 0).keys.from(1), query, out);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const double expected = oracle::logit({query.begin(), query.end()}, rows.row_of_doubles(i + 1, 0), {});
    CHECK(static_cast<double>(out[i]) == doctest::Approx(expected).epsilon(1e-4));
  }
}
