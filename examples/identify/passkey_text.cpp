// SPDX-License-Identifier: Apache-2.0
#include "passkey_text.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>

#include <fmt/format.h>

#include <common/key_format.hpp>
#include <common/random.hpp>

namespace kvpolicy::tools {
namespace {

constexpr double least_depth = 0.05;
constexpr double most_depth = 0.95;
constexpr std::size_t least_haystack = 128;

/// The sentences of one passkey, and the positions of the key in them.
struct Sentences {
  std::string hidden, question, answer;
  std::size_t key_in_hidden = 0;
  std::size_t key_in_answer = 0;
  std::size_t key_size = 0;
};

std::vector<Sentences> digit_sentences(Random& random, std::size_t count) {
  std::vector<Sentences> all;
  for (const std::string& name : draw_names(random, count)) {
    const std::string key = draw_key(random);
    Sentences one{.hidden = key_fact(name, key),
                  .question = ask_key(name),
                  .answer = key_answer(name, key),
                  .key_in_hidden = 0,
                  .key_in_answer = 0,
                  .key_size = key.size()};
    one.key_in_hidden = one.hidden.size() - key.size() - 2;  // the key is followed by ". "
    one.key_in_answer = one.answer.size() - key.size() - 1;
    all.push_back(std::move(one));
  }
  return all;
}

std::vector<Sentences> word_sentences(Random& random, std::size_t count) {
  constexpr std::array<std::string_view, 20> ordinals{
      "first",     "second",    "third",       "fourth",     "fifth",      "sixth",      "seventh",
      "eighth",    "ninth",     "tenth",       "eleventh",   "twelfth",    "thirteenth", "fourteenth",
      "fifteenth", "sixteenth", "seventeenth", "eighteenth", "nineteenth", "twentieth"};
  constexpr std::array<std::string_view, 26> alphabet{
      "alpha",   "bravo", "charlie", "delta",  "echo",     "foxtrot", "golf",   "hotel",  "india",
      "juliett", "kilo",  "lima",    "mike",   "november", "oscar",   "papa",   "quebec", "romeo",
      "sierra",  "tango", "uniform", "victor", "whiskey",  "xray",    "yankee", "zulu"};
  constexpr std::size_t words = 32;
  require(count <= ordinals.size(), "passkeys of words: ", count,
          " are asked for, there are names "
          "for at most ",
          ordinals.size());
  std::vector<Sentences> all;
  for (std::size_t i = 0; i < count; ++i) {
    std::string key;
    for (std::size_t word = 0; word < words; ++word) {
      if (word > 0) key += ' ';
      key += alphabet[random.below(alphabet.size())];
    }
    Sentences one;
    // The published sentences, unchanged.
    const std::string lead =
        fmt::format("\n\nRemeber this sequence of words, it's the {} passkey to the vault: ", ordinals[i]);
    one.hidden = lead + key + "\n\n";
    one.question = fmt::format(
        "Based on the content of the book, what is the {} passkey to the "
        "vault?\nPasskey: ",
        ordinals[i]);
    one.answer = key + "\n\n";
    one.key_in_hidden = lead.size();
    one.key_size = key.size();
    all.push_back(std::move(one));
  }
  return all;
}

/// Different depths out of `depths` evenly spaced ones, ascending, as shares of the text.
std::vector<double> draw_depths(Random& random, std::size_t depths, std::size_t count) {
  std::vector<std::size_t> indices(depths);
  std::iota(indices.begin(), indices.end(), std::size_t{0});
  random.shuffle(indices);
  indices.resize(count);
  std::ranges::sort(indices);
  std::vector<double> shares;
  for (const std::size_t index : indices) {
    const double step = depths > 1 ? static_cast<double>(index) / static_cast<double>(depths - 1) : 0.5;
    shares.push_back(least_depth + step * (most_depth - least_depth));
  }
  return shares;
}

/// The length of text `number`. Lengths come in rounds, each in a random order of its own.
std::size_t length_of(const PasskeyTextConfig& config, std::size_t number, std::size_t least) {
  require(config.lengths > 0, "passkey texts: 0 lengths, must be at least 1");
  std::vector<std::size_t> order(config.lengths);
  std::iota(order.begin(), order.end(), std::size_t{0});
  Random random{config.seed, 1, number / config.lengths};
  random.shuffle(order);
  const std::size_t index = order[number % config.lengths];
  if (config.lengths == 1) return config.context;
  return least + (config.context - least) * index / (config.lengths - 1);
}

/// A slice of `bytes` bytes that begins at a sentence.
std::string_view draw_slice(std::string_view plain, std::size_t bytes, Random& random) {
  require(bytes <= plain.size(), "passkey texts: ", bytes,
          " bytes of plain text are asked for, there "
          "are ",
          plain.size());
  std::size_t first = random.below(plain.size() - bytes + 1);
  while (first > 0 && !is_sentence_start(plain, first)) --first;
  return plain.substr(first, bytes);
}

/// A text before it is tokens: positions and lengths are in bytes.
struct DrawnText {
  std::string text;
  std::vector<reference::Passkey> passkeys;
  std::size_t first_label = 0;
};

DrawnText draw_passkeys(std::string_view plain, const PasskeyTextConfig& config, std::size_t number) {
  require(config.passkeys > 0 && config.passkeys <= config.depths, "passkey texts: ", config.passkeys,
          " passkeys at ", config.depths, " depths, must be 1 to as many");
  Random random{config.seed, 0, number};
  std::vector<Sentences> sentences = config.kind == PasskeyKind::digits
                                         ? digit_sentences(random, config.passkeys)
                                         : word_sentences(random, config.passkeys);
  std::size_t taken = 0;
  for (const Sentences& one : sentences) {
    taken += one.hidden.size() + one.question.size() + one.answer.size();
  }
  require(config.context >= taken + least_haystack, "passkey texts: ", config.passkeys,
          " passkeys and their questions take ", taken, " bytes, a context of ", config.context,
          " is too short for them and ", least_haystack,
          " of text: use a longer one or fewer "
          "passkeys");
  const std::size_t length = length_of(config, number, taken + least_haystack);
  const std::string_view slice = draw_slice(plain, length - taken, random);
  const std::vector<double> depths = draw_depths(random, config.depths, config.passkeys);

  std::string text;
  std::size_t done = 0;
  DrawnText result;
  for (std::size_t i = 0; i < sentences.size(); ++i) {
    auto position = static_cast<std::size_t>(depths[i] * static_cast<double>(slice.size()));
    if (config.kind == PasskeyKind::digits) {
      while (position < slice.size() && !is_sentence_start(slice, position)) ++position;
    }
    position = std::max(position, done);
    text += slice.substr(done, position - done);
    done = position;
    result.passkeys.push_back(
        {.hidden = text.size() + sentences[i].key_in_hidden, .answer = 0, .tokens = sentences[i].key_size});
    text += sentences[i].hidden;
  }
  text += slice.substr(done);

  // Words are asked for in their order, because their names contain it; digits in random order.
  std::vector<std::size_t> order(sentences.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (config.kind == PasskeyKind::digits) random.shuffle(order);
  result.first_label = text.size();
  for (const std::size_t i : order) {
    text += sentences[i].question;
    result.passkeys[i].answer = text.size() + sentences[i].key_in_answer;
    text += sentences[i].answer;
  }
  result.text = std::move(text);
  return result;
}

DrawnText draw_plain(std::string_view plain, const PasskeyTextConfig& config, std::size_t number) {
  require(config.context >= 2 * least_haystack, "plain texts: a context of ", config.context,
          " bytes is too short, must be at least ", 2 * least_haystack);
  Random random{config.seed, 2, number};
  const std::size_t length = length_of(config, number, config.context / 2);
  return {.text = std::string{draw_slice(plain, length, random)}, .passkeys = {}, .first_label = 0};
}

/// A key is the tokens that lie in it whole. Where they differ from those in the answer, because of
/// the text in front, its last ones count.
reference::LabelledText in_tokens(const TextModel& model, const DrawnText& drawn) {
  reference::LabelledText result;
  result.tokens = model.encode(drawn.text);
  const auto at = [&](std::size_t byte) { return model.tokens_before(result.tokens, drawn.text, byte); };
  for (const reference::Passkey& key : drawn.passkeys) {
    const std::size_t hidden_end = at(key.hidden + key.tokens);
    const std::size_t answer_end = at(key.answer + key.tokens);
    const std::size_t tokens = std::min(hidden_end - at(key.hidden), answer_end - at(key.answer));
    result.passkeys.push_back(
        {.hidden = hidden_end - tokens, .answer = answer_end - tokens, .tokens = tokens});
  }
  const std::size_t first = std::max<std::size_t>(at(drawn.first_label), 1);
  for (std::size_t i = first; i < result.tokens.size(); ++i) result.labels.push_back(i);
  return result;
}

/// Draws shorter texts until one has no more tokens than the context.
template <class Draw>
reference::LabelledText draw_within(const TextModel& model, std::string_view plain, PasskeyTextConfig config,
                                    std::size_t number, Draw draw) {
  const std::size_t most = config.context;
  const double bytes = static_cast<double>(most) * model.bytes_per_token(plain);
  config.context = static_cast<std::size_t>(std::ceil(bytes));
  for (;;) {
    reference::LabelledText text = in_tokens(model, draw(plain, config, number));
    if (text.tokens.size() <= most) return text;
    config.context -= config.context / 64 + 1;
  }
}

}  // namespace

reference::LabelledText passkey_text(const TextModel& model, std::string_view plain,
                                     const PasskeyTextConfig& config, std::size_t number) {
  return draw_within(model, plain, config, number, draw_passkeys);
}

reference::LabelledText plain_text(const TextModel& model, std::string_view plain,
                                   const PasskeyTextConfig& config, std::size_t number) {
  return draw_within(model, plain, config, number, draw_plain);
}

}  // namespace kvpolicy::tools
