// SPDX-License-Identifier: Apache-2.0
#include <reference_model/identify/loss.hpp>

#include <algorithm>
#include <cmath>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy::reference {
namespace {

/// -log of a token's probability; replaces its logits by `share` times the derivative.
double surprise(std::span<float> logits, std::size_t token, double share) {
  const float highest = *std::ranges::max_element(logits);
  double sum = 0.0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit - highest));
  const double result = std::log(sum) - static_cast<double>(logits[token] - highest);
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double probability = std::exp(static_cast<double>(logits[i] - highest)) / sum;
    logits[i] = static_cast<float>(share * (probability - (i == token ? 1.0 : 0.0)));
  }
  return result;
}

}  // namespace

Loss distillation_loss(std::span<const float> mixed, std::span<const float> full, const LabelledText& text,
                       Reduction reduction) {
  text.check();
  require<ShapeError>(mixed.size() == full.size() && mixed.size() % text.tokens.size() == 0,
                      "distillation_loss: ", mixed.size(), " and ", full.size(), " hidden numbers of ",
                      text.tokens.size(), " tokens");
  const std::size_t width = mixed.size() / text.tokens.size();
  const double share =
      reduction == Reduction::sum ? 1.0 : 1.0 / static_cast<double>(text.labels.size() * width);
  Loss loss{.value = 0.0, .dhidden = std::vector<float>(mixed.size())};
  for (const std::size_t label : text.labels) {
    for (std::size_t i = label * width; i < (label + 1) * width; ++i) {
      const double distance = static_cast<double>(mixed[i]) - static_cast<double>(full[i]);
      loss.value += share * distance * distance;
      loss.dhidden[i] = static_cast<float>(2.0 * share * distance);
    }
  }
  return loss;
}

Loss language_loss(const Llama& model, std::span<const float> hidden, const LabelledText& text,
                   Reduction reduction) {
  text.check();
  const std::size_t width = model.config().hidden;
  const std::size_t vocabulary = model.config().vocabulary;
  require<ShapeError>(hidden.size() == text.tokens.size() * width, "language_loss: ", hidden.size(),
                      " hidden numbers of ", text.tokens.size(), " tokens of ", width);
  const auto counted = static_cast<std::size_t>(
      std::ranges::count_if(text.labels, [](std::size_t label) { return label > 0; }));
  require<ShapeError>(counted > 0,
                      "language_loss: only the first token is labelled, nothing "
                      "foretells it");
  const double share = reduction == Reduction::sum ? 1.0 : 1.0 / static_cast<double>(counted);
  Loss loss{.value = 0.0, .dhidden = std::vector<float>(hidden.size())};
  // Weights may have to be converted, which pays for many rows at once.
  constexpr std::size_t block = 64;
  std::vector<std::size_t> labels(text.labels.begin(), text.labels.end());
  std::erase(labels, std::size_t{0});
  std::vector<float> rows(std::min(block, labels.size()) * width);
  std::vector<float> logits(std::min(block, labels.size()) * vocabulary);
  for (std::size_t first = 0; first < labels.size(); first += block) {
    const std::size_t count = std::min(block, labels.size() - first);
    for (std::size_t i = 0; i < count; ++i) {
      std::copy_n(hidden.data() + (labels[first + i] - 1) * width, width, rows.data() + i * width);
    }
    model.head().apply(rows.data(), count, logits.data());
    for (std::size_t i = 0; i < count; ++i) {
      const auto token = static_cast<std::size_t>(text.tokens[labels[first + i]]);
      loss.value += share * surprise(std::span{logits}.subspan(i * vocabulary, vocabulary), token, share);
    }
    model.head().back(logits.data(), count, rows.data());
    for (std::size_t i = 0; i < count; ++i) {
      std::copy_n(rows.data() + i * width, width, loss.dhidden.data() + (labels[first + i] - 1) * width);
    }
  }
  return loss;
}

}  // namespace kvpolicy::reference
