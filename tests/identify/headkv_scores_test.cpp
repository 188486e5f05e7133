// SPDX-License-Identifier: Apache-2.0
//
// Scores of attention made by hand, and scores of whole models compared with plain loops in double that share
// no code with the library: they have their own cache, softmax and ranking.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/cpu.hpp>
#include <reference_model/identify/headkv_scores.hpp>

#include "model/golden.hpp"

namespace kvpolicy::reference::headkv_scores_test {
namespace {

// The needle is the tokens 5, 6, 7 at positions 2 to 4.
NeedleSample small_sample() {
  return {.prompt = {1, 2, 5, 6, 7, 5, 9}, .answer = {5, 6, 7}, .needle = 2, .needle_tokens = 3};
}

using Attention = std::vector<float>;

double scored(NeedleRule rule, const std::vector<std::pair<Attention, int>>& steps) {
  const NeedleSample sample = small_sample();
  NeedleScorer scorer{sample, rule, 2, 3};
  for (const auto& [attention, token] : steps) {
    for (std::size_t layer = 0; layer < 2; ++layer) {
      for (std::size_t head = 0; head < 3; ++head) {
        // Every other head attends only to its own token.
        Attention own(attention.size());
        own.back() = 1.0F;
        scorer.attended(layer, head, layer == 1 && head == 2 ? attention : own);
      }
    }
    scorer.wrote(token);
  }
  for (std::size_t i = 0; i < 5; ++i) CHECK(scorer.scores().values()[i] == 0.0);
  return scorer.scores()(1, 2);
}

TEST_CASE("retrieval: the most attended row must be the needle's and hold what is written") {
  const auto score = [](const std::vector<std::pair<Attention, int>>& steps) {
    return scored(NeedleRule::retrieval, steps);
  };
  constexpr double third = 1.0 / 3;
  CHECK(score({{{0, 0, 1, 0, 0, 0, 0}, 5}}) == doctest::Approx(third));
  CHECK(score({{{0, 0, 1, 0, 0, 0, 0}, 6}}) == 0.0);  // attends to 5, writes 6
  CHECK(score({{{0, 0, 0, 0, 0, 1, 0}, 5}}) == 0.0);  // the 5 is not in the needle
  CHECK(score({{{0, 0.4F, 0.3F, 0.3F, 0, 0, 0}, 5}}) == 0.0);
  CHECK(score({{{0, 0.5F, 0.5F, 0, 0, 0, 0}, 5}}) == 0.0);  // the first of equal rows counts
  CHECK(score({{{0, 0, 0.5F, 0, 0, 0.5F, 0}, 5}}) == doctest::Approx(third));
  CHECK(score({{{0, 0, 1, 0, 0, 0, 0}, 5},
               {{0, 0, 0, 1, 0, 0, 0, 0}, 6},
               {{0, 0, 0, 0, 0.9F, 0, 0, 0.1F, 0}, 7}}) == doctest::Approx(1.0));
  // A row that is hit twice counts twice, as in the published code.
  CHECK(score({{{0, 0, 1, 0, 0, 0, 0}, 5}, {{0, 0, 1, 0, 0, 0, 0, 0}, 5}}) == doctest::Approx(2 * third));
}

TEST_CASE("enhanced: the attention to needle rows among the N most attended rows") {
  const auto score = [](const std::vector<std::pair<Attention, int>>& steps) {
    return scored(NeedleRule::enhanced, steps);
  };
  CHECK(score({{{0, 0, 0.2F, 0.5F, 0.3F, 0, 0}, 5}}) == doctest::Approx(1.0 / 3));
  CHECK(score({{{0, 0, 0.2F, 0.5F, 0.3F, 0, 0}, 99}}) == doctest::Approx(1.0 / 3));  // whatever token is
                                                                                     // written
  // Of the three most attended rows, with 0.4, 0.3 and 0.2, the one with 0.3 is in the needle.
  CHECK(score({{{0.4F, 0.2F, 0.3F, 0.1F, 0, 0, 0}, 5}}) == doctest::Approx(0.3 / 3));
  // Of four equal rows the first three count, two of which are in the needle.
  CHECK(score({{{0, 0.25F, 0.25F, 0.25F, 0.25F, 0, 0}, 5}}) == doctest::Approx(0.5 / 3));
  CHECK(score({{{0, 0, 1, 0, 0, 0, 0}, 5}, {{0, 0, 0, 0.5F, 0, 0, 0, 0.5F}, 6}}) == doctest::Approx(1.5 / 3));
  CHECK(score({{{0.5F, 0.25F, 0, 0, 0, 0.125F, 0.125F}, 5}}) == 0.0);
}

TEST_CASE("samples that cannot be scored are refused") {
  const auto refused = [](auto change) {
    NeedleSample sample = small_sample();
    change(sample);
    CHECK_THROWS_AS((NeedleScorer{sample, NeedleRule::retrieval, 1, 1}), ShapeError);
  };
  refused([](NeedleSample& s) { s.prompt.clear(); });
  refused([](NeedleSample& s) { s.answer.clear(); });
  refused([](NeedleSample& s) { s.needle_tokens = 0; });
  refused([](NeedleSample& s) { s.needle = 5; });
  refused([](NeedleSample& s) { s.needle = static_cast<std::size_t>(-1); });
  refused([](NeedleSample& s) { s.needle_tokens = 8; });
}

// ---- whole models

// Attention by the definition, over all rows that a query may see, in double.
class SlowText {
 public:
  explicit SlowText(const Llama& model)
      : model_{&model}, keys_(model.config().layers), values_(model.config().layers) {}

