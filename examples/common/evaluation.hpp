// SPDX-License-Identifier: Apache-2.0
//
// Measurements of many plans on many tasks, as a file: a point is one plan on one suite at one
// length with the tasks of one seed. The file grows while it is measured, and what is in it already
// need not be measured again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <reference_model/llama.hpp>

#include "exam_plan.hpp"
#include "suite.hpp"

namespace kvpolicy::tools {

struct Point {
  Suite suite = Suite::keys;
  std::size_t length = 0;
  std::uint64_t seed = 0;
  std::string plan;    ///< with its settings: "h2o:512"
  std::string method;  ///< without its numbers: "h2o"
  double share = 0;    ///< of the full cache's bytes that its settings were made for; 0: none
  io::OrderedJson settings = {};  ///< all of the plan's, what its name leaves open included
  Outcome outcome;

  /// Whether it is the same measurement.
  [[nodiscard]] bool same_as(const Point& other) const {
    return suite == other.suite && length == other.length && seed == other.seed &&
           plan == other.plan && method == other.method && share == other.share &&
           settings == other.settings;
  }
};

/// One plan to be measured at one length.
struct Entry {
  std::string method;
  double share = 0;
  ExamPlan plan;
};

/// Everything that decides about results, besides a point's own fields.
[[nodiscard]] nlohmann::json settings_of(const SuiteConfig& config, const std::string& model);

/// A point on a line: {"suite": …, "tokens": …, "seed": …, "plan": …, "settings": {…}, "marks" or
/// measures, bytes}.
/// Bytes are means over the point's questions or texts, to the byte; measures have six digits.
[[nodiscard]] nlohmann::ordered_json as_json(const Point& point);

/// The file: {"what", "command", "settings", "points": [one on each line]}.
[[nodiscard]] std::string file_of(const std::string& command, const nlohmann::json& settings,
                                  const std::vector<nlohmann::ordered_json>& points);

/// The points of such a file, as they were written; none if there is no file.
/// @throws FormatError if it is something else; ConfigError if it was made with other settings.
[[nodiscard]] std::vector<nlohmann::ordered_json> points_of(const std::string& path,
                                                            const nlohmann::json& settings);

/// The one among `points` that is the same measurement; null if there is none.
[[nodiscard]] const nlohmann::ordered_json* find_point(
    const std::vector<nlohmann::ordered_json>& points, const Point& point);

/// All entries on all seeds' tasks of one suite and length. Texts are shared out among threads;
/// results do not depend on how many there are. `advance` is called by one of them at a time.
/// @throws what drawing and performing throw.
[[nodiscard]] std::vector<Point> measure(const reference::Llama& model, Suite suite,
                                         const SuiteConfig& config,
                                         const std::vector<std::uint64_t>& seeds,
                                         const std::vector<Entry>& entries,
                                         const std::string& plain, const Advance& advance = {});

}  // namespace kvpolicy::tools
