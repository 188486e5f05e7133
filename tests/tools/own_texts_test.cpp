// SPDX-License-Identifier: Apache-2.0
//
// Files are written here by hand, as text. What is read from them is compared with what was meant, and
// every kind of damage must be named.
#include <identify/own_texts.hpp>

#include <cstddef>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/json_text.hpp>
#include <kvpolicy/io/text_file.hpp>

#include "byte_model.hpp"
#include "common/retrieval_text.hpp"
#include "identify/duo_checkpoint.hpp"
#include "identify/duo_settings.hpp"
#include "identify/needles.hpp"
#include "identify/passkey_text.hpp"
#include "support/temporary_folder.hpp"

using namespace kvpolicy;
using namespace kvpolicy::tools;

namespace {

constexpr std::size_t vocabulary = 64;

const std::string labelled = R"({"format": "kvpolicy labelled texts", "version": 1, "texts": [
  {"tokens": [5, 9, 2, 7, 9, 2], "labelled": [[3, 4], [5, 6]],
   "passkeys": [{"hidden": [1, 3], "answer": [4, 6]}, {"hidden": [0, 1], "answer": [1, 2]}]},
  {"tokens": [63, 0], "labelled": [[0, 2]]}]})";

const std::string needles = R"({"format": "kvpolicy needle samples", "version": 1, "samples": [
  {"prompt": [5, 9, 2, 7], "answer": [9, 2], "needle": [1, 2]},
  {"prompt": [63], "answer": [0], "needle": [0, 1]},
  {"prompt": [1, 2, 3], "answer": [3, 3], "needle": [2, 1]}]})";

/// `text` with `place` replaced by `other`; `place` must occur exactly once.
std::string with(const std::string& text, const std::string& place, const std::string& other) {
  const std::size_t at = text.find(place);
  REQUIRE(at != std::string::npos);
  REQUIRE(text.find(place, at + 1) == std::string::npos);
  return text.substr(0, at) + other + text.substr(at + place.size());
}

void refuse_labelled(const std::string& place, const std::string& other, const char* why) {
  CAPTURE(other);
  CHECK_THROWS_WITH_AS(
      static_cast<void>(parse_labelled_texts(with(labelled, place, other), "own.json", vocabulary)),
      doctest::Contains(why), FormatError);
}

void refuse_needles(const std::string& place, const std::string& other, const char* why) {
  CAPTURE(other);
  CHECK_THROWS_WITH_AS(
      static_cast<void>(parse_needle_samples(with(needles, place, other), "own.json", vocabulary)),
      doctest::Contains(why), FormatError);
}

}  // namespace

TEST_CASE("labelled texts are read as they are meant, with ranges at both ends of a text") {
  const LabelledTexts own = parse_labelled_texts(labelled, "own.json", vocabulary);
  REQUIRE(own.texts.size() == 2);
  for (const auto& text : own.texts) CHECK_NOTHROW(text.check());
  CHECK(own.texts[0].tokens == std::vector<int>{5, 9, 2, 7, 9, 2});
  CHECK(own.texts[0].labels == std::vector<std::size_t>{3, 5});
  REQUIRE(own.texts[0].passkeys.size() == 2);
  CHECK(own.texts[0].passkeys[0].hidden == 1);
  CHECK(own.texts[0].passkeys[0].answer == 4);
  CHECK(own.texts[0].passkeys[0].tokens == 2);
  CHECK(own.texts[0].passkeys[1].hidden == 0);
  CHECK(own.texts[0].passkeys[1].answer == 1);
  CHECK(own.texts[0].passkeys[1].tokens == 1);
  CHECK(own.texts[1].tokens == std::vector<int>{63, 0});
  CHECK(own.texts[1].labels == std::vector<std::size_t>{0, 1});
  CHECK(own.texts[1].passkeys.empty());

  // Adjacent ranges, and a text that is labelled everywhere.
  const LabelledTexts touching =
      parse_labelled_texts(with(labelled, "[[3, 4], [5, 6]]", "[[0, 2], [2, 6]]"), "own.json", vocabulary);
  CHECK(touching.texts[0].labels == std::vector<std::size_t>{0, 1, 2, 3, 4, 5});
}

