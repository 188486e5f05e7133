// SPDX-License-Identifier: Apache-2.0
#include "evaluation.hpp"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/json_text.hpp>
#include <kvpolicy/io/text_file.hpp>
#include <reference_model/parallel.hpp>

#include "../common/json_line.hpp"

namespace kvpolicy::tools {
namespace {

double mean(const std::vector<double>& values) {
  return values.empty()
             ? 0
             : std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// Rounds to six digits, which keeps committed files small and survives writing and reading.
double rounded(double value) { return std::strtod(fmt::format("{:.6g}", value).c_str(), nullptr); }

std::vector<long long> mean_of_heads(const std::vector<std::vector<double>>& head_bytes) {
  std::vector<double> sums(head_bytes.empty() ? 0 : head_bytes.front().size());
  for (const auto& heads : head_bytes) {
    for (std::size_t i = 0; i < heads.size(); ++i) sums[i] += heads[i];
  }
  std::vector<long long> means;
  for (const double sum : sums) {
    means.push_back(std::llround(sum / static_cast<double>(head_bytes.size())));
  }
  return means;
}

// The fields that identify a measurement in the file.
nlohmann::ordered_json key_of(const Point& point) {
  nlohmann::ordered_json key{{"suite", name_of(point.suite)},
                             {"tokens", point.length},
                             {"seed", point.seed},
                             {"plan", point.plan},
                             {"method", point.method}};
  if (point.share > 0) key["share"] = rounded(point.share);
  if (!point.settings.empty()) key["settings"] = point.settings;
  return key;
}

}  // namespace

nlohmann::json settings_of(const SuiteConfig& config, const std::string& model) {
  nlohmann::json settings{{"model", std::filesystem::path{model}.filename().string()},
                          {"questions", config.questions},
                          {"per_text", config.per_text},
                          {"depths", config.depths},
                          {"windows", config.windows},
                          {"scored_tokens", config.scored},
                          {"lead_in", config.lead_in},
                          {"prefill", config.prefill == Prefill::shared ? "shared" : "own"},
                          {"compress", config.compress == Compress::after_text ? "text" : "question"}};
  if (config.chat) settings["chat"] = true;
  return settings;
}

nlohmann::ordered_json as_json(const Point& point) {
  nlohmann::ordered_json json = key_of(point);
  if (!point.outcome.marks.empty()) json["marks"] = point.outcome.marks;
  if (!point.outcome.said.empty()) json["said"] = point.outcome.said;
  if (!point.outcome.questions_per_text.empty()) {
    json["questions_per_text"] = point.outcome.questions_per_text;
  }
  for (const auto& [name, values] : point.outcome.measures) {
    std::vector<double> short_values;
    for (const double value : values) short_values.push_back(rounded(value));
    json[name] = std::move(short_values);
  }
  const std::vector<long long> heads = mean_of_heads(point.outcome.head_bytes);
  json["kv_bytes"] = std::llround(mean(point.outcome.kv_bytes));
  json["row_bytes"] = std::accumulate(heads.begin(), heads.end(), 0LL);
  json["row_bytes_by_head"] = heads;
  if (!point.outcome.kv_footprint.empty()) json["kv_footprint"] = rounded(mean(point.outcome.kv_footprint));
  return json;
}

std::string file_of(const std::string& command, const nlohmann::json& settings,
                    const std::vector<nlohmann::ordered_json>& points) {
  const nlohmann::ordered_json what =
      "the same tasks for every plan. marks: a question each, 1 right, o the key of the other of "
      "the two names; found: the share of several answers; said: the tokens of each answer. nats: "
      "surprise per byte; token_nats: per token. answer_ and text_ kl and same: "
      "divergence from the full cache in nats per token, share of the same likeliest tokens. "
      "kv_bytes: pages; row_bytes: "
      "rows kept where the answer begins, by_head: of each KV head, layer after layer. kv_footprint: "
      "rows times the tokens for which they are held, from the text's first to the answer's last, as a "
      "share of a full cache's. settings: all that the plan was made with";
  std::string text = fmt::format("{{\n  \"what\": {},\n  \"command\": {},\n  \"settings\": {},\n",
                                 as_line(what), as_line(nlohmann::json(command)), as_line(settings));
  text += "  \"points\": [";
  for (std::size_t i = 0; i < points.size(); ++i) {
    text += (i == 0 ? "\n    " : ",\n    ") + as_line(points[i]);
  }
  return text + "\n  ]\n}\n";
}

std::vector<nlohmann::ordered_json> points_of(const std::string& path, const nlohmann::json& settings) {
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return {};
  const auto file = nlohmann::ordered_json::parse(io::read_text_file(path), nullptr, false);
  require<FormatError>(
      file.is_object() && file.contains("settings") && file.contains("points") && file["points"].is_array(),
      path, ": is not a file that evaluate has written; give another --out");
  require(as_line(nlohmann::json::parse(as_line(file["settings"]))) == as_line(settings), path,
          ": was measured with other settings: ", as_line(file["settings"]), ", these are ",
          as_line(settings), "; use those, or give another --out");
  return {file["points"].begin(), file["points"].end()};
}

const nlohmann::ordered_json* find_point(const std::vector<nlohmann::ordered_json>& points,
                                         const Point& point) {
  const nlohmann::ordered_json key = key_of(point);
  for (const auto& known : points) {
    bool same = known.contains("share") == key.contains("share") &&
                known.contains("settings") == key.contains("settings");
    for (const auto& [name, value] : key.items()) {
      same = same && known.contains(name) && known[name] == value;
    }
    if (same) return &known;
  }
  return nullptr;
}

std::vector<Point> measure(const TextModel& model, Suite suite, const SuiteConfig& config,
                           const std::vector<std::uint64_t>& seeds, const std::vector<Entry>& entries,
                           const std::string& plain, const Advance& advance) {
  std::vector<const ExamPlan*> plans;
  for (const Entry& entry : entries) plans.push_back(&entry.plan);
  struct Job {
    std::size_t seed = 0;  // index into the list of seeds
    Task task;
    std::vector<Outcome> outcomes;
  };
  std::vector<Job> jobs;
  for (std::size_t s = 0; s < seeds.size(); ++s) {
    for (Task& task : draw_tasks(model, suite, config, seeds[s], plain)) {
      jobs.push_back({s, std::move(task), {}});
    }
  }
  std::mutex reporting;
  reference::for_each_block(jobs.size(), 1, true, [&](std::size_t i, std::size_t) {
    set_threads(1);  // because the number of threads in a text would change the last bits
    jobs[i].outcomes =
        perform(model, jobs[i].task, plans, config, suite == Suite::agreement, [&](double units) {
          const std::lock_guard lock{reporting};
          if (advance) advance(units);
        });
  });
  std::vector<Point> points;
  for (std::size_t s = 0; s < seeds.size(); ++s) {
    for (std::size_t e = 0; e < entries.size(); ++e) {
      Point point{.suite = suite,
                  .length = config.length,
                  .seed = seeds[s],
                  .plan = entries[e].plan.name,
                  .method = entries[e].method,
                  .share = entries[e].share,
                  .settings = entries[e].plan.settings,
                  .outcome = {}};
      for (const Job& job : jobs) {
        if (job.seed == s) point.outcome.add(job.outcomes[e]);
      }
      points.push_back(std::move(point));
    }
  }
  return points;
}

}  // namespace kvpolicy::tools
