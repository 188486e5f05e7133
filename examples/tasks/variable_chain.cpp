// SPDX-License-Identifier: Apache-2.0
//
// Variable tracking: a number, and names that stand for it, one through another.
#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "../common/words.hpp"
#include "families.hpp"
#include "haystack.hpp"

namespace kvpolicy::tools {
namespace {

constexpr std::size_t names_in_chain = 5;  // one has the number, four have another's

std::vector<std::string> draw_names(Random& random) {
  std::set<std::string> known;
  std::vector<std::string> names;
  while (names.size() < names_in_chain) {
    std::string name = draw_letters(random, 5, 'A');
    if (known.insert(name).second) names.push_back(std::move(name));
  }
  return names;
}

std::vector<std::string> assignments(const std::vector<std::string>& names, const std::string& number) {
  std::vector<std::string> lines;
  for (std::size_t i = 0; i < names.size(); ++i) {
    lines.push_back("VAR " + names[i] + " = " + (i == 0 ? number : "VAR " + names[i - 1]) + ".");
  }
  return lines;
}

LanguageQuestion ask(const std::vector<std::string>& names, const std::string& number) {
  return {.text = "\nWhich variables have the value " + number + ", directly or through others?",
          .lead_in = "The " + std::to_string(names.size()) + " variables with the value " + number + " are",
          .answers = names};
}

}  // namespace

LanguageTask draw_variable_chain(const TaskSource& source) {
  const std::vector<std::string> shown_names = draw_names(source.random);
  const std::string shown_number = draw_digits(source.random, 5);
  std::vector<std::string> names;
  do {
    names = draw_names(source.random);
  } while (std::ranges::find_first_of(names, shown_names) != names.end());
  std::string number = shown_number;
  while (number == shown_number) number = draw_digits(source.random, 5);

  // A short example shows what is asked for, as in RULER.
  std::string opening = "Values are given to variables in the following text. Keep track of them.\n\n";
  for (const std::string& line : assignments(shown_names, shown_number)) opening.append(line).append("\n");
  opening.append(ask(shown_names, shown_number).prompt().substr(1));
  for (std::size_t i = 0; i < shown_names.size(); ++i) {
    opening.append(i == 0 ? " " : ", ").append(shown_names[i]);
  }
  opening += ".\n\n";

  std::vector<double> depths(names.size());
  for (double& depth : depths) depth = draw_depth(source.random);
  std::ranges::sort(depths);
  std::vector<Needle> needles;
  const std::vector<std::string> lines = assignments(names, number);
  for (std::size_t i = 0; i < lines.size(); ++i) needles.push_back({lines[i], depths[i]});

  LanguageTask task;
  task.questions.push_back(ask(names, number));
  const Haystack haystack{source.config.length};
  task.body = fit_body(source.config, source.count, task.questions, needles.size(), haystack.words(),
                       [&](std::size_t words) { return opening + haystack.with(words, needles); });
  task.questions.front().depth =
      static_cast<double>(task.body.find(lines.front())) / static_cast<double>(task.body.size());
  return task;
}

}  // namespace kvpolicy::tools