TEST_CASE("needle samples are read as they are meant, with needles at both ends") {
  const NeedleSamples own = parse_needle_samples(needles, "own.json", vocabulary);
  REQUIRE(own.samples.size() == 3);
  for (const auto& sample : own.samples) CHECK_NOTHROW(sample.check());
  CHECK(own.samples[0].prompt == std::vector<int>{5, 9, 2, 7});
  CHECK(own.samples[0].answer == std::vector<int>{9, 2});
  CHECK(own.samples[0].needle == 1);
  CHECK(own.samples[0].needle_tokens == 2);
  CHECK(own.samples[1].prompt == std::vector<int>{63});
  CHECK(own.samples[1].needle == 0);
  CHECK(own.samples[1].needle_tokens == 1);
  CHECK(own.samples[2].needle == 2);
  CHECK(own.samples[2].needle_tokens == 1);
}

TEST_CASE("texts that we draw are read back from a file unchanged") {
  const std::string plain = identification_text();
  const TextModel model = random_text_model();
  io::Json texts = io::Json::array();
  io::Json samples = io::Json::array();
  std::vector<reference::LabelledText> drawn;
  std::vector<reference::NeedleSample> needles_drawn;
  for (std::size_t number = 0; number < 4; ++number) {
    const auto text = passkey_text(model, plain, {.context = 1024 + 100 * number, .passkeys = 3}, number);
    io::Json keys = io::Json::array();
    for (const reference::Passkey& key : text.passkeys) {
      keys.push_back({{"hidden", {key.hidden, key.hidden + key.tokens}},
                      {"answer", {key.answer, key.answer + key.tokens}}});
    }
    // All tokens after the body are labelled.
    const std::size_t first = text.labels.front();
    texts.push_back({{"tokens", text.tokens},
                     {"labelled", io::Json::array({{first, text.tokens.size()}})},
                     {"passkeys", keys}});
    drawn.push_back(text);
    const auto sample = draw_needle(model, plain, {.length = 700, .depth = 0.5, .number = number});
    samples.push_back({{"prompt", sample.prompt},
                       {"answer", sample.answer},
                       {"needle", {sample.needle, sample.needle_tokens}}});
    needles_drawn.push_back(sample);
  }
  const io::Json labelled_file = {{"format", "kvpolicy labelled texts"}, {"version", 1}, {"texts", texts}};
  const LabelledTexts own = parse_labelled_texts(labelled_file.dump(), "own.json", 256);
  REQUIRE(own.texts.size() == drawn.size());
  for (std::size_t i = 0; i < drawn.size(); ++i) {
    CHECK(own.texts[i].tokens == drawn[i].tokens);
    CHECK(own.texts[i].labels == drawn[i].labels);
    REQUIRE(own.texts[i].passkeys.size() == drawn[i].passkeys.size());
    for (std::size_t key = 0; key < drawn[i].passkeys.size(); ++key) {
      CHECK(own.texts[i].passkeys[key].hidden == drawn[i].passkeys[key].hidden);
      CHECK(own.texts[i].passkeys[key].answer == drawn[i].passkeys[key].answer);
      CHECK(own.texts[i].passkeys[key].tokens == drawn[i].passkeys[key].tokens);
    }
  }
  const io::Json needle_file = {{"format", "kvpolicy needle samples"}, {"version", 1}, {"samples", samples}};
  const NeedleSamples read = parse_needle_samples(needle_file.dump(), "own.json", 256);
  REQUIRE(read.samples.size() == needles_drawn.size());
  for (std::size_t i = 0; i < needles_drawn.size(); ++i) {
    CHECK(read.samples[i].prompt == needles_drawn[i].prompt);
    CHECK(read.samples[i].answer == needles_drawn[i].answer);
    CHECK(read.samples[i].needle == needles_drawn[i].needle);
    CHECK(read.samples[i].needle_tokens == needles_drawn[i].needle_tokens);
  }
}

