// SPDX-License-Identifier: Apache-2.0
//
// Compares damages of single heads with a forward pass in plain loops that masks the rows that the head
// may not see.
#include <identify/head_damage.hpp>

#include <cmath>
#include <cstddef>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/plan/low_bits.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>
#include <reference_model/llama.hpp>

#include <common/files.hpp>
#include <common/sequence.hpp>

using namespace kvpolicy;
using namespace kvpolicy::tools;

namespace {

using Plan = HeadPlan<bfloat16>;
using Dense = DenseStorage<bfloat16>;
using Full = FullCache<Dense>::Config;
using Window = SinkRecentCache<Dense>::Config;
using Budget = HeadBudgetCache<Dense>::Config;

const TextModel& shipped() {
  static const auto model = TextModel::load(repository_path(shipped_model));
  return model;
}

std::vector<RetrievalText> texts(std::size_t count, std::size_t questions = 2) {
  std::vector<RetrievalText> drawn;
  for (std::size_t i = 0; i < count; ++i) {
    drawn.push_back(draw_text(identification_text(), {.length = 512, .questions = questions, .number = i}));
  }
  return drawn;
}

// Attention of a whole text in plain loops. From token `from` on, KV head `head` of layer `layer` sees
// only the first `sinks` tokens and the latest `recent`.
struct MaskedHead {
  std::size_t layer = 0, head = 0, sinks = 0, recent = 0, from = 0;
};

reference::AttendFn plain_attention(const MaskedHead& masked) {
  return [masked](std::size_t layer, TensorView<const float> q, TensorView<const float> k,
                  TensorView<const float> v, TensorView<float> out) {
    const std::size_t group = q.heads / k.heads;
    for (std::size_t t = 0; t < q.tokens; ++t) {
      for (std::size_t head = 0; head < q.heads; ++head) {
        const std::size_t kv = head / group;
        const bool windowed = layer == masked.layer && kv == masked.head && t >= masked.from;
        std::vector<double> weights(t + 1, 0.0);
        double total = 0;
        for (std::size_t row = 0; row <= t; ++row) {
          if (windowed && row >= masked.sinks && row + masked.recent <= t) continue;
          double dot = 0;
          for (std::size_t i = 0; i < q.head_dim; ++i) {
            dot += static_cast<double>(q.row(t, head)[i]) * static_cast<double>(k.row(row, kv)[i]);
          }
          total += weights[row] = std::exp(dot / std::sqrt(static_cast<double>(q.head_dim)));
        }
        for (std::size_t i = 0; i < q.head_dim; ++i) {
          double sum = 0;
          for (std::size_t row = 0; row <= t; ++row) {
            sum += weights[row] / total * static_cast<double>(v.row(row, kv)[i]);
          }
          out.row(t, head)[i] = static_cast<float>(sum);
        }
      }
    }
  };
}

// The mean loss of tokens[from, end), in nats.
double plain_loss(const std::vector<int>& tokens, std::size_t from, const MaskedHead& masked) {
  const auto logits =
      shipped().llama().forward(tokens, std::size_t{0}, plain_attention(masked), reference::LogitsOf::all);
  double sum = 0;
  for (std::size_t t = from; t < tokens.size(); ++t) {
    const float* row = logits.data() + (t - 1) * 256;
    double total = 0;
    for (std::size_t i = 0; i < 256; ++i) total += std::exp(static_cast<double>(row[i]));
    sum += std::log(total) - static_cast<double>(row[static_cast<std::size_t>(tokens[t])]);
  }
  return sum / static_cast<double>(tokens.size() - from);
}

TextLoss plain_losses(const RetrievalText& text, std::size_t end, MaskedHead masked) {
  const std::vector<int> body = shipped().encode(text.body);
  TextLoss loss;
  masked.from = body.size() - end;
  loss.text = plain_loss(body, masked.from + 1, masked);
  masked.from = body.size();
  for (const Question& question : text.questions) {
    const std::vector<int> tokens = shipped().encode(text.body + question.text + question.answer);
    loss.answers += plain_loss(tokens, tokens.size() - question.answer.size(), masked) *
                    static_cast<double>(question.answer.size()) / static_cast<double>(text.questions.size());
  }
  return loss;
}

}  // namespace

