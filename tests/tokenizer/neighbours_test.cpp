// SPDX-License-Identifier: Apache-2.0
//
// What the files beside tokenizer.json say of tokens: the goldens are transformers' (make_neighbour_goldens.py).
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/text_file.hpp>
#include <reference_model/tokenizer/tokenizer.hpp>
#include <reference_model/tokenizer/unicode.hpp>

#include "golden_texts.hpp"
#include "io/says.hpp"
#include "support/temporary_folder.hpp"

namespace {

using namespace kvpolicy;
using namespace kvpolicy::testing;
using nlohmann::json;
using reference::Tokenizer;

// A tokenizer of the goldens, and files beside it.
Tokenizer load(const std::string& base, const json& files) {
  const TemporaryFolder folder;
  folder.write("tokenizer.json", io::read_text_file(goldens + base + "/tokenizer.json"));
  for (const auto& [name, contents] : files.items()) folder.write(name, contents.dump());
  return Tokenizer::load(folder.path());
}

std::string refusal(const json& config, const std::string& base = "metaspace",
                    const std::string& file = "tokenizer_config.json") {
  try {
    static_cast<void>(load(base, {{file, config}}));
  } catch (const FormatError& error) {
    return error.what();
  }
  return "";
}

TEST_CASE("tokens that only the neighbours of tokenizer.json name are found as transformers finds them") {
  const auto golden = json::parse(io::read_text_file(goldens + "neighbours.json"));
  std::size_t count = 0;
  for (const json& one : golden["cases"]) {
    const auto base = one["base"].get<std::string>();
    if (!reference::have_icu() && base != "metaspace" && base != "llama2") continue;
    CAPTURE(base);
    CAPTURE(one["name"].get<std::string>());
    const Tokenizer tokenizer = load(base, one["files"]);
    for (std::size_t i = 0; i < golden["texts"].size(); ++i) {
      const auto text = golden["texts"][i].get<std::string>();
      CAPTURE(text);
      CHECK(tokenizer.encode(text) == one["tokens"][i].get<std::vector<int>>());
      ++count;
    }
  }
  CHECK(count >= 200);
}

TEST_CASE(
    "a token that is named beside the tokenizer is special, ends a text, and may have no row in a model" *
    doctest::skip(!reference::have_icu())) {
  const Tokenizer tokenizer = load("smollm", {{"tokenizer_config.json", {{"eos_token", "<extra>"}}}});
  const int end = tokenizer.find("<extra>").value();
  CHECK(end == 700);
  CHECK(tokenizer.is_end(end));
  CHECK(tokenizer.is_special(end));
  CHECK(tokenizer.decode(tokenizer.encode("a<extra>b")) == "ab");
  CHECK(tokenizer.named_tokens().at("eos_token") == "<extra>");
  tokenizer.require_fits(700);
  tokenizer.require_fits(704);
  CHECK_THROWS_AS(tokenizer.require_fits(699), FormatError);
}

TEST_CASE("what cannot be read of the neighbours is refused by name") {
  CHECK(refusal({{"eos_token", {{"text", "<extra>"}}}}) == Says{"tokenizer_config.json, eos_token"});
  CHECK(refusal({{"eos_token", {{"content", "<extra>"}, {"colour", 3}}}}) == Says{"unknown key 'colour'"});
  CHECK(refusal({{"added_tokens_decoder", {{"x", {{"content", "a"}}}}}}) == Says{"added_tokens_decoder"});
  CHECK(refusal({{"added_tokens_decoder", 3}}) == Says{"added_tokens_decoder: must be an object"});
  CHECK(refusal({{"additional_special_tokens", "x"}}) == Says{"must be a list"});
  CHECK(refusal({{"additional_special_tokens", {3}}}) == Says{"must be a token's text"});
  CHECK(refusal({{"additional_special_tokens", {"x"}}}, "metaspace", "special_tokens_map.json").empty());
  // Flags, numbers and empty texts are none.
  CHECK(
      refusal({{"add_bos_token", true}, {"num_image_token", 256}, {"pad_token", nullptr}, {"bos_token", ""}})
          .empty());
}

TEST_CASE(
    "a class that puts a space in front of texts where the file puts none is refused, and the other way "
    "round" *
    doctest::skip(!reference::have_icu())) {
  for (const char* base : {"metaspace", "llama2", "gpt2"}) {
    CHECK(refusal({{"tokenizer_class", "LlamaTokenizerFast"}, {"add_prefix_space", true}}, base).empty());
    CHECK(refusal({{"tokenizer_class", "LlamaTokenizer"}, {"add_prefix_space", false}}, base) ==
          Says{"add_prefix_space is false for 'LlamaTokenizer'"});
    CHECK(
        refusal({{"tokenizer_class", "PreTrainedTokenizerFast"}, {"add_prefix_space", false}}, base).empty());
    CHECK(refusal({{"tokenizer_class", "LlamaTokenizer"}, {"add_prefix_space", nullptr}}, base).empty());
  }
  CHECK(refusal({{"tokenizer_class", "GPT2Tokenizer"}, {"add_prefix_space", true}}, "smollm") ==
        Says{"add_prefix_space is true"});
}

}  // namespace