TEST_CASE("damaged labelled texts are refused, with position and reason") {
  refuse_labelled("labelled texts", "labeled texts", "own.json, format: is 'kvpolicy labeled");
  refuse_labelled("\"version\": 1", "\"version\": 2", "own.json, version: is 2");
  refuse_labelled("\"texts\": [", "\"texts\": [], \"more\": [",
                  "own.json, texts: must be an array "
                  "of at least one text, is an array of 0");
  refuse_labelled("\"version\": 1", "\"version\": 1, \"seed\": 1", "unknown key 'seed'");
  refuse_labelled("{\"tokens\": [63, 0]", "{\"label\": 1, \"tokens\": [63, 0]",
                  "own.json, texts[1]: unknown key 'label'");
  refuse_labelled("\"labelled\": [[0, 2]]", "\"passkeys\": []", "texts[1]: the key 'labelled' is");
  refuse_labelled("{\"tokens\": [63, 0], ", "{", "texts[1]: the key 'tokens' is missing");
  refuse_labelled("[63, 0]", "[]", "texts[1], tokens: must be an array of at least one token");
  refuse_labelled("[63, 0]", "\"63\"", "texts[1], tokens: must be an array");

  const char* no_token = "texts[1], tokens[1]: is ";
  for (const char* id :
       {"64", "-1", "0.5", "1e300", "4294967296", "18446744073709551615", "\"0\"", "null", "[0]", "true"}) {
    refuse_labelled("[63, 0]", std::string{"[63, "} + id + "]", no_token);
  }
  refuse_labelled("[63, 0]", "[64, 0]",
                  "texts[1], tokens[0]: is 64, must be a token of the model, "
                  "0 to 63");

  const char* bad_range = "texts[1], labelled[0]: is [";
  for (const char* range : {"[0, 3]", "[1, 1]", "[2, 2]", "[2, 1]", "[2, 3]", "[1, 18446744073709551615]",
                            "[18446744073709551615, 2]"}) {
    refuse_labelled("[[0, 2]]", "[" + std::string{range} + "]", bad_range);
  }
  refuse_labelled("[[0, 2]]", "[[0, 3]]", "end at most 2, the number of tokens");
  refuse_labelled("[[0, 2]]", "[0, 2]", "labelled[0]: must be [first, end], is 0");
  refuse_labelled("[[0, 2]]", "[[0, 1, 2]]", "must be [first, end], is an array of 3");
  refuse_labelled("[[0, 2]]", "[[-1, 2]]", "labelled[0][0]: must be a whole number, is -1");
  refuse_labelled("[[0, 2]]", "[]", "labelled: must be an array of at least one range");
  refuse_labelled("[[0, 2]]", "[[0, 1]]", "labelled: is the first token alone");
  refuse_labelled("[[3, 4], [5, 6]]", "[[3, 5], [4, 6]]",
                  "texts[0], labelled[1]: begins at 4, the range before it ends at 5");
  refuse_labelled("[[3, 4], [5, 6]]", "[[5, 6], [3, 4]]", "ranges must be in order and apart");

  refuse_labelled("\"hidden\": [1, 3]", "\"hidden\": [1, 2]",
                  "passkeys[0]: 1 tokens are hidden and 2 answer");
  refuse_labelled("\"hidden\": [1, 3]", "\"hidden\": [3, 5]",
                  "passkeys[0]: is hidden up to 5 and answered from 4 on");
  refuse_labelled("\"answer\": [4, 6]", "\"answer\": [5, 7]", "passkeys[0], answer: is [5, 7]");
  refuse_labelled("\"answer\": [4, 6]", "\"ans\": [4, 6]", "passkeys[0]: the key 'answer' is");
  refuse_labelled("\"hidden\": [1, 3]", "\"hidden\": [1, 3], \"x\": 1", "passkeys[0]: unknown key");
  refuse_labelled("{\"hidden\": [0, 1], \"answer\": [1, 2]}", "[0, 1]", "passkeys[1]: must be an object");
}

TEST_CASE("damaged needle samples are refused, with position and reason") {
  refuse_needles("needle samples", "labelled texts", "own.json, format: is 'kvpolicy labelled");
  refuse_needles("\"version\": 1", "\"version\": 0", "own.json, version: is 0");
  refuse_needles("\"samples\": [", "\"samples\": {}, \"more\": [", "own.json, samples: must be");
  refuse_needles("\"version\": 1", "\"version\": 1, \"seed\": 1", "unknown key 'seed'");
  refuse_needles("\"needle\": [0, 1]", "\"needle\": [0, 1], \"n\": 1", "samples[1]: unknown key");
  refuse_needles(", \"needle\": [0, 1]", "", "samples[1]: the key 'needle' is missing");
  refuse_needles("\"answer\": [0]", "\"answer\": []", "samples[1], answer: must be an array of at");
  refuse_needles("\"answer\": [0]", "\"answer\": [64]", "samples[1], answer[0]: is 64");
  refuse_needles("\"prompt\": [63]", "\"prompt\": []", "samples[1], prompt: must be an array of");
  refuse_needles("\"prompt\": [63]", "\"prompt\": [64]",
                 "samples[1], prompt[0]: is 64, must be a "
                 "token of the model, 0 to 63");
  for (const char* range : {"[0, 0]", "[1, 0]", "[0, 2]", "[1, 1]", "[2, 18446744073709551615]",
                            "[18446744073709551615, 1]", "[18446744073709551615, 2]"}) {
    refuse_needles("[0, 1]", range, "samples[1], needle: is [");
  }
  refuse_needles("[0, 1]", "[0, 2]", "of the prompt, which has 1");
  refuse_needles("[0, 1]", "0", "needle: must be [first, count], is 0");
  refuse_needles("[0, 1]", "[0, 1.5]", "needle[1]: must be a whole number, is 1.5");
}

