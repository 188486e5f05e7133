// SPDX-License-Identifier: Apache-2.0
#include "evaluation_table.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <numbers>
#include <numeric>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include <kvpolicy/format.hpp>

#include "../common/plan_name.hpp"
#include "../common/table.hpp"
#include "../common/terminal.hpp"
#include "../tasks/language_task.hpp"

namespace kvpolicy::tools {
namespace {

using Json = nlohmann::ordered_json;
using Points = std::vector<Json>;

double mean_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double share_of_marks(const Json& point, std::string_view wanted) {
  const auto marks = point["marks"].get<std::string>();
  const auto found =
      std::ranges::count_if(marks, [&](char mark) { return wanted.find(mark) != std::string_view::npos; });
  return static_cast<double>(found) / static_cast<double>(marks.size());
}

// "97.1 ± 0.8": mean and standard deviation over seeds.
std::string with_spread(const std::vector<double>& values, double unit, int digits) {
  const double mean = mean_of(values);
  std::string text = fixed(mean * unit, digits);
  if (values.size() < 2) return text;
  double squares = 0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  const double deviation = std::sqrt(squares / static_cast<double>(values.size() - 1));
  return text + " ± " + fixed(deviation * unit, digits);
}

// How to read one number of a point.
struct Measure {
  std::string suite;
  std::string field;  // of the point; measurements that have no such field are not shown
  std::string title;
  double unit = 1;
  int digits = 1;
  std::function<double(const Json&)> of;
};

std::vector<Measure> language_measures() {
  std::vector<Measure> measures;
  for (const std::string_view name : task_family_names) {
    const std::string suite{name};
    measures.push_back({suite, "found", suite + ": answers found, %", 100, 1, [](const Json& point) {
                          return mean_of(point["found"].get<std::vector<double>>());
                        }});
    measures.push_back({suite, "marks", suite + ": questions answered, %", 100, 1,
                        [](const Json& point) { return share_of_marks(point, "1"); }});
  }
  return measures;
}

std::vector<Measure> measures() {
  const auto marks = [](std::string wanted) {
    return [wanted = std::move(wanted)](const Json& point) { return share_of_marks(point, wanted); };
  };
  const auto values = [](std::string name) {
    return [name = std::move(name)](const Json& point) {
      return mean_of(point[name].get<std::vector<double>>());
    };
  };
  std::vector<Measure> all{
      {"keys", "marks", "Questions answered exactly, %", 100, 1, marks("1")},
      {"passkey", "marks", "Passkeys found, all depths, %", 100, 1, marks("1")},
      {"reasoning", "marks", "Two-step questions answered exactly, %", 100, 1, marks("1")},
      {"reasoning", "marks", "Two-step questions: the key of one of the two names, %", 100, 1, marks("1o")},
      {"perplexity", "nats", "Surprise at text that goes on, nats per byte", 1, 4, values("nats")},
      {"perplexity", "nats", "The same in bits per byte", std::numbers::log2e, 4, values("nats")},
      {"perplexity", "token_nats", "The same in nats per token", 1, 4, values("token_nats")},
      {"agreement", "answer_same", "Answers: the same likeliest token as the full cache, %", 100, 2,
       values("answer_same")},
      {"agreement", "answer_kl", "Answers: KL divergence from the full cache, nats per token", 1, 5,
       values("answer_kl")},
      {"agreement", "text_same", "Text that goes on: the same likeliest token, %", 100, 2,
       values("text_same")},
      {"agreement", "text_kl", "Text that goes on: KL divergence, nats per token", 1, 5, values("text_kl")},
  };
  std::ranges::move(language_measures(), std::back_inserter(all));
  return all;
}

// Plans for one budget have other settings at each length; they share a row.
std::string row_name(const Json& point) {
  const auto method = point["method"].get<std::string>();
  if (!point.contains("share")) return point["plan"].get<std::string>();
  return fmt::format("{} at {} %", method, fmt::format("{:.4g}", 100 * point["share"].get<double>()));
}

template <class Key>
auto distinct(const Points& points, Key key) {
  std::vector<decltype(key(points.front()))> found;
  for (const Json& point : points) {
    auto own = key(point);
    if (std::ranges::find(found, own) == found.end()) found.push_back(std::move(own));
  }
  return found;
}

std::string table_of(const Measure& measure, const Points& points) {
  const auto lengths = distinct(points, [](const Json& point) { return point["tokens"].get<std::size_t>(); });
  Table table;
  table.add_column("plan", "", Align::left);
  for (const std::size_t length : lengths) table.add_column(thousands(length));
  table.add_column("rows kept at " + thousands(lengths.back()));
  table.add_column("KV cache");
  // Files of earlier versions lack it.
  const auto has_footprint = [](const Json& point) { return point.contains("kv_footprint"); };
  const bool with_footprint = std::ranges::any_of(points, has_footprint);
  if (with_footprint) table.add_column("KV footprint, %");
  for (const std::string& name : distinct(points, row_name)) {
    std::vector<std::string> row{name};
    double rows = 0;
    double pages = 0;
    std::vector<double> footprints;  // at the last length
    for (const std::size_t length : lengths) {
      std::vector<double> values;
      for (const Json& point : points) {
        if (point["tokens"] != length || row_name(point) != name) continue;
        values.push_back(measure.of(point));
        rows = point["row_bytes"].get<double>();
        pages = point["kv_bytes"].get<double>();
        if (length == lengths.back() && has_footprint(point)) footprints.push_back(point["kv_footprint"]);
      }
      row.push_back(values.empty() ? "-" : with_spread(values, measure.unit, measure.digits));
    }
    row.push_back(fmt::format("{:MB}", Bytes{static_cast<std::uint64_t>(rows)}));
    row.push_back(fmt::format("{:MB}", Bytes{static_cast<std::uint64_t>(pages)}));
    if (with_footprint) row.push_back(footprints.empty() ? "-" : fixed(100 * mean_of(footprints), 1));
    table.add_row(std::move(row));
  }
  return table.markdown();
}

// "- `headkv:128`: capacity 128, kernel 7": the settings that the plans' names leave open.
std::string settings_list(const Points& points) {
  std::string text;
  for (const std::string& plan :
       distinct(points, [](const Json& point) { return point["plan"].get<std::string>(); })) {
    const auto point = std::ranges::find_if(
        points, [&](const Json& one) { return one["plan"] == plan && one.contains("settings"); });
    if (point == points.end()) continue;
    text += fmt::format("- `{}`: {}\n", plan, shown_settings((*point)["settings"]));
  }
  return text.empty() ? "" : "\nSettings:\n\n" + text;
}

}  // namespace

std::string evaluation_tables(const std::vector<nlohmann::ordered_json>& points) {
  std::string text;
  for (const Measure& measure : measures()) {
    Points own;
    for (const Json& point : points) {
      if (point["suite"] == measure.suite && point.contains(measure.field)) own.push_back(point);
    }
    if (own.empty()) continue;
    text += fmt::format("{}{}:\n\n{}", text.empty() ? "" : "\n", measure.title, table_of(measure, own));
  }
  return text + settings_list(points);
}

}  // namespace kvpolicy::tools
