// SPDX-License-Identifier: Apache-2.0
//
// Common words and frequent words: what is repeated most often in a long list.
#include <algorithm>
#include <cctype>
#include <cmath>
#include <numbers>
#include <set>
#include <string>
#include <vector>

#include <kvpolicy/core/error.hpp>

#include "../common/words.hpp"
#include "families.hpp"
#include "haystack.hpp"

namespace kvpolicy::tools {
namespace {

// Distinct lower-case words of four to nine letters, in random order.
std::vector<std::string> words_of(std::string_view prose, Random& random) {
  std::set<std::string> known;
  std::string word;
  for (const char letter : prose) {
    if (letter >= 'a' && letter <= 'z') {
      word += letter;
      continue;
    }
    const bool plain = letter == ' ' || letter == ',' || letter == '.' || letter == ';';
    if (plain && word.size() >= 4 && word.size() <= 9) known.insert(word);
    word.clear();
    if (!plain && letter != '\n') word += '\0';  // part of a longer word
  }
  std::erase_if(known, [](const std::string& one) { return one.front() == '\0'; });
  std::vector<std::string> words{known.begin(), known.end()};
  random.shuffle(words);
  return words;
}

constexpr std::size_t common_words = 10;

struct Frequencies {
  std::size_t of_common;
  std::size_t of_others;
};

// "1. kettle 2. swim 3. kettle ...", in an order that depends on `random` alone.
std::string numbered_list(std::span<const std::string> words, std::size_t others,
                          const Frequencies& frequencies, Random random) {
  std::vector<const std::string*> list;
  for (std::size_t i = 0; i < common_words + others; ++i) {
    list.insert(list.end(), i < common_words ? frequencies.of_common : frequencies.of_others, &words[i]);
  }
  random.shuffle(list);
  std::string text;
  for (std::size_t i = 0; i < list.size(); ++i) {
    text.append(i == 0 ? "" : " ").append(std::to_string(i + 1)).append(". ").append(*list[i]);
  }
  return text;
}

LanguageQuestion ask_common(std::span<const std::string> words) {
  return {.text = "\nWhich ten words are repeated most often in this list?",
          .lead_in = "The ten words that are repeated most often are:",
          .answers = {words.begin(), words.begin() + common_words}};
}

}  // namespace

LanguageTask draw_common_words(const TaskSource& source) {
  const LanguageTaskConfig& config = source.config;
  std::vector<std::string> words = words_of(source.prose, source.random);
  // RULER repeats less, and shows a shorter example, in short texts.
  const bool is_short = config.length < 4096;
  const Frequencies shown{is_short ? 3U : 10U, is_short ? 1U : 3U};
  const Frequencies hidden{is_short ? 6U : 30U, is_short ? 1U : 3U};
  const std::size_t shown_others = is_short ? 10 : 30;
  require(words.size() > 2 * common_words + shown_others, "the prose has ", words.size(),
          " different words, too few for a list");
  std::string opening =
      "Some words of the following numbered list are repeated more often than the others. Remember "
      "those that are repeated most often.\n";
  std::string body = opening + numbered_list(words, shown_others, shown, source.random);
  const LanguageQuestion example = ask_common(words);
  body += example.prompt();
  for (std::size_t i = 0; i < common_words; ++i) {
    body.append(" ").append(std::to_string(i + 1)).append(". ").append(example.answers[i]);
  }
  body.append("\n\n").append(opening);

  const std::span<const std::string> own = std::span{words}.subspan(common_words + shown_others);
  LanguageTask task;
  task.questions.push_back(ask_common(own));
  const Random order = source.random;
  task.body = fit_body(config, source.count, task.questions, 1, own.size() - common_words,
                       [&](std::size_t others) { return body + numbered_list(own, others, hidden, order); });
  return task;
}

LanguageTask draw_frequent_words(const TaskSource& source) {
  const LanguageTaskConfig& config = source.config;
  // The word of rank k has a share of 1 / (k^2 zeta(2)). The first rank is noise, as in RULER.
  const auto count_of = [](std::size_t words, std::size_t rank) {
    const auto k = static_cast<double>(rank);
    return static_cast<std::size_t>(static_cast<double>(words) * 6 /
                                    (std::numbers::pi * std::numbers::pi * k * k));
  };
  std::vector<std::string> coded{"..."};
  for (std::set<std::string> known; coded.size() < 256;) {
    std::string word = draw_letters(source.random, 6, 'a');
    if (known.insert(word).second) coded.push_back(std::move(word));
  }
  LanguageTask task;
  task.questions.push_back(
      {.text = "\nWhich three coded words appear most often? Pay no attention to the dots.",
       .lead_in = "The three coded words that appear most often are",
       .answers = {coded.begin() + 1, coded.begin() + 4}});
  const Random order = source.random;
  task.body = fit_body(config, source.count, task.questions, 100, 1U << 20U, [&](std::size_t words) {
    std::vector<const std::string*> list;
    for (std::size_t rank = 1; rank <= coded.size() && count_of(words, rank) > 0; ++rank) {
      list.insert(list.end(), count_of(words, rank), &coded[rank - 1]);
    }
    Random shuffling = order;
    shuffling.shuffle(list);
    std::string body = "Keep track of how often each coded word appears in the following text.\n";
    for (const std::string* word : list) body.append(" ").append(*word);
    return body;
  });
  return task;
}

}  // namespace kvpolicy::tools
