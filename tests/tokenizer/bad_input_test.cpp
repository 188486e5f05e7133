// SPDX-License-Identifier: Apache-2.0
//
// Damaged and hostile tokenizer.json files are refused by name.
#include <string>
#include <utility>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/text_file.hpp>
#include <reference_model/tokenizer/sentencepiece_model.hpp>
#include <reference_model/tokenizer/tokenizer.hpp>
#include <reference_model/tokenizer/tokenizer_json.hpp>
#include <reference_model/tokenizer/unicode.hpp>

#include "golden_texts.hpp"
#include "support/temporary_folder.hpp"

namespace {

using namespace kvpolicy;
using nlohmann::json;
using reference::Tokenizer;

json good() {
  return json::parse(R"({
    "version": "1.0", "truncation": null, "padding": null,
    "added_tokens": [{"id": 4, "content": "<end>", "single_word": false, "lstrip": false, "rstrip": false,
                      "normalized": false, "special": true}],
    "normalizer": null, "pre_tokenizer": null, "post_processor": null,
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "abab": 3}, "merges": ["a b", ["ab", "ab"]]}})");
}

Tokenizer make(const json& file) {
  return Tokenizer{reference::parse_tokenizer_json(file.dump(), "tokenizer.json")};
}

/// Changes the good file at a JSON pointer.
void refused(const char* where, const json& value, const char* why) {
  CAPTURE(where);
  CAPTURE(value.dump());
  json file = good();
  file[json::json_pointer{where}] = value;
  CHECK_THROWS_WITH_AS(make(file), doctest::Contains(why), FormatError);
}

TEST_CASE("the file that the others are made of") {
  CHECK(make(good()).encode("ababab<end>a") == std::vector<int>{3, 2, 4, 0});
}

TEST_CASE("a vocabulary with holes, doubles, empty or missing tokens") {
  refused("/model/vocab/ab", 1, "are both token 1");
  refused("/model/vocab/abab", 4, "are both token 4");
  refused("/added_tokens/0/id", 16000000, "only 5 tokens");
  refused("/model/vocab/abab", 2, "are both token 2");
  refused("/model/vocab/abab", -1, "whole number");
  refused("/model/vocab/abab", 1.5, "whole number");
  refused("/model/vocab/abab", "3", "whole number");
  refused("/added_tokens/0/id", 2, "'ab' and '<end>' are both token 2");
  refused("/added_tokens/0/content", "", "is empty");
  refused("/added_tokens/0/content", "ab", "are both 'ab'");
  refused("/model/vocab", json::array(), "must be an object");
  refused("/model/vocab", json::object(), "has only 1 tokens");
  json hole = good();
  hole["model"]["vocab"].erase("b");
  hole["model"]["merges"] = json::array();
  hole["added_tokens"].push_back({{"id", 3}, {"content", "abab"}});
  CHECK_THROWS_WITH_AS(make(hole), doctest::Contains("no token has the number 1"), FormatError);
  json empty = good();
  empty["model"]["vocab"][""] = 4;
  CHECK_THROWS_WITH_AS(make(empty), doctest::Contains("token 4 is empty"), FormatError);
  refused("/model/unk_token", "c", "no token");
}

TEST_CASE("merges of unknown tokens, of themselves, twice") {
  refused("/model/merges/0", "a c", "'c' is no token");
  refused("/model/merges/0", "b a", "'ba' is no token");
  refused("/model/merges/1", "a b", "given twice");
  refused("/model/merges/0", "ab", "two tokens with a space");
  refused("/model/merges/0", "a b ", "two tokens with a space");
  refused("/model/merges/0", "a ", "empty half");
  refused("/model/merges/0", json::array({"a", "b", "c"}), "two texts or one");
  refused("/model/merges/0", 7, "two texts or one");
  refused("/model/merges", "a b", "must be an array");
}

