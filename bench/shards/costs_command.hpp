// SPDX-License-Identifier: Apache-2.0
//
// `shards_bench costs`: measures a table of costs and writes it as a file (io/cost_table_json.hpp).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <kvpolicy/io/cost_table_json.hpp>
#include <kvpolicy/io/low_bits.hpp>
#include <kvpolicy/plan/low_bits.hpp>

#include "bench/cpu/machine.hpp"
#include "bench/cpu/neighbours.hpp"
#include "common/files.hpp"
#include "common/progress.hpp"
#include "head_costs.hpp"

namespace kvpolicy::bench {

using Json = nlohmann::ordered_json;

struct CostsArguments {
  CostSettings measure;
  std::vector<std::string> formats = {"full", "int4"};
  std::string json;
  bool smoke = false;
};

/// The kind of head that a name stands for: full, or a precision.
[[nodiscard]] inline CostKind kind_named(const std::string& name, std::size_t head_dim) {
  if (name == "full") return {name, FullCache<DenseStorage<bfloat16>>::Config{}, 1};
  const LowBitFormat format = LowBitFormat::of_text(io::low_bits_named(name), {1, 1, 1, head_dim});
  // Below that no row is quantised.
  return {name, format.head<bfloat16>(), format.sinks + 2 * format.storage.residual};
}

[[nodiscard]] inline std::string date_now() {
  const auto now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  return fmt::format("{:%FT%TZ}", fmt::gmtime(now));
}

/// @throws ConfigError for an unknown format, StorageError if a result is wrong or the file cannot be written
inline void measure_costs(CostsArguments a) {
  if (a.smoke) {
    a.measure.queries = {2};
    a.measure.rows = {64, 300};
    a.measure.samples = 2;
  }
  std::vector<CostKind> kinds;
  for (const std::string& name : a.formats) kinds.push_back(kind_named(name, a.measure.head_dim));
  const Machine here = machine();
  const Neighbours neighbours;
  // Huge pages for a buffer that no cache holds.
  const std::size_t buffer = a.smoke ? std::size_t{1} << 20 : here.l3_bytes;
  const Reader reader{buffer};
  tools::Progress progress;
  std::size_t points = 0;
  for (const CostKind& kind : kinds) {
    for (const std::size_t rows : a.measure.rows)
      points += rows >= kind.least_rows ? a.measure.queries.size() : 0;
  }
  progress.update(0, "how fast memory is read");
  double bandwidth = reading_speed(reader);
  std::size_t done = 0;
  Json curves = Json::array();
  for (const CostKind& kind : kinds) {
    for (const std::size_t queries : a.measure.queries) {
      Json measured = Json::array();
      for (const std::size_t rows : a.measure.rows) {
        if (rows < kind.least_rows) continue;
        progress.update(static_cast<double>(done++) / static_cast<double>(points),
                        fmt::format("{}, {} query heads, {} rows", kind.name, queries, rows));
        const CostPoint point = measure_cost(kind, queries, rows, a.measure, a.smoke ? nullptr : &reader);
        measured.push_back(
            {{"rows", rows}, {"seconds", point.median}, {"p10", point.p10}, {"p90", point.p90}});
        const double bytes =
            bytes_read(kind.settings.rule(a.measure.head_dim), rows,
                       {queries, 1, a.measure.head_dim, a.measure.head_dim}, sizeof(bfloat16));
        progress.note(
            fmt::format("{:<5} {:>2} query heads {:>7} rows {:>10.2f} us ({:.2f} to {:.2f}) {:>5.1f} GB/s, "
                        "off by {:.1g}",
                        kind.name, queries, rows, 1e6 * point.median, 1e6 * point.p10, 1e6 * point.p90,
                        1e-9 * bytes / point.median, point.error));
      }
      if (measured.empty()) continue;
      curves.push_back({{"setting", Json::parse(io::write_setting(kind.settings))},
                        {"queries", queries},
                        {"measured", std::move(measured)}});
    }
  }
  bandwidth = std::max(bandwidth, reading_speed(reader));
  progress.clear();
  const Json file{{"format", io::costs_format},
                  {"version", io::costs_version},
                  {"head_dim", a.measure.head_dim},
                  {"bandwidth", bandwidth},
                  {"machine",
                   {{"cpu", here.cpu},
                    {"target", hwy::TargetName(HWY_TARGET)},
                    {"threads", 1},
                    {"samples", a.measure.samples},
                    {"others_percent", neighbours.percent()},
                    {"smoke", a.smoke},
                    {"date", date_now()}}},
                  {"curves", std::move(curves)}};
  fmt::print("{}: one thread reads {:.1f} GB/s; others ran {:.0f} % of the time\n", here.cpu,
             1e-9 * bandwidth, neighbours.percent());
  const std::string text = file.dump(1) + "\n";
  (void)io::parse_costs<bfloat16>(text);  // what is written can be read
  if (!a.json.empty()) tools::write_result(a.json, text);
}

}  // namespace kvpolicy::bench
