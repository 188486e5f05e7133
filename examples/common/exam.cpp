// SPDX-License-Identifier: Apache-2.0
#include "exam.hpp"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>

#include <kvpolicy/core/error.hpp>
#include <reference_model/sampler.hpp>

#include "stopwatch.hpp"

namespace kvpolicy::tools {

std::size_t ExamResult::right_count() const {
  return static_cast<std::size_t>(std::ranges::count(right, true));
}

double agreement(const ExamResult& one, const ExamResult& other) {
  std::size_t same = 0;
  std::size_t all = 0;
  for (std::size_t i = 0; i < std::min(one.answers.size(), other.answers.size()); ++i) {
    const std::size_t bytes = std::min(one.answers[i].size(), other.answers[i].size());
    for (std::size_t at = 0; at < bytes; ++at) same += one.answers[i][at] == other.answers[i][at];
    all += bytes;
  }
  return all == 0 ? 0 : static_cast<double>(same) / static_cast<double>(all);
}

std::vector<int> tokens_of(std::string_view text) {
  std::vector<int> tokens(text.size());
  std::ranges::transform(text, tokens.begin(),
                         [](char c) { return static_cast<unsigned char>(c); });
  return tokens;
}

void require_bytes(const reference::Llama& model) {
  require(model.config().vocabulary == 256, "the model has a vocabulary of ",
          model.config().vocabulary, "; questions are asked in bytes, so it must be 256");
}

namespace {

using TokensDone = std::function<void(std::size_t)>;

// Sums of the measurements of one text, stored in the fields of a result.
ExamResult examine_text(const MakeSequence& make, const ExamPlan& plan, const RetrievalText& text,
                        const TokensDone& advance) {
  ExamResult result;
  const auto prefilled = make(plan.plan);
  if (plan.fastgen) prefilled->choose_after_prompt(*plan.fastgen);
  const Stopwatch prefill;
  std::size_t before = 0;
  // The logits after the text are not needed, because the questions come next.
  static_cast<void>(
      prefilled->prefill(tokens_of(text.body), 512, [&](std::size_t read, std::size_t) {
        advance(read - before);
        before = read;
      }));
  result.prefill_ms = prefill.milliseconds();
  result.peak_bytes = static_cast<double>(prefilled->bytes());
  if (plan.compresses && plan.compress == Compress::after_text) {
    const Stopwatch compress;
    prefilled->compress();
    result.compress_ms = compress.milliseconds();
  }
  for (const Question& question : text.questions) {
    const std::unique_ptr<Sequence> cache = prefilled->fork();
    std::vector<float> logits = cache->prefill(tokens_of(question.text), question.text.size());
    if (plan.compresses && plan.compress == Compress::after_question) {
      const Stopwatch compress;
      cache->compress();
      result.compress_ms += compress.milliseconds();
    }
    std::string answer{static_cast<char>(reference::likeliest(logits))};
    const Stopwatch decode;
    while (answer.size() < question.answer.size()) {
      logits = cache->decode(static_cast<unsigned char>(answer.back()), plan.reading);
      answer += static_cast<char>(reference::likeliest(logits));
    }
    result.decode_ms += decode.milliseconds();
    result.bytes += static_cast<double>(cache->bytes());
    result.bytes_read += static_cast<double>(cache->bytes_read(plan.reading));
    result.right.push_back(answer == question.answer);
    result.answers.push_back(std::move(answer));
    advance(question.text.size() + question.answer.size());
  }
  return result;
}

// Does the same with speculative decoding.
ExamResult examine_by_guesses(const reference::Llama& model, const ExamPlan& plan,
                              const RetrievalText& text, const TokensDone& advance) {
  ExamResult result;
  SpeculativeText read{model, plan.small_model.get(), *plan.speculation};
  const Stopwatch prefill;
  std::size_t before = 0;
  read.read(tokens_of(text.body), [&](std::size_t done, std::size_t) {
    advance(done - before);
    before = done;
  });
  result.prefill_ms = prefill.milliseconds();
  result.peak_bytes = static_cast<double>(read.bytes() + read.draft_bytes());
  for (const Question& question : text.questions) {
    const std::unique_ptr<SpeculativeText> cache = read.fork(*plan.speculation);
    cache->read(tokens_of(question.text));
    std::string answer;
    const auto take = [&](const DecodedStep& step) {
      for (const NewToken& token : step.tokens) answer += static_cast<char>(token.token);
    };
    // The first token counts as part of the question's time, as in the other plans.
    take(cache->step(1));
    const std::size_t bytes_before = cache->bytes_read();
    const Stopwatch decode;
    while (answer.size() < question.answer.size()) {
      take(cache->step(question.answer.size() - answer.size()));
    }
    result.decode_ms += decode.milliseconds();
    result.bytes += static_cast<double>(cache->bytes() + cache->draft_bytes());
    result.bytes_read += static_cast<double>(cache->bytes_read() - bytes_before) /
                         static_cast<double>(std::max<std::size_t>(answer.size(), 2) - 1);
    result.right.push_back(answer == question.answer);
    result.answers.push_back(std::move(answer));
    advance(question.text.size() + question.answer.size());
  }
  return result;
}

std::size_t tokens_in(std::span<const RetrievalText> texts) {
  std::size_t tokens = 0;
  for (const RetrievalText& text : texts) {
    tokens += text.body.size();
    for (const Question& question : text.questions) {
      tokens += question.text.size() + question.answer.size();
    }
  }
  return tokens;
}

// Joins the texts' results in order and turns sums into means.
ExamResult joined(const std::string& name, std::span<const ExamResult> parts) {
  ExamResult whole;
  whole.plan = name;
  double decoded = 0;
  for (const ExamResult& part : parts) {
    whole.bytes += part.bytes;
    whole.peak_bytes += part.peak_bytes;
    whole.bytes_read += part.bytes_read;
    whole.prefill_ms += part.prefill_ms;
    whole.compress_ms += part.compress_ms;
    whole.decode_ms += part.decode_ms;
    for (const std::string& answer : part.answers)
      decoded += static_cast<double>(answer.size()) - 1;
    whole.answers.insert(whole.answers.end(), part.answers.begin(), part.answers.end());
    whole.right.insert(whole.right.end(), part.right.begin(), part.right.end());
  }
  const auto texts = static_cast<double>(std::max<std::size_t>(parts.size(), 1));
  const auto questions = static_cast<double>(std::max<std::size_t>(whole.right.size(), 1));
  whole.prefill_ms /= texts;
  whole.peak_bytes /= texts;
  whole.compress_ms /= questions;
  whole.bytes /= questions;
  whole.bytes_read /= questions;
  whole.decode_ms /= std::max(decoded, 1.0);
  return whole;
}

}  // namespace

ExamResult examine(const reference::Llama& model, const ExamPlan& plan,
                   std::span<const RetrievalText> texts, const ExamReport& report, Threads share,
                   const MakeSequence& make) {
  require_bytes(model);
  const MakeSequence on_cpu = [&](HeadPlan<bfloat16> own) {
    return make_sequence(model, std::move(own));
  };
  const MakeSequence& made = make ? make : on_cpu;
  const std::size_t total = tokens_in(texts);
  std::size_t done = 0;
  std::mutex reporting;
  const TokensDone advance = [&](std::size_t tokens) {
    const std::lock_guard lock{reporting};
    done += tokens;
    if (report) report(done, total);
  };
  const auto examine_one = [&](const RetrievalText& text) {
    return plan.speculation ? examine_by_guesses(model, plan, text, advance)
                            : examine_text(made, plan, text, advance);
  };
  std::vector<ExamResult> parts(texts.size());
  if (share == Threads::one_text) {
    for (std::size_t i = 0; i < texts.size(); ++i) {
      parts[i] = examine_one(texts[i]);
    }
    return joined(plan.name, parts);
  }
  std::exception_ptr failure;  // an exception must not leave a parallel loop
  const auto count = static_cast<std::ptrdiff_t>(texts.size());
#pragma omp parallel for schedule(dynamic, 1)
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(i);
    try {
      parts[at] = examine_one(texts[at]);
    } catch (...) {
      const std::lock_guard lock{reporting};
      failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
  return joined(plan.name, parts);
}

}  // namespace kvpolicy::tools