TEST_CASE("kinds that are not implemented are refused by name") {
  refused("/normalizer", {{"type", "Lowercase"}}, "'Lowercase'");
  refused("/pre_tokenizer", {{"type", "BertPreTokenizer"}}, "'BertPreTokenizer'");
  refused("/post_processor", {{"type", "RobertaProcessing"}}, "'RobertaProcessing'");
  refused("/decoder", {{"type", "WordPiece"}}, "'WordPiece'");
  refused("/decoder", nullptr, "must be an object");
  refused("/model/type", "Unigram", "tokenizer.model");
  refused("/model/dropout", 0.1, "dropout");
  refused("/model/end_of_word_suffix", "</w>", "end_of_word_suffix");
  refused("/model/continuing_subword_prefix", "##", "continuing_subword_prefix");
  refused("/truncation", {{"max_length", 5}}, "truncation");
  refused("/padding", {{"length", 5}}, "padding");
  refused("/surprise", 1, "unknown key 'surprise'");
  refused("/model/surprise", 1, "unknown key 'surprise'");
  refused("/added_tokens/0/surprise", 1, "unknown key 'surprise'");
  const json byte_level{{"type", "ByteLevel"}};
  const json digits{{"type", "Digits"}};
  refused("/pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {byte_level, digits}}},
          "must be the last");
  refused("/pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {digits, byte_level}}},
          "must be the first");
  refused("/pre_tokenizer", {{"type", "Metaspace"}, {"replacement", "_"}}, "must be U+2581");
  refused("/pre_tokenizer",
          {{"type", "Split"}, {"pattern", {{"String", "a"}}}, {"behavior", "Sideways"}, {"invert", false}},
          "'Sideways'");
  refused("/pre_tokenizer",
          {{"type", "Split"}, {"pattern", {{"String", ""}}}, {"behavior", "Isolated"}, {"invert", false}},
          "pattern is empty");
  refused("/decoder", {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}, "after Fuse");
  refused("/post_processor",
          {{"type", "TemplateProcessing"}, {"single", json::array()}, {"special_tokens", json::object()}},
          "no Sequence");
  refused("/post_processor",
          {{"type", "TemplateProcessing"},
           {"single", {{{"SpecialToken", {{"id", "x"}, {"type_id", 0}}}}, {{"Sequence", {{"id", "A"}}}}}},
           {"special_tokens", {{"x", {{"id", "x"}, {"ids", {99}}, {"tokens", {"x"}}}}}}},
          "token 99");
}

TEST_CASE("patterns that ICU refuses, and those that never end" * doctest::skip(!reference::have_icu())) {
  const auto split = [](const char* expression) {
    return json{{"type", "Split"}, {"pattern", {{"Regex", expression}}}, {"behavior", "Isolated"}};
  };
  refused("/pre_tokenizer", split("(a"), "refused by ICU");
  json slow = good();
  slow["pre_tokenizer"] = split("(a+)+$");
  const Tokenizer tokenizer = make(slow);
  CHECK_THROWS_WITH_AS(static_cast<void>(tokenizer.encode(std::string(60, 'a') + "b")),
                       doctest::Contains("takes too long"), ConfigError);
  CHECK(tokenizer.encode("ab") == std::vector<int>{2});
}

TEST_CASE("tokenizer.model that is none") {
  const testing::TemporaryFolder folder;
  const auto good_model = io::read_text_file(goldens + "sentencepiece_bpe/tokenizer.model");
  for (const std::string& model : {std::string{"nonsense"}, good_model.substr(0, good_model.size() / 2)}) {
    folder.write("tokenizer.model", model);
    if (reference::have_sentencepiece()) {
      CHECK_THROWS_WITH_AS(static_cast<void>(Tokenizer::load(folder.path().string())),
                           doctest::Contains("no SentencePiece model"), FormatError);
    } else {
      CHECK_THROWS_WITH_AS(static_cast<void>(Tokenizer::load(folder.path().string())),
                           doctest::Contains("libsentencepiece-dev"), ConfigError);
    }
  }
}

TEST_CASE("text that is no JSON of this kind") {
  const auto refused_text = [](const std::string& text, const char* why) {
    CHECK_THROWS_WITH_AS(static_cast<void>(reference::parse_tokenizer_json(text, "tokenizer.json")),
                         doctest::Contains(why), FormatError);
  };
  refused_text("", "is empty");
  refused_text("[]", "must be an object");
  refused_text("{", "line 1");
  refused_text(std::string(100, '['), "nested deeper");
  refused_text(R"({"model": {"vocab": {"a": 0, "a": 1}}})", "given twice");
  refused_text("{}", "'model' is missing");
}

}  // namespace
