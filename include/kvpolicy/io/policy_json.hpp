// SPDX-License-Identifier: Apache-2.0
//
// Stores a head's settings in a plan file: the policy's names, then the settings by the names that their
// type lists (core/fields.hpp). A policy of your own can be used in plan files if it has a `name`, its
// Config has `fields`, and a registry knows it (plan/policy_registry.hpp).
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvpolicy/core/fields.hpp>
#include <kvpolicy/io/json_text.hpp>
#include <kvpolicy/plan/policy_registry.hpp>
#include <kvpolicy/policy/policy_names.hpp>

namespace kvpolicy::io {

/// JSON with keys in the order in which they are set, for people to read.
using OrderedJson = nlohmann::ordered_json;

/// Writes settings by name as the members of a JSON object. Names are C identifiers and need no escapes. It
/// writes text directly, because a second JSON type for ordered objects would cost every user seconds of
/// compile time.
class JsonFieldWriter final : public FieldVisitor {
 public:
  /// Appends members to `text`, which must end in '{' or in a member. `storage` is the storage's name.
  JsonFieldWriter(std::string& text, std::string_view storage) : text_{&text}, storage_{storage} {}

  /// Writes a member whose value needs no escapes.
  void put_text(std::string_view name, std::string_view value) { put(name, message('"', value, '"')); }

 private:
  void count(std::string_view name, std::size_t& value) override { put(name, message(value)); }
  void number(std::string_view name, double& value) override { put(name, Json(value).dump()); }
  void flag(std::string_view name, bool& value) override { put(name, value ? "true" : "false"); }
  void choice(std::string_view name, std::size_t& index, std::span<const std::string_view> names) override {
    put_text(name, names[index]);
  }
  void begin(std::string_view name) override {
    put(name, "{");
    if (name == "storage") put_text("type", storage_);
  }
  bool begin_optional(std::string_view name, bool present) override {
    if (present) begin(name);
    return present;
  }
  void end() override { *text_ += '}'; }
  [[nodiscard]] bool is_writing() const override { return true; }
  [[nodiscard]] bool is_brief() const override { return true; }

  void put(std::string_view name, std::string_view value) {
    if (text_->back() != '{') *text_ += ',';
    text_->append("\"").append(name).append("\":").append(value);
  }

  std::string* text_;
  std::string_view storage_;
};

/// Fills settings by name from a JSON object; a setting that is missing keeps its value. Throws FormatError
/// for a value of the wrong kind, and for an unknown key in a nested object. For the outermost object the
/// caller has to call `refuse_others`.
class JsonFieldReader final : public FieldVisitor {
 public:
  explicit JsonFieldReader(JsonObject& object) : object_{&object} {}

 private:
  void count(std::string_view name, std::size_t& value) override { value = now().count_or(key(name), value); }
  void number(std::string_view name, double& value) override { value = now().number_or(key(name), value); }
  void flag(std::string_view name, bool& value) override { value = now().flag_or(key(name), value); }
  void choice(std::string_view name, std::size_t& index, std::span<const std::string_view> names) override {
    if (now().find(key(name)) == nullptr) return;
    const std::string& text = now().text(key(name));
    std::string list;
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (names[i] == text) {
        index = i;
        return;
      }
      if (!list.empty()) list += ", ";
      list += names[i];
    }
    fail<FormatError>(now().where(name), ": is ", in_quotes(text), ", must be one of ", list);
  }
  void begin(std::string_view name) override {
    static const Json nothing = Json::object();
    const Json* found = now().find(key(name));
    inner_.emplace_back(found == nullptr ? nothing : *found, now().where(name));
    // The key "type" of a storage was read with the policy's names, so it counts as known.
    if (name == "storage") static_cast<void>(now().find("type"));
  }
  bool begin_optional(std::string_view name, bool /*present*/) override {
    if (now().find(key(name)) == nullptr) return false;
    begin(name);
    return true;
  }
  void end() override {
    now().refuse_others();
    inner_.pop_back();
  }
  [[nodiscard]] bool is_writing() const override { return false; }
  [[nodiscard]] std::string_view name_in_use(std::string_view name, std::string_view before) override {
    return now().find(key(name)) == nullptr && now().find(key(before)) != nullptr ? before : name;
  }

  [[nodiscard]] JsonObject& now() { return inner_.empty() ? *object_ : inner_.back(); }
  [[nodiscard]] const char* key(std::string_view name) {
    key_ = name;
    return key_.c_str();
  }

