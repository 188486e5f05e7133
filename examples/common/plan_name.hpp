// SPDX-License-Identifier: Apache-2.0
//
// The name of a plan as the tools' --plan has it (io/plan_name.hpp), with the settings that were taken from it:
// reports and files of results show them.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/plan_name.hpp>
#include <kvpolicy/io/policy_json.hpp>

namespace kvpolicy::tools {

/// The maker of a plan takes one setting after another; refuse_others() then reports settings that
/// remain.
class PlanName : public io::PlanName {
 public:
  /// @throws ConfigError for bits or a setting given twice
  explicit PlanName(std::string_view all) : io::PlanName{all, std::string{"--plan "}.append(all)} {}

  /// The value of a setting, or `otherwise` if it is not given. @throws ConfigError for an invalid
  /// value
  [[nodiscard]] std::size_t count(std::string_view setting, std::size_t otherwise) {  ///< 0 to 2^40
    return noted(setting, io::PlanName::count(setting, otherwise));
  }
  [[nodiscard]] double number(std::string_view setting, double otherwise) {  ///< finite
    return noted(setting, io::PlanName::number(setting, otherwise));
  }
  /// An enumerator, by the names that `names_of` returns.
  template <class T>
  [[nodiscard]] T choice(std::string_view setting, T otherwise) {
    const T value = io::PlanName::choice(setting, otherwise);
    settings_[std::string{setting}] = names_of(T{})[static_cast<std::size_t>(value)];
    return value;
  }
  [[nodiscard]] bool flag(std::string_view setting, bool otherwise) {
    static constexpr std::array<std::string_view, 2> names{"false", "true"};
    return noted(setting, one_of(setting, otherwise ? 1 : 0, names) == 1);
  }

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
  template <class T>
  T noted(std::string_view setting, T value) {
    settings_[std::string{setting}] = value;
    return value;
  }

  io::OrderedJson settings_ = io::OrderedJson::object();
};

/// "capacity 128, kernel 7".
[[nodiscard]] std::string shown_settings(const io::OrderedJson& settings);

}  // namespace kvpolicy::tools
