// SPDX-License-Identifier: Apache-2.0
//
// Reads and writes plans as files in a JSON format of our own. A table `settings` lists the distinct
// settings, and `heads` has, for each layer, the index into the table for each head.
//
//     {"format": "kvpolicy plan", "version": 1,
//      "shape": {"layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 64},
//      "settings": [{"policy": "full", "storage": {"type": "dense"}},
//                   {"policy": "sink_recent", "sinks": 4, "recent": 64}],
//      "heads": [[0, 1], [1, 1]]}
//
// A setting that is left out has its default; an unknown key is an error. The element type is not part of a
// plan: one file serves float, float16 and bfloat16 caches.
//
// If the layers of a model differ, the shape lists each layer, with the members of LayerShape that are not
// 0:
//
//      "shape": {"layers": 2, "per_layer": [{"q_heads": 4, "kv_heads": 2, "head_dim": 64, "window":
//      512}, {}]}
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvpolicy/io/json_text.hpp>
#include <kvpolicy/io/policy_json.hpp>
#include <kvpolicy/io/text_file.hpp>
#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>

namespace kvpolicy::io {

/// The value of "format" in a plan file.
inline constexpr std::string_view plan_format = "kvpolicy plan";
/// The version that is written and read.
inline constexpr std::size_t plan_version = 1;
/// Most KV heads of a plan file, over all layers.
inline constexpr std::size_t largest_plan = std::size_t{1} << 20;

namespace detail {

// Writes one entry of "per_layer".
[[nodiscard]] inline std::string write_layer(const LayerShape& layer) {
  std::string text = "{";
  const auto put = [&](const char* name, const auto& value) {
    text.append(message(text.size() > 1 ? "," : "", '"', name, "\":", value));
  };
  const auto put_unless_0 = [&](const char* name, std::size_t value) {
    if (value != 0) put(name, value);
  };
  put_unless_0("q_heads", layer.q_heads);
  put_unless_0("kv_heads", layer.kv_heads);
  put_unless_0("head_dim", layer.head_dim);
  put_unless_0("value_dim", layer.value_dim == layer.head_dim ? 0 : layer.value_dim);
  put_unless_0("window", layer.window);
  if (layer.softcap != 0.0F) put("softcap", Json(layer.softcap).dump());
  if (layer.reads) put("reads", *layer.reads);
  return text + '}';
}

[[nodiscard]] inline LayerShape read_layer(const Json& json, const std::string& where) {
  JsonObject own{json, where};
  LayerShape layer{.q_heads = own.count_or("q_heads", 0),
                   .kv_heads = own.count_or("kv_heads", 0),
                   .head_dim = own.count_or("head_dim", 0),
                   .value_dim = own.count_or("value_dim", 0),
                   .window = own.count_or("window", 0),
                   .softcap = static_cast<float>(own.number_or("softcap", 0.0))};
  if (own.find("reads") != nullptr) layer.reads = own.count("reads");
  own.refuse_others();
  return layer;
}

}  // namespace detail

/// Writes the value of "shape".
[[nodiscard]] inline std::string write_shape(const ModelShape& shape) {
  std::string text = message("{\"layers\":", shape.layers);
  if (shape.is_uniform()) {
    const LayerShape layer = shape.layer(0);
    return text.append(message(",\"q_heads\":", layer.q_heads, ",\"kv_heads\":", layer.kv_heads,
                               ",\"head_dim\":", layer.head_dim, '}'));
  }
  text += ",\"per_layer\":[";
  for (std::size_t l = 0; l < shape.layers; ++l) {
    text.append(l == 0 ? "" : ",").append(detail::write_layer(shape.layer(l)));
  }
  return text + "]}";
}

/// Reads the value of "shape". @throws FormatError for a shape that no model can have, or more than
/// `largest_plan` heads.
[[nodiscard]] inline ModelShape read_shape(JsonObject& object) {
  JsonObject own{object.at("shape"), object.where("shape")};
  ModelShape shape{.layers = own.count("layers")};
  if (const Json* each = own.find("per_layer")) {
    const std::string where = own.where("per_layer");
    require<FormatError>(each->is_array() && each->size() == shape.layers, where, ": must be an array of ",
                         shape.layers, " layers, is ", shown(*each));
    for (const Json& layer : *each) {
      shape.per_layer.push_back(detail::read_layer(layer, message(where, '[', shape.per_layer.size(), ']')));
    }
  } else {
    shape.q_heads = own.count("q_heads");
    shape.kv_heads = own.count("kv_heads");
    shape.head_dim = own.count("head_dim");
    shape.value_dim = own.count_or("value_dim", 0);
  }
  own.refuse_others();
  KVPOLICY_TRY { shape.validate(); }
  KVPOLICY_CATCH_AS(ConfigError, error) { fail<FormatError>(object.where("shape"), ": ", error.what()); }
  require<FormatError>(shape.kv_head_count() <= largest_plan, object.where("shape"), ": has ",
                       shape.kv_head_count(), " KV heads in all, must be at most ", largest_plan);
  return shape;
}

/// Checks the format and the version of a file.
/// @throws FormatError unless the file says that it is of this format and version.
inline void require_format(JsonObject& object, std::string_view format, std::size_t version) {
  const std::string& own = object.text("format");
  require<FormatError>(own == format, object.where("format"), ": is ", in_quotes(own), ", must be '", format,
                       "'");
  const std::size_t written = object.count("version");
  require<FormatError>(written == version, object.where("version"), ": is ", written,
                       ", this program reads version ", version);
}

/// Writes the text of a plan file.
/// @throws ConfigError for more than `largest_plan` heads, or a policy that cannot be written to a file.
template <class... T>
[[nodiscard]] std::string format_plan(const HeadPlan<T...>& plan) {
  const ModelShape& shape = plan.shape();
  require(shape.kv_head_count() <= largest_plan, "format_plan: the plan has ", shape.kv_head_count(),
          " heads, must be at most ", largest_plan);
  std::vector<typename HeadPlan<T...>::Settings> settings;
  std::string heads;
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    heads += layer == 0 ? "\n    [" : ",\n    [";
    for (std::size_t head = 0; head < shape.layer(layer).kv_heads; ++head) {
      const auto& own = plan.at(layer, head);
      std::size_t number = 0;
      while (number < settings.size() && !(settings[number] == own)) ++number;
      if (number == settings.size()) settings.push_back(own);
      heads += message(head == 0 ? "" : ", ", number);
    }
    heads += ']';
  }
  std::string table;
  for (const auto& own : settings) {
    table += message(table.empty() ? "\n    " : ",\n    ", write_setting(own));
  }
  return message("{\n  \"format\": \"", plan_format, "\",\n  \"version\": ", plan_version,
                 ",\n  \"shape\": ", write_shape(shape), ",\n  \"settings\": [", table,
                 "\n  ],\n  \"heads\": [", heads, "\n  ]\n}\n");
}

