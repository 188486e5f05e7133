// SPDX-License-Identifier: Apache-2.0
#include "retrieval_text.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <utility>

#include <kvpolicy/core/error.hpp>

#include <fmt/format.h>

#include "key_format.hpp"
#include "random.hpp"
#include "texts.hpp"
#include "word_facts.hpp"

namespace kvpolicy::tools {
namespace {

constexpr std::size_t slack = 2000;  // bytes left so that a slice can move to the start of a
                                     // sentence

std::size_t facts_in(std::size_t length) { return std::clamp<std::size_t>(length / 128, 4, 32); }

struct Hidden {
  std::string sentence;
  double depth = -1;         // share of the slice; negative: anywhere
  std::size_t position = 0;  // in the plain slice
  std::size_t end = 0;       // in the body, after the sentence
};

// The element of the ascending `positions` that is closest to `wanted`.
std::size_t nearest(const std::vector<std::size_t>& positions, double wanted) {
  return *std::ranges::min_element(
      positions, {}, [&](std::size_t position) { return std::abs(static_cast<double>(position) - wanted); });
}

// Returns the slice with the sentences inserted.
std::string hide(std::string_view slice, std::vector<Hidden>& hidden, Random& random) {
  std::vector<std::size_t> positions{0};
  for (std::size_t at = 2; at <= slice.size(); ++at) {
    if (is_sentence_start(slice, at)) positions.push_back(at);
  }
  for (Hidden& one : hidden) {
    one.position = one.depth < 0 ? positions[random.below(positions.size())]
                                 : nearest(positions, one.depth * static_cast<double>(slice.size()));
  }
  std::vector<std::size_t> order(hidden.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  random.shuffle(order);  // so that the order of sentences at one position does not reveal which is
                          // asked for
  std::ranges::stable_sort(order, {}, [&](std::size_t i) { return hidden[i].position; });
  std::string body;
  std::size_t done = 0;
  for (const std::size_t i : order) {
    body += slice.substr(done, hidden[i].position - done);
    done = hidden[i].position;
    body += hidden[i].sentence;
    hidden[i].end = body.size();
  }
  body += slice.substr(done);
  return body;
}

void require_room(std::string_view plain, std::size_t length) {
  require(length <= longest_text(plain), "a text of ", length,
          " bytes is longer than the sample text has room for, which is ", longest_text(plain));
}

// A slice of that many bytes that begins at a boundary.
std::string_view slice_of(std::string_view plain, std::size_t bytes, Random& random) {
  std::size_t first = random.below(plain.size() - bytes - slack);
  while (!is_sentence_start(plain, first)) {
    ++first;
    require<FormatError>(first + bytes <= plain.size(),
                         "the sample text has no sentence for thousands of bytes");
  }
  return plain.substr(first, bytes);
}

void require_depths(const RetrievalTextConfig& config) {
  require(config.depths.empty() || !config.two_step,
          "depths are for facts that are asked for by themselves, not for two-step questions");
  require(config.depths.size() <= 32, "a text takes at most 32 depths, there are ", config.depths.size());
  for (const double depth : config.depths) {
    require(depth >= 0 && depth <= 1, "a depth is ", depth, ", must be a share from 0 to 1");
  }
}

}  // namespace

std::size_t questions_per_text(std::size_t length, bool two_step) {
  return two_step ? facts_in(length) / 4 : facts_in(length);
}

std::size_t longest_text(std::string_view plain) { return plain.size() - std::min(plain.size(), slack); }

RetrievalText draw_text(std::string_view plain, const RetrievalTextConfig& config) {
  require_depths(config);
  const bool words = config.kind == FactKind::words;
  std::size_t facts = config.depths.empty() ? facts_in(config.length) : config.depths.size();
  if (words && config.depths.empty()) facts = std::min(facts, most_word_facts);
  const std::size_t pairs = config.two_step ? facts / 4 : 0;
  require(!config.lead_in || !config.two_step,
          "the opening of an answer would give away a two-step question: ask for whole answers");
  require(!words || !config.two_step, "two-step questions are about keys, not about words");
  Random random{config.seed, config.length, config.number};
  std::vector<WordFact> word_facts;
  if (words) word_facts = draw_word_facts(random, facts);
  const std::vector<std::string> names = draw_names(random, words ? 0 : facts);
  std::vector<std::string> keys;
  std::vector<Hidden> hidden;
  for (const WordFact& fact : word_facts) hidden.push_back({.sentence = fact.sentence});
  for (const std::string& name : names) {
    keys.push_back(draw_key(random));
    hidden.push_back({.sentence = key_fact(name, keys.back())});
  }
  for (std::size_t i = 0; i < config.depths.size(); ++i) hidden[i].depth = config.depths[i];
  for (std::size_t i = 0; i < pairs; ++i) {
    hidden.push_back({.sentence = key_older(names[2 * i], names[2 * i + 1])});
  }

  // Question i is about fact i, or pair i if it takes two steps; facts are in random order.
  RetrievalText text;
  text.facts = facts;
  const std::size_t questions = std::min(config.questions, config.two_step ? pairs : facts);
  std::size_t tail = 0;
  for (std::size_t i = 0; i < questions; ++i) {
    const std::size_t asked = config.two_step ? 2 * i : i;
    Question question;
    question.answer = words ? word_facts[i].answer : key_answer(names[asked], keys[asked]);
    if (words) {
      question.text = word_facts[i].question;
    } else if (config.two_step) {
      std::array<std::string_view, 2> pair{names[asked], names[asked + 1]};
      random.shuffle(pair);
      question.text = ask_key_of_older(pair[0], pair[1]);
      question.other = key_answer(names[asked + 1], keys[asked + 1]);
    } else {
      question.text = ask_key(names[asked]);
    }
    tail = std::max(tail, question.text.size() + question.answer.size());
    if (config.lead_in) {
      const std::size_t last_word = question.answer.rfind(' ') + 1;
      question.text += question.answer.substr(0, last_word);
      question.answer.erase(0, last_word);
    }
    text.questions.push_back(std::move(question));
  }

  std::size_t taken = tail;
  for (const Hidden& one : hidden) taken += one.sentence.size();
  require(config.length > taken, "a text of ", config.length, " bytes is too short for ", facts,
          " facts and a question: it takes at least ", taken + 1);
  require_room(plain, config.length);
  const std::size_t bytes = config.length - taken;
  text.body = hide(slice_of(plain, bytes, random), hidden, random);
  for (std::size_t i = 0; i < questions; ++i) {
    text.questions[i].distance = text.body.size() - hidden[config.two_step ? 2 * i : i].end;
  }
  return text;
}

RetrievalText draw_plain_text(std::string_view plain, const RetrievalTextConfig& config) {
  require_room(plain, config.length);
  Random random{config.seed, config.length, config.number};
  RetrievalText text;
  text.body = slice_of(plain, config.length, random);
  return text;
}

std::string held_out_text() { return text_named("kjv"); }

std::string identification_text() { return part_of(held_out_text(), Split::validation); }

std::string evaluation_text() { return part_of(held_out_text(), Split::test); }

}  // namespace kvpolicy::tools