TEST_CASE("losses under a plan are those of plain loops with a mask") {
  const ModelShape shape = shipped().config().shape();
  const auto drawn = texts(1, 1);
  constexpr std::size_t end = 100;
  double retrieval_damage = 0;
  for (const auto& place : {std::pair{1, 1}, std::pair{0, 2}}) {
    const int layer = place.first, head = place.second;  // clang 14 captures no structured binding
    CAPTURE(layer);
    Plan plan{shape};
    plan.set(static_cast<std::size_t>(layer), static_cast<std::size_t>(head),
             Window{.sinks = 8, .recent = 40});
    const TextLoss fast = loss_under(shipped(), plan, drawn, {.end = end});
    const TextLoss slow = plain_losses(
        drawn[0], end, {static_cast<std::size_t>(layer), static_cast<std::size_t>(head), 8, 40, 0});
    // Rows are kept in bfloat16 here and in float there.
    CHECK(std::abs(fast.answers - slow.answers) <= 0.05 * slow.answers + 0.005);
    CHECK(std::abs(fast.text - slow.text) <= 0.02 * slow.text);
    if (layer == 1) retrieval_damage = slow.answers;
  }
  const TextLoss full = loss_under(shipped(), Plan{shape}, drawn, {.end = end});
  const TextLoss slow = plain_losses(drawn[0], end, {99, 0, 0, 0, 0});
  CHECK(std::abs(full.answers - slow.answers) <= 0.05 * slow.answers + 0.005);
  CHECK(std::abs(full.text - slow.text) <= 0.02 * slow.text);
  CHECK(retrieval_damage > full.answers + 0.02);  // otherwise the bounds above would not test anything
}

TEST_CASE("damage is how much one head's choice raises the loss, for any number of threads") {
  const ModelShape shape = shipped().config().shape();
  const auto drawn = texts(2);
  const std::vector<HeadSettings<bfloat16>> choices{
      Full{}, Window{.sinks = 4, .recent = 28}, Budget{.budget = 24, .scorer = {.observation_window = 8}}};
  double reported = 0;
  const std::size_t before = threads();
  set_threads(2);
  const auto measured =
      measure_damage(shipped(), choices, drawn, [&](double share) { reported = share; }, {.end = 64});
  set_threads(1);
  const auto again = measure_damage(shipped(), choices, drawn, {}, {.end = 64});
  set_threads(before);
  CHECK(reported == 1.0);
  REQUIRE(measured.size() == 3);
  for (std::size_t c = 0; c < 3; ++c) {
    CHECK(measured[c].settings == choices[c]);
    for (std::size_t i = 0; i < shape.kv_head_count(); ++i) {
      const double one = measured[c].damage.values()[i];
      CHECK(std::abs(one - again[c].damage.values()[i]) <= 1e-3 + 0.01 * one);
    }
  }
  for (const double damage : measured[0].damage.values()) CHECK(damage == 0.0);

  // Each case separately: only the head has the choice, and only the head does not have it.
  const auto rise = [&](const Plan& worse, const Plan& better) {
    const TextLoss a = loss_under(shipped(), worse, drawn, {.end = 64});
    const TextLoss b = loss_under(shipped(), better, drawn, {.end = 64});
    return std::max(0.0, a.answers - b.answers) + std::max(0.0, a.text - b.text);
  };
  for (const std::size_t head : {4U, 9U}) {
    Plan alone{shape};
    alone.set(head / 4, head % 4, choices[2]);
    Plan spared{shape, choices[2]};
    spared.set(head / 4, head % 4, choices[0]);
    const double expected = (rise(alone, Plan{shape}) + rise(Plan{shape, choices[2]}, spared)) / 2;
    CHECK(measured[2].damage(head / 4, head % 4) == doctest::Approx(expected).epsilon(0.01));
  }
  CHECK(measured[2].damage(1, 0) > 0.01);
  CHECK_THROWS_AS((void)measure_damage(shipped(), choices, {}, {}, {.end = 64}), ConfigError);
  CHECK_THROWS_AS((void)measure_damage(shipped(), choices, drawn, {}, {.end = 10000}), ConfigError);
}