  // for the last token read: [layer][q_head][position]
  std::vector<std::vector<std::vector<double>>> attention;

  int read(int token) {
    const LlamaConfig& c = model_->config();
    attention.assign(c.layers, std::vector<std::vector<double>>(c.q_heads));
    const int tokens[]{token};
    const auto logits = model_->forward(
        tokens, read_++,
        [&](std::size_t l, TensorView<const float> q, TensorView<const float> k, TensorView<const float> v,
            TensorView<float> out) { attend(l, q, k, v, out); },
        LogitsOf::last);
    return static_cast<int>(std::ranges::max_element(logits) - logits.begin());
  }

 private:
  using Row = std::vector<double>;  // [kv_heads, head_dim]

  void attend(std::size_t layer, TensorView<const float> q, TensorView<const float> k,
              TensorView<const float> v, TensorView<float> out) {
    keys_[layer].emplace_back(k.data, k.data + k.heads * k.head_dim);
    values_[layer].emplace_back(v.data, v.data + v.heads * v.head_dim);
    const std::size_t rows = keys_[layer].size();
    const std::size_t window = model_->config().windows[layer];
    for (std::size_t head = 0; head < q.heads; ++head) {
      const std::size_t first = head / (q.heads / k.heads) * k.head_dim;
      std::vector<double>& weights = attention[layer][head];
      weights.assign(rows, 0.0);
      double sum = 0;
      for (std::size_t row = 0; row < rows; ++row) {
        if (window > 0 && row + window < rows) continue;
        double logit = 0;
        for (std::size_t i = 0; i < k.head_dim; ++i) {
          logit += static_cast<double>(q.row(0, head)[i]) * keys_[layer][row][first + i];
        }
        weights[row] = std::exp(logit / std::sqrt(static_cast<double>(k.head_dim)));
        sum += weights[row];
      }
      for (double& weight : weights) weight /= sum;
      for (std::size_t i = 0; i < k.head_dim; ++i) {
        double mean = 0;
        for (std::size_t row = 0; row < rows; ++row) {
          mean += weights[row] * values_[layer][row][first + i];
        }
        out.row(0, head)[i] = static_cast<float>(mean);
      }
    }
  }

