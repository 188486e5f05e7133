// SPDX-License-Identifier: Apache-2.0
#include "plan_name.hpp"

namespace kvpolicy::tools {

std::string PlanName::with_numbers(const std::string& numbers) const {
  std::string values = numbers;
  for (const Given& one : given()) {
    if (one.named) values += (values.empty() ? "" : ",") + one.setting + "=" + one.value;
  }
  return values.empty() ? head() : head() + ":" + values;
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