  JsonObject* object_;
  std::vector<JsonObject> inner_;  // open nested objects; the last one is read
  std::string key_;
};

/// Writes one entry of a plan file's table of settings.
/// @throws ConfigError if the policy or its settings have no names
template <Element E>
[[nodiscard]] std::string write_setting(const HeadSettings<E>& settings) {
  const PolicyNames names = settings.names();
  require(settings.has_names(), "plan file: ", names.policy,
          " cannot be written to a file: a policy needs a `name`, and its Config `void "
          "fields(FieldVisitor&)`");
  std::string text = "{";
  JsonFieldWriter writer{text, names.storage};
  writer.put_text("policy", names.policy);
  if (!names.scorer.empty()) writer.put_text("scorer", names.scorer);
  if (!names.summary.empty()) writer.put_text("summary", names.summary);
  settings.write_fields(writer);
  text += '}';
  return text;
}

/// Reads the names in a setting. They are views of the JSON's strings.
[[nodiscard]] inline PolicyNames read_names(JsonObject& setting) {
  PolicyNames names{.policy = setting.text("policy")};
  if (setting.find("scorer") != nullptr) names.scorer = setting.text("scorer");
  if (setting.find("summary") != nullptr) names.summary = setting.text("summary");
  if (const Json* storage = setting.find("storage")) {
    names.storage = JsonObject{*storage, setting.where("storage")}.text("type");
  }
  return names;
}

/// What is wrong with one part of a policy's names, if no policy among `known` has that part.
[[nodiscard]] inline std::string unknown_part(const char* key, std::string_view name,
                                              std::span<const PolicyNames> known,
                                              std::string_view PolicyNames::*part) {
  std::vector<std::string_view> choices;
  for (const PolicyNames& own : known) {
    if (own.*part == name) return {};
    const bool listed = std::ranges::find(choices, own.*part) != choices.end();
    if (!(own.*part).empty() && !listed) choices.push_back(own.*part);
  }
  if (name.empty()) return {};
  std::string text = message(key, " is ", in_quotes(name), ", must be ");
  if (choices.empty()) return text.append("left out: the policy has none");
  for (std::size_t i = 0; i < choices.size(); ++i) {
    if (i > 0) text += i + 1 == choices.size() ? " or " : ", ";
    text += choices[i];
  }
  return text;
}

/// Why no policy has these names: the first name that is not known with what it may be, or else which
/// combinations there are of the policy.
[[nodiscard]] inline std::string unknown_policy(const PolicyNames& names, std::vector<PolicyNames> known) {
  std::string text = unknown_part("policy", names.policy, known, &PolicyNames::policy);
  std::erase_if(known, [&](const PolicyNames& own) { return own.policy != names.policy; });
  if (text.empty()) text = unknown_part("storage.type", names.storage, known, &PolicyNames::storage);
  if (text.empty()) text = unknown_part("scorer", names.scorer, known, &PolicyNames::scorer);
  if (text.empty()) text = unknown_part("summary", names.summary, known, &PolicyNames::summary);
  if (!text.empty()) return text;
  text = message("there is no policy ", in_quotes(names.shown()), "; there are ");
  for (std::size_t i = 0; i < known.size(); ++i) {
    if (i > 0) text += ", ";
    text += known[i].shown();
  }
  return text;
}

/// A policy without a scorer or a summary must not be given one.
inline void refuse_name(const JsonObject& setting, const char* key, std::string_view given,
                        std::string_view own, std::string_view policy) {
  require<FormatError>(given.empty() || !own.empty(), setting.where(key), ": is ", in_quotes(given), ", but ",
                       policy, " has no ", key);
}

/// Reads the settings of one entry of the table.
/// @throws FormatError for a policy that is not known, or a setting that it does not have
template <Element E>
[[nodiscard]] HeadSettings<E> read_setting(JsonObject& setting, const PolicyRegistry<E>& policies) {
  const PolicyNames names = read_names(setting);
  JsonFieldReader reader{setting};
  std::optional<HeadSettings<E>> settings = policies.read(names, reader);
  require<FormatError>(settings.has_value(), setting.where(), ": ", unknown_policy(names, policies.names()));
  const PolicyNames own = settings->names();
  refuse_name(setting, "scorer", names.scorer, own.scorer, own.policy);
  refuse_name(setting, "summary", names.summary, own.summary, own.policy);
  setting.refuse_others();
  return *std::move(settings);
}

}  // namespace kvpolicy::io
