// SPDX-License-Identifier: Apache-2.0
//
// The name of a plan, taken apart:
//
//     name[+intN][@source][:value,...]            headkv+int4@scores.json:128,kernel=29
//
// A value is a number, which its place makes a setting, or setting=value. "+intN" may also stand
// after the source. A source is a path: of a : or + in it, only those after its last / end it.
#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/policy_json.hpp>

namespace kvpolicy::tools {

/// Whoever makes the plan takes one setting after another; what is then left over nobody knows.
class PlanName {
 public:
  /// @throws ConfigError for bits or a setting that are given twice
  explicit PlanName(std::string_view text);

  std::string text;  ///< all of it
  std::string name;  ///< "headkv"; a text with a / and no source is a path, and all of it the name
  std::string source;   ///< "scores.json"; empty: what lies beside the model's weights
  std::string storage;  ///< "int4"; empty: exact rows

  /// The settings that the first, the second, ... number stands for.
  /// @throws ConfigError for more numbers, or one whose setting is also given by name
  void place(std::initializer_list<std::string_view> settings);

  /// A setting, or `otherwise` where it is not given. @throws ConfigError for what it cannot be
  [[nodiscard]] std::size_t count(std::string_view setting, std::size_t otherwise);  ///< 0 to 2^40
  [[nodiscard]] double number(std::string_view setting, double otherwise);           ///< finite
  /// An enumerator, by the names that `names_of` gives.
  template <class T>
  [[nodiscard]] T choice(std::string_view setting, T otherwise) {
    static constexpr auto names = names_of(T{});
    return static_cast<T>(choice(setting, static_cast<std::size_t>(otherwise), names));
  }
  [[nodiscard]] bool flag(std::string_view setting, bool otherwise) {
    static constexpr std::array<std::string_view, 2> names{"false", "true"};
    const bool value = choice(setting, std::size_t{otherwise}, names) == 1;
    settings_[std::string{setting}] = value;
    return value;
  }

  /// @throws ConfigError for a setting that was given and not taken
  void refuse_others() const;
  /// @throws ConfigError if the rows shall be quantised
  void require_exact_rows() const;

  /// Adds what followed from the settings, for whoever reads them later.
  void record(std::string_view what, std::size_t number) { settings_[std::string{what}] = number; }

  /// Everything that was taken, given or not, and recorded: {"capacity": 128, "kernel": 7}.
  [[nodiscard]] const io::OrderedJson& settings() const { return settings_; }

  /// Without its numbers: "headkv+int4@scores.json:kernel=29".
  [[nodiscard]] std::string method() const { return with_numbers(""); }
  /// A method with numbers: "headkv:128,kernel=29".
  [[nodiscard]] std::string with_numbers(const std::string& numbers) const;

 private:
  [[nodiscard]] std::size_t choice(std::string_view setting, std::size_t otherwise,
                                   std::span<const std::string_view> names);

  struct Given {
    std::string setting;  // empty: a number that has not been placed
    std::string value;
    bool taken = false;
    bool named = false;
  };
  [[nodiscard]] const std::string* find(std::string_view setting);

  std::string head_;  // before the colon
  std::vector<Given> given_;
  io::OrderedJson settings_ = io::OrderedJson::object();
};

/// "capacity 128, kernel 7".
[[nodiscard]] std::string shown_settings(const io::OrderedJson& settings);

}  // namespace kvpolicy::tools
