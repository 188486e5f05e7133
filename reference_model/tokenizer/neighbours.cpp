// SPDX-License-Identifier: Apache-2.0
#include <reference_model/tokenizer/neighbours.hpp>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/text_file.hpp>

namespace kvpolicy::reference {
namespace {

namespace fs = std::filesystem;
using io::Json;

constexpr std::size_t largest_config = 16 << 20;

Json object_or_empty(const fs::path& path) { return read_object(path).value_or(Json::object()); }

/// A token as such files have it: its spelling, or an object with it and how it is found.
struct NamedToken {
  std::string spelling;
  AddedToken how{.special = true};
};

/// Nothing for null and an empty text. @throws FormatError for another value
std::optional<NamedToken> named_token(const Json& value, const std::string& where) {
  if (value.is_null()) return {};
  NamedToken named;
  if (value.is_object()) {
    io::JsonObject object{value, where};
    named.spelling = object.text("content");
    named.how.special = object.flag_or("special", true);
    named.how.single_word = object.flag_or("single_word", false);
    named.how.lstrip = object.flag_or("lstrip", false);
    named.how.rstrip = object.flag_or("rstrip", false);
    named.how.normalized = object.flag_or("normalized", !named.how.special);
    static_cast<void>(object.find("__type"));
    object.refuse_others();
  } else {
    require<FormatError>(value.is_string(), where, ": must be a token's text, or an object with it, is ",
                         io::shown(value));
    named.spelling = value.get<std::string>();
  }
  return named.spelling.empty() ? std::nullopt : std::optional{std::move(named)};
}

/// The special tokens that files name.
struct Names {
  std::map<std::string, NamedToken> by_name;
  std::optional<std::vector<NamedToken>> list;  ///< those without a name of their own

  /// A later file's come before an earlier one's. @throws FormatError
  void read(const Json& from, const fs::path& file) {
    const auto where = [&](const std::string& name) { return message(file.string(), ", ", name); };
    const auto read_name = [&](const std::string& name, const Json& value) {
      if (auto token = named_token(value, where(name))) by_name.insert_or_assign(name, *std::move(token));
    };
    // "add_bos_token" is a flag, "num_image_token" a number.
    for (const auto& [name, value] : from.items()) {
      if (name.ends_with("_token") && (value.is_string() || value.is_object())) read_name(name, value);
    }
    // Both keys are one list's; the newer one comes first, and adds to another file's.
    for (const char* key : {"extra_special_tokens", "additional_special_tokens"}) {
      const auto found = from.find(key);
      if (found == from.end() || found->is_null()) continue;
      const bool is_newer = std::string_view{key}.starts_with("extra");
      require<FormatError>(found->is_array() || (is_newer && found->is_object()), where(key),
                           ": must be a list of tokens, is ", io::shown(*found));
      if (found->is_object()) {
        for (const auto& [name, value] : found->items()) read_name(name, value);
        continue;
      }
      if (list && !is_newer) continue;
      if (!list) list.emplace();
      for (const Json& one : *found) {
        if (auto token = named_token(one, where(key))) list->push_back(*std::move(token));
      }
    }
  }
  [[nodiscard]] std::unordered_set<std::string> spellings() const {
    std::unordered_set<std::string> all;
    for (const auto& [name, token] : by_name) all.insert(token.spelling);
    if (list) {
      for (const NamedToken& token : *list) all.insert(token.spelling);
    }
    return all;
  }
};

/// Adds the tokens that files name, in transformers' order.
class NamedTokens {
 public:
  explicit NamedTokens(TokenizerParts& parts) : parts_{parts} {
    ids_.reserve(parts.tokens.size());
    for (std::size_t id = 0; id < parts.tokens.size(); ++id)
      ids_.emplace(parts.tokens[id], static_cast<int>(id));
    for (const AddedToken& token : parts.added) added_.insert(token.id);
  }

  [[nodiscard]] std::optional<int> find(const std::string& spelling) const {
    const auto found = ids_.find(spelling);
    return found == ids_.end() ? std::nullopt : std::optional{found->second};
  }

  void add(const std::optional<NamedToken>& named) {
    if (!named) return;
    const auto [place, is_new] = ids_.try_emplace(named->spelling, static_cast<int>(parts_.tokens.size()));
    AddedToken token = named->how;
    token.id = place->second;
    token.outside_model = is_new;
    if (!added_.insert(token.id).second) return;
    if (is_new) {
      parts_.tokens.push_back(named->spelling);
      if (!parts_.scores.empty()) parts_.scores.push_back(0);
      ++parts_.named_beside;
    }
    parts_.added.push_back(token);
  }

