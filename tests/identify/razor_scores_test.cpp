// SPDX-License-Identifier: Apache-2.0
//
// Echo and induction scores of whole models, compared with attention by the definition in double, and with a
// search for equal tokens instead of steps of a period.
#include <reference_model/identify/razor_scores.hpp>

#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/error.hpp>

#include "model/dense_attention.hpp"
#include "model/golden.hpp"

namespace kvpolicy::reference::razor_scores_test {
namespace {

double dot(const float* a, const float* b, std::size_t count) {
  double sum = 0;
  for (std::size_t i = 0; i < count; ++i) sum += double{a[i]} * double{b[i]};
  return sum;
}

// Shares of attention by brute force: each query over all rows that it sees.
RazorScores slow_scores(const Llama& model, const std::vector<int>& text, std::size_t scored_from,
                        std::size_t first) {
  const LlamaConfig& c = model.config();
  RazorScores scores{.echo = {c.layers, c.q_heads}, .induction = {c.layers, c.q_heads}};
  DenseCache cache(c);
  const AttendFn inner = cache.attend();
  static_cast<void>(
      model.hidden(text, [&](std::size_t layer, TensorView<const float> q, TensorView<const float> k,
                             TensorView<const float> v, TensorView<float> out) {
        inner(layer, q, k, v, out);
        for (std::size_t head = 0; head < c.q_heads; ++head) {
          for (std::size_t t = scored_from; t < text.size(); ++t) {
            const std::size_t window = c.windows[layer];
            double all = 0, echo = 0, induction = 0;
            for (std::size_t row = 0; row <= t; ++row) {
              if (window > 0 && t - row >= window) continue;
              const double weight =
                  std::exp(dot(q.row(t, head), k.row(row, head / (c.q_heads / c.kv_heads)), c.head_dim) /
                           std::sqrt(double(c.head_dim)));
              all += weight;
              if (row >= first && row < t && text[row] == text[t]) echo += weight;
              if (row > first && row - 1 < t && row - 1 >= first && text[row - 1] == text[t])
                induction += weight;
            }
            const double count = static_cast<double>(text.size() - scored_from);
            scores.echo(layer, head) += echo / all / count;
            scores.induction(layer, head) += induction / all / count;
          }
        }
      }));
  return scores;
}

TEST_CASE("echo and induction are the attention to earlier equal tokens and to what followed them") {
  for (const std::string name : {"mha_d64", "gqa7_d64", "mistral_window"}) {
    CAPTURE(name);
    const Llama model = Llama::load(golden_folder(name));
    const std::vector<int> tokens{7, 3, 19, 11, 2, 30, 5, 17};
    for (const std::vector<int>& opening : {std::vector<int>{}, std::vector<int>{1, 3}}) {
      std::vector<int> text = opening;
      for (int i = 0; i < 4; ++i) text.insert(text.end(), tokens.begin(), tokens.end());
      const RazorScores scores = razor_scores(model, opening, tokens, 4);
      const RazorScores wanted = slow_scores(model, text, opening.size() + tokens.size(), opening.size());
      for (std::size_t i = 0; i < wanted.echo.values().size(); ++i) {
        CHECK(scores.echo.values()[i] == doctest::Approx(wanted.echo.values()[i]).epsilon(1e-4));
        CHECK(scores.induction.values()[i] == doctest::Approx(wanted.induction.values()[i]).epsilon(1e-4));
        CHECK(scores.echo.values()[i] > 0.0);
        CHECK(scores.echo.values()[i] + scores.induction.values()[i] <= 1.0 + 1e-6);
      }
    }
  }
}

TEST_CASE("texts that repeat nothing are refused") {
  const Llama model = Llama::load(golden_folder("mha_d64"));
  const std::vector<int> tokens{1, 2, 3};
  CHECK_THROWS_AS(static_cast<void>(razor_scores(model, {}, tokens, 1)), ShapeError);
  CHECK_THROWS_AS(static_cast<void>(razor_scores(model, {}, std::vector<int>{1, 2}, 4)), ShapeError);
  CHECK_THROWS_AS(static_cast<void>(razor_scores(model, {}, std::vector<int>{1, 2, 64}, 4)), ShapeError);
}

}  // namespace
}  // namespace kvpolicy::reference::razor_scores_test
