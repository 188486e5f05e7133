// SPDX-License-Identifier: Apache-2.0
//
// Compares shares of single heads with attention in double and plain loops over the rows that a head keeps, of which
// its policy's definition says which they are. Layer 0 has the same queries, keys and values whatever the plan.
#include <identify/head_shares.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/plan/low_bits.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>
#include <kvpolicy/policy/key_diff_scorer.hpp>
#include <model/dense_attention.hpp>

#include "byte_model.hpp"

using namespace kvpolicy;
using namespace kvpolicy::tools;

namespace {

using Dense = DenseStorage<bfloat16>;
using Settings = std::vector<HeadSettings<bfloat16>>;
using Rows = std::vector<std::size_t>;
constexpr std::size_t dim = 64, q_heads = 4, kv_heads = 2, group = q_heads / kv_heads;

const TextModel& model() {
  static const TextModel made = random_text_model();
  return made;
}

SplitText text(std::size_t context, std::size_t later, std::uint32_t bits) {
  std::vector<int> tokens;
  for (std::size_t i = 0; i < context + later; ++i) {
    bits = bits * 1664525U + 1013904223U;
    tokens.push_back(static_cast<int>(bits >> 24));
  }
  const auto middle = tokens.begin() + static_cast<std::ptrdiff_t>(context);
  return {{tokens.begin(), middle}, {middle, tokens.end()}};
}

// Rounds to the nearest bfloat16, as rows are kept.
float rounded(float number) {
  const auto bits = std::bit_cast<std::uint32_t>(number);
  return std::bit_cast<float>((bits + 0x7fffU + (bits >> 16 & 1U)) & 0xffff0000U);
}

// The queries, keys and values of layer 0: [tokens, heads, dim].
struct FirstLayer {
  std::vector<float> queries, keys, values;

  explicit FirstLayer(const SplitText& split) {
    std::vector<int> tokens = split.context;
    tokens.insert(tokens.end(), split.later.begin(), split.later.end());
    reference::DenseCache cache{model().config()};
    const reference::AttendFn dense = cache.attend();
    static_cast<void>(model().llama().forward(
        tokens, 0,
        [&](std::size_t layer, TensorView<const float> q, TensorView<const float> k,
            TensorView<const float> v, TensorView<float> out) {
          if (layer == 0) {
            queries.assign(q.data, q.data + q.tokens * q.heads * dim);
            keys.assign(k.data, k.data + k.tokens * k.heads * dim);
            values.assign(v.data, v.data + v.tokens * v.heads * dim);
          }
          dense(layer, q, k, v, out);
        },
        reference::LogitsOf::none));
    for (auto* rows : {&keys, &values}) {
      for (float& number : *rows) number = rounded(number);
    }
  }

  [[nodiscard]] double key(std::size_t row, std::size_t head, std::size_t channel) const {
    return static_cast<double>(keys[(row * kv_heads + head) * dim + channel]);
  }

  // The weights that a query gives `rows`, so that all rows of the text up to it sum to 1.
  [[nodiscard]] std::vector<double> weights(std::size_t token, std::size_t q_head, const Rows& rows) const {
    const auto weight = [&](std::size_t row) {
      double logit = 0;
      for (std::size_t i = 0; i < dim; ++i) {
        logit +=
            static_cast<double>(queries[(token * q_heads + q_head) * dim + i]) * key(row, q_head / group, i);
      }
      return std::exp(logit / std::sqrt(static_cast<double>(dim)));
    };
    double sum = 0;
    for (std::size_t row = 0; row <= token; ++row) sum += weight(row);
    std::vector<double> found;
    for (const std::size_t row : rows) found.push_back(weight(row) / sum);
    return found;
  }

