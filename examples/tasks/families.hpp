// SPDX-License-Identifier: Apache-2.0
//
// How the families of tasks are drawn, a file each. All take what draw_language_task takes, and the
// task's own random numbers.
#pragma once

#include <string_view>

#include "../common/random.hpp"
#include "language_task.hpp"

namespace kvpolicy::tools {

/// What a task is drawn from.
struct TaskSource {
  const LanguageTaskConfig& config;
  std::string_view prose;
  const CountTokens& count;
  Random& random;
};

[[nodiscard]] LanguageTask draw_needles(const TaskSource& source);         // niah_...
[[nodiscard]] LanguageTask draw_variable_chain(const TaskSource& source);  // vt
[[nodiscard]] LanguageTask draw_common_words(const TaskSource& source);    // cwe
[[nodiscard]] LanguageTask draw_frequent_words(const TaskSource& source);  // fwe
[[nodiscard]] LanguageTask draw_documents(const TaskSource& source);       // qa_...
[[nodiscard]] LanguageTask draw_choices(const TaskSource& source);         // choice_...

}  // namespace kvpolicy::tools
