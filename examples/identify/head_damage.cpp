// SPDX-License-Identifier: Apache-2.0
#include "head_damage.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

#include <kvpolicy/core/error.hpp>
#include <reference_model/parallel.hpp>

#include "../common/asked_question.hpp"
#include "../common/distribution.hpp"
#include "../common/sequence.hpp"
#include "../tool_plan.hpp"

namespace kvpolicy::tools {
namespace {

using Plan = HeadPlan<bfloat16>;

// A text that was read with all rows kept, up to the start of each probe.
class ReadText {
 public:
  // `queries`: the largest number of queries that any plan chooses rows by.
  ReadText(const TextModel& model, const RetrievalText& text, const DamageConfig& config, std::size_t queries)
      : text_{model, text}, by_{config.by} {
    const std::size_t end = config.end;
    const std::span<const int> tokens{text_.body};
    require(tokens.size() > end && end > 1, "a text of ", tokens.size(), " tokens has no end of ", end,
            " to be measured by");
    const Plan full{model.config().shape()};
    before_end_ = make_sequence(model.llama(), full, queries);
    static_cast<void>(before_end_->prefill(tokens.first(tokens.size() - end)));
    end_ = tokens.last(end);
    whole_ = before_end_->fork();
    static_cast<void>(whole_->prefill(end_));
    if (by_ == DamageBy::divergence) of_full_ = predictions(full);
  }

  [[nodiscard]] TextLoss loss(const Plan& plan) const {
    const Predictions found = predictions(plan);
    const bool diverges = by_ == DamageBy::divergence;
    TextLoss loss;
    loss.text = sum(end_.subspan(1), found.end, diverges ? &of_full_.end : nullptr) /
                static_cast<double>(end_.size() - 1);
    for (std::size_t i = 0; i < text_.questions.size(); ++i) {
      loss.answers +=
          sum(text_.questions[i].answer(), found.answers[i], diverges ? &of_full_.answers[i] : nullptr);
    }
    loss.answers /= static_cast<double>(std::max<std::size_t>(text_.questions.size(), 1));
    return loss;
  }

 private:
  // The logits before each token that counts: [tokens, vocabulary].
  struct Predictions {
    std::vector<float> end;
    std::vector<std::vector<float>> answers;  // of each question
  };

  [[nodiscard]] Predictions predictions(const Plan& plan) const {
    const bool compresses = needs_of(plan).compress;
    Predictions found;
    const auto ending = before_end_->fork_as(plan);
    if (compresses) ending->compress();
    found.end = ending->score(end_.first(end_.size() - 1));

    const auto whole = whole_->fork_as(plan);
    for (const AskedQuestion& question : text_.questions) {
      const auto asked = whole->fork();
      std::vector<float> logits = asked->prefill(question.question(), question.question().size());
      if (compresses) asked->compress();
      const std::span<const int> answer{question.answer()};
      if (answer.size() > 1) {
        const std::vector<float> rest = asked->score(answer.first(answer.size() - 1));
        logits.insert(logits.end(), rest.begin(), rest.end());
      }
      found.answers.push_back(std::move(logits));
    }
    return found;
  }

  // Adds up what `tokens` count, by what was predicted before each; `full` is what the full cache predicts.
  static double sum(std::span<const int> tokens, std::span<const float> logits,
                    const std::vector<float>* full) {
    const std::size_t vocabulary = logits.size() / tokens.size();
    double total = 0;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const auto row = logits.subspan(i * vocabulary, vocabulary);
      total += full == nullptr ? surprise(row, static_cast<std::size_t>(tokens[i]))
                               : divergence(std::span{*full}.subspan(i * vocabulary, vocabulary), row);
    }
    return total;
  }