  [[nodiscard]] std::vector<double> output(std::size_t token, std::size_t q_head, const Rows& rows) const {
    const std::vector<double> own = weights(token, q_head, rows);
    const double sum = std::accumulate(own.begin(), own.end(), 0.0);
    std::vector<double> out(dim, 0.0);
    for (std::size_t n = 0; n < rows.size(); ++n) {
      for (std::size_t i = 0; i < dim; ++i) {
        out[i] += own[n] / sum * static_cast<double>(values[(rows[n] * kv_heads + q_head / group) * dim + i]);
      }
    }
    return out;
  }
};

Rows all_rows(std::size_t count) {
  Rows rows(count);
  std::iota(rows.begin(), rows.end(), std::size_t{0});
  return rows;
}

struct Expected {
  double error = 0;
  double lost = 0;
};

// `rows_at(token)`: the rows that the head has for a later token's query.
template <class RowsAt>
Expected expected(const FirstLayer& layer, const SplitText& split, std::size_t head, RowsAt rows_at) {
  double error = 0, output = 0, lost = 0, queries = 0;
  for (std::size_t token = split.context.size(); token < split.context.size() + split.later.size(); ++token) {
    const Rows rows = rows_at(token);
    for (std::size_t q = head * group; q < (head + 1) * group; ++q) {
      const std::vector<double> exact = layer.output(token, q, all_rows(token + 1));
      const std::vector<double> own = layer.output(token, q, rows);
      for (std::size_t i = 0; i < dim; ++i) {
        error += (own[i] - exact[i]) * (own[i] - exact[i]);
        output += exact[i] * exact[i];
      }
      const std::vector<double> kept = layer.weights(token, q, rows);
      lost += 1.0 - std::accumulate(kept.begin(), kept.end(), 0.0);
      queries += 1;
    }
  }
  return {error / output, lost / queries};
}

bool is_near(double value, double right) { return std::abs(value - right) <= 1e-4 + 0.01 * right; }

// The rows of the context that survive by KeyDiff's definition, and all later ones.
Rows by_key_diff(const FirstLayer& layer, std::size_t head, std::size_t context, std::size_t budget) {
  std::vector<double> mean(dim, 0.0);
  const auto length = [&](std::size_t row) {
    double squares = 0;
    for (std::size_t i = 0; i < dim; ++i) squares += layer.key(row, head, i) * layer.key(row, head, i);
    return std::sqrt(squares);
  };
  for (std::size_t row = 0; row < context; ++row) {
    for (std::size_t i = 0; i < dim; ++i) mean[i] += layer.key(row, head, i) / length(row);
  }
  std::vector<double> cosine(context, 0.0);
  for (std::size_t row = 0; row < context; ++row) {
    for (std::size_t i = 0; i < dim; ++i) cosine[row] += layer.key(row, head, i) * mean[i] / length(row);
  }
  Rows rows = all_rows(context);
  std::ranges::sort(rows, {}, [&](std::size_t row) { return cosine[row]; });
  rows.resize(budget);
  return rows;
}

}  // namespace

TEST_CASE("what a window and a budget lose is what attention in double says over the rows that they keep") {
  const std::vector<SplitText> texts{text(150, 5, 1), text(97, 1, 2)};
  const Settings settings{FullCache<Dense>::Config{},
                          SinkRecentCache<Dense>::Config{.sinks = 3, .recent = 20},
                          HeadBudgetCache<Dense, KeyDiffScorer>::Config{.budget = 40}};
  std::size_t reports = 0;
  double last = 0;
  const auto found = measure_shares(model(), settings, texts, {}, [&](double share) {
    ++reports;
    last = std::max(last, share);
  });
  CHECK(reports == 6);
  CHECK(last == 1.0);
  REQUIRE(found.size() == 3);
  const HeadTable<double> none = mean_of(found[0].error);
  for (const double error : none.values()) CHECK(error == 0.0);
  for (std::size_t t = 0; t < texts.size(); ++t) {
    CAPTURE(t);
    const FirstLayer layer{texts[t]};
    const std::size_t context = texts[t].context.size();
    for (std::size_t head = 0; head < kv_heads; ++head) {
      CAPTURE(head);
      const Expected window = expected(layer, texts[t], head, [&](std::size_t token) {
        Rows rows{0, 1, 2};
        for (std::size_t row = token + 1 - 20; row <= token; ++row) rows.push_back(row);
        return rows;
      });
      const Rows kept = by_key_diff(layer, head, context, 40);
      const Expected budget = expected(layer, texts[t], head, [&](std::size_t token) {
        Rows rows = kept;
        for (std::size_t row = context; row <= token; ++row) rows.push_back(row);
        return rows;
      });
      CHECK(window.lost > 0.1);  // so that the numbers say something
      CHECK(budget.error > 0.01);
      CHECK(is_near(found[1].lost(0, head)[t], window.lost));
      CHECK(is_near(found[1].error(0, head)[t], window.error));
      CHECK(is_near(found[2].lost(0, head)[t], budget.lost));
      CHECK(is_near(found[2].error(0, head)[t], budget.error));
    }
  }
  // The mean is over texts, and tables of what a setting does not have are empty.
  const double mean = (found[1].lost(1, 1)[0] + found[1].lost(1, 1)[1]) / 2;
  CHECK(is_near(mean_of(found[1].lost)(1, 1), mean));
  CHECK(found[0].lost(0, 0).empty());
  CHECK(found[1].rows_read(0, 0).empty());
}