TEST_CASE("half a file, or an empty one, is refused") {
  for (const std::string& whole : {labelled, needles}) {
    const auto parse = [&](const std::string& text) {
      if (whole == labelled) {
        static_cast<void>(parse_labelled_texts(text, "own.json", vocabulary));
      } else {
        static_cast<void>(parse_needle_samples(text, "own.json", vocabulary));
      }
    };
    CHECK_NOTHROW(parse(whole));
    for (std::size_t size = 0; size < whole.size(); ++size) {
      CAPTURE(size);
      CHECK_THROWS_AS(parse(whole.substr(0, size)), FormatError);
    }
    CHECK_THROWS_AS(parse("[]"), FormatError);
    CHECK_THROWS_AS(parse("{}"), FormatError);
  }
  const testing::TemporaryFolder folder;
  const std::string path = (folder.path() / "own.json").string();
  CHECK_THROWS_WITH_AS(static_cast<void>(load_labelled_texts(path, vocabulary)),
                       doctest::Contains("own.json: there is no such file"), FormatError);
  io::write_text_file(path, needles);
  CHECK(load_needle_samples(path, vocabulary).samples.size() == 3);
  CHECK_THROWS_AS(static_cast<void>(load_labelled_texts(path, vocabulary)), FormatError);
}

TEST_CASE("a file's digest distinguishes it from others, however small the difference") {
  const LabelledTexts own = parse_labelled_texts(labelled, "own.json", vocabulary);
  CHECK(own.digest.size() == 16);
  CHECK(parse_labelled_texts(labelled, "other.json", vocabulary).digest == own.digest);
  CHECK(parse_labelled_texts(with(labelled, "63", "62"), "own.json", vocabulary).digest != own.digest);
  const std::string digest = parse_needle_samples(needles, "own.json", vocabulary).digest;
  CHECK(digest.size() == 16);
  CHECK(parse_needle_samples(needles + " ", "own.json", vocabulary).digest != digest);
}

TEST_CASE("if passkeys are needed, the first text without one is named") {
  LabelledTexts own = parse_labelled_texts(labelled, "own.json", vocabulary);
  CHECK_THROWS_WITH_AS(require_passkeys(own, "own.json"),
                       doctest::Contains("own.json, texts[1]: has no passkeys"), FormatError);
  own.texts.pop_back();
  CHECK_NOTHROW(require_passkeys(own, "own.json"));
}

TEST_CASE("training continues with the file it was begun with, not with another of the same name") {
  DuoSettings a;
  a.model = "some/model";
  a.labelled = "here/own.json";
  a.labelled_digest = "0123456789abcdef";
  settle(a);
  const io::Json begun = json_of(a);
  CHECK(begun.at("texts") == "own");
  CHECK(begun.at("labelled") == "own.json");
  for (const char* name : {"context", "lengths", "seed", "passkeys"}) {
    CAPTURE(name);
    CHECK_FALSE(begun.contains(name));  // they mean nothing for such texts
  }
  const testing::TemporaryFolder folder;
  const std::string path = (folder.path() / "checkpoint.json").string();
  DuoCheckpoint checkpoint;
  checkpoint.state.gates = HeadGates{1, 1, 1.0};
  checkpoint.state.mean = HeadGates{1, 1, 0.0};
  checkpoint.state.square = HeadGates{1, 1, 0.0};
  checkpoint.settings = begun;
  save_checkpoint(path, checkpoint);
  a.labelled = "moved/own.json";
  CHECK_NOTHROW(static_cast<void>(load_checkpoint(path, json_of(a))));
  a.labelled_digest = "0123456789abcdee";
  CHECK_THROWS_WITH_AS(static_cast<void>(load_checkpoint(path, json_of(a))),
                       doctest::Contains("was made with labelled_digest"), FormatError);
  DuoSettings drawn;
  drawn.model = a.model;
  settle(drawn);
  CHECK_THROWS_WITH_AS(static_cast<void>(load_checkpoint(path, json_of(drawn))),
                       doctest::Contains("was made with"), FormatError);
}
