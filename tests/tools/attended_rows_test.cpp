// SPDX-License-Identifier: Apache-2.0
#include <visualize/attended_rows.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <set>
#include <span>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/core/scalar_engine.hpp>
#include <reference_model/llama.hpp>
#include <reference_model/run.hpp>

using namespace kvpolicy;
using namespace kvpolicy::tools;

namespace attended_rows_test {

const reference::Llama& model() {
  static const auto loaded = reference::Llama::load("tests/model/goldens/gqa2_d80");
  return loaded;
}

std::vector<int> tokens_of_a_text(int count) {
  std::vector<int> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back((i * 7 + i / 5) % 64);
  return tokens;
}

// Plain causal attention in double. probabilities[layer * kv_heads + head][query][row] is the mean
// over the query heads of a KV head.
struct Dense {
  std::vector<std::vector<std::vector<double>>> probabilities;

  explicit Dense(const std::vector<int>& tokens) {
    const ModelShape shape = model().config().shape();
    probabilities.assign(shape.kv_head_count(), {});
    static_cast<void>(
        model().forward(tokens, 0,
                        [&](std::size_t layer, TensorView<const float> q, TensorView<const float> k,
                            TensorView<const float> v, TensorView<float> out) {
                          for (std::size_t query_head = 0; query_head < shape.q_heads; ++query_head) {
                            attend(layer, query_head, q, k, v, out);
                          }
                        }));
  }

  void attend(std::size_t layer, std::size_t query_head, TensorView<const float> q, TensorView<const float> k,
              TensorView<const float> v, TensorView<float> out) {
    const ModelShape shape = model().config().shape();
    const std::size_t group = shape.q_heads / shape.kv_heads;
    const std::size_t head = query_head / group;
    auto& own = probabilities[layer * shape.kv_heads + head];
    own.resize(q.tokens);
    for (std::size_t t = 0; t < q.tokens; ++t) {
      std::vector<double> weights;
      double sum = 0;
      for (std::size_t row = 0; row <= t; ++row) {
        double dot = 0;
        for (std::size_t c = 0; c < shape.head_dim; ++c) {
          dot += double{q.row(t, query_head)[c]} * double{k.row(row, head)[c]};
        }
        weights.push_back(std::exp(dot / std::sqrt(static_cast<double>(shape.head_dim))));
        sum += weights.back();
      }
      own[t].resize(t + 1);
      std::vector<double> result(shape.head_dim);
      for (std::size_t row = 0; row <= t; ++row) {
        const double share = weights[row] / sum;
        own[t][row] += share / static_cast<double>(group);
        for (std::size_t c = 0; c < shape.head_dim; ++c) {
          result[c] += share * double{v.row(row, head)[c]};
        }
      }
      for (std::size_t c = 0; c < shape.head_dim; ++c) {
        out.row(t, query_head)[c] = static_cast<float>(result[c]);
      }
    }
  }
};

// What each query's choice shows of each head, by a cache with the plain engine.
std::vector<std::vector<std::set<std::size_t>>> choices(const SpeculationSetup& setup,
                                                        const std::vector<int>& tokens, std::size_t read) {
  KvCache<bfloat16, ScalarEngine> cache{target_plan(model().config().shape(), setup)};
  std::vector<std::vector<std::set<std::size_t>>> all;
  static_cast<void>(reference::prefill(model(), cache, std::span{tokens}.first(read), 512));
  const ModelShape shape = model().config().shape();
  for (std::size_t t = read; t < tokens.size(); ++t) {
    static_cast<void>(reference::step(model(), cache, std::span{tokens}.subspan(t, 1), LogitsOf::none,
                                      {.read = Read::all, .refresh_selection = true}));
    auto& heads = all.emplace_back(shape.kv_head_count());
    for (std::size_t head = 0; head < heads.size(); ++head) {
      const SegmentList shown = cache.segments(head / shape.kv_heads, head % shape.kv_heads, Read::selected);
      for (const Segment& segment : shown) {
        segment.for_each_run([&](const RowRun& run) {
          for (std::size_t row = run.first; row < run.first + run.rows; ++row) {
            heads[head].insert(static_cast<std::size_t>(segment.position_of(row)));
          }
        });
      }
    }
  }
  return all;
}

}  // namespace attended_rows_test

TEST_CASE("the shares of chosen, best and latest rows are those of plain attention") {
  using namespace attended_rows_test;
  constexpr std::size_t read = 70;
  const std::vector<int> tokens = tokens_of_a_text(83);
  const Dense dense{tokens};
  const AttendedRows attended{model(), std::span{tokens}.first(read)};
  for (const std::size_t budget : {4U, 24U, 128U}) {
    CAPTURE(budget);
    SpeculationSetup setup;
    setup.chunk = 4;
    setup.budget = budget;
    const auto queries = attended.follow(setup, std::span{tokens}.subspan(read));
    const auto chosen = choices(setup, tokens, read);
    REQUIRE(queries.size() == tokens.size() - read);
    std::size_t changed = 0;
    for (std::size_t query = 0; query < queries.size(); ++query) {
      REQUIRE(queries[query].size() == dense.probabilities.size());
      for (std::size_t head = 0; head < queries[query].size(); ++head) {
        const AttendedShares& shares = queries[query][head];
        const std::vector<double>& row = dense.probabilities[head][read + query];
        const std::set<std::size_t>& own = chosen[query][head];
        const std::set<std::size_t>& first = chosen[0][head];
        std::vector<double> sorted = row;
        std::ranges::sort(sorted, std::greater{});
        double best = 0, of_chosen = 0, of_latest = 0, of_first = 0;
        for (std::size_t i = 0; i < own.size(); ++i) best += sorted[i];
        for (std::size_t i = 0; i < row.size(); ++i) {
          const std::size_t opening = std::min<std::size_t>(16, own.size());
          if (own.contains(i)) of_chosen += row[i];
          if (first.contains(i) || i > read) of_first += row[i];
          if (i < opening || i + own.size() - opening >= row.size()) of_latest += row[i];
        }
        // Rows are rounded to bfloat16 before a query reads them.
        CHECK(shares.best == doctest::Approx(best).epsilon(0.02));
        CHECK(shares.chosen == doctest::Approx(of_chosen).epsilon(0.02));
        CHECK(shares.latest == doctest::Approx(of_latest).epsilon(0.02));
        CHECK(shares.fixed == doctest::Approx(of_first).epsilon(0.02));
        // Rows 68 to 70 are no whole chunk when the first query chooses.
        double again = 0, before = 0;
        for (const std::size_t i : first) {
          if (i >= 68) continue;
          ++before;
          again += own.contains(i) ? 1 : 0;
        }
        CHECK(shares.overlap == doctest::Approx(again / before));
        if (shares.overlap < 1.0) ++changed;
        if (query == 0) CHECK(shares.overlap == 1.0);
      }
    }
    CHECK((changed > 0) == (budget == 24));  // the first chunk is always chosen, and so are all
  }
}
