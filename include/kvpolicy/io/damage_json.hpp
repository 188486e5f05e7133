// SPDX-License-Identifier: Apache-2.0
//
// Reads and writes damage files: how much each choice of settings was measured to harm the model, for each
// head. `identify_heads damage` writes them, and they are the input of plan search (plan/search.hpp).
// Settings look as in plan files.
//
//     {"format": "kvpolicy damage", "version": 1,
//      "shape": {"layers": 1, "q_heads": 4, "kv_heads": 2, "head_dim": 64},
//      "context": 2048,
//      "choices": [{"setting": {"policy": "full"}, "damage": [[0, 0]]},
//                  {"setting": {"policy": "sink_recent", "sinks": 4, "recent": 64},
//                   "damage": [[0.7, 0.01]]}]}
//
// A choice may also have "rows_read", as many shares as damages: the head is then read with a bound, and reads so many
// of its rows in halves in full. The file has the bound as "epsilon".
#pragma once

#include <cmath>
#include <cstddef>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvpolicy/io/plan_json.hpp>
#include <kvpolicy/plan/search.hpp>

namespace kvpolicy::io {

/// The value of "format" in a damage file.
inline constexpr std::string_view damage_format = "kvpolicy damage";
/// The version that is written and read.
inline constexpr std::size_t damage_version = 1;

/// The measured damage that the model takes if one head gets one choice of a menu: in nats (`identify_heads damage`),
/// or as the share of the head's output that is wrong (`identify_heads shares`).
template <Element E>
struct DamageTable {
  ModelShape shape;
  std::size_t context = 0;  ///< Tokens of the texts that the damage was measured on.
  std::vector<HeadChoice<E>> choices;
  /// What may stay unread where choices have `rows_read`, which were measured with this bound.
  std::optional<double> epsilon = {};
};

namespace detail {

/// A number for each head: [layers][kv_heads].
inline Json head_rows(const HeadTable<double>& table, std::string_view what) {
  Json rows = Json::array();
  for (std::size_t layer = 0; layer < table.layers(); ++layer) {
    Json row = Json::array();
    for (const double number : table.layer(layer)) {
      require(std::isfinite(number), "format_damage: a ", what, " is ", number, ", must be finite");
      row.push_back(number);
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

/// Reads such numbers, from 0 to `most`.
inline HeadTable<double> parse_head_rows(const Json& layers, std::string_view where, const char* key,
                                         const ModelShape& shape, double most) {
  const std::size_t heads = shape.layer(0).kv_heads;
  require<FormatError>(layers.is_array() && layers.size() == shape.layers, where, ": '", key,
                       "' must be an array of ", shape.layers, " layers, is ", shown(layers));
  HeadTable<double> table{shape.layers, heads};
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    const Json& row = layers[layer];
    require<FormatError>(row.is_array() && row.size() == heads, where, ": '", key, "' of layer ", layer,
                         " must be an array of ", heads, " KV heads, is ", shown(row));
    for (std::size_t head = 0; head < heads; ++head) {
      const double value = row[head].is_number() ? row[head].get<double>() : std::nan("");
      require<FormatError>(value >= 0.0 && value <= most, where, ": the ", key, " of layer ", layer,
                           ", head ", head, " is ", shown(row[head]), ", must be 0 or positive",
                           most == 1.0 ? ", and at most 1" : "");
      table(layer, head) = value;
    }
  }
  return table;
}

}  // namespace detail

/// Writes the text of a damage file.
/// @throws ConfigError for a table that does not fit the shape or has a number that is not finite
template <Element E>
[[nodiscard]] std::string format_damage(const DamageTable<E>& table) {
  std::string choices;
  for (const HeadChoice<E>& choice : table.choices) {
    kvpolicy::detail::require_fits(choice.damage, table.shape, "format_damage");
    std::string rows_read;
    if (!choice.rows_read.values().empty()) {
      kvpolicy::detail::require_fits(choice.rows_read, table.shape, "format_damage");
      require(table.epsilon.has_value(), "format_damage: a choice has rows_read, but the table no epsilon");
      rows_read =
          ",\n     \"rows_read\": " + detail::head_rows(choice.rows_read, "share of rows read").dump();
    }
    choices +=
        message(choices.empty() ? "\n    " : ",\n    ", "{\"setting\": ", write_setting(choice.settings),
                ",\n     \"damage\": ", detail::head_rows(choice.damage, "damage").dump(), rows_read, '}');
  }
  std::string epsilon;
  if (table.epsilon) {
    require(*table.epsilon >= 0.0 && *table.epsilon <= 1.0, "format_damage: epsilon is ", *table.epsilon,
            ", must be a share of the attention, 0 to 1");
    epsilon = message(",\n  \"epsilon\": ", Json(*table.epsilon).dump());
  }
  return message("{\n  \"format\": \"", damage_format, "\",\n  \"version\": ", damage_version,
                 ",\n  \"shape\": ", write_shape(table.shape), ",\n  \"context\": ", table.context, epsilon,
                 ",\n  \"choices\": [", choices, "\n  ]\n}\n");
}

/// Reads the text of a damage file. Error messages begin with `origin`.
/// @throws FormatError
template <Element E>
[[nodiscard]] DamageTable<E> parse_damage(std::string_view text, std::string_view origin = "damage",
                                          const PolicyRegistry<E>& policies = shipped_policies<E>()) {
  const Json json = parse_json(text, origin);
  JsonObject object{json, std::string{origin}};
  require_format(object, damage_format, damage_version);
  DamageTable<E> table{read_shape(object), object.count("context"), {}, {}};
  if (const Json* const epsilon = object.find("epsilon")) {
    const double share = epsilon->is_number() ? epsilon->get<double>() : std::nan("");
    require<FormatError>(share >= 0.0 && share <= 1.0, object.where("epsilon"),
                         ": must be a share of the attention, 0 to 1, is ", shown(*epsilon));
    table.epsilon = share;
  }
  const Json& choices = object.at("choices");
  require<FormatError>(choices.is_array() && !choices.empty(), object.where("choices"),
                       ": must be an array of at least one choice, is ", shown(choices));
  object.refuse_others();
  constexpr double any = std::numeric_limits<double>::max();
  for (const Json& entry : choices) {
    const std::string where = message(origin, ", choices[", table.choices.size(), ']');
    JsonObject choice{entry, where};
    const HeadSettings<E> settings =
        parse_setting(choice.at("setting"), message(where, ", key 'setting'"), table.shape, policies);
    HeadDamage damage = detail::parse_head_rows(choice.at("damage"), where, "damage", table.shape, any);
    HeadTable<double> rows_read;
    if (const Json* const shares = choice.find("rows_read")) {
      require<FormatError>(
          table.epsilon.has_value(), where,
          ": has rows_read, which need the bound that they were measured with; add 'epsilon'");
      rows_read = detail::parse_head_rows(*shares, where, "rows_read", table.shape, 1.0);
    }
    choice.refuse_others();
    table.choices.push_back({settings, std::move(damage), std::move(rows_read)});
  }
  return table;
}

/// Reads a damage file.
/// @throws FormatError
template <Element E>
[[nodiscard]] DamageTable<E> load_damage(const std::filesystem::path& path) {
  return parse_damage<E>(read_text_file(path), path.string());
}

/// Writes a damage file.
/// @throws ConfigError as `format_damage`, StorageError if the file cannot be written
template <Element E>
void save_damage(const std::filesystem::path& path, const DamageTable<E>& table) {
  write_text_file(path, format_damage(table));
}

}  // namespace kvpolicy::io