  /// "added_tokens_decoder": objects by their numbers, which transformers reads for their order alone.
  void add_numbered(const Json& numbered, const std::string& origin) {
    const std::string where = message(origin, ", added_tokens_decoder");
    require<FormatError>(numbered.is_object(), where, ": must be an object, is ", io::shown(numbered));
    std::vector<std::pair<std::size_t, const Json*>> tokens;
    for (const auto& [key, value] : numbered.items()) {
      const bool is_number =
          !key.empty() && key.size() < 9 && key.find_first_not_of("0123456789") == key.npos;
      require<FormatError>(is_number, where, ": ", io::in_quotes(key), " must be a token's number");
      tokens.emplace_back(std::stoul(key), &value);
    }
    std::ranges::sort(tokens);
    for (const auto& [id, value] : tokens) {
      auto named = named_token(*value, message(where, ", ", id));
      if (named && !value->contains("special")) named->how.special = false;
      add(named);
    }
  }

  /// added_tokens.json: numbers by spelling. `named`: those that are special.
  void add_spelled(const Json& spelled, const std::string& origin,
                   const std::unordered_set<std::string>& named) {
    std::vector<std::pair<std::size_t, std::string>> tokens;
    for (const auto& [spelling, id] : spelled.items()) {
      tokens.emplace_back(
          io::JsonObject::as_count(id, message(origin, ", ", io::in_quotes(spelling)), max_vocabulary),
          spelling);
    }
    std::ranges::sort(tokens);
    for (const auto& [id, spelling] : tokens) {
      const bool special = named.contains(spelling);
      if (!spelling.empty()) add(NamedToken{spelling, {.special = special, .normalized = !special}});
    }
  }

 private:
  TokenizerParts& parts_;
  std::unordered_map<std::string, int> ids_;
  std::unordered_set<int> added_;
};

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

/// Some classes of tokenizers put a space in front of a text, or none, whatever their own file says.
void require_same_prefix(const Json& config, const std::string& origin, const TokenizerParts& parts) {
  const auto wanted = config.find("add_prefix_space");
  const auto named = config.find("tokenizer_class");
  const std::string own_class =
      named != config.end() && named->is_string() ? named->get<std::string>() : std::string{};
  constexpr std::array<std::string_view, 4> classes{"Llama", "CodeLlama", "GPT2", "Gemma"};
  const bool counts =
      std::ranges::any_of(classes, [&](std::string_view name) { return own_class.starts_with(name); });
  if (!counts || wanted == config.end() || !wanted->is_boolean()) return;
  const bool prepends = parts.pre_tokenizer.prepend != PrependSpace::never ||
                        std::ranges::any_of(parts.normalizer, [](const NormalizerStep& step) {
                          return step.kind == NormalizerStep::Kind::prepend;
                        });
  require<FormatError>(wanted->get<bool>() == prepends, origin, ": add_prefix_space is ",
                       prepends ? "false" : "true", " for ", io::in_quotes(own_class), ", but ", parts.origin,
                       prepends ? " puts a space in front of a text" : " puts no space in front of a text",
                       "; make them the same (save the tokenizer with transformers)");
}

}  // namespace

std::optional<Json> read_object(const fs::path& path) {
  if (!fs::exists(path)) return {};
  Json json = io::parse_json(io::read_text_file(path, largest_config), path.string());
  require<FormatError>(json.is_object(), path.string(), ": must be an object, is ", io::shown(json));
  return json;
}

void read_neighbours(const fs::path& folder, TokenizerParts& parts) {
  const fs::path config_file = folder / "tokenizer_config.json";
  const fs::path map_file = folder / "special_tokens_map.json";
  const Json config = object_or_empty(config_file);
  const Json map = object_or_empty(map_file);
  require_same_prefix(config, config_file.string(), parts);

  // As transformers does it: where tokenizer_config.json numbers its tokens, the two older files say nothing. Otherwise
  // special_tokens_map.json comes before it.
  const auto numbered = config.find("added_tokens_decoder");
  const bool is_numbered = numbered != config.end() && !numbered->is_null();
  Names names;
  names.read(config, config_file);
  if (!is_numbered) names.read(map, map_file);

  NamedTokens tokens{parts};
  if (is_numbered) {
    tokens.add_numbered(*numbered, config_file.string());
  } else {
    const fs::path added = folder / "added_tokens.json";
    tokens.add_spelled(object_or_empty(added), added.string(), names.spellings());
  }
  constexpr std::array<const char*, 7> first{"bos_token", "eos_token", "unk_token", "sep_token",
                                             "pad_token", "cls_token", "mask_token"};
  for (const char* name : first) {
    if (const auto found = names.by_name.find(name); found != names.by_name.end()) tokens.add(found->second);
  }
  for (const auto& [name, token] : names.by_name) {
    tokens.add(token);
    parts.named_tokens.insert_or_assign(name, token.spelling);
  }
  if (names.list) {
    for (const NamedToken& token : *names.list) tokens.add(token);
  }

  const auto id_of = [&](const char* name) {
    const auto found = names.by_name.find(name);
    return found == names.by_name.end() ? std::nullopt : tokens.find(found->second.spelling);
  };
  if (const auto bos = id_of("bos_token")) parts.bos = bos;
  if (const auto end = id_of("eos_token")) parts.ends.push_back(*end);
  for (const char* name : {"generation_config.json", "config.json"}) {
    const auto json = read_object(folder / name);
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

}  // namespace kvpolicy::reference