TEST_CASE("damage by divergence is that of plain loops, 0 for the full cache and less for more bits") {
  const ModelShape shape = shipped().config().shape();
  const auto drawn = texts(1, 1);
  constexpr std::size_t end = 60;
  const DamageConfig config{.end = end, .by = DamageBy::divergence};
  const TextLoss none = loss_under(shipped(), Plan{shape}, drawn, config);
  CHECK(none.answers == 0.0);
  CHECK(none.text == 0.0);

  // Probabilities before tokens[from, end), of the model under a mask.
  const auto probabilities = [](const std::vector<int>& tokens, std::size_t from, const MaskedHead& masked) {
    const auto logits =
        shipped().llama().forward(tokens, std::size_t{0}, plain_attention(masked), reference::LogitsOf::all);
    std::vector<double> shares;
    for (std::size_t t = from; t < tokens.size(); ++t) {
      const float* row = logits.data() + (t - 1) * 256;
      double total = 0;
      for (std::size_t i = 0; i < 256; ++i) total += std::exp(static_cast<double>(row[i]));
      for (std::size_t i = 0; i < 256; ++i) shares.push_back(std::exp(static_cast<double>(row[i])) / total);
    }
    return shares;
  };
  const auto divergence_of = [](const std::vector<double>& truth, const std::vector<double>& guess) {
    double sum = 0;
    for (std::size_t i = 0; i < truth.size(); ++i) sum += truth[i] * std::log(truth[i] / guess[i]);
    return sum;
  };
  Plan plan{shape};
  plan.set(1, 1, Window{.sinks = 8, .recent = 40});
  const TextLoss fast = loss_under(shipped(), plan, drawn, config);
  const std::vector<int> body = shipped().encode(drawn[0].body);
  MaskedHead masked{1, 1, 8, 40, body.size() - end};
  const MaskedHead unmasked{99, 0, 0, 0, 0};
  const double text = divergence_of(probabilities(body, body.size() - end + 1, unmasked),
                                    probabilities(body, body.size() - end + 1, masked)) /
                      static_cast<double>(end - 1);
  CHECK(text > 1e-3);
  CHECK(std::abs(fast.text - text) <= 0.1 * text);
  masked.from = body.size();
  const Question& question = drawn[0].questions[0];
  const std::vector<int> tokens = shipped().encode(drawn[0].body + question.text + question.answer);
  const std::size_t from = tokens.size() - question.answer.size();
  const double answer =
      divergence_of(probabilities(tokens, from, unmasked), probabilities(tokens, from, masked));
  CHECK(std::abs(fast.answers - answer) <= 0.1 * answer + 1e-3);

  const auto codes = [&](LowBits bits) { return LowBitFormat::of_text(bits, shape, 32).head<bfloat16>(); };
  const auto measured =
      measure_damage(shipped(), std::vector{codes({8, 8}), codes({4, 4}), codes({2, 2})}, drawn, {}, config);
  for (std::size_t i = 0; i < shape.kv_head_count(); ++i) {
    CHECK(measured[0].damage.values()[i] < 1e-3);
  }
  const double four = loss_under(shipped(), Plan{shape, codes({4, 4})}, drawn, config).sum();
  const double two = loss_under(shipped(), Plan{shape, codes({2, 2})}, drawn, config).sum();
  CHECK(four > 0);
  CHECK(two > four);
}
