// SPDX-License-Identifier: Apache-2.0
#include "word_facts.hpp"

#include <algorithm>
#include <array>
#include <span>
#include <string_view>
#include <utility>

#include <kvpolicy/core/error.hpp>

#include "words.hpp"

namespace kvpolicy::tools {
namespace {

struct Statement {
  std::string_view kind;  // of the word that ends it, as in word_kinds()
  std::string_view beginning;
  std::string_view question;
};

constexpr std::array<Statement, most_word_facts> statements{{
    {"fish", "The fisherman sells nothing but", "What does the fisherman sell?"},
    {"bird", "On the roof of the school sat a large", "What sat on the roof of the school?"},
    {"fruit", "The favourite fruit of the baker is the", "What is the favourite fruit of the baker?"},
    {"vegetable", "The soup of the innkeeper is made of", "What is the soup of the innkeeper made of?"},
    {"tool", "Under the bed of the tailor lies a heavy", "What lies under the bed of the tailor?"},
    {"tree", "In front of the town hall stands an old", "What stands in front of the town hall?"},
    {"colour", "The coat of the postman is", "What colour is the coat of the postman?"},
    {"metal", "The key of the cellar is made of", "What is the key of the cellar made of?"},
    {"musical instrument", "The captain has learned to play the", "What has the captain learned to play?"},
    {"insect", "The painter is afraid of every", "What is the painter afraid of?"},
    {"garment", "The shepherd has lost his woollen", "What has the shepherd lost?"},
    {"vehicle", "The teacher comes to work by", "How does the teacher come to work?"},
}};

}  // namespace

std::vector<WordFact> draw_word_facts(Random& random, std::size_t count) {
  require(count <= statements.size(), "there are ", statements.size(), " facts about words, not ", count);
  std::array<Statement, most_word_facts> order = statements;
  random.shuffle(order);
  std::vector<WordFact> facts;
  for (const auto& [kind, beginning, question] : std::span{order}.first(count)) {
    const auto words = words_in(std::ranges::find(word_kinds(), kind, &WordKind::name)->words);
    WordFact fact;
    fact.answer.append(beginning).append(" ").append(words[random.below(words.size())]);
    fact.sentence.append(fact.answer).append(". ");
    fact.question.append("\n").append(question).append(" ");
    facts.push_back(std::move(fact));
  }
  return facts;
}

}  // namespace kvpolicy::tools
