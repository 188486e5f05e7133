// SPDX-License-Identifier: Apache-2.0
//
// Measures what a model can still do under a plan. A suite is a kind of task; its tasks are drawn
// from a seed, and every plan gets the same ones. One task is performed for many plans at once, so
// that its text is read only once (prompt_forks.hpp).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "../common/exam_plan.hpp"
#include "../common/retrieval_text.hpp"
#include "../common/text_model.hpp"
#include "prompt_forks.hpp"
#include "prompt_form.hpp"

namespace kvpolicy::tools {

/// Suites after `agreement` are the families of tasks in plain English, in their order.
enum class Suite : std::uint8_t {
  passkey,     ///< facts at even depths, one question each: a grid of length and depth
  keys,        ///< many facts anywhere in a text, as the model was trained
  reasoning,   ///< two-step questions: the key of the older of two
  perplexity,  ///< surprise at the continuation of a text
  agreement,   ///< distance from the full cache, for answers and continuations
};

inline constexpr std::size_t first_language_suite = 5;

inline constexpr auto suite_names = [] {
  std::array<std::string_view, first_language_suite + task_family_names.size()> names{
      "passkey", "keys", "reasoning", "perplexity", "agreement"};
  std::ranges::copy(task_family_names, names.begin() + first_language_suite);
  return names;
}();

[[nodiscard]] inline std::string_view name_of(Suite suite) {
  return suite_names[static_cast<std::size_t>(suite)];
}

/// The family of a suite in plain English.
[[nodiscard]] inline std::optional<TaskFamily> language_family(Suite suite) {
  const auto number = static_cast<std::size_t>(suite);
  if (number < first_language_suite) return {};
  return static_cast<TaskFamily>(number - first_language_suite);
}

/// Whether the suite's tasks are questions with right answers.
[[nodiscard]] inline bool asks(Suite suite) {
  return suite != Suite::perplexity && suite != Suite::agreement;
}

/// So many depths from 5 % to 95 %.
[[nodiscard]] std::vector<double> even_depths(std::size_t count);

/// How tasks are drawn, and how plans perform them.
struct SuiteConfig {
  std::size_t length = 4096;   ///< tokens of text, question and answer together, or text and continuation
  std::size_t questions = 34;  ///< per seed; the passkey grid rounds up to whole texts
  std::size_t per_text = 10;   ///< most questions that share a text
  /// Of passkey and niah_depths, from 5 % to 95 %. A text of niah_depths has `per_text` of them, in
  /// turn.
  std::size_t depths = 10;
  std::size_t windows = 4;   ///< continued texts, per seed
  std::size_t scored = 256;  ///< tokens of the continuation
  bool lead_in = false;      ///< questions end with the opening of their answer
  bool chat = false;         ///< suites in plain English are asked in the model's chat form (prompt_form.hpp)
  Prefill prefill = Prefill::shared;
  Compress compress = Compress::after_question;
};

/// A text with questions about it, or with its continuation.
struct Task {
  RetrievalText text;
  std::vector<LanguagePrompt> language = {};  ///< The questions of a suite in plain English.
  std::vector<int> follows = {};  ///< Tokens of the continuation; empty where there are questions.
  std::size_t follows_bytes = 0;  ///< The bytes of text that they stand for.
  std::vector<int> body = {};     ///< The tokens of the text.
};

/// Draws the tasks of one length and seed. They are the same on every machine, for any plans and
/// threads; models with different tokenizers get texts of their own, of as many tokens. `agreement` has texts with
/// questions first, then continued texts.
/// @throws ConfigError for an impossible length or depths, and for a suite without a chat form;
/// FormatError for a model without a chat template
[[nodiscard]] std::vector<Task> draw_tasks(const TextModel& model, Suite suite, const SuiteConfig& config,
                                           std::uint64_t seed, const std::string& plain);

/// The rows that a head which keeps all of them holds when the answer or the continuation begins.
[[nodiscard]] std::size_t rows_before_answer(const TextModel& model, const Task& task);

/// The results of one plan, over one or several tasks.
struct Outcome {
  /// One mark for each question: '1' right; 'o' the key of the other name of a two-step question;
  /// '0' wrong, or not all of several answers.
  std::string marks;
  std::vector<std::vector<int>> said;           ///< The tokens written in answer to each question.
  std::vector<std::size_t> questions_per_text;  ///< How many of the marks are of each text.
  /// "nats": surprise per byte of the text, for each continued text, which models with different
  /// tokenizers can be compared by; "token_nats": per token. "answer_kl", "text_kl": divergence from
  /// the full cache in nats per token; "answer_same", "text_same": share of tokens with the same
  /// likeliest next token; both for each question or text. "found": the share of several answers
  /// that was found, for each question.
  std::map<std::string, std::vector<double>> measures;
  /// When the answer or the continuation begins, for each question or text: allocated bytes, and
  /// bytes of the rows that each KV head keeps, layer after layer.
  std::vector<double> kv_bytes;
  std::vector<std::vector<double>> head_bytes;
  /// When the answer or the continuation ends (of a choice: when it begins), for each question or text: rows times the
  /// tokens for which they were held, as a share of a full cache's (common/footprint.hpp).
  std::vector<double> kv_footprint;

  void add(const Outcome& more);
};

/// Is called with the units of cost done since the last call.
using Advance = std::function<void(double units)>;

/// Performs a task under each plan. Single-threaded, so that results do not depend on how tasks are
/// distributed over threads.
/// @throws what the cache throws
[[nodiscard]] std::vector<Outcome> perform(const TextModel& model, const Task& task,
                                           std::span<const ExamPlan* const> plans, const SuiteConfig& config,
                                           bool compare_with_full, const Advance& advance = {});

/// The cost of performing a task under that many plans, in arbitrary units.
[[nodiscard]] double cost(const Task& task, std::size_t plans);

}  // namespace kvpolicy::tools
