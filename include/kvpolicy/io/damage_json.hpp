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
#pragma once

#include <cmath>
#include <cstddef>
#include <filesystem>
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

/// The measured damage, in nats, that the model takes if one head gets one choice of a menu.
template <Element E>
struct DamageTable {
  ModelShape shape;
  std::size_t context = 0;  ///< Tokens of the texts that the damage was measured on.
  std::vector<HeadChoice<E>> choices;
};

/// Writes the text of a damage file.
/// @throws ConfigError for a table that does not fit the shape or has a number that is not finite
template <Element E>
[[nodiscard]] std::string format_damage(const DamageTable<E>& table) {
  std::string choices;
  for (const HeadChoice<E>& choice : table.choices) {
    kvpolicy::detail::require_fits(choice.damage, table.shape, "format_damage");
    Json rows = Json::array();
    for (std::size_t layer = 0; layer < table.shape.layers; ++layer) {
      Json row = Json::array();
      for (const double damage : choice.damage.layer(layer)) {
        require(std::isfinite(damage), "format_damage: a damage is ", damage, ", must be finite");
        row.push_back(damage);
      }
      rows.push_back(std::move(row));
    }
    choices +=
        message(choices.empty() ? "\n    " : ",\n    ", "{\"setting\": ", write_setting(choice.settings),
                ",\n     \"damage\": ", rows.dump(), '}');
  }
  return message("{\n  \"format\": \"", damage_format, "\",\n  \"version\": ", damage_version,
                 ",\n  \"shape\": ", write_shape(table.shape), ",\n  \"context\": ", table.context,
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
  DamageTable<E> table{read_shape(object), object.count("context"), {}};
  const std::size_t heads = table.shape.layer(0).kv_heads;
  const Json& choices = object.at("choices");
  require<FormatError>(choices.is_array() && !choices.empty(), object.where("choices"),
                       ": must be an array of at least one choice, is ", shown(choices));
  object.refuse_others();
  for (const Json& entry : choices) {
    const std::string where = message(origin, ", choices[", table.choices.size(), ']');
    JsonObject choice{entry, where};
    const HeadSettings<E> settings =
        parse_setting(choice.at("setting"), message(where, ", key 'setting'"), table.shape, policies);
    const Json& layers = choice.at("damage");
    choice.refuse_others();
    require<FormatError>(layers.is_array() && layers.size() == table.shape.layers, where,
                         ": 'damage' must be an array of ", table.shape.layers, " layers, is ",
                         shown(layers));
    HeadDamage damage{table.shape.layers, heads};
    for (std::size_t layer = 0; layer < table.shape.layers; ++layer) {
      const Json& row = layers[layer];
      require<FormatError>(row.is_array() && row.size() == heads, where, ": 'damage' of layer ", layer,
                           " must be an array of ", heads, " KV heads, is ", shown(row));
      for (std::size_t head = 0; head < heads; ++head) {
        const double value = row[head].is_number() ? row[head].get<double>() : std::nan("");
        require<FormatError>(value >= 0.0 && std::isfinite(value), where, ": the damage of layer ", layer,
                             ", head ", head, " is ", shown(row[head]), ", must be 0 or positive");
        damage(layer, head) = value;
      }
    }
    table.choices.push_back({settings, std::move(damage)});
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
