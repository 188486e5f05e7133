// SPDX-License-Identifier: Apache-2.0
//
// Reads cost tables (plan/cost_table.hpp): how long an engine took over heads of each kind. `shards_bench
// costs` writes them; `plan shards --costs` divides heads by them. Settings look as in plan files.
//
//     {"format": "kvpolicy costs", "version": 1,
//      "head_dim": 128,
//      "bandwidth": 1.1e10,
//      "machine": {"cpu": "..."},
//      "curves": [{"setting": {"policy": "full"}, "queries": 4,
//                  "measured": [{"rows": 256, "seconds": 1.2e-5, "p10": 1.1e-5, "p90": 1.5e-5},
//                               {"rows": 4096, "seconds": 1.9e-4}]}]}
//
// Spreads (p10, p90) and `machine` are for people: they are read over, and not kept.
#pragma once

#include <cmath>
#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvpolicy/io/plan_json.hpp>
#include <kvpolicy/plan/cost_table.hpp>

namespace kvpolicy::io {

/// The value of "format" in a file of costs.
inline constexpr std::string_view costs_format = "kvpolicy costs";
/// The version that is read.
inline constexpr std::size_t costs_version = 1;

/// What a file of costs says.
template <Element E>
struct MeasuredCosts {
  CostTable<E> table;
  double bandwidth = 0;  ///< bytes a second that the same machine reads from memory at best; 0: not measured
};

namespace detail {

[[nodiscard]] inline double positive(JsonObject& object, const char* key, double otherwise) {
  const double number = object.number_or(key, otherwise);
  require<FormatError>(std::isfinite(number) && number >= 0, object.where(key), ": is ", number,
                       ", must be 0 or positive, and finite");
  return number;
}

[[nodiscard]] inline MeasuredCost read_cost(const Json& json, const std::string& where) {
  JsonObject own{json, where};
  (void)own.at("seconds");
  const MeasuredCost cost{own.count("rows", std::size_t{1} << 40), positive(own, "seconds", 0)};
  (void)positive(own, "p10", 0);
  (void)positive(own, "p90", 0);
  own.refuse_others();
  return cost;
}

}  // namespace detail

/// Reads the text of a file of costs. Error messages begin with `origin`.
/// @throws FormatError
template <Element E>
[[nodiscard]] MeasuredCosts<E> parse_costs(std::string_view text, std::string_view origin = "costs",
                                           const PolicyRegistry<E>& policies = shipped_policies<E>()) {
  const Json json = parse_json(text, origin);
  JsonObject object{json, std::string{origin}};
  require_format(object, costs_format, costs_version);
  const std::size_t head_dim = object.count("head_dim");
  const ModelShape shape{1, 1, 1, head_dim, object.count_or("value_dim", head_dim)};
  KVPOLICY_TRY { shape.validate(); }
  KVPOLICY_CATCH_AS(ConfigError, error) { fail<FormatError>(object.where("head_dim"), ": ", error.what()); }
  const double bandwidth = detail::positive(object, "bandwidth", 0);
  (void)object.find("machine");
  const Json& list = object.at("curves");
  object.refuse_others();
  require<FormatError>(list.is_array() && !list.empty(), object.where("curves"),
                       ": must be an array of at least one curve, is ", shown(list));
  std::vector<CostCurve<E>> curves;
  for (const Json& entry : list) {
    const std::string where = message(origin, ", curves[", curves.size(), ']');
    JsonObject own{entry, where};
    const HeadSettings<E> settings =
        parse_setting(own.at("setting"), message(where, ", key 'setting'"), shape, policies);
    const std::size_t queries = own.count("queries", std::size_t{1} << 20);
    const Json& measured = own.at("measured");
    own.refuse_others();
    require<FormatError>(measured.is_array() && !measured.empty(), where,
                         ": 'measured' must be an array of at least one measurement, is ", shown(measured));
    std::vector<MeasuredCost> costs;
    for (const Json& cost : measured) {
      costs.push_back(detail::read_cost(cost, message(where, ", measured[", costs.size(), ']')));
    }
    curves.push_back({settings, queries, std::move(costs)});
  }
  KVPOLICY_TRY { return {CostTable<E>{head_dim, shape.layer(0).value_dim, std::move(curves)}, bandwidth}; }
  KVPOLICY_CATCH_AS(ConfigError, error) { fail<FormatError>(origin, ": ", error.what()); }
}

/// Reads a file of costs.
/// @throws FormatError
template <Element E>
[[nodiscard]] MeasuredCosts<E> load_costs(const std::filesystem::path& path) {
  return parse_costs<E>(read_text_file(path), path.string());
}

}  // namespace kvpolicy::io
