// SPDX-License-Identifier: Apache-2.0
//
// Tasks in plain English for pretrained models: a text, and questions about it. The long ones have
// the shapes of the passkey test (Mohtashami and Jaggi, arXiv:2305.16300) and of RULER (Hsieh et
// al., arXiv:2404.06654), after which they are named; words and sentences are our own. The short
// ones are choices between endings, which need no long text: compression should cost nothing there.
//
// A family, a length, a seed and a number give the same task on every machine, for the same prose
// and the same count of tokens. No model is needed to draw tasks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace kvpolicy::tools {

enum class TaskFamily : std::uint8_t {
  niah_depths,      ///< five digits at each of several depths of prose, each asked for by itself
  niah_single_1,    ///< one number in a sentence that repeats
  niah_single_2,    ///< one number in prose
  niah_single_3,    ///< one UUID in prose
  niah_multikey_1,  ///< four numbers of four things in prose, one is asked for
  niah_multikey_2,  ///< nothing but such numbers
  niah_multikey_3,  ///< nothing but UUIDs that belong to UUIDs
  niah_multivalue,  ///< four numbers of one thing in prose, all are asked for
  niah_multiquery,  ///< four numbers of four things in prose, all are asked for
  vt,               ///< variable tracking: all names that one value reaches in four assignments
  cwe,              ///< the ten words that a numbered list repeats most often
  fwe,              ///< the three most frequent of made-up words, whose frequencies fall by Zipf's law
  qa_1,             ///< a fact of one of many short documents
  qa_2,             ///< a fact that takes two of them
  choice_kind,      ///< "A trout is a kind of": fish, bird, ...
  choice_capital,   ///< "The capital of Japan is": four cities
  choice_opposite,  ///< "The opposite of hot is": four adjectives
  choice_larger,    ///< "Of 12 and 57, the larger number is": the two
  choice_ending,    ///< a text and four sentences, of which one follows it
};

inline constexpr std::array<std::string_view, 19> task_family_names{"niah_depths",
                                                                    "niah_single_1",
                                                                    "niah_single_2",
                                                                    "niah_single_3",
                                                                    "niah_multikey_1",
                                                                    "niah_multikey_2",
                                                                    "niah_multikey_3",
                                                                    "niah_multivalue",
                                                                    "niah_multiquery",
                                                                    "vt",
                                                                    "cwe",
                                                                    "fwe",
                                                                    "qa_1",
                                                                    "qa_2",
                                                                    "choice_kind",
                                                                    "choice_capital",
                                                                    "choice_opposite",
                                                                    "choice_larger",
                                                                    "choice_ending"};

[[nodiscard]] constexpr std::string_view name_of(TaskFamily family) {
  return task_family_names[static_cast<std::size_t>(family)];
}

/// Whether the family's questions are choices between endings.
[[nodiscard]] constexpr bool is_choice(TaskFamily family) { return family >= TaskFamily::choice_kind; }

struct LanguageQuestion {
  /// Asks, right after the body: "\nWhat is the secret number of the amber lantern?"
  std::string text = {};
  /// Opens the answer: "The secret number of the amber lantern is". After a chat template it opens
  /// the model's turn.
  std::string lead_in = {};
  /// What the output has to contain. A choice has one answer, which is one of its choices.
  std::vector<std::string> answers = {};
  /// If there are any, the model ranks them, by their log-likelihood per byte, instead of writing.
  std::vector<std::string> choices = {};
  std::size_t max_tokens = 0;  ///< How many tokens the model may write, or read as a choice.
  /// Where the answer, or the first of several, is in the body: a share of its bytes. Negative
  /// where the answer is nowhere, or all over the body.
  double depth = -1;

  /// What the model reads after the body if there is no chat template.
  [[nodiscard]] std::string prompt() const { return lead_in.empty() ? text : text + ' ' + lead_in; }
};

struct LanguageTask {
  std::string body;
  std::vector<LanguageQuestion> questions;  ///< Each is asked by itself, after the body.
};

/// How many tokens a text has.
using CountTokens = std::function<std::size_t(std::string_view text)>;

struct LanguageTaskConfig {
  TaskFamily family = TaskFamily::niah_depths;
  /// Tokens of the body, of the longest question and of its answer's `max_tokens`, together; never
  /// exceeded. Choices other than `choice_ending` are as short as they are.
  std::size_t length = 1024;
  /// Tokens of a chat template, which count as well.
  std::size_t overhead = 0;
  /// Questions that share a body, at most; families that ask for everything have one.
  std::size_t questions = 1;
  /// Shares of the body at which facts are put, from 0 to 1, in ascending order, for `niah_depths`
  /// alone; question i asks for the fact at depth i. Other families draw depths.
  std::vector<double> depths = {0.5};
  std::uint64_t seed = 1;
  std::uint64_t number = 0;  ///< Which of a seed's tasks.
};

/// `prose` surrounds the facts, and gives the words of lists.
/// @throws ConfigError for a length that the task or the prose is too long or too short for, for
/// impossible depths, and for no questions
[[nodiscard]] LanguageTask draw_language_task(const LanguageTaskConfig& config, std::string_view prose,
                                              const CountTokens& count);

/// The tokens by which a task's length is judged, for its longest question.
[[nodiscard]] std::size_t length_of(const LanguageTask& task, const LanguageTaskConfig& config,
                                    const CountTokens& count);

/// The share of a question's answers that the output contains, whatever their case, as RULER
/// scores.
[[nodiscard]] double score(const LanguageQuestion& question, std::string_view output);

}  // namespace kvpolicy::tools
