// SPDX-License-Identifier: Apache-2.0
//
// Compares single-head ablation and attention profiles with attention written out in double, query by query,
// with a loop for each measurement.
#include <reference_model/identify/head_ablation.hpp>
#include <reference_model/identify/head_profile.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/error.hpp>

#include "model/golden.hpp"

namespace kvpolicy::reference::heads_test {
namespace {

constexpr AttentionMask streaming{.sinks = 3, .recent = 20};

/// A text with a "passkey" of four tokens that is repeated later.
LabelledText text_with_keys(const std::string& name, std::size_t shift) {
  LabelledText text{.tokens = load_golden(name).tokens, .labels = {}, .passkeys = {}};
  std::rotate(text.tokens.begin(), text.tokens.begin() + static_cast<std::ptrdiff_t>(shift),
              text.tokens.end());
  for (std::size_t i = 0; i < 4; ++i) text.tokens[120 + i] = text.tokens[40 + i];
  for (std::size_t i = 110; i < 124; ++i) text.labels.push_back(i);
  text.passkeys = {{.hidden = 40, .answer = 120, .tokens = 4}};
  return text;
}

/// Probabilities of one query for the rows [0, query]; 0 for rows that it does not see.
std::vector<double> probabilities(TensorView<const float> q, TensorView<const float> k, std::size_t query,
                                  std::size_t head, const std::function<bool(std::size_t)>& seen) {
  std::vector<double> p(query + 1);
  double sum = 0.0;
  for (std::size_t row = 0; row <= query; ++row) {
    double score = 0.0;
    for (std::size_t i = 0; i < q.head_dim; ++i) {
      score += static_cast<double>(q.row(query, head)[i]) *
               static_cast<double>(k.row(row, head / (q.heads / k.heads))[i]);
    }
    p[row] = seen(row) ? std::exp(score / std::sqrt(static_cast<double>(q.head_dim))) : 0.0;
    sum += p[row];
  }
  for (double& one : p) one /= sum;
  return p;
}

/// Attention of a text in which one KV head streams; calls watch(layer, head, query, probabilities).
AttendFn attend(
    std::size_t its_layer, std::size_t its_head,
    std::function<void(std::size_t, std::size_t, std::size_t, const std::vector<double>&)> watch = {}) {
  return [=](std::size_t layer, TensorView<const float> q, TensorView<const float> k,
             TensorView<const float> v, TensorView<float> out) {
    for (std::size_t head = 0; head < q.heads; ++head) {
      const std::size_t kv_head = head / (q.heads / k.heads);
      const bool streams = layer == its_layer && kv_head == its_head;
      for (std::size_t query = 0; query < q.tokens; ++query) {
        const auto p = probabilities(
            q, k, query, head, [&](std::size_t row) { return !streams || row < 3 || query - row < 20; });
        if (watch) watch(layer, head, query, p);
        for (std::size_t i = 0; i < q.head_dim; ++i) {
          double sum = 0.0;
          for (std::size_t row = 0; row <= query; ++row) {
            sum += p[row] * static_cast<double>(v.row(row, kv_head)[i]);
          }
          out.row(query, head)[i] = static_cast<float>(sum);
        }
      }
    }
  };
}

double loss_of(const Llama& model, const std::vector<int>& tokens, const std::vector<std::size_t>& labels,
               const AttendFn& attention) {
  const std::vector<float> logits = model.forward(tokens, 0, attention, LogitsOf::all);
  const std::size_t vocabulary = model.config().vocabulary;
  double loss = 0.0;
  for (const std::size_t label : labels) {
    const float* row = logits.data() + (label - 1) * vocabulary;
    double sum = 0.0;
    for (std::size_t i = 0; i < vocabulary; ++i) sum += std::exp(static_cast<double>(row[i]));
    loss += std::log(sum) - static_cast<double>(row[static_cast<std::size_t>(tokens[label])]);
  }
  return loss / static_cast<double>(labels.size());
}

TEST_CASE("ablation: the losses with one head streaming") {
  const std::string name = "gqa2_d80";
  const Llama model = Llama::load(golden_folder(name));
  const std::vector<LabelledText> texts{text_with_keys(name, 0), text_with_keys(name, 11)};
  std::size_t reports = 0;
  const HeadAblation found =
      ablate_heads(model, texts, streaming, GateObjective::language, [&](std::size_t done, std::size_t all) {
        CHECK(done == ++reports);
        CHECK(all == 10);
      });
  CHECK(reports == 10);
  const std::vector<std::size_t> answers{120, 121, 122, 123};
  const auto mean = [&](std::size_t layer, std::size_t head) {
    return (loss_of(model, texts[0].tokens, answers, attend(layer, head)) +
            loss_of(model, texts[1].tokens, answers, attend(layer, head))) /
           2.0;
  };
  CHECK(std::abs(found.loss - mean(99, 0)) <= 1e-5);
  for (std::size_t layer = 0; layer < 2; ++layer) {
    for (std::size_t head = 0; head < 2; ++head) {
      CHECK(std::abs(found.losses(layer, head) - mean(layer, head)) <= 1e-5);
      CHECK(std::abs(found.losses(layer, head) - found.loss) > 1e-4);  // the head was restricted
    }
  }
}

TEST_CASE("ablation: plain text, and distances instead of losses") {
  const std::string name = "gqa2_d80";
  const Llama model = Llama::load(golden_folder(name));
  LabelledText text = text_with_keys(name, 0);
  text.passkeys.clear();
  const HeadAblation found = ablate_heads(model, {&text, 1}, streaming, GateObjective::language);
  CHECK(std::abs(found.losses(1, 0) - loss_of(model, text.tokens, text.labels, attend(1, 0))) <= 1e-5);
  const HeadAblation far = ablate_heads(model, {&text, 1}, streaming, GateObjective::distillation);
  CHECK(far.loss == 0.0);
  for (const double distance : far.losses.values()) CHECK(distance > 0.0);
  CHECK_THROWS_AS(static_cast<void>(ablate_heads(model, {}, streaming, GateObjective::language)), ShapeError);
}

TEST_CASE("increases of the loss become gates on a logarithmic scale") {
  const HeadAblation ablation{.loss = 0.5, .losses = HeadTable<double>{2, 2, {0.5, 0.6, 1.5, 0.1}}};
  const HeadGates gates = gates_of_rises(ablation);
  CHECK(gates(0, 0) == 0.0);
  CHECK(gates(1, 1) == 0.0);
  CHECK(gates(1, 0) == 1.0);
  CHECK(gates(0, 1) == doctest::Approx(4.0 / 5.0));  // a tenth of 1, which is 4 of 5 powers of ten above 1e-5
  const HeadAblation flat{.loss = 1.0, .losses = HeadTable<double>{1, 2, {1.0, 1.0}}};
  CHECK(gates_of_rises(flat)(0, 1) == 0.0);
}

TEST_CASE("profiles: attention to passkeys and to far rows") {
  for (const std::string name : {"gqa2_d80", "all_biases"}) {
    CAPTURE(name);
    const Llama model = Llama::load(golden_folder(name));
    const auto& c = model.config();
    const std::vector<LabelledText> texts{text_with_keys(name, 0), text_with_keys(name, 11)};
    for (const ProfileOf what : {ProfileOf::outside, ProfileOf::passkey}) {
      HeadTable<double> expected{c.layers, c.kv_heads, 0.0};
      const std::size_t group = c.q_heads / c.kv_heads;
      for (const LabelledText& text : texts) {
        const auto watch = [&](std::size_t layer, std::size_t head, std::size_t query,
                               const std::vector<double>& p) {
          if (query < 119 || query > 122) return;  // the rows before the answer's tokens
          for (std::size_t row = 0; row <= query; ++row) {
            const bool counts =
                what == ProfileOf::passkey ? row >= 40 && row < 44 : row >= 3 && query - row >= 20;
            if (counts) {
              expected(layer, head / group) += p[row] / (4.0 * 2.0 * static_cast<double>(group));
            }
          }
        };
        static_cast<void>(model.forward(text.tokens, 0, attend(99, 0, watch), LogitsOf::none));
      }
      const HeadGates found = profile_heads(model, texts, streaming, what);
      for (std::size_t i = 0; i < found.values().size(); ++i) {
        CHECK(std::abs(found.values()[i] - expected.values()[i]) <= 1e-5);
        CHECK(expected.values()[i] > 1e-4);
      }
    }
  }
}

TEST_CASE("profiles: plain text has no passkeys to look for") {
  const Llama model = Llama::load(golden_folder("mha_d64"));
  LabelledText text = text_with_keys("mha_d64", 0);
  text.passkeys.clear();
  CHECK_NOTHROW(static_cast<void>(profile_heads(model, {&text, 1}, streaming, ProfileOf::outside)));
  CHECK_THROWS_AS(static_cast<void>(profile_heads(model, {&text, 1}, streaming, ProfileOf::passkey)),
                  ConfigError);
  CHECK_THROWS_AS(static_cast<void>(profile_heads(model, {}, streaming, ProfileOf::outside)), ShapeError);
  text.passkeys = {{.hidden = 40, .answer = 42, .tokens = 4}};  // the two ranges overlap
  CHECK_THROWS_AS(static_cast<void>(profile_heads(model, {&text, 1}, streaming, ProfileOf::passkey)),
                  ShapeError);
}

}  // namespace
}  // namespace kvpolicy::reference::heads_test
