// SPDX-License-Identifier: Apache-2.0
//
// Renders templates for published_test.py: a line of JSON with `template`, `names` and `now` (year, month, day, hour, minute,
// second) becomes one with `text`, or with `refused`, or with `failed` for what the template itself does not allow.
#include <ctime>
#include <iostream>
#include <string>

#include <nlohmann/json.hpp>

#include <kvpolicy/core/error.hpp>
#include <reference_model/jinja/json_value.hpp>
#include <reference_model/jinja/template.hpp>

int main() {
  using namespace kvpolicy;
  namespace jinja = reference::jinja;
  for (std::string line; std::getline(std::cin, line);) {
    const auto given = nlohmann::ordered_json::parse(line);
    nlohmann::ordered_json answer;
    try {
      std::tm now{};
      const auto& time = given["now"];
      now.tm_year = time[0].get<int>() - 1900;
      now.tm_mon = time[1].get<int>() - 1;
      now.tm_mday = time[2].get<int>();
      now.tm_hour = time[3].get<int>();
      now.tm_min = time[4].get<int>();
      now.tm_sec = time[5].get<int>();
      now.tm_isdst = -1;
      std::mktime(&now);
      std::map<std::string, jinja::Value, std::less<>> names;
      for (const auto& [name, value] : given["names"].items()) names.emplace(name, jinja::value_of(value));
      answer["text"] =
          jinja::Template{given["template"].get<std::string>()}.render(std::move(names), {.now = now}).text;
    } catch (const FormatError& error) {
      answer["refused"] = error.what();
    } catch (const ConfigError& error) {
      answer["failed"] = error.what();
    }
    std::cout << answer.dump() << "\n";
  }
}
