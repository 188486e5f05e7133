// SPDX-License-Identifier: Apache-2.0
//
// Small tokenizers of each supported shape find the tokens that PyPI's `tokenizers` and
// `sentencepiece` found in the same texts (make_goldens.py).
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <kvpolicy/io/text_file.hpp>
#include <reference_model/tokenizer/sentencepiece_model.hpp>
#include <reference_model/tokenizer/tokenizer.hpp>
#include <reference_model/tokenizer/unicode.hpp>
#include <reference_model/utf8.hpp>

#include "golden_texts.hpp"

namespace {

using namespace kvpolicy;
using reference::Tokenizer;

void compare(const std::string& name) {
  CAPTURE(name);
  const std::string folder = goldens + name;
  const auto tokenizer = Tokenizer::load(folder);
  const auto golden = nlohmann::json::parse(io::read_text_file(folder + "/golden.json"));
  const std::vector<std::string> texts = golden_texts();
  REQUIRE(texts.size() > 100);
  REQUIRE(golden.at("tokens").size() == texts.size());
  REQUIRE(golden.at("decoded").size() == texts.size());
  // SentencePiece itself parses no special tokens.
  const bool parse_special = !name.starts_with("sentencepiece");
  for (std::size_t i = 0; i < texts.size(); ++i) {
    CAPTURE(texts[i]);
    if (golden["tokens"][i].is_null()) continue;  // a tie
    const auto tokens = golden["tokens"][i].get<std::vector<int>>();
    const auto decoded = golden["decoded"][i].get<std::string>();
    CHECK(tokenizer.encode(texts[i], {.parse_special = parse_special}) == tokens);
    CHECK(tokenizer.decode(tokens) == decoded);
    reference::TextStream stream{tokenizer};
    std::string streamed;
    for (const int token : tokens) {
      const std::string part = stream.next(token);
      CHECK(reference::valid_utf8(part) == part);
      streamed += part;
    }
    CHECK(streamed == decoded);
    CHECK(stream.finish().empty());
  }
}

TEST_CASE("the byte-level shapes find the tokens of PyPI tokenizers" *
          doctest::skip(!reference::have_icu())) {
  for (const char* name : {"gpt2", "smollm", "llama3", "qwen2"}) compare(name);
}

TEST_CASE("byte fallback, as in Llama 2 and Mistral, finds the tokens of PyPI tokenizers" *
          doctest::skip(!reference::have_icu())) {
  for (const char* name : {"llama2", "metaspace"}) compare(name);
}

TEST_CASE("tokenizer.model finds the tokens of PyPI sentencepiece" *
          doctest::skip(!reference::have_sentencepiece())) {
  for (const char* name : {"sentencepiece_bpe", "sentencepiece_unigram"}) compare(name);
}

TEST_CASE("bytes come back as they were") {
  const auto tokenizer = Tokenizer::bytes();
  CHECK(tokenizer.vocabulary() == 256);
  for (const std::string& text : golden_texts()) {
    std::vector<int> expected;
    for (const char byte : text) expected.push_back(static_cast<unsigned char>(byte));
    CHECK(tokenizer.encode(text) == expected);
    CHECK(tokenizer.decode(expected) == reference::valid_utf8(text));
  }
}

}  // namespace