  const Llama* model_;
  std::size_t read_ = 0;
  std::vector<std::vector<Row>> keys_, values_;
};

double slow_step(NeedleRule rule, const std::vector<double>& attention, const NeedleSample& sample,
                 int written) {
  const double n = static_cast<double>(sample.needle_tokens);
  const auto needle = [&](std::size_t row) {
    return row >= sample.needle && row < sample.needle + sample.needle_tokens;
  };
  std::vector<std::pair<double, std::size_t>> rows;
  for (std::size_t i = 0; i < attention.size(); ++i) rows.emplace_back(-attention[i], i);
  std::ranges::sort(rows);
  if (rule == NeedleRule::retrieval) {
    const std::size_t best = rows.front().second;
    return needle(best) && sample.prompt[best] == written ? 1 / n : 0.0;
  }
  double mass = 0;
  for (std::size_t i = 0; i < std::min(rows.size(), sample.needle_tokens); ++i) {
    if (needle(rows[i].second)) mass -= rows[i].first;
  }
  return mass / n;
}

TEST_CASE_TEMPLATE("a model's heads get the scores of plain loops", Engine, ScalarEngine, cpu::Engine<>) {
  double earned[2]{};
  for (const std::string name :
       {"gqa2_d80", "mha_d64", "gqa7_d64", "qwen2_window_upper_layers", "mistral_window"}) {
    CAPTURE(name);
    const Llama model = Llama::load(golden_folder(name));
    const Golden golden = load_golden(name);
    NeedleSample sample;
    sample.prompt.assign(golden.tokens.begin(), golden.tokens.begin() + 120);
    sample.needle = 3;
    sample.needle_tokens = 117;  // long, because a random model only finds a needle by chance
    constexpr std::size_t steps = 12;
    // The right answer is defined as what the model writes.
    SlowText slow{model};
    for (std::size_t i = 0; i + 1 < sample.prompt.size(); ++i) slow.read(sample.prompt[i]);
    std::vector<decltype(slow.attention)> attention;
    int token = sample.prompt.back();
    for (std::size_t i = 0; i < steps; ++i) {
      token = slow.read(token);
      sample.answer.push_back(token);
      attention.push_back(slow.attention);
    }
    std::vector<double> scores_when_right;
    for (const NeedleRule rule : {NeedleRule::retrieval, NeedleRule::enhanced}) {
      const NeedleResult result = score_needle<Engine>(model, sample, rule);
      CHECK(result.right);
      scores_when_right = {result.scores.values().begin(), result.scores.values().end()};
      bool close = true;
      for (std::size_t layer = 0; layer < model.config().layers; ++layer) {
        for (std::size_t head = 0; head < model.config().q_heads; ++head) {
          double expected = 0;
          for (std::size_t i = 0; i < steps; ++i) {
            expected += slow_step(rule, attention[i][layer][head], sample, sample.answer[i]);
          }
          close = close && std::abs(result.scores(layer, head) - expected) <= 2e-5;
          earned[rule == NeedleRule::enhanced] += expected;
        }
      }
      CHECK(close);
    }
    // With one wrong token the answer does not count.
    sample.answer[steps / 2] ^= 1;
    CHECK(!score_needle<Engine>(model, sample, NeedleRule::enhanced).right);
    // It counts where the caller accepts what was said, and earns what it earned above.
    AnswerCheck check{.judge = [&](std::span<const int> said) -> std::optional<bool> {
      CHECK(said.back() == (said.size() - 1 == steps / 2 ? sample.answer[said.size() - 1] ^ 1
                                                         : sample.answer[said.size() - 1]));
      return said.size() == steps ? std::optional{true} : std::nullopt;
    }};
    const NeedleResult accepted = score_needle<Engine>(model, sample, NeedleRule::enhanced, check);
    CHECK(accepted.right);
    CHECK(std::ranges::equal(accepted.scores.values(), scores_when_right));
    check.most_tokens = steps - 1;
    CHECK(!score_needle<Engine>(model, sample, NeedleRule::enhanced, check).right);
    // Nothing is written after an answer that is judged wrong.
    std::size_t written = 0;
    check = {.judge = [&](std::span<const int> said) {
      written = said.size();
      return false;
    }};
    CHECK(!score_needle<Engine>(model, sample, NeedleRule::enhanced, check).right);
    CHECK(written == 1);
  }
  CHECK(earned[0] > 0.05);  // the rules did apply
  CHECK(earned[1] > 1.0);
}

TEST_CASE("observed attention is the model's own, however many tokens were read at once before") {
  for (const std::string name : {"gqa2_d80", "mistral_window"}) {
    const Llama model = Llama::load(golden_folder(name));
    const Golden golden = load_golden(name);
    for (const std::size_t before : {0, 1, 63, 64, 100}) {
      CAPTURE(name);
      CAPTURE(before);
      SlowText slow{model};
      for (std::size_t i = 0; i <= before; ++i) slow.read(golden.tokens[i]);
      ObservedText<> text{model};
      CHECK(text.read({}).empty());
      text.read(std::span{golden.tokens}.first(before), 40);
      std::size_t calls = 0;
      bool close = true;
      text.observe(golden.tokens[before], [&](std::size_t layer, std::size_t head,
                                              std::span<const float> attention) {
        CHECK(calls++ == layer * model.config().q_heads + head);
        REQUIRE(attention.size() == before + 1);
        for (std::size_t row = 0; row <= before; ++row) {
          close = close &&
                  std::abs(static_cast<double>(attention[row]) - slow.attention[layer][head][row]) <= 1e-5;
        }
      });
      CHECK(close);
      CHECK(calls == model.config().layers * model.config().q_heads);
      CHECK(text.tokens() == before + 1);
    }
  }
}

}  // namespace
}  // namespace kvpolicy::reference::headkv_scores_test
