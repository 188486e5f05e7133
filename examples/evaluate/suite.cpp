// SPDX-License-Identifier: Apache-2.0
#include "suite.hpp"

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include <kvpolicy/core/error.hpp>
#include <reference_model/sampler.hpp>

#include "../common/asked_question.hpp"
#include "../common/distribution.hpp"
#include "language_suite.hpp"

namespace kvpolicy::tools {
namespace {

using Logits = std::vector<float>;

void draw_questions(const TextModel& model, Suite suite, const SuiteConfig& config, std::uint64_t seed,
                    const std::string& plain, std::vector<Task>& tasks) {
  RetrievalTextConfig text{.lead_in = config.lead_in, .two_step = suite == Suite::reasoning, .seed = seed};
  if (suite == Suite::passkey) text.depths = even_depths(config.depths);
  const std::size_t per_text =
      suite == Suite::passkey ? config.depths
                              : std::min(config.per_text, questions_per_text(config.length, text.two_step));
  for (std::size_t left = config.questions; left > 0;) {
    text.questions = suite == Suite::passkey ? per_text : std::min(left, per_text);
    text.number = tasks.size();
    Task task{.text = draw_text_in_tokens(model, plain, config.length, text)};
    task.body = model.encode(task.text.body);
    tasks.push_back(std::move(task));
    left -= std::min(left, text.questions);
  }
}

// Draws texts without facts, and the tokens that follow them.
void draw_windows(const TextModel& model, const SuiteConfig& config, std::uint64_t seed,
                  const std::string& plain, std::vector<Task>& tasks) {
  require(config.scored < config.length, "a text of ", config.length, " tokens has no room for ",
          config.scored, " to score; score fewer");
  for (std::size_t i = 0; i < config.windows; ++i) {
    Task task;
    task.body = draw_plain_tokens(model, plain, config.length, {.seed = seed, .number = i});
    const std::size_t bytes = model.decode(task.body).size();
    task.follows.assign(task.body.end() - static_cast<std::ptrdiff_t>(config.scored), task.body.end());
    task.body.resize(config.length - config.scored);
    task.text.body = model.decode(task.body);
    task.follows_bytes = bytes - task.text.body.size();
    tasks.push_back(std::move(task));
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

Asked ask(const Sequence& read, const ExamPlan& plan, const std::vector<int>& question) {
  Asked asked{read.fork(), {}};
  asked.logits = asked.cache->prefill(question, question.size());
  if (plan.compresses && plan.compress == Compress::after_question) asked.cache->compress();
  return asked;
}

void answer_all(const Sequence& read, const ExamPlan& plan, const std::vector<AskedQuestion>& questions,
                Outcome& outcome) {
  for (const AskedQuestion& question : questions) {
    Asked asked = ask(read, plan, question.question());
    count_bytes(*asked.cache, outcome);
    outcome.said.push_back(question.decode(*asked.cache, asked.logits, plan.reading));
    outcome.kv_footprint.push_back(asked.cache->footprint());
    outcome.marks += question.mark(outcome.said.back());
  }
}

void answer_language(const TextModel& model, const Sequence& read, const ExamPlan& plan, const Task& task,
                     Outcome& outcome) {
  for (const LanguagePrompt& prompt : task.language) {
    Asked asked = ask(read, plan, prompt.tokens);
    count_bytes(*asked.cache, outcome);
    LanguageAnswer answer = answer_question(model, prompt.question, task.text.body + prompt.text,
                                            *asked.cache, std::move(asked.logits), plan.reading);
    outcome.kv_footprint.push_back(asked.cache->footprint());
    outcome.marks += answer.found == 1 ? '1' : '0';
    if (prompt.question.answers.size() > 1) outcome.measures["found"].push_back(answer.found);
    outcome.said.push_back(std::move(answer.said));
  }
}

// The logits before each of the tokens, which the cache reads one by one; `bytes_read` gets the bytes of rows that each
// of them read.
std::vector<Logits> along(Sequence& cache, const Reading& reading, Logits first, std::span<const int> tokens,
                          std::vector<double>* bytes_read = nullptr) {
  std::vector<Logits> said;
  said.push_back(std::move(first));
  for (std::size_t i = 0; i + 1 < tokens.size(); ++i) {
    said.push_back(cache.decode(tokens[i], reading));
    if (bytes_read != nullptr) bytes_read->push_back(static_cast<double>(cache.bytes_read(reading)));
  }
  return said;
}

struct Distance {
  double kl = 0;
  double same = 0;
};

// The distance per token.
Distance distance(const std::vector<Logits>& truth, const std::vector<Logits>& guess) {
  Distance sum;
  for (std::size_t i = 0; i < truth.size(); ++i) {
    sum.kl += divergence(truth[i], guess[i]);
    sum.same += reference::likeliest(truth[i]) == reference::likeliest(guess[i]) ? 1 : 0;
  }
  const auto tokens = static_cast<double>(truth.size());
  return {sum.kl / tokens, sum.same / tokens};
}

// The full cache's own answer to a question, as long as the right one, and its logits on the way.
struct Truth {
  std::vector<int> answer;
  std::vector<Logits> said;
};

Truth answer_in_full(const Sequence& full, const AskedQuestion& question) {
  const auto cache = full.fork();
  Truth truth;
  truth.said.push_back(cache->prefill(question.question(), question.question().size()));
  for (;;) {
    truth.answer.push_back(reference::likeliest(truth.said.back()));
    if (truth.answer.size() == question.answer().size()) return truth;
    truth.said.push_back(cache->decode(truth.answer.back()));
  }
}

void compare_answers(const Sequence& read, const ExamPlan& plan, const std::vector<AskedQuestion>& questions,
                     const std::vector<Truth>& truths, Outcome& outcome) {
  for (std::size_t q = 0; q < questions.size(); ++q) {
    Asked asked = ask(read, plan, questions[q].question());
    count_bytes(*asked.cache, outcome);
    const Distance apart = distance(
        truths[q].said, along(*asked.cache, plan.reading, std::move(asked.logits), truths[q].answer));
    outcome.kv_footprint.push_back(asked.cache->footprint());
    outcome.measures["answer_kl"].push_back(apart.kl);
    outcome.measures["answer_same"].push_back(apart.same);
  }
}

// The logits before each continuing token, from a cache that has read all of the text but its last
// token.
std::vector<Logits> going_on(Sequence& cache, const Reading& reading, const Task& task,
                             std::vector<double>* bytes_read = nullptr) {
  Logits first = cache.decode(task.body.back(), reading);
  return along(cache, reading, std::move(first), task.follows, bytes_read);
}

void go_on(Sequence& cache, const ExamPlan& plan, const Task& task, const std::vector<Logits>& truth,
           Outcome& outcome) {
  if (plan.compresses) cache.compress();
  count_bytes(cache, outcome);
  std::vector<double> bytes_read;
  const std::vector<Logits> said = going_on(cache, plan.reading, task, &bytes_read);
  outcome.kv_footprint.push_back(cache.footprint());
  if (!bytes_read.empty()) {
    const double sum = std::accumulate(bytes_read.begin(), bytes_read.end(), 0.0);
    outcome.measures["text_bytes_read"].push_back(sum / static_cast<double>(bytes_read.size()));
  }
  double nats = 0;
  for (std::size_t i = 0; i < said.size(); ++i) {
    nats += surprise(said[i], static_cast<std::size_t>(task.follows[i]));
  }
  outcome.measures["nats"].push_back(nats / static_cast<double>(task.follows_bytes));
  if (task.follows_bytes != said.size()) {  // else both are the same
    outcome.measures["token_nats"].push_back(nats / static_cast<double>(said.size()));
  }
  if (truth.empty()) return;
  const Distance apart = distance(truth, said);
  outcome.measures["text_kl"].push_back(apart.kl);
  outcome.measures["text_same"].push_back(apart.same);
}

}  // namespace

std::vector<double> even_depths(std::size_t count) {
  std::vector<double> depths;
  for (std::size_t i = 0; i < count; ++i) {
    depths.push_back(count == 1 ? 0.5 : 0.05 + 0.9 * static_cast<double>(i) / static_cast<double>(count - 1));
  }
  return depths;
}

void Outcome::add(const Outcome& more) {
  marks += more.marks;
  questions_per_text.insert(questions_per_text.end(), more.questions_per_text.begin(),
                            more.questions_per_text.end());
  said.insert(said.end(), more.said.begin(), more.said.end());
  for (const auto& [name, values] : more.measures) {
    auto& own = measures[name];
    own.insert(own.end(), values.begin(), values.end());
  }
  kv_bytes.insert(kv_bytes.end(), more.kv_bytes.begin(), more.kv_bytes.end());
  head_bytes.insert(head_bytes.end(), more.head_bytes.begin(), more.head_bytes.end());
  kv_footprint.insert(kv_footprint.end(), more.kv_footprint.begin(), more.kv_footprint.end());
}

std::vector<Task> draw_tasks(const TextModel& model, Suite suite, const SuiteConfig& config,
                             std::uint64_t seed, const std::string& plain) {
  if (const auto family = language_family(suite)) {
    return draw_language_tasks(model, *family, config, seed, plain);
  }
  require(!config.chat, "the suite ", name_of(suite),
          " has no chat form; those in plain English have: niah_depths to choice_ending");
  std::vector<Task> tasks;
  if (suite != Suite::perplexity) draw_questions(model, suite, config, seed, plain, tasks);
  if (!asks(suite)) draw_windows(model, config, seed, plain, tasks);
  return tasks;
}

std::size_t rows_before_answer(const TextModel& model, const Task& task) {
  if (!task.language.empty()) return task.body.size() + task.language.front().tokens.size();
  const auto& questions = task.text.questions;
  if (questions.empty()) return task.body.size();
  return task.body.size() + AskedQuestion{model, task.text.body, questions.front()}.question().size();
}

std::vector<Outcome> perform(const TextModel& model, const Task& task, std::span<const ExamPlan* const> plans,
                             const SuiteConfig& config, bool compare_with_full, const Advance& advance) {
  std::vector<int> prompt = task.body;
  if (!task.follows.empty()) prompt.pop_back();
  const bool scores = std::ranges::any_of(plans, [](const ExamPlan* plan) { return plan->scores; });
  PromptForks forks{model.llama(), std::move(prompt), config.prefill,
                    scores ? model.repeat_request() : reference::RepeatRequest{}};
  std::vector<AskedQuestion> questions;
  for (const Question& question : task.text.questions) {
    questions.emplace_back(model, task.text.body, question);
  }
  std::vector<Truth> truths;
  std::vector<Logits> truth;
  if (compare_with_full) {
    const auto full = forks.in_full();
    for (const AskedQuestion& question : questions) {
      truths.push_back(answer_in_full(*full, question));
    }
    if (!task.follows.empty()) truth = going_on(*full, {}, task);
  }
  std::vector<Outcome> outcomes(plans.size());
  for (std::size_t p = 0; p < plans.size(); ++p) {
    const auto read = forks.under(*plans[p]);
    if (task.follows.empty() && plans[p]->compresses && plans[p]->compress == Compress::after_text) {
      read->compress();
    }
    if (!task.follows.empty()) {
      go_on(*read, *plans[p], task, truth, outcomes[p]);
    } else if (compare_with_full) {
      compare_answers(*read, *plans[p], questions, truths, outcomes[p]);
    } else if (!task.language.empty()) {
      answer_language(model, *read, *plans[p], task, outcomes[p]);
    } else {
      answer_all(*read, *plans[p], questions, outcomes[p]);
    }
    if (!outcomes[p].marks.empty()) outcomes[p].questions_per_text = {outcomes[p].marks.size()};
    if (advance) advance(cost(task, plans.size()) / static_cast<double>(plans.size()));
  }
  return outcomes;
}

double cost(const Task& task, std::size_t plans) {
  const auto length = static_cast<double>(task.body.size());
  std::size_t tokens = task.follows.size() + 40 * task.text.questions.size();
  for (const auto& [question, text, prompt] : task.language) {
    tokens += prompt.size() + question.max_tokens * std::max<std::size_t>(question.choices.size(), 1);
  }
  const auto decoded = static_cast<double>(tokens);
  const auto count = static_cast<double>(plans);
  return (1 + 0.3 * count) * length * (1 + length / 4000) + count * decoded * 7 * (1 + length / 2000);
}

}  // namespace kvpolicy::tools
