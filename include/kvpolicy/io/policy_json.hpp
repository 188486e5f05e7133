// SPDX-License-Identifier: Apache-2.0
//
// How the settings of the shipped policies and storages stand in a plan file. A policy of your own
// joins plan files by a specialisation of `PolicyJson`.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <kvpolicy/io/json_text.hpp>
#include <kvpolicy/policy/chunk_retrieval_cache.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/h2o_scorer.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/key_norm_scorer.hpp>
#include <kvpolicy/policy/policy_names.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>
#include <kvpolicy/policy/tova_scorer.hpp>
#include <kvpolicy/storage/residual_storage.hpp>

namespace kvpolicy::io {

/// Written with keys in the order in which they are set, for people to read.
using OrderedJson = nlohmann::ordered_json;

/// Between an enumerator and its name in a file.
template <class T, std::size_t N>
struct EnumNames {
  std::array<std::pair<T, std::string_view>, N> names;

  [[nodiscard]] std::string_view operator()(T value) const {
    for (const auto& [known, name] : names) {
      if (known == value) return name;
    }
    fail<ConfigError>("plan file: an enumerator without a name");
  }
  /// The enumerator named by `key`, or `otherwise` where the key is missing.
  [[nodiscard]] T read(JsonObject& object, const char* key, T otherwise) const {
    if (object.find(key) == nullptr) return otherwise;
    const std::string& text = object.text(key);
    std::string list;
    for (const auto& [value, name] : names) {
      if (name == text) return value;
      list += (list.empty() ? "" : ", ") + std::string{name};
    }
    fail<FormatError>(object.where(key), ": is ", in_quotes(text), ", must be one of ", list);
  }
};

/// In files.
inline constexpr EnumNames<Flush, 2> flush_names{
    {{{Flush::steady, "steady"}, {Flush::kivi, "kivi"}}}};
/// In files.
inline constexpr EnumNames<Mask, 2> mask_names{{{{Mask::exact, "exact"}, {Mask::chunk, "chunk"}}}};
/// In files.
inline constexpr EnumNames<Pooling, 2> pooling_names{
    {{{Pooling::max, "max"}, {Pooling::average, "average"}}}};
/// In files.
inline constexpr EnumNames<RotaryConfig::Scaling, 3> scaling_names{
    {{{RotaryConfig::Scaling::none, "none"},
      {RotaryConfig::Scaling::linear, "linear"},
      {RotaryConfig::Scaling::llama3, "llama3"}}}};

// ---- parts of settings: write(config) -> JSON, read(object, …) -> config

/// The value of "rotary_in_cache".
[[nodiscard]] inline OrderedJson write_rotary(const RotaryConfig& rotary) {
  OrderedJson json = {{"theta", rotary.theta}, {"scaling", scaling_names(rotary.scaling)}};
  json["factor"] = rotary.factor;
  json["low_freq_factor"] = rotary.low_freq_factor;
  json["high_freq_factor"] = rotary.high_freq_factor;
  json["original_max_position"] = rotary.original_max_position;
  return json;
}

/// The same, read. @throws FormatError
[[nodiscard]] inline RotaryConfig read_rotary(const Json& json, std::string where) {
  JsonObject object{json, std::move(where)};
  RotaryConfig rotary;
  rotary.theta = object.number_or("theta", rotary.theta);
  rotary.scaling = scaling_names.read(object, "scaling", rotary.scaling);
  rotary.factor = object.number_or("factor", rotary.factor);
  rotary.low_freq_factor = object.number_or("low_freq_factor", rotary.low_freq_factor);
  rotary.high_freq_factor = object.number_or("high_freq_factor", rotary.high_freq_factor);
  rotary.original_max_position =
      object.number_or("original_max_position", rotary.original_max_position);
  object.refuse_others();
  return rotary;
}

/// The settings of a quantised storage; a dense one has none.
template <class Config>
void write_storage(const Config& config, OrderedJson& json) {
  if constexpr (requires { config.bits; }) {
    json["bits"] = config.bits;
    json["key_group"] = config.key_group;
    json["value_group"] = config.value_group;
    json["residual"] = config.residual;
    json["flush"] = flush_names(config.flush);
  }
}

/// The same, read. @throws FormatError
template <class Config>
[[nodiscard]] Config read_storage(JsonObject& object) {
  Config config;
  if constexpr (requires { config.bits; }) {
    config.bits = object.count_or("bits", config.bits);
    config.key_group = object.count_or("key_group", config.key_group);
    config.value_group = object.count_or("value_group", config.value_group);
    config.residual = object.count_or("residual", config.residual);
    config.flush = flush_names.read(object, "flush", config.flush);
  }
  return config;
}

// ---- policies: what is written besides "policy" and "storage"

/// write(config, json) adds the keys, read(object, config) takes them; `config.storage` is seen to.
template <class P>
struct PolicyJson;

template <class Storage>
struct PolicyJson<FullCache<Storage>> {
  using Config = typename FullCache<Storage>::Config;
  static void write(const Config&, OrderedJson&) {}
  static void read(JsonObject&, Config&) {}
};

template <class Storage>
struct PolicyJson<SinkRecentCache<Storage>> {
  using Config = typename SinkRecentCache<Storage>::Config;
  static void write(const Config& config, OrderedJson& json) {
    json["sinks"] = config.sinks;
    json["recent"] = config.recent;
    json["mask"] = mask_names(config.mask);
    if (config.rotary_in_cache) json["rotary_in_cache"] = write_rotary(*config.rotary_in_cache);
  }
  static void read(JsonObject& object, Config& config) {
    config.sinks = object.count_or("sinks", config.sinks);
    config.recent = object.count_or("recent", config.recent);
    config.mask = mask_names.read(object, "mask", config.mask);
    if (const Json* rotary = object.find("rotary_in_cache")) {
      config.rotary_in_cache = read_rotary(*rotary, object.where("rotary_in_cache"));
    }
  }
};

/// The same of a scorer's settings, which stand beside its policy's.
template <class Scorer>
struct ScorerJson;

template <>
struct ScorerJson<SnapKvScorer> {
  static void write(const SnapKvScorer::Config& config, OrderedJson& json) {
    json["window"] = config.window;
    json["pooling"] = pooling_names(config.pooling);
    json["kernel"] = config.kernel;
  }
  static void read(JsonObject& object, SnapKvScorer::Config& config) {
    config.window = object.count_or("window", config.window);
    config.pooling = pooling_names.read(object, "pooling", config.pooling);
    config.kernel = object.count_or("kernel", config.kernel);
  }
};
template <>
struct ScorerJson<TovaScorer> {
  static void write(const TovaScorer::Config&, OrderedJson&) {}
  static void read(JsonObject&, TovaScorer::Config&) {}
};
template <>
struct ScorerJson<H2oScorer> {
  static void write(const H2oScorer::Config& config, OrderedJson& json) {
    json["recent"] = config.recent;
  }
  static void read(JsonObject& object, H2oScorer::Config& config) {
    config.recent = object.count_or("recent", config.recent);
  }
};
template <>
struct ScorerJson<KeyNormScorer> {
  static void write(const KeyNormScorer::Config& config, OrderedJson& json) {
    json["recent"] = config.recent;
  }
  static void read(JsonObject& object, KeyNormScorer::Config& config) {
    config.recent = object.count_or("recent", config.recent);
  }
};

template <class Storage, class Scorer>
struct PolicyJson<HeadBudgetCache<Storage, Scorer>> {
  using Config = typename HeadBudgetCache<Storage, Scorer>::Config;
  static void write(const Config& config, OrderedJson& json) {
    json["budget"] = config.budget;
    if (config.compress_from > 0) json["compress_from"] = config.compress_from;
    json["compress_every"] = config.compress_every;
    if (config.after_first_compress) json["after_first_compress"] = true;
    if (config.share_in_layer) json["share_in_layer"] = true;
    if (config.safeguard != Config{}.safeguard) json["safeguard"] = config.safeguard;
    ScorerJson<Scorer>::write(config.scorer, json);
  }
  static void read(JsonObject& object, Config& config) {
    config.budget = object.count_or("budget", config.budget);
    config.compress_from = object.count_or("compress_from", config.compress_from);
    config.compress_every = object.count_or("compress_every", config.compress_every);
    config.after_first_compress = object.flag_or("after_first_compress", config.after_first_compress);
    config.share_in_layer = object.flag_or("share_in_layer", config.share_in_layer);
    config.safeguard = object.number_or("safeguard", config.safeguard);
    ScorerJson<Scorer>::read(object, config.scorer);
  }
};

template <class Storage, class Summary>
struct PolicyJson<ChunkRetrievalCache<Storage, Summary>> {
  using Config = typename ChunkRetrievalCache<Storage, Summary>::Config;
  static void write(const Config& config, OrderedJson& json) {
    json["chunk"] = config.chunk;
    json["budget"] = config.budget;
    json["refresh_every"] = config.refresh_every;
  }
  static void read(JsonObject& object, Config& config) {
    config.chunk = object.count_or("chunk", config.chunk);
    config.budget = object.count_or("budget", config.budget);
    config.refresh_every = object.count_or("refresh_every", config.refresh_every);
  }
};

/// One entry of a plan file's table of settings.
template <class P>
[[nodiscard]] OrderedJson write_setting(const typename P::Config& config) {
  const auto names = PolicyNames::of<P>();
  OrderedJson json = {{"policy", names.policy}};
  if constexpr (requires { P::scorer_type::name; }) json["scorer"] = names.scorer;
  if constexpr (requires { P::summary_type::name; }) json["summary"] = names.summary;
  PolicyJson<P>::write(config, json);
  if constexpr (requires { config.storage; }) {
    OrderedJson storage = {{"type", names.storage}};
    write_storage(config.storage, storage);
    json["storage"] = std::move(storage);
  }
  return json;
}

/// The names in a setting. Views of the JSON's strings.
[[nodiscard]] inline PolicyNames read_names(JsonObject& setting) {
  PolicyNames names{.policy = setting.text("policy")};
  if (setting.find("scorer") != nullptr) names.scorer = setting.text("scorer");
  if (setting.find("summary") != nullptr) names.summary = setting.text("summary");
  if (const Json* storage = setting.find("storage")) {
    names.storage = JsonObject{*storage, setting.where("storage")}.text("type");
  }
  return names;
}

/// The setting as a config of `P`, whose names it has.
template <class P>
[[nodiscard]] typename P::Config read_setting(JsonObject& setting) {
  typename P::Config config;
  PolicyJson<P>::read(setting, config);
  if constexpr (requires { config.storage; }) {
    if (const Json* json = setting.find("storage")) {
      JsonObject storage{*json, setting.where("storage")};
      (void)storage.text("type");
      config.storage = read_storage<decltype(config.storage)>(storage);
      storage.refuse_others();
    }
  }
  setting.refuse_others();
  return config;
}

}  // namespace kvpolicy::io
