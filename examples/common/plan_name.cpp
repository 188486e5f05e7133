// SPDX-License-Identifier: Apache-2.0
#include "plan_name.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

#include <fmt/ranges.h>

namespace kvpolicy::tools {
namespace {

// Parses all of `digits` as a number; returns false if it is not one.
template <class T>
bool read_number(std::string_view digits, T& value) {
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  return error == std::errc{} && end == digits.data() + digits.size();
}

}  // namespace

PlanName::PlanName(std::string_view all) : text{all} {
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
    const std::size_t plus = head_.rfind("+int");
    if (plus != std::string::npos && plus >= last) {
      source = head_.substr(at + 1, plus - at - 1);
      storage = head_.substr(plus + 1);
    }
  }
  if (const std::size_t plus = name.find('+'); plus != std::string::npos) {
    require(storage.empty(), "--plan ", text, ": gives the bits twice, ", name.substr(plus + 1), " and ",
            storage);
    storage = name.substr(plus + 1);
    name.resize(plus);
  }
  if (colon == std::string_view::npos) return;
  for (std::string_view rest = all.substr(colon + 1);;) {
    const std::size_t comma = rest.find(',');
    const std::string_view value = rest.substr(0, comma);
    const std::size_t equals = value.find('=');
    if (equals == std::string_view::npos) {
      given_.push_back({"", std::string{value}});
    } else {
      const std::string setting{value.substr(0, equals)};
      require(std::ranges::count(given_, setting, &Given::setting) == 0 || setting.empty(), "--plan ", text,
              ": gives ", setting, " twice");
      given_.push_back({setting, std::string{value.substr(equals + 1)}, false, true});
    }
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
}

void PlanName::place(std::initializer_list<std::string_view> settings) {
  const auto* next = settings.begin();
  for (Given& one : given_) {
    if (one.named) continue;
    require(next != settings.end(), "--plan ", text, ": ", name, " takes at most ", settings.size(),
            " numbers, has ", std::ranges::count(given_, false, &Given::named));
    require(std::ranges::count(given_, *next, &Given::setting) == 0, "--plan ", text, ": gives ", *next,
            " twice");
    one.setting = *next++;
  }
}

const std::string* PlanName::find(std::string_view setting) {
  const auto found = std::ranges::find(given_, setting, &Given::setting);
  if (found == given_.end()) return nullptr;
  found->taken = true;
  return &found->value;
}

std::size_t PlanName::count(std::string_view setting, std::size_t otherwise) {
  constexpr std::size_t most = std::size_t{1} << 40;
  std::size_t value = otherwise;
  if (const std::string* digits = find(setting)) {
    require(read_number(*digits, value), "--plan ", text, ": ", setting, " is '", *digits,
            "', which is not a whole number");
    require(value <= most, "--plan ", text, ": ", setting, " is ", value, ", must be at most 2^40");
  }
  settings_[std::string{setting}] = value;
  return value;
}

double PlanName::number(std::string_view setting, double otherwise) {
  double value = otherwise;
  if (const std::string* digits = find(setting)) {
    require(read_number(*digits, value) && std::isfinite(value), "--plan ", text, ": ", setting, " is '",
            *digits, "', which is not a number");
  }
  settings_[std::string{setting}] = value;
  return value;
}

std::size_t PlanName::choice(std::string_view setting, std::size_t otherwise,
                             std::span<const std::string_view> names) {
  std::size_t index = otherwise;
  if (const std::string* word = find(setting)) {
    const auto found = std::ranges::find(names, std::string_view{*word});
    require(found != names.end(), "--plan ", text, ": ", setting, " is '", *word, "', must be one of ",
            fmt::format("{}", fmt::join(names, ", ")));
    index = static_cast<std::size_t>(found - names.begin());
  }
  settings_[std::string{setting}] = names[index];
  return index;
}

void PlanName::refuse_others() const {
  for (const Given& one : given_) {
    if (one.taken) continue;
    std::string list;
    for (const auto& [setting, value] : settings_.items()) list += (list.empty() ? "" : ", ") + setting;
    require(one.named, "--plan ", text, ": ", name, " takes no number");
    fail<ConfigError>("--plan ", text, ": ", name, " has no setting '", one.setting, "', ",
                      list.empty() ? "nor any other" : "only " + list);
  }
}

void PlanName::require_exact_rows() const {
  require(storage.empty(), "--plan ", text, ": ", name, " cannot be combined with ", storage);
}

std::string PlanName::with_numbers(const std::string& numbers) const {
  std::string values = numbers;
  for (const Given& one : given_) {
    if (one.named) values += (values.empty() ? "" : ",") + one.setting + "=" + one.value;
  }
  return values.empty() ? head_ : head_ + ":" + values;
}

std::string shown_settings(const io::OrderedJson& settings) {
  std::string text;
  for (const auto& [setting, value] : settings.items()) {
    text += (text.empty() ? "" : ", ") + setting + " " +
            (value.is_string() ? value.get<std::string>() : value.dump());
  }
  return text;
}

}  // namespace kvpolicy::tools