  EncodedText text_;
  DamageBy by_;
  std::span<const int> end_;  // a part of the text's tokens
  std::unique_ptr<Sequence> before_end_, whole_;
  Predictions of_full_;  // where divergences are counted
};

// Returns losses[text][plan].
std::vector<std::vector<TextLoss>> losses_under(const TextModel& model, std::span<const Plan> plans,
                                                std::span<const RetrievalText> texts,
                                                const DamageConfig& config, const DamageReport& report) {
  require(!texts.empty(), "there are no texts to measure damage by");
  std::size_t queries = 0;
  for (const Plan& plan : plans) {
    for (std::size_t layer = 0; layer < plan.shape().layers; ++layer) {
      queries = std::max(queries, plan.observed_queries(layer));
    }
  }
  std::vector<std::vector<TextLoss>> losses(texts.size());
  std::mutex reporting;
  std::size_t done = 0;
  reference::for_each_block(texts.size(), 1, true, [&](std::size_t i, std::size_t) {
    const ReadText read{model, texts[i], config, queries};
    for (const Plan& plan : plans) {
      losses[i].push_back(read.loss(plan));
      const std::lock_guard lock{reporting};
      ++done;
      if (report) {
        report(static_cast<double>(done) / static_cast<double>(texts.size() * plans.size()));
      }
    }
  });
  return losses;
}

TextLoss mean(std::span<const std::vector<TextLoss>> losses, std::size_t plan) {
  TextLoss sum;
  for (const auto& own : losses) {
    sum.answers += own[plan].answers;
    sum.text += own[plan].text;
  }
  const auto texts = static_cast<double>(losses.size());
  return {sum.answers / texts, sum.text / texts};
}

// Whether `small` can do no less damage than `large` but by chance: the same policy and storage, in fewer bytes, with
// no more bits for keys or for values, the same rows rotated and the same codebooks.
bool is_less(const HeadSettings<bfloat16>& small, const HeadSettings<bfloat16>& large, std::size_t head_dim,
             std::size_t tokens) {
  if (small.names() != large.names()) return false;
  const HeadRule own = small.rule(head_dim);
  const HeadRule other = large.rule(head_dim);
  if (own.key_hadamard != other.key_hadamard || own.value_hadamard != other.value_hadamard) return false;
  if (own.key_codebook != other.key_codebook || own.value_codebook != other.value_codebook) return false;
  if (bits_of(own.key_encoding) > bits_of(other.key_encoding)) return false;
  if (bits_of(own.value_encoding) > bits_of(other.value_encoding)) return false;
  const auto bytes = [&](const HeadSettings<bfloat16>& settings) {
    return Plan{ModelShape{1, 1, 1, head_dim}, settings}.memory(tokens, {}, true).heads;
  };
  return bytes(small) < bytes(large);
}

// Where a few texts say that a setting does less damage than one that keeps more, it is chance, and a search would
// pick exactly these settings.
void smooth(std::vector<HeadChoice<bfloat16>>& choices, std::size_t head_dim, std::size_t tokens) {
  for (HeadChoice<bfloat16>& small : choices) {
    for (const HeadChoice<bfloat16>& large : choices) {
      if (!is_less(small.settings, large.settings, head_dim, tokens)) continue;
      for (std::size_t i = 0; i < small.damage.values().size(); ++i) {
        double& own = small.damage.values()[i];
        own = std::max(own, large.damage.values()[i]);
      }
    }
  }
}

}  // namespace

std::vector<HeadChoice<bfloat16>> measure_damage(const TextModel& model,
                                                 std::span<const HeadSettings<bfloat16>> choices,
                                                 std::span<const RetrievalText> texts,
                                                 const DamageReport& report, const DamageConfig& config) {
  const ModelShape shape = model.config().shape();
  const std::size_t heads = shape.kv_head_count();
  std::vector<Plan> plans{Plan{shape}};
  const auto add = [&](const Plan& others, std::size_t head, const HeadSettings<bfloat16>& own) {
    plans.push_back(others);
    plans.back().set(head / shape.kv_heads, head % shape.kv_heads, own);
  };
  for (const HeadSettings<bfloat16>& choice : choices) {
    const Plan all{shape, choice};
    plans.push_back(all);
    for (std::size_t head = 0; head < heads; ++head) {
      add(Plan{shape}, head, choice);
      add(all, head, Plan{shape}.at(0, 0));
    }
  }
  const auto losses = losses_under(model, plans, texts, config, report);
  // The loss of `worse` beyond that of `better`.
  const auto rise = [](const TextLoss& worse, const TextLoss& better) {
    return std::max(0.0, worse.answers - better.answers) + std::max(0.0, worse.text - better.text);
  };
  const TextLoss none = mean(losses, 0);
  std::vector<HeadChoice<bfloat16>> measured;
  std::size_t plan = 1;
  for (const HeadSettings<bfloat16>& choice : choices) {
    const TextLoss all = mean(losses, plan++);
    HeadDamage damage{shape.layers, shape.kv_heads};
    for (double& one : damage.values()) {
      const TextLoss alone = mean(losses, plan++);
      const TextLoss spared = mean(losses, plan++);
      one = (rise(alone, none) + rise(all, spared)) / 2;
    }
    measured.push_back({choice, std::move(damage)});
  }
  std::size_t longest = 0;
  for (const RetrievalText& text : texts) {
    longest = std::max(longest, model.encode(text.body).size());
  }
  smooth(measured, shape.head_dim, longest);
  return measured;
}

TextLoss loss_under(const TextModel& model, const Plan& plan, std::span<const RetrievalText> texts,
                    const DamageConfig& config) {
  return mean(losses_under(model, {&plan, 1}, texts, config, {}), 0);
}

}  // namespace kvpolicy::tools
