// SPDX-License-Identifier: Apache-2.0
//
// Finds the tokenizer of a model's folder, and what the files beside it say of it.
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/json_text.hpp>
#include <kvpolicy/io/text_file.hpp>
#include <reference_model/tokenizer/json_section.hpp>
#include <reference_model/tokenizer/sentencepiece_model.hpp>
#include <reference_model/tokenizer/tokenizer.hpp>
#include <reference_model/tokenizer/tokenizer_json.hpp>

namespace kvpolicy::reference {
namespace {

namespace fs = std::filesystem;
using io::Json;

constexpr std::size_t largest_config = 16 << 20;
constexpr const char* json_file = "tokenizer.json";
constexpr const char* model_file = "tokenizer.model";

std::optional<Json> read_config(const fs::path& folder, const char* name) {
  const fs::path path = folder / name;
  if (!fs::exists(path)) return {};
  Json json = io::parse_json(io::read_text_file(path, largest_config), path.string());
  require<FormatError>(json.is_object(), path.string(), ": must be an object, is ", io::shown(json));
  return json;
}

/// The number of the token that `parts` spells so.
std::optional<int> token_of(const TokenizerParts& parts, std::string_view spelling) {
  for (std::size_t id = 0; id < parts.tokens.size(); ++id) {
    if (parts.tokens[id] == spelling) return static_cast<int>(id);
  }
  return {};
}

/// A token as tokenizer_config.json has it: its spelling, or an object with it.
std::optional<std::string> spelling_of(const Json& config, const char* key) {
  const auto found = config.find(key);
  if (found == config.end()) return {};
  const Json* value = &*found;
  if (value->is_object() && value->contains("content")) value = &value->at("content");
  return value->is_string() ? std::optional{value->get<std::string>()} : std::nullopt;
}

/// eos_token_id of a config, a number or several.
void add_ends(const Json& config, const std::string& origin, TokenizerParts& parts) {
  const auto found = config.find("eos_token_id");
  if (found == config.end() || found->is_null()) return;
  const std::string where = message(origin, ", eos_token_id");
  const auto add = [&](const Json& id) {
    parts.ends.push_back(static_cast<int>(io::JsonObject::as_count(id, where, max_vocabulary)));
  };
  if (!found->is_array()) return add(*found);
  for (const Json& id : *found) add(id);
}

std::string chat_template_of(const fs::path& folder, const Json& config) {
  const fs::path file = folder / "chat_template.jinja";
  if (fs::exists(file)) return io::read_text_file(file, largest_config);
  const auto found = config.find("chat_template");
  if (found == config.end() || found->is_null()) return {};
  if (found->is_string()) return found->get<std::string>();
  for (const Json& named : *found) {
    if (named.is_object() && named.value("name", Json{}) == Json("default") &&
        named.value("template", Json{}).is_string()) {
      return named.at("template").get<std::string>();
    }
  }
  // ChatTemplate refuses it, and quotes it; other texts do not need a template.
  return found->dump();
}

/// Adds what the files beside the tokenizer's own say.
void read_neighbours(const fs::path& folder, TokenizerParts& parts) {
  const Json config = read_config(folder, "tokenizer_config.json").value_or(Json::object());
  for (const Json& named :
       {read_config(folder, "special_tokens_map.json").value_or(Json::object()), config}) {
    for (const auto& [name, value] : named.items()) {
      if (!name.ends_with("_token")) continue;
      if (const auto spelling = spelling_of(named, name.c_str()))
        parts.named_tokens.insert_or_assign(name, *spelling);
    }
  }
  if (const auto spelling = spelling_of(config, "bos_token")) parts.bos = token_of(parts, *spelling);
  if (const auto spelling = spelling_of(config, "eos_token")) {
    if (const auto end = token_of(parts, *spelling)) parts.ends.push_back(*end);
  }
  for (const char* name : {"generation_config.json", "config.json"}) {
    const auto json = read_config(folder, name);
    if (!json) continue;
    add_ends(*json, (folder / name).string(), parts);
    const auto bos = json->find("bos_token_id");
    if (!parts.bos && bos != json->end() && bos->is_number_unsigned() &&
        bos->get<std::size_t>() < parts.tokens.size()) {
      parts.bos = bos->get<int>();
    }
  }
  parts.chat_template = chat_template_of(folder, config);
}

bool reads_bytes(const fs::path& folder) {
  const auto config = read_config(folder, "config.json");
  return config && config->value("vocab_size", Json{}) == Json(256);
}

}  // namespace

bool Tokenizer::is_in(const fs::path& folder) {
  std::error_code ignored;
  return fs::exists(folder / json_file, ignored) || fs::exists(folder / model_file, ignored) ||
         reads_bytes(folder);
}

Tokenizer Tokenizer::load(const fs::path& folder) {
  const fs::path json = folder / json_file;
  const fs::path model = folder / model_file;
  if (fs::exists(json)) {
    TokenizerParts parts = parse_tokenizer_json(io::read_text_file(json), json.string());
    read_neighbours(folder, parts);
    return Tokenizer{std::move(parts)};
  }
  if (fs::exists(model)) {
    auto [parts, pieces] = read_sentencepiece(model);
    read_neighbours(folder, parts);
    return {std::move(parts), std::move(pieces)};
  }
  require<FormatError>(reads_bytes(folder), folder.string(),
                       ": has no tokenizer: neither tokenizer.json nor tokenizer.model is there, and "
                       "only a model of 256 tokens can do without");
  return bytes();
}

}  // namespace kvpolicy::reference