/// Reads one entry of the table of settings. @throws FormatError
template <Element E>
[[nodiscard]] HeadSettings<E> parse_setting(const Json& json, const std::string& where,
                                            const ModelShape& shape, const PolicyRegistry<E>& policies) {
  JsonObject setting{json, where};
  const HeadSettings<E> settings = read_setting(setting, policies);
  // Whether the settings fit the channels of a layer is checked when they are set for its heads.
  std::size_t layer = 0;
  while (shape.layer(layer).kv_heads == 0) ++layer;
  KVPOLICY_TRY {
    const LayerShape own = shape.layer(layer);
    const HeadPlan<E> checked{ModelShape{1, 1, 1, own.head_dim, own.value_dim}, settings};
    return checked.at(0, 0);
  }
  KVPOLICY_CATCH_AS(ConfigError, error) { fail<FormatError>(where, ": ", error.what()); }
}

/// Reads a plan whose policies are among `policies`.
/// @throws FormatError
template <Element E = float>
[[nodiscard]] HeadPlan<E> parse_plan(std::string_view text, std::string_view origin = "plan",
                                     const PolicyRegistry<E>& policies = shipped_policies<E>()) {
  const Json json = parse_json(text, origin);
  JsonObject object{json, std::string{origin}};
  require_format(object, plan_format, plan_version);
  const ModelShape shape = read_shape(object);

  const Json& table = object.at("settings");
  require<FormatError>(table.is_array() && !table.empty(), object.where("settings"),
                       ": must be an array of at least one setting, is ", shown(table));
  std::vector<HeadSettings<E>> settings;
  for (const Json& entry : table) {
    settings.push_back(
        parse_setting(entry, message(origin, ", settings[", settings.size(), ']'), shape, policies));
  }

  const Json& layers = object.at("heads");
  require<FormatError>(layers.is_array() && layers.size() == shape.layers, object.where("heads"),
                       ": must be an array of ", shape.layers, " layers, is ", shown(layers));
  object.refuse_others();
  HeadPlan<E> plan{shape};
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    const std::string where = message(origin, ", heads[", layer, ']');
    const Json& row = layers[layer];
    const std::size_t heads = shape.layer(layer).kv_heads;
    require<FormatError>(row.is_array() && row.size() == heads, where, ": must be an array of ", heads,
                         " KV heads, is ", shown(row));
    for (std::size_t head = 0; head < heads; ++head) {
      const std::size_t number = JsonObject::as_count(row[head], where, settings.size() - 1);
      KVPOLICY_TRY { plan.set(layer, head, settings[number]); }
      KVPOLICY_CATCH_AS(ConfigError, error) { fail<FormatError>(where, ": ", error.what()); }
    }
  }
  return plan;
}

/// Reads a plan file.
/// @throws FormatError
template <Element E = float>
[[nodiscard]] HeadPlan<E> load_plan(const std::filesystem::path& path,
                                    const PolicyRegistry<E>& policies = shipped_policies<E>()) {
  return parse_plan<E>(read_text_file(path), path.string(), policies);
}

/// Writes a plan file.
/// @throws StorageError if the file cannot be written
template <class... T>
void save_plan(const std::filesystem::path& path, const HeadPlan<T...>& plan) {
  write_text_file(path, format_plan(plan));
}

}  // namespace kvpolicy::io
