// SPDX-License-Identifier: Apache-2.0
#include "exam.hpp"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>

#include <reference_model/parallel.hpp>

#include "asked_question.hpp"
#include "stopwatch.hpp"

namespace kvpolicy::tools {

std::size_t ExamResult::right_count() const {
  return static_cast<std::size_t>(std::ranges::count(right, true));
}

double agreement(const ExamResult& one, const ExamResult& other) {
  std::size_t same = 0;
  std::size_t all = 0;
  for (std::size_t i = 0; i < std::min(one.answers.size(), other.answers.size()); ++i) {
    const std::size_t tokens = std::min(one.answers[i].size(), other.answers[i].size());
    for (std::size_t at = 0; at < tokens; ++at) same += one.answers[i][at] == other.answers[i][at];
    all += tokens;
  }
  return all == 0 ? 0 : static_cast<double>(same) / static_cast<double>(all);
}

namespace {

using TokensDone = std::function<void(std::size_t)>;

// Sums of the measurements of one text, stored in the fields of a result.
ExamResult examine_text(const TextModel& model, const MakeSequence& make, const ExamPlan& plan,
                        const EncodedText& text, const TokensDone& advance) {
  ExamResult result;
  const auto prefilled = make(plan.plan);
  if (plan.fastgen) prefilled->choose_after_prompt(*plan.fastgen);
  const Stopwatch prefill;
  std::size_t before = 0;
  // The logits after the text are not needed, because the questions come next.
  static_cast<void>(prefilled->prefill(text.body, 512, [&](std::size_t read, std::size_t) {
    advance(read - before);
    before = read;
  }));
  result.prefill_ms = prefill.milliseconds();
  result.peak_bytes = static_cast<double>(prefilled->bytes());
  if (plan.compresses && plan.compress == Compress::after_text) {
    const Stopwatch compress;
    if (plan.scores) prefilled->score_rows(text.body, model.repeat_request());
    prefilled->compress();
    result.compress_ms = compress.milliseconds();
  }
  for (const AskedQuestion& asked : text.questions) {
    const std::unique_ptr<Sequence> cache = prefilled->fork();
    const std::vector<float> logits = cache->prefill(asked.question(), asked.question().size());
    if (plan.compresses && plan.compress == Compress::after_question) {
      const Stopwatch compress;
      cache->compress();
      result.compress_ms += compress.milliseconds();
    }
    const Stopwatch decode;
    std::vector<int> answer = asked.decode(*cache, logits, plan.reading);
    result.decode_ms += decode.milliseconds();
    result.bytes += static_cast<double>(cache->bytes());
    result.bytes_read += static_cast<double>(cache->bytes_read(plan.reading));
    result.right.push_back(asked.is_right(answer));
    result.answers.push_back(std::move(answer));
    advance(asked.size());
  }
  return result;
}

// Does the same with speculative decoding.
ExamResult examine_by_guesses(const TextModel& model, const ExamPlan& plan, const EncodedText& text,
                              const TokensDone& advance) {
  ExamResult result;
  SpeculativeText read{model.llama(), plan.small_model.get(), *plan.speculation};
  const Stopwatch prefill;
  std::size_t before = 0;
  read.read(text.body, [&](std::size_t done, std::size_t) {
    advance(done - before);
    before = done;
  });
  result.prefill_ms = prefill.milliseconds();
  result.peak_bytes = static_cast<double>(read.bytes() + read.draft_bytes());
  for (const AskedQuestion& asked : text.questions) {
    const std::unique_ptr<SpeculativeText> cache = read.fork(*plan.speculation);
    cache->read(asked.question());
    std::vector<int> answer;
    const auto take = [&](const DecodedStep& step) {
      for (const NewToken& token : step.tokens) {
        if (answer.empty() || !model.is_end(answer.back())) answer.push_back(token.token);
      }
    };
    // The first token counts as part of the question's time, as in the other plans.
    take(cache->step(1));
    const std::size_t bytes_before = cache->bytes_read();
    const Stopwatch decode;
    while (asked.goes_on(answer)) {
      const std::size_t whole = asked.answer().size();
      take(cache->step(std::max(whole, answer.size() + 1) - answer.size()));
    }
    result.decode_ms += decode.milliseconds();
    result.bytes += static_cast<double>(cache->bytes() + cache->draft_bytes());
    result.bytes_read += static_cast<double>(cache->bytes_read() - bytes_before) /
                         static_cast<double>(std::max<std::size_t>(answer.size(), 2) - 1);
    result.right.push_back(asked.is_right(answer));
    result.answers.push_back(std::move(answer));
    advance(asked.size());
  }
  return result;
}

std::size_t tokens_in(std::span<const EncodedText> texts) {
  std::size_t tokens = 0;
  for (const EncodedText& text : texts) {
    tokens += text.body.size();
    for (const AskedQuestion& asked : text.questions) tokens += asked.size();
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
    for (const std::vector<int>& answer : part.answers) decoded += static_cast<double>(answer.size()) - 1;
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

ExamResult examine(const TextModel& model, const ExamPlan& plan, std::span<const RetrievalText> drawn,
                   const ExamReport& report, Threads share, const MakeSequence& make) {
  std::vector<EncodedText> texts;
  for (const RetrievalText& text : drawn) texts.emplace_back(model, text);
  const MakeSequence on_cpu = [&](HeadPlan<bfloat16> own) {
    return make_sequence(model.llama(), std::move(own));
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
  const auto examine_one = [&](const EncodedText& text) {
    return plan.speculation ? examine_by_guesses(model, plan, text, advance)
                            : examine_text(model, made, plan, text, advance);
  };
  std::vector<ExamResult> parts(texts.size());
  reference::for_each_block(texts.size(), 1, share == Threads::texts,
                            [&](std::size_t i, std::size_t) { parts[i] = examine_one(texts[i]); });
  return joined(plan.name, parts);
}

}  // namespace kvpolicy::tools
