// SPDX-License-Identifier: Apache-2.0
//
// Numbers and UUIDs that belong to things, hidden in a text or among others of their kind.
#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>

#include "../common/words.hpp"
#include "families.hpp"
#include "haystack.hpp"

namespace kvpolicy::tools {
namespace {

enum class Surroundings : std::uint8_t { noise, prose, needles };

struct NeedleShape {
  std::string_view what;  // each thing has one
  Surroundings surroundings;
  std::size_t things = 1;
  std::size_t values = 1;  // of each thing
  bool ask_all = false;    // in one question
};

NeedleShape shape_of(const LanguageTaskConfig& config) {
  using enum Surroundings;
  switch (config.family) {
    case TaskFamily::niah_depths: return {"pass key", prose, config.depths.size()};
    case TaskFamily::niah_single_1: return {"secret number", noise};
    case TaskFamily::niah_single_3: return {"secret code", prose};
    case TaskFamily::niah_multikey_1: return {"secret number", prose, 4};
    case TaskFamily::niah_multikey_2:
      return {"secret number", needles, std::min<std::size_t>(config.questions, 32)};
    case TaskFamily::niah_multikey_3:
      return {"secret code", needles, std::min<std::size_t>(config.questions, 32)};
    case TaskFamily::niah_multivalue: return {"secret number", prose, 1, 4, true};
    case TaskFamily::niah_multiquery: return {"secret number", prose, 4, 1, true};
    default: return {"secret number", prose};
  }
}

// Things and their values, no two of them alike.
class Drawn {
 public:
  Drawn(const TaskSource& source, const NeedleShape& shape)
      : source_{source},
        shape_{shape},
        uuid_things_{source.config.family == TaskFamily::niah_multikey_3},
        names_{uuid_things_ ? std::vector<std::string>{} : draw_things(source.random, most_things)} {}

  std::string thing() {
    if (uuid_things_) return draw_uuid(source_.random);
    require(!names_.empty(), "a task names at most ", most_things, " things; ask for a shorter one");
    std::string name = std::move(names_.back());
    names_.pop_back();
    return name;
  }
  std::string value() {
    for (;;) {
      std::string value = source_.config.family == TaskFamily::niah_depths ? draw_digits(source_.random, 5)
                          : shape_.what == "secret code"                   ? draw_uuid(source_.random)
                                                                           : draw_digits(source_.random, 7);
      if (source_.prose.find(value) == std::string_view::npos && known_.insert(value).second) {
        return value;
      }
    }
  }

 private:
  const TaskSource& source_;
  const NeedleShape& shape_;
  bool uuid_things_;
  std::vector<std::string> names_;
  std::set<std::string> known_;
};

std::string sentence_for(const NeedleShape& shape, const std::string& thing, const std::string& value) {
  std::string sentence = shape.values > 1 ? "One " : "The ";
  sentence.append(shape.what).append(" of the ").append(thing).append(" is ").append(value);
  return sentence += '.';
}

// "the amber lantern, the blue bell and the cold piano"
std::string list_of(const std::vector<std::string>& things) {
  std::string list;
  for (std::size_t i = 0; i < things.size(); ++i) {
    if (i > 0) list += i + 1 == things.size() ? " and " : ", ";
    list.append("the ").append(things[i]);
  }
  return list;
}

LanguageQuestion ask(const NeedleShape& shape, const std::vector<std::string>& things,
                     std::vector<std::string> values, double depth) {
  const std::string subject =
      std::string{shape.what} + (values.size() > 1 ? "s of " : " of ") + list_of(things);
  const std::string_view is = values.size() > 1 ? " are" : " is";
  LanguageQuestion question;
  question.text.append("\nWhat").append(is).append(shape.values > 1 ? " all the " : " the ").append(subject);
  question.text += '?';
  question.lead_in.append(shape.values > 1 ? "All the " : "The ").append(subject).append(is);
  question.answers = std::move(values);
  question.depth = depth;
  return question;
}

void require_depths(const LanguageTaskConfig& config) {
  if (config.family != TaskFamily::niah_depths) return;
  require(!config.depths.empty() && config.depths.size() <= 32, "a passkey text has ", config.depths.size(),
          " depths, must have 1 to 32");
  for (const double depth : config.depths) {
    require(depth >= 0 && depth <= 1, "a depth is ", depth, ", must be a share from 0 to 1");
  }
  require(std::ranges::is_sorted(config.depths), "the depths of a passkey text must ascend");
}

}  // namespace

LanguageTask draw_needles(const TaskSource& source) {
  const LanguageTaskConfig& config = source.config;
  require_depths(config);
  const NeedleShape shape = shape_of(config);
  Drawn drawn{source, shape};

  LanguageTask task;
  std::vector<Needle> needles;
  std::vector<std::string> things;
  std::vector<std::string> values;
  for (std::size_t i = 0; i < shape.things; ++i) {
    things.push_back(drawn.thing());
    for (std::size_t j = 0; j < shape.values; ++j) {
      values.push_back(drawn.value());
      const double depth =
          config.family == TaskFamily::niah_depths ? config.depths[i] : draw_depth(source.random);
      needles.push_back({sentence_for(shape, things.back(), values.back()), depth});
    }
  }
  if (shape.ask_all) {
    task.questions.push_back(ask(shape, things, values, needles.front().depth));
  } else {
    const std::size_t asked = config.family == TaskFamily::niah_depths ? things.size() : config.questions;
    for (std::size_t i = 0; i < std::min(asked, things.size()); ++i) {
      task.questions.push_back(ask(shape, {things[i]}, {values[i]}, needles[i].depth));
    }
  }

  std::string opening = "Remember every ";
  opening.append(shape.what).append(" in the following text. A question about them comes after it.\n\n");
  if (shape.surroundings == Surroundings::needles) {
    std::vector<std::string> others;
    std::ranges::stable_sort(needles, {}, &Needle::depth);
    task.body = fit_body(
        config, source.count, task.questions, 0, most_things - needles.size(), [&](std::size_t others_shown) {
          while (others.size() < others_shown)
            others.push_back(sentence_for(shape, drawn.thing(), drawn.value()));
          std::string body = opening;
          std::size_t next = 0;
          for (std::size_t i = 0; i <= others_shown; ++i) {
            while (next < needles.size() &&
                   needles[next].depth * static_cast<double>(others_shown) <= static_cast<double>(i)) {
              body.append(needles[next++].sentence).append("\n");
            }
            if (i < others_shown) body.append(others[i]).append("\n");
          }
          return body;
        });
  } else {
    const Haystack haystack = shape.surroundings == Surroundings::noise
                                  ? Haystack{config.length}
                                  : Haystack{source.prose, config.length, source.random};
    task.body = fit_body(config, source.count, task.questions, needles.size(), haystack.words(),
                         [&](std::size_t words) { return opening + haystack.with(words, needles); });
  }
  // The boundaries have moved the needles a little.
  for (LanguageQuestion& question : task.questions) {
    std::size_t first = task.body.size();
    for (const std::string& answer : question.answers) first = std::min(first, task.body.find(answer));
    question.depth = static_cast<double>(first) / static_cast<double>(task.body.size());
  }
  return task;
}

}  // namespace kvpolicy::tools
