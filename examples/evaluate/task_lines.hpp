// SPDX-License-Identifier: Apache-2.0
//
// Tasks as lines of JSON, so that other programs can be asked the same questions: texts, their
// tokens as this model reads them, the right answers, and the rule that scores them
// (bench/peers/ask.py).
#pragma once

#include <cstddef>
#include <cstdint>

#include <nlohmann/json.hpp>

#include "../common/text_model.hpp"
#include "suite.hpp"

namespace kvpolicy::tools {

/// What a task is called among those of a file: tasks of one suite, length and seed form one point.
struct TaskName {
  Suite suite = Suite::keys;
  std::size_t length = 0;
  std::uint64_t seed = 0;
  std::size_t number = 0;  ///< among the tasks of its suite, length and seed
};

/// {"suite", "tokens": the length, "seed", "number", "ends": [tokens that end a text], "body":
/// {"text", "tokens"}, "questions": [{"text", "tokens", "answers", "rule", "max_tokens", "choices":
/// [{"text", "tokens"}], "depth" where it is known}]}. The rule "contains": the share of the
/// answers that the output holds, whatever the case of ASCII letters; "begins": the output begins
/// with the answer.
/// @throws ConfigError for a task without questions
[[nodiscard]] nlohmann::ordered_json task_as_json(const TextModel& model, const TaskName& name,
                                                  const Task& task);

}  // namespace kvpolicy::tools
