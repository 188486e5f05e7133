// SPDX-License-Identifier: Apache-2.0
//
// A tokenizer made from a GGUF file's metadata finds the tokens of the same tokenizer's own file.
#include <cmath>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/text_file.hpp>
#include <reference_model/tokenizer/gguf_parts.hpp>
#include <reference_model/tokenizer/tokenizer.hpp>
#include <reference_model/tokenizer/unicode.hpp>

#include "golden_texts.hpp"

namespace {

using namespace kvpolicy;
using reference::GgufTokenizer;
using reference::Tokenizer;

nlohmann::json read(const std::string& file) {
  return nlohmann::json::parse(io::read_text_file(goldens + file));
}

void compare(const GgufTokenizer& gguf, const std::string& name, bool parse_special) {
  CAPTURE(name);
  const Tokenizer tokenizer{parts_of_gguf(gguf, name)};
  const auto golden = read(name + "/golden.json");
  const std::vector<std::string> texts = golden_texts();
  for (std::size_t i = 0; i < texts.size(); ++i) {
    CAPTURE(texts[i]);
    const auto tokens = golden["tokens"][i].get<std::vector<int>>();
    CHECK(tokenizer.encode(texts[i], {.parse_special = parse_special}) == tokens);
    CHECK(tokenizer.decode(tokens) == golden["decoded"][i].get<std::string>());
  }
}

/// The metadata that a byte-level tokenizer.json becomes.
GgufTokenizer byte_level(const std::string& name, const std::string& pre) {
  const auto json = read(name + "/tokenizer.json");
  GgufTokenizer gguf;
  gguf.model = "gpt2";
  gguf.pre = pre;
  gguf.tokens.resize(json["model"]["vocab"].size());
  gguf.token_types.assign(gguf.tokens.size(), 1);
  for (const auto& item : json["model"]["vocab"].items()) gguf.tokens.at(item.value()) = item.key();
  for (const auto& merge : json["model"]["merges"]) {
    gguf.merges.push_back(merge[0].get<std::string>() + " " + merge[1].get<std::string>());
  }
  for (const auto& token : json["added_tokens"]) gguf.token_types.at(token["id"]) = 3;
  return gguf;
}

GgufTokenizer scored() {
  const auto json = read("sentencepiece_bpe/gguf.json");
  GgufTokenizer gguf;
  gguf.model = "llama";
  gguf.tokens = json["tokens"].get<std::vector<std::string>>();
  gguf.scores = json["scores"].get<std::vector<double>>();
  gguf.token_types = json["types"].get<std::vector<std::int64_t>>();
  gguf.bos = 1;
  gguf.eos = 2;
  gguf.unknown = 0;
  return gguf;
}

TEST_CASE("byte-level BPE of a GGUF file" * doctest::skip(!reference::have_icu())) {
  compare(byte_level("smollm", "smollm"), "smollm", true);
  GgufTokenizer llama3 = byte_level("llama3", "llama-bpe");
  llama3.bos = 0;
  compare(llama3, "llama3", true);
}

TEST_CASE("SentencePiece's BPE of a GGUF file goes by scores") {
  compare(scored(), "sentencepiece_bpe", false);
}

TEST_CASE("a GGUF file that says what it is not") {
  const auto refused = [](const GgufTokenizer& gguf, const char* why) {
    CHECK_THROWS_WITH_AS(Tokenizer{parts_of_gguf(gguf, "file.gguf")}, doctest::Contains(why), FormatError);
  };
  const auto changed = [](auto change) {
    GgufTokenizer gguf = scored();
    change(gguf);
    return gguf;
  };
  refused(changed([](auto& g) { g.model = "bert"; }), "'bert'");
  refused(changed([](auto& g) { g.scores.pop_back(); }), "699 tokenizer.ggml.scores for 700");
  refused(changed([](auto& g) { g.token_types.pop_back(); }), "699 tokenizer.ggml.token_type for 700");
  refused(changed([](auto& g) { g.bos = 700; }), "700");
  refused(changed([](auto& g) { g.tokens[300] = g.tokens[301]; }), "are both");
  refused(changed([](auto& g) { g.tokens[300] = "\xff"; }), "not UTF-8");
  refused(changed([](auto& g) { g.scores[300] = NAN; }), "not a finite number");
  GgufTokenizer gpt2 = byte_level("smollm", "falcon");
  refused(gpt2, "'falcon'");
  gpt2.pre = "gpt-2";
  GgufTokenizer letters = gpt2;
  letters.merges.clear();
  refused(letters, "has no tokenizer.ggml.merges, by which letters become the token '");
  if (!reference::have_icu()) return;
  gpt2.merges[3] = "no-space";
  refused(gpt2, "merge 3 is 'no-space'");
}

}  // namespace
