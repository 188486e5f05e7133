// SPDX-License-Identifier: Apache-2.0
//
// The suites whose tasks are plain English (tasks/language_task.hpp): how a model's tokens make
// them, and what a cache that has read a question makes of it.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "../common/sequence.hpp"
#include "../common/text_model.hpp"
#include "suite.hpp"

namespace kvpolicy::tools {

/// @throws ConfigError as draw_language_task
[[nodiscard]] std::vector<Task> draw_language_tasks(const TextModel& model, TaskFamily family,
                                                    const SuiteConfig& config, std::uint64_t seed,
                                                    std::string_view plain);

struct LanguageAnswer {
  /// The share of the question's answers that was found; of a choice, 1 if the right one is the
  /// likeliest per byte.
  double found = 0;
  std::vector<int> said = {};  ///< The tokens that were written; none for a choice.
};

/// What the cache answers, always with the likeliest token. `cache` has read `before`, the text and
/// the question, and `logits` are those after it.
[[nodiscard]] LanguageAnswer answer_question(const TextModel& model, const LanguageQuestion& question,
                                             std::string_view before, Sequence& cache,
                                             std::vector<float> logits, const Reading& reading);

}  // namespace kvpolicy::tools