TEST_CASE("the rows that a bound reads: all at 0, and never fewer than hold the rest") {
  const std::vector<SplitText> texts{text(230, 4, 3)};
  const LowBitFormat format = LowBitFormat::of_bounded(model().config().shape(), 8, 16);
  const Settings settings{format.head<bfloat16>()};
  const FirstLayer layer{texts[0]};
  double before = 1.0;
  for (const float epsilon : {0.0F, 0.02F, 0.1F, 0.3F, 1.0F}) {
    CAPTURE(epsilon);
    const auto found = measure_shares(model(), settings, texts, {.epsilon = epsilon});
    REQUIRE(found.size() == 1);
    const double share = found[0].rows_read(0, 0).front();
    CHECK(share <= before);
    before = share;
    for (std::size_t i = 0; i < 4; ++i) {
      CHECK(found[0].unread.values()[i].front() <= static_cast<double>(epsilon) + 1e-6);
      CHECK(found[0].error.values()[i].front() <= (epsilon < 0.05F ? 0.01 : 1.0));
      CHECK(found[0].rows_read.values()[i].front() <= 1.0);
    }
    if (epsilon == 0.0F) CHECK(share == 1.0);
    if (epsilon == 1.0F) CHECK(share < 1.0);
    // From row 4 on, keys are quantised 64 at a time, and 16 rows stay exact: 192 rows are in halves. Whatever chooses
    // units of 8 of them for both queries of a head must choose as many as the query needs that needs most.
    double least = 0;
    for (std::size_t token = 230; token < 234; ++token) {
      double most = 0;
      for (std::size_t q = 0; q < group; ++q) {
        const std::vector<double> weights = layer.weights(token, q, all_rows(token + 1));
        std::vector<double> units(24, 0.0);
        for (std::size_t row = 0; row < 192; ++row) units[row / 8] += weights[row + 4];
        std::ranges::sort(units);
        double left = 0;
        std::size_t unread = 0;
        // A hundredth more than the bound: keys of 8 bits are not those that these weights are of.
        while (unread < 24 && left + units[unread] <= static_cast<double>(epsilon) + 0.01)
          left += units[unread++];
        most = std::max(most, static_cast<double>(24 - unread) / 24);
      }
      least += most / 4;
    }
    CHECK(share >= least);
  }
}

TEST_CASE("what measuring shares refuses") {
  const std::vector<SplitText> texts{text(60, 2, 4)};
  const Settings full{FullCache<Dense>::Config{}};
  CHECK_NOTHROW((void)measure_shares(model(), full, texts));
  CHECK_THROWS_AS((void)measure_shares(model(), full, {}), ConfigError);
  const std::vector<SplitText> nothing_later{text(60, 0, 5)}, no_context{text(0, 3, 5)};
  CHECK_THROWS_AS((void)measure_shares(model(), full, nothing_later), ConfigError);
  CHECK_THROWS_AS((void)measure_shares(model(), full, no_context), ConfigError);
  const Settings together{HeadBudgetCache<Dense>::Config{.budget = 20, .adaptive_in_layer = true}};
  CHECK_THROWS_WITH_AS((void)measure_shares(model(), together, texts), doctest::Contains("compete"),
                       ConfigError);
  const Settings repeated{HeadBudgetCache<Dense, KvZipScorer>::Config{.budget = 20}};
  CHECK_THROWS_WITH_AS((void)measure_shares(model(), repeated, texts), doctest::Contains("scoring pass"),
                       ConfigError);
  // Of 60 rows none has left the residual yet.
  const Settings halves{LowBitFormat::of_bounded(model().config().shape(), 4, 64).head<bfloat16>()};
  CHECK_THROWS_WITH_AS((void)measure_shares(model(), halves, texts), doctest::Contains("too short"),
                       ConfigError);
}
