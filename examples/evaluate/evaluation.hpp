// SPDX-License-Identifier: Apache-2.0
//
// Measurements of many plans on many tasks, kept in a file. A point is one plan on one suite at one
// length with the tasks of one seed. The file grows during a run, and points that it has already
// are not measured again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "../common/exam_plan.hpp"
#include "suite.hpp"

namespace kvpolicy::tools {

struct Point {
  Suite suite = Suite::keys;
  std::size_t length = 0;
  std::uint64_t seed = 0;
  std::string plan;               ///< with its settings: "h2o:512"
  std::string method;             ///< without its numbers: "h2o"
  double share = 0;               ///< of the full cache's bytes, for which the settings were chosen; 0: none
  io::OrderedJson settings = {};  ///< all settings of the plan, defaults included
  Outcome outcome;
};

/// One plan to be measured at one length.
struct Entry {
  std::string method;
  double share = 0;
  ExamPlan plan;
};

/// Everything that results depend on besides the fields of a point.
[[nodiscard]] nlohmann::json settings_of(const SuiteConfig& config, const std::string& model);

/// A point as one line of the file: {"suite": …, "tokens": …, "seed": …, "plan": …, "settings":
/// {…}, "marks" or measures, bytes}. Bytes are exact means over the point's questions or texts;
/// measures have six digits.
[[nodiscard]] nlohmann::ordered_json as_json(const Point& point);

/// The text of the file: {"what", "command", "settings", "points": [one on each line]}.
[[nodiscard]] std::string file_of(const std::string& command, const nlohmann::json& settings,
                                  const std::vector<nlohmann::ordered_json>& points);

/// Reads the points of such a file, unchanged; none if the file does not exist.
/// @throws FormatError if it is another kind of file, ConfigError if it was made with other
/// settings
[[nodiscard]] std::vector<nlohmann::ordered_json> points_of(const std::string& path,
                                                            const nlohmann::json& settings);

/// The element of `points` that is the same measurement; null if there is none.
[[nodiscard]] const nlohmann::ordered_json* find_point(const std::vector<nlohmann::ordered_json>& points,
                                                       const Point& point);

/// Measures all entries on the tasks of all seeds of one suite and length. Texts are distributed
/// over threads; results do not depend on the number of threads. `advance` is called by one thread
/// at a time.
/// @throws what draw_tasks and perform throw
[[nodiscard]] std::vector<Point> measure(const TextModel& model, Suite suite, const SuiteConfig& config,
                                         const std::vector<std::uint64_t>& seeds,
                                         const std::vector<Entry>& entries, const std::string& plain,
                                         const Advance& advance = {});

}  // namespace kvpolicy::tools
