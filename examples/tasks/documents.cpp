// SPDX-License-Identifier: Apache-2.0
//
// Questions about short documents on people and towns that do not exist, among many others like
// them. The shape is RULER's of SQuAD (one document answers) and HotpotQA (two do).
#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "../common/key_format.hpp"
#include "../common/words.hpp"
#include "families.hpp"
#include "haystack.hpp"

namespace kvpolicy::tools {
namespace {

constexpr std::array<std::string_view, 16> trades{"a baker",  "a carpenter",  "a teacher", "a painter",
                                                  "a sailor", "a doctor",     "a printer", "a gardener",
                                                  "a weaver", "a blacksmith", "a lawyer",  "a miller",
                                                  "a tailor", "a surveyor",   "a potter",  "a pharmacist"};
constexpr std::array<std::string_view, 16> products{
    "wool",    "cheese",  "bricks",  "glass", "paper", "salt",   "honey",   "timber",
    "pottery", "carpets", "candles", "bells", "boats", "apples", "leather", "clocks"};

// What a question is about: a person, and the town of that person.
struct Life {
  std::string person;
  std::string town;
  std::string land;
  std::string lived;  // a document each
  std::string lies;
};

Life draw_life(Random& random, std::vector<std::string>& names) {
  const auto name = [&] {
    std::string drawn = std::move(names.back());
    names.pop_back();
    return drawn;
  };
  Life life;
  life.person = name() + ' ' + name();
  life.town = name();
  life.land = name();
  const std::size_t born = 1700 + random.below(200);
  life.lived.append(life.person).append(" was born in the town of ").append(life.town).append(" in ");
  life.lived.append(std::to_string(born)).append(", worked as ").append(trades[random.below(trades.size())]);
  life.lived.append(", and died at the age of ").append(std::to_string(50 + random.below(45))).append(".");
  life.lies.append(life.town).append(" is a town in the province of ").append(life.land).append(". It has ");
  life.lies.append(std::to_string(2 + random.below(90)))
      .append(" thousand inhabitants and is known for its ");
  life.lies.append(products[random.below(products.size())]).append(".");
  return life;
}

}  // namespace

LanguageTask draw_documents(const TaskSource& source) {
  const LanguageTaskConfig& config = source.config;
  const bool two_steps = config.family == TaskFamily::qa_2;
  // A document takes more than 24 tokens and four names.
  const std::size_t asked = std::min<std::size_t>(config.questions, 8);
  std::vector<std::string> names =
      draw_names(source.random, std::min<std::size_t>(config.length / 6 + 4 * asked + 16, 100'000));

  LanguageTask task;
  std::vector<Needle> hidden;
  for (std::size_t i = 0; i < asked; ++i) {
    const Life life = draw_life(source.random, names);
    hidden.push_back({life.lived, draw_depth(source.random)});
    hidden.push_back({life.lies, draw_depth(source.random)});
    LanguageQuestion question;
    if (two_steps) {
      question.text = "\nIn which province is the town where " + life.person + " was born?";
      question.lead_in = "The town where " + life.person + " was born is in the province of";
      question.answers = {life.land};
    } else {
      question.text = "\nIn which town was " + life.person + " born?";
      question.lead_in = life.person + " was born in the town of";
      question.answers = {life.town};
    }
    task.questions.push_back(std::move(question));
  }
  std::ranges::stable_sort(hidden, {}, &Needle::depth);

  const std::string opening = "Answer the question after these documents.\n\n";
  std::vector<std::string> others;
  const std::size_t most = names.size() / 4;
  task.body = fit_body(config, source.count, task.questions, 0, most, [&](std::size_t parts) {
    while (others.size() < parts) {
      Life life = draw_life(source.random, names);
      others.push_back(std::move(source.random.below(2) == 0 ? life.lived : life.lies));
    }
    std::string body = opening;
    std::size_t next = 0;
    std::size_t number = 0;
    const auto add = [&](const std::string& document) {
      ++number;
      body.append(number == 1 ? "" : "\n").append("Document ").append(std::to_string(number));
      body.append(": ").append(document);
    };
    for (std::size_t i = 0; i <= parts; ++i) {
      while (next < hidden.size() &&
             hidden[next].depth * static_cast<double>(parts) <= static_cast<double>(i)) {
        add(hidden[next++].sentence);
      }
      if (i < parts) add(others[i]);
    }
    return body;
  });
  for (LanguageQuestion& question : task.questions) {
    question.depth =
        static_cast<double>(task.body.find(question.answers.front())) / static_cast<double>(task.body.size());
  }
  return task;
}

}  // namespace kvpolicy::tools
