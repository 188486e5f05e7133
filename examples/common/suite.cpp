// SPDX-License-Identifier: Apache-2.0
#include "suite.hpp"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include <kvpolicy/core/error.hpp>
#include <reference_model/sampler.hpp>

#include "distribution.hpp"
#include "exam.hpp"

namespace kvpolicy::tools {
namespace {

using Logits = std::vector<float>;

std::vector<double> even_depths(std::size_t count) {
  std::vector<double> depths;
  for (std::size_t i = 0; i < count; ++i) {
    depths.push_back(
        count == 1 ? 0.5 : 0.05 + 0.9 * static_cast<double>(i) / static_cast<double>(count - 1));
  }
  return depths;
}

void draw_questions(Suite suite, const SuiteConfig& config, std::uint64_t seed,
                    const std::string& plain, std::vector<Task>& tasks) {
  RetrievalTextConfig text{.length = config.length,
                           .lead_in = config.lead_in,
                           .two_step = suite == Suite::reasoning,
                           .seed = seed};
  if (suite == Suite::passkey) text.depths = even_depths(config.depths);
  const std::size_t per_text =
      suite == Suite::passkey
          ? config.depths
          : std::min(config.per_text, questions_per_text(config.length, text.two_step));
  for (std::size_t left = config.questions; left > 0;) {
    text.questions = suite == Suite::passkey ? per_text : std::min(left, per_text);
    text.number = tasks.size();
    tasks.push_back({draw_text(plain, text), {}});
    left -= std::min(left, text.questions);
  }
}

// Draws texts without facts, and the bytes that follow them.
void draw_windows(const SuiteConfig& config, std::uint64_t seed, const std::string& plain,
                  std::vector<Task>& tasks) {
  require(config.scored < config.length, "a text of ", config.length, " bytes has no room for ",
          config.scored, " to score; score fewer");
  for (std::size_t i = 0; i < config.windows; ++i) {
    RetrievalText text =
        draw_plain_text(plain, {.length = config.length, .seed = seed, .number = i});
    std::string follows = text.body.substr(config.length - config.scored);
    text.body.resize(config.length - config.scored);
    tasks.push_back({std::move(text), std::move(follows)});
  }
}

// Counts the rows that a plan has when it begins to answer or to continue.
void count_bytes(const Sequence& cache, Outcome& outcome) {
  outcome.kv_bytes.push_back(static_cast<double>(cache.bytes()));
  const std::vector<std::size_t> heads = cache.head_bytes();
  outcome.head_bytes.emplace_back(heads.begin(), heads.end());
}

// A fork that has read the question, and the logits after it.
struct Asked {
  std::unique_ptr<Sequence> cache;
  Logits logits;
};

Asked ask(const Sequence& read, const ExamPlan& plan, const Question& question) {
  Asked asked{read.fork(), {}};
  asked.logits = asked.cache->prefill(tokens_of(question.text), question.text.size());
  if (plan.compresses && plan.compress == Compress::after_question) asked.cache->compress();
  return asked;
}

char mark(const std::string& answer, const Question& question) {
  if (answer == question.answer) return '1';
  return !question.other.empty() && answer == question.other ? 'o' : '0';
}

void answer_all(const Sequence& read, const ExamPlan& plan, const RetrievalText& text,
                Outcome& outcome) {
  for (const Question& question : text.questions) {
    Asked asked = ask(read, plan, question);
    count_bytes(*asked.cache, outcome);
    std::string answer{static_cast<char>(reference::likeliest(asked.logits))};
    while (answer.size() < question.answer.size()) {
      answer += static_cast<char>(reference::likeliest(
          asked.cache->decode(static_cast<unsigned char>(answer.back()), plan.reading)));
    }
    outcome.marks += mark(answer, question);
  }
}

// The logits before each of the bytes, which the cache reads one by one.
std::vector<Logits> along(Sequence& cache, const Reading& reading, Logits first,
                          std::string_view bytes) {
  std::vector<Logits> said;
  said.push_back(std::move(first));
  for (std::size_t i = 0; i + 1 < bytes.size(); ++i) {
    said.push_back(cache.decode(static_cast<unsigned char>(bytes[i]), reading));
  }
  return said;
}

struct Distance {
  double kl = 0;
  double same = 0;
};

// The distance per byte.
Distance distance(const std::vector<Logits>& truth, const std::vector<Logits>& guess) {
  Distance sum;
  for (std::size_t i = 0; i < truth.size(); ++i) {
    sum.kl += divergence(truth[i], guess[i]);
    sum.same += reference::likeliest(truth[i]) == reference::likeliest(guess[i]) ? 1 : 0;
  }
  const auto bytes = static_cast<double>(truth.size());
  return {sum.kl / bytes, sum.same / bytes};
}

// The full cache's own answer to a question, and its logits on the way.
struct Truth {
  std::string answer;
  std::vector<Logits> said;
};

Truth answer_in_full(const Sequence& full, const Question& question) {
  const auto cache = full.fork();
  Truth truth;
  truth.said.push_back(cache->prefill(tokens_of(question.text), question.text.size()));
  for (;;) {
    truth.answer += static_cast<char>(reference::likeliest(truth.said.back()));
    if (truth.answer.size() == question.answer.size()) return truth;
    truth.said.push_back(cache->decode(static_cast<unsigned char>(truth.answer.back())));
  }
}

void compare_answers(const Sequence& read, const ExamPlan& plan, const RetrievalText& text,
                     const std::vector<Truth>& truths, Outcome& outcome) {
  for (std::size_t q = 0; q < text.questions.size(); ++q) {
    Asked asked = ask(read, plan, text.questions[q]);
    count_bytes(*asked.cache, outcome);
    const Distance apart =
        distance(truths[q].said,
                 along(*asked.cache, plan.reading, std::move(asked.logits), truths[q].answer));
    outcome.measures["answer_kl"].push_back(apart.kl);
    outcome.measures["answer_same"].push_back(apart.same);
  }
}

// The logits before each continuing byte, from a cache that has read all of the text but its last
// byte.
std::vector<Logits> going_on(Sequence& cache, const Reading& reading, const Task& task) {
  Logits first = cache.decode(static_cast<unsigned char>(task.text.body.back()), reading);
  return along(cache, reading, std::move(first), task.follows);
}

void go_on(Sequence& cache, const ExamPlan& plan, const Task& task,
           const std::vector<Logits>& truth, Outcome& outcome) {
  if (plan.compresses) cache.compress();
  count_bytes(cache, outcome);
  const std::vector<Logits> said = going_on(cache, plan.reading, task);
  double nats = 0;
  for (std::size_t i = 0; i < said.size(); ++i) {
    nats += surprise(said[i], static_cast<unsigned char>(task.follows[i]));
  }
  outcome.measures["nats"].push_back(nats / static_cast<double>(said.size()));
  if (truth.empty()) return;
  const Distance apart = distance(truth, said);
  outcome.measures["text_kl"].push_back(apart.kl);
  outcome.measures["text_same"].push_back(apart.same);
}

}  // namespace

void Outcome::add(const Outcome& more) {
  marks += more.marks;
  for (const auto& [name, values] : more.measures) {
    auto& own = measures[name];
    own.insert(own.end(), values.begin(), values.end());
  }
  kv_bytes.insert(kv_bytes.end(), more.kv_bytes.begin(), more.kv_bytes.end());
  head_bytes.insert(head_bytes.end(), more.head_bytes.begin(), more.head_bytes.end());
}

std::vector<Task> draw_tasks(Suite suite, const SuiteConfig& config, std::uint64_t seed,
                             const std::string& plain) {
  std::vector<Task> tasks;
  if (suite != Suite::perplexity) draw_questions(suite, config, seed, plain, tasks);
  if (!asks(suite)) draw_windows(config, seed, plain, tasks);
  return tasks;
}

std::vector<Outcome> perform(const reference::Llama& model, const Task& task,
                             std::span<const ExamPlan* const> plans, const SuiteConfig& config,
                             bool compare_with_full, const Advance& advance) {
  std::vector<int> prompt = tokens_of(task.text.body);
  if (!task.follows.empty()) prompt.pop_back();
  PromptForks forks{model, std::move(prompt), config.prefill};
  std::vector<Truth> truths;
  std::vector<Logits> truth;
  if (compare_with_full) {
    const auto full = forks.in_full();
    for (const Question& question : task.text.questions) {
      truths.push_back(answer_in_full(*full, question));
    }
    if (!task.follows.empty()) truth = going_on(*full, {}, task);
  }
  std::vector<Outcome> outcomes(plans.size());
  for (std::size_t p = 0; p < plans.size(); ++p) {
    const auto read = forks.under(*plans[p]);
    if (task.follows.empty() && plans[p]->compresses &&
        plans[p]->compress == Compress::after_text) {
      read->compress();
    }
    if (!task.follows.empty()) {
      go_on(*read, *plans[p], task, truth, outcomes[p]);
    } else if (compare_with_full) {
      compare_answers(*read, *plans[p], task.text, truths, outcomes[p]);
    } else {
      answer_all(*read, *plans[p], task.text, outcomes[p]);
    }
    if (advance) advance(cost(task, plans.size()) / static_cast<double>(plans.size()));
  }
  return outcomes;
}

double cost(const Task& task, std::size_t plans) {
  const auto length = static_cast<double>(task.text.body.size());
  const auto decoded = static_cast<double>(task.follows.size() + 40 * task.text.questions.size());
  const auto count = static_cast<double>(plans);
  return (1 + 0.3 * count) * length * (1 + length / 4000) +
         count * decoded * 7 * (1 + length / 2000);
}

}  // namespace kvpolicy::tools
