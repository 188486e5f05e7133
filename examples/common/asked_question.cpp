// SPDX-License-Identifier: Apache-2.0
#include "asked_question.hpp"

#include <algorithm>
#include <cmath>

#include <kvpolicy/core/error.hpp>
#include <reference_model/sampler.hpp>

namespace kvpolicy::tools {
namespace {

bool is_beginning(std::string_view text, std::string_view of) {
  return text.size() < of.size() && of.starts_with(text);
}

std::size_t bytes_of(double tokens, double bytes_per_token) {
  return static_cast<std::size_t>(std::ceil(tokens * bytes_per_token));
}

}  // namespace

AskedQuestion::AskedQuestion(const TextModel& model, std::string_view body, const Question& question)
    : model_{&model} {
  const std::vector<int> both = model.encode_after(body, question.text + question.answer);
  question_ = model.encode_after(body, question.text);
  const auto shared = std::ranges::mismatch(question_, both);
  if (shared.in1 != question_.begin()) question_.erase(shared.in1, question_.end());
  answer_ = after_question(body, question.text, question.answer);
  right_ = model.decode(answer_);
  if (!question.other.empty()) {
    other_ = model.decode(after_question(body, question.text, question.other));
  }
}

std::vector<int> AskedQuestion::after_question(std::string_view body, const std::string& question,
                                               const std::string& answer) const {
  const std::vector<int> both = model_->encode_after(body, question + answer);
  if (std::ranges::mismatch(question_, both).in1 != question_.end()) {
    return model_->encode_after(question, answer);
  }
  return {both.begin() + static_cast<std::ptrdiff_t>(question_.size()), both.end()};
}

bool AskedQuestion::goes_on(std::span<const int> said) const {
  if (!said.empty() && model_->is_end(said.back())) return false;
  if (said.size() < answer_.size()) return true;
  if (said.size() >= answer_.size() + right_.size()) return false;
  const std::string text = model_->decode(said);
  return is_beginning(text, right_) || is_beginning(text, other_);
}

char AskedQuestion::mark(std::span<const int> said) const {
  const std::string text = model_->decode(said);
  if (text.starts_with(right_)) return '1';
  return !other_.empty() && text.starts_with(other_) ? 'o' : '0';
}

std::vector<int> AskedQuestion::decode(Sequence& cache, std::span<const float> logits,
                                       const Reading& reading) const {
  std::vector<int> said{reference::likeliest(logits)};
  while (goes_on(said)) {
    said.push_back(reference::likeliest(cache.decode(said.back(), reading)));
  }
  return said;
}

EncodedText::EncodedText(const TextModel& model, const RetrievalText& text) : body{model.encode(text.body)} {
  for (const Question& question : text.questions) {
    questions.emplace_back(model, text.body, question);
  }
}

RetrievalText draw_text_in_tokens(const TextModel& model, std::string_view plain, std::size_t length,
                                  RetrievalTextConfig config) {
  constexpr double least_share = 0.97;
  constexpr double aim = 0.985;
  constexpr int draws = 32;
  const auto most = static_cast<double>(length);
  config.length = bytes_of(most, model.bytes_per_token(plain));
  for (int draw = 0;; ++draw) {
    RetrievalText text = draw_text(plain, config);
    const EncodedText encoded{model, text};
    std::size_t longest = 0;
    for (const AskedQuestion& question : encoded.questions) {
      longest = std::max(longest, question.size());
    }
    const std::size_t tokens = encoded.body.size() + longest;
    if (tokens <= length && (static_cast<double>(tokens) >= least_share * most || draw >= draws)) {
      return text;
    }
    require(draw < 2 * draws, "no text of ", length, " tokens could be drawn; another seed may do");
    config.length = static_cast<std::size_t>(static_cast<double>(config.length) * aim * most /
                                             static_cast<double>(tokens));
  }
}

std::vector<int> draw_plain_tokens(const TextModel& model, std::string_view plain, std::size_t length,
                                   RetrievalTextConfig config) {
  config.length = bytes_of(static_cast<double>(length), model.bytes_per_token(plain));
  for (;;) {
    std::vector<int> tokens = model.encode(draw_plain_text(plain, config).body);
    if (tokens.size() >= length) {
      tokens.resize(length);
      return tokens;
    }
    config.length += config.length / 32 + 1;
  }
}

}  // namespace kvpolicy::tools
