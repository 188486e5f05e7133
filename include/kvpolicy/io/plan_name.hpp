// SPDX-License-Identifier: Apache-2.0
//
// Takes the name of a plan apart:
//
//     name[+precision][@source][:value,...]       duo+int4@pattern/:0.5,hadamard=both
//
// A value is setting=value, or a number whose index in the list decides its setting. "+int4" or "+k8v4" may also
// stand after the source. A source is a path; a : or + ends it only after its last /. A text with a / and no source
// is a path as a whole.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/low_bits.hpp>

namespace kvpolicy::io {

/// The parts of a name. Whoever makes the plan takes one setting after another; refuse_others() then reports
/// settings that remain. Every error is a ConfigError that begins with `called`.
class PlanName {
 public:
  std::string text;     ///< all of it
  std::string name;     ///< "duo"
  std::string source;   ///< "pattern/"
  std::string storage;  ///< "int4"; empty: exact rows

  /// `called`: what errors call the plan. @throws ConfigError for a precision or a setting given twice
  explicit PlanName(std::string_view all, std::string called) : text{all}, called_{std::move(called)} {
    const std::size_t at = all.find('@');
    const bool sourced =
        at != std::string_view::npos && all.substr(0, at).find_first_of(":/") == std::string_view::npos;
    const std::size_t slash = all.rfind('/');
    if (!sourced && slash != std::string_view::npos) {
      name = head_ = text;
      return;
    }
    const std::size_t last = !sourced ? 0 : slash == std::string_view::npos ? at + 1 : slash;
    const std::size_t colon = all.find(':', last);
    head_ = all.substr(0, colon);
    name = head_;
    if (sourced) {
      name = head_.substr(0, at);
      source = head_.substr(at + 1);
      const std::size_t plus = head_.rfind('+');
      if (plus != std::string::npos && plus >= last && is_precision(head_.substr(plus + 1))) {
        source = head_.substr(at + 1, plus - at - 1);
        storage = head_.substr(plus + 1);
      }
    }
    if (const std::size_t plus = name.find('+'); plus != std::string::npos) {
      require(storage.empty(), called_, ": gives the bits twice, ", name.substr(plus + 1), " and ", storage);
      storage = name.substr(plus + 1);
      name.resize(plus);
    }
    if (colon != std::string_view::npos) read_values(all.substr(colon + 1));
  }

  /// Says which settings the first, the second, ... unnamed number stands for.
  /// @throws ConfigError for more numbers, or for one whose setting is also given by name
  void place(std::initializer_list<std::string_view> settings) {
    const auto* next = settings.begin();
    for (Given& one : given_) {
      if (one.named) continue;
      require(next != settings.end(), called_, ": ", name, " takes at most ", settings.size(),
              " numbers, has ", std::ranges::count(given_, false, &Given::named));
      require(std::ranges::count(given_, *next, &Given::setting) == 0, called_, ": gives ", *next, " twice");
      one.setting = *next++;
    }
  }

  /// The value of a setting, or `otherwise` if it is not given: 0 to 2^40.
  /// @throws ConfigError for an invalid value
  [[nodiscard]] std::size_t count(std::string_view setting, std::size_t otherwise) {
    constexpr std::size_t most = std::size_t{1} << 40;
    const std::string* digits = find(setting);
    if (digits == nullptr) return otherwise;
    std::size_t value = 0;
    require(read_number(*digits, value), called_, ": ", setting, " is ", in_quotes(*digits),
            ", which is not a whole number");
    require(value <= most, called_, ": ", setting, " is ", value, ", must be at most 2^40");
    return value;
  }
  /// The same for a finite number.
  [[nodiscard]] double number(std::string_view setting, double otherwise) {
    const std::string* digits = find(setting);
    if (digits == nullptr) return otherwise;
    double value = 0;
    require(read_number(*digits, value) && std::isfinite(value), called_, ": ", setting, " is ",
            in_quotes(*digits), ", which is not a number");
    return value;
  }
  /// The same for an enumerator, by the names that `names_of` returns.
  template <class T>
  [[nodiscard]] T choice(std::string_view setting, T otherwise) {
    static constexpr auto names = names_of(T{});
    return static_cast<T>(one_of(setting, static_cast<std::size_t>(otherwise), names));
  }

  /// @throws ConfigError for a setting that was given and not taken
  void refuse_others() const {
    for (const Given& one : given_) {
      if (one.taken) continue;
      std::string list;
      for (const std::string& setting : asked_) list.append(list.empty() ? "" : ", ").append(setting);
      require(one.named, called_, ": ", name, " takes no number");
      fail<ConfigError>(called_, ": ", name, " has no setting ", in_quotes(one.setting), ", ",
                        list.empty() ? "nor any other" : "only " + list);
    }
  }
  /// @throws ConfigError if the name asks for quantised rows
  void require_exact_rows() const {
    require(storage.empty(), called_, ": ", name, " cannot be combined with ", storage);
  }

 protected:
  struct Given {
    std::string setting;  // empty: a number to which `place` has given no setting yet
    std::string value;
    bool taken = false;
    bool named = false;
  };

  /// The index of a setting's value among `names`.
  [[nodiscard]] std::size_t one_of(std::string_view setting, std::size_t otherwise,
                                   std::span<const std::string_view> names) {
    const std::string* word = find(setting);
    if (word == nullptr) return otherwise;
    const auto found = std::ranges::find(names, std::string_view{*word});
    if (found == names.end()) {
      std::string list;
      for (const std::string_view known : names) list.append(list.empty() ? "" : ", ").append(known);
      fail<ConfigError>(called_, ": ", setting, " is ", in_quotes(*word), ", must be one of ", list);
    }
    return static_cast<std::size_t>(found - names.begin());
  }

  [[nodiscard]] const std::string& head() const { return head_; }  ///< the text before the colon
  [[nodiscard]] const std::vector<Given>& given() const { return given_; }

 private:
  // What looks like a precision: of one that does not exist the plan's maker says so.
  [[nodiscard]] static bool is_precision(std::string_view word) {
    return word.starts_with("int") || low_bits_named(word) || small_floats_named(word) != Codebook::even;
  }
  template <class T>
  [[nodiscard]] static bool read_number(std::string_view digits, T& value) {
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    return error == std::errc{} && end == digits.data() + digits.size();
  }

  void read_values(std::string_view rest) {
    for (;;) {
      const std::size_t comma = rest.find(',');
      const std::string_view value = rest.substr(0, comma);
      const std::size_t equals = value.find('=');
      if (equals == std::string_view::npos) {
        given_.push_back({"", std::string{value}});
      } else {
        const std::string setting{value.substr(0, equals)};
        require(std::ranges::count(given_, setting, &Given::setting) == 0 || setting.empty(), called_,
                ": gives ", setting, " twice");
        given_.push_back({setting, std::string{value.substr(equals + 1)}, false, true});
      }
      if (comma == std::string_view::npos) return;
      rest.remove_prefix(comma + 1);
    }
  }
  [[nodiscard]] const std::string* find(std::string_view setting) {
    if (std::ranges::find(asked_, setting) == asked_.end()) asked_.emplace_back(setting);
    const auto found = std::ranges::find(given_, setting, &Given::setting);
    if (found == given_.end()) return nullptr;
    found->taken = true;
    return &found->value;
  }

  std::string called_;
  std::string head_;
  std::vector<Given> given_;
  std::vector<std::string> asked_;  // in order
};

}  // namespace kvpolicy::io
