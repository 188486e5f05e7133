// SPDX-License-Identifier: Apache-2.0
//
// Takes the name of a plan apart:
//
//     name[+intN][@source][:value,...]            headkv+int4@scores.json:128,kernel=29
//
// A value is setting=value, or a number whose index in the list decides its setting. "+intN" may
// also stand after the source. A source is a path; a : or + ends it only after its last /.
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

/// The maker of a plan takes one setting after another; refuse_others() then reports settings that
/// remain.
class PlanName {
 public:
  /// @throws ConfigError for bits or a setting given twice
  explicit PlanName(std::string_view text);

  std::string text;     ///< all of it
  std::string name;     ///< "headkv"; a text with a / and no source is a path, and is the name as a
                        ///< whole
  std::string source;   ///< "scores.json"; empty: the file beside the model's weights
  std::string storage;  ///< "int4"; empty: exact rows

  /// Says which settings the first, the second, ... unnamed number stands for.
  /// @throws ConfigError for more numbers, or for one whose setting is also given by name
  void place(std::initializer_list<std::string_view> settings);

  /// The value of a setting, or `otherwise` if it is not given. @throws ConfigError for an invalid
  /// value
  [[nodiscard]] std::size_t count(std::string_view setting, std::size_t otherwise);  ///< 0 to 2^40
  [[nodiscard]] double number(std::string_view setting, double otherwise);           ///< finite
  /// An enumerator, by the names that `names_of` returns.
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
  /// @throws ConfigError if the name asks for quantised rows
  void require_exact_rows() const;

  /// Adds a number that followed from the settings to settings().
  void record(std::string_view what, std::size_t number) { settings_[std::string{what}] = number; }

  /// Every setting that was taken, given or not, and what was recorded: {"capacity": 128, "kernel":
  /// 7}.
  [[nodiscard]] const io::OrderedJson& settings() const { return settings_; }

  /// The name without its unnamed numbers: "headkv+int4@scores.json:kernel=29".
  [[nodiscard]] std::string method() const { return with_numbers(""); }
  /// The method with other numbers: "headkv:128,kernel=29".
  [[nodiscard]] std::string with_numbers(const std::string& numbers) const;

 private:
  [[nodiscard]] std::size_t choice(std::string_view setting, std::size_t otherwise,
                                   std::span<const std::string_view> names);

  struct Given {
    std::string setting;  // empty: a number to which `place` has given no setting yet
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
