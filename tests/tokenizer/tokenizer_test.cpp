// SPDX-License-Identifier: Apache-2.0
//
// What a tokenizer does besides finding the tokens of its peers: special tokens, streams, folders.
#include <algorithm>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/error.hpp>
#include <reference_model/tokenizer/chat_template.hpp>
#include <reference_model/tokenizer/tokenizer.hpp>
#include <reference_model/tokenizer/unicode.hpp>
#include <reference_model/utf8.hpp>

#include "golden_texts.hpp"
#include "support/temporary_folder.hpp"

namespace {

using namespace kvpolicy;
using reference::ByteRange;
using reference::TextStream;
using reference::Tokenizer;
using testing::TemporaryFolder;

TEST_CASE("special tokens can be added, parsed, or left as text" * doctest::skip(!reference::have_icu())) {
  const auto tokenizer = Tokenizer::load(goldens + "llama3");
  const int bos = tokenizer.find("<|begin_of_text|>").value();
  const int end = tokenizer.find("<|eot_id|>").value();
  const std::string text = "a<|eot_id|>b";
  CHECK(tokenizer.is_special(end));
  CHECK_FALSE(tokenizer.is_special(tokenizer.find("a").value()));
  CHECK(tokenizer.encode(text).front() == bos);
  CHECK(tokenizer.encode(text).at(2) == end);
  CHECK(tokenizer.encode(text, {.add_special = false}).size() == 3);
  const std::vector<int> plain = tokenizer.encode(text, {.add_special = false, .parse_special = false});
  CHECK(plain.size() > 3);
  CHECK(tokenizer.decode(plain) == text);
  const std::vector<ByteRange> all{{0, text.size()}};
  CHECK(tokenizer.encode(text, {.add_special = false, .literal = all}) == plain);
  const std::vector<ByteRange> b{{11, 12}};
  CHECK(tokenizer.encode(text, {.literal = b}) == tokenizer.encode(text));
  const std::vector<ByteRange> outside{{11, 13}};
  CHECK_THROWS_AS(static_cast<void>(tokenizer.encode(text, {.literal = outside})), ShapeError);
  CHECK(tokenizer.decode(tokenizer.encode(text)) == "ab");
  CHECK(tokenizer.decode(tokenizer.encode(text), {.skip_special = false}) == "<|begin_of_text|>a<|eot_id|>b");
  CHECK(tokenizer.is_end(end));
  CHECK_FALSE(tokenizer.is_end(bos));
}

TEST_CASE("an empty text has the special tokens alone" * doctest::skip(!reference::have_icu())) {
  for (const char* name : {"gpt2", "llama3", "qwen2", "llama2", "metaspace"}) {
    CAPTURE(name);
    const auto tokenizer = Tokenizer::load(goldens + name);
    CHECK(tokenizer.encode("", {.add_special = false}).empty());
    CHECK(tokenizer.decode({}).empty());
    CHECK(tokenizer.encode("").size() <= 1);
  }
}

TEST_CASE("a stream holds a character back until it is whole") {
  const auto tokenizer = Tokenizer::bytes();
  TextStream stream{tokenizer};
  const auto feed = [&](int byte) { return stream.next(byte); };
  CHECK(feed('a') == "a");
  CHECK(feed(0xE2).empty());
  CHECK(feed(0x82).empty());
  CHECK(feed(0xAC) == "\xE2\x82\xAC");
  CHECK(feed(0xE2).empty());
  CHECK(feed('b') ==
        "\xEF\xBF\xBD"
        "b");
  CHECK(feed(0xFF) == "\xEF\xBF\xBD");
  CHECK(feed(0xF0).empty());
  CHECK(feed(0x9F).empty());
  CHECK(stream.finish() == "\xEF\xBF\xBD");
  CHECK(stream.finish().empty());
  CHECK_THROWS_AS(static_cast<void>(stream.next(-1)), ShapeError);
  CHECK(feed('c') == "c");
}

TEST_CASE("a row of the embedding that has no token says nothing, wherever it comes") {
  const auto tokenizer = Tokenizer::bytes();
  const int first = 256;
  const int last = first + static_cast<int>(Tokenizer::most_padding) - 1;
  CHECK(tokenizer.decode(std::vector<int>{last, 'a', 0xE2, first, 0x82, last, 0xAC, first}) ==
        "a\xE2\x82\xAC");
  CHECK(tokenizer.decode(std::vector<int>{first}).empty());
  TextStream stream{tokenizer};
  CHECK(stream.next(last).empty());
  CHECK_THROWS_AS(static_cast<void>(stream.next(last + 1)), ShapeError);
  CHECK_THROWS_AS(static_cast<void>(tokenizer.token_text(first)), ShapeError);
}

TEST_CASE("literal ranges may come in any order, touch, overlap and be many" *
          doctest::skip(!reference::have_icu())) {
  const auto tokenizer = Tokenizer::load(goldens + "llama3");
  const int end = tokenizer.find("<|eot_id|>").value();
  const auto ends_of = [&](const std::string& text, const std::vector<ByteRange>& literal) {
    const auto tokens = tokenizer.encode(text, {.literal = literal});
    return std::count(tokens.begin(), tokens.end(), end);
  };
  const std::string text = "<|eot_id|><|eot_id|><|eot_id|><|eot_id|>";
  CHECK(ends_of(text, {}) == 4);
  CHECK(ends_of(text, {{30, 40}, {0, 10}}) == 2);
  CHECK(ends_of(text, {{10, 20}, {0, 10}, {5, 12}}) == 2);
  CHECK(ends_of(text, {{0, 40}, {13, 14}}) == 0);
  CHECK(ends_of(text, {{10, 10}, {20, 20}}) == 4);
  // A conversation of many messages: as many ranges, and as many tokens that may be in one of them.
  std::string many;
  std::vector<ByteRange> literal;
  constexpr std::size_t count = 50'000;
  for (std::size_t i = 0; i < count; ++i) {
    many += "<|eot_id|>a";
    literal.push_back({11 * i + 10, 11 * i + 11});
  }
  CHECK(ends_of(many, literal) == count);
}

TEST_CASE("UTF-8 is repaired as Unicode recommends") {
  // Unicode 15, table 3-8 and its neighbours.
  const std::string r = "\xEF\xBF\xBD";
  CHECK(reference::valid_utf8("\x61\xF1\x80\x80\xE1\x80\xC2\x62\x80\x63\x80\xBF\x64") ==
        "a" + r + r + r + "b" + r + "c" + r + r + "d");
  CHECK(reference::valid_utf8("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41") == r + r + r + r + r + r + r + r + "A");
  CHECK(reference::valid_utf8("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41") == r + r + r + r + r + r + r + r + "A");
  CHECK(reference::valid_utf8("\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42") ==
        r + r + r + r + r + "A" + r + r + "B");
  CHECK(reference::valid_utf8("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41") == r + r + r + r + "A");
}

TEST_CASE("a tokenizer must fit its model") {
  const auto tokenizer = Tokenizer::bytes();
  CHECK_NOTHROW(tokenizer.require_fits(256));
  CHECK_NOTHROW(tokenizer.require_fits(256 + Tokenizer::most_padding));
  CHECK_THROWS_WITH_AS(tokenizer.require_fits(255), doctest::Contains("only 255 rows"), FormatError);
  CHECK_THROWS_WITH_AS(tokenizer.require_fits(257 + Tokenizer::most_padding),
                       doctest::Contains("another model's"), FormatError);
}

TEST_CASE("a folder's other files name ends and template" * doctest::skip(!reference::have_icu())) {
  const testing::TemporaryFolder folder;
  std::filesystem::copy_file(goldens + "smollm/tokenizer.json", folder / "tokenizer.json");
  CHECK(Tokenizer::load(folder.path().string()).chat_template().empty());
  folder.write("tokenizer_config.json",
               R"({"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"},
                   "chat_template": [{"name": "tool", "template": "x"}, {"name": "default", "template": "y"}]})");
  folder.write("generation_config.json", R"({"eos_token_id": [2, 5]})");
  folder.write("config.json", R"({"eos_token_id": 7, "bos_token_id": null})");
  const auto tokenizer = Tokenizer::load(folder.path().string());
  CHECK(tokenizer.bos() == tokenizer.find("<|im_start|>"));
  CHECK(std::vector<int>(tokenizer.ends().begin(), tokenizer.ends().end()) == std::vector<int>{0, 2, 5, 7});
  CHECK(tokenizer.chat_template() == "y");
  // Texts can be encoded where the template is none; a conversation is refused, with what is there.
  for (const std::string none : {R"([{"name": "tool", "template": "x"}])", "7", R"({"a": "b"})"}) {
    folder.write("tokenizer_config.json", R"({"chat_template": )" + none + "}");
    CHECK_THROWS_WITH_AS(reference::ChatTemplate{Tokenizer::load(folder.path().string())},
                         doctest::Contains("prints nothing of a user"), FormatError);
  }
  folder.write("tokenizer_config.json", R"({"chat_template": null})");
  CHECK(Tokenizer::load(folder.path().string()).chat_template().empty());
  folder.write("chat_template.jinja", "z");
  CHECK(Tokenizer::load(folder.path().string()).chat_template() == "z");
  folder.write("generation_config.json", R"({"eos_token_id": [700]})");
  CHECK_THROWS_WITH_AS(static_cast<void>(Tokenizer::load(folder.path().string())),
                       doctest::Contains("token 700"), FormatError);
}

TEST_CASE("a folder without a tokenizer is one of bytes, or refused") {
  const testing::TemporaryFolder folder;
  CHECK_THROWS_WITH_AS(static_cast<void>(Tokenizer::load(folder.path().string())),
                       doctest::Contains("neither tokenizer.json nor tokenizer.model"), FormatError);
  folder.write("config.json", R"({"vocab_size": 257})");
  CHECK_FALSE(Tokenizer::is_in(folder.path().string()));
  CHECK_THROWS_AS(static_cast<void>(Tokenizer::load(folder.path().string())), FormatError);
  folder.write("config.json", R"({"vocab_size": 256})");
  CHECK(Tokenizer::is_in(folder.path().string()));
  CHECK(Tokenizer::load(folder.path().string()).vocabulary() == 256);
  folder.write("config.json", R"({"vocab_size": 257})");
  folder.write("tokenizer.json", "{}");
  CHECK(Tokenizer::is_in(folder.path().string()));  // a damaged one is there too
}

TEST_CASE("a space is put in front of the beginning alone" * doctest::skip(!reference::have_icu())) {
  reference::TokenizerParts parts;
  parts.tokens = {"a", "\xE2\x96\x81", "X"};
  parts.pre_tokenizer.metaspace = true;
  for (const bool normalized : {false, true}) {
    CAPTURE(normalized);
    parts.added = {{.id = 2, .normalized = normalized, .outside_model = true}};
    parts.pre_tokenizer.prepend = reference::PrependSpace::first;
    CHECK(Tokenizer{parts}.encode("aXa") == std::vector<int>{1, 0, 2, 0});
    CHECK(Tokenizer{parts}.encode("Xa") == std::vector<int>{2, 0});
    CHECK(Tokenizer{parts}.encode(" a") == std::vector<int>{1, 0});
    parts.pre_tokenizer.prepend = reference::PrependSpace::always;
    CHECK(Tokenizer{parts}.encode("aXa") == std::vector<int>{1, 0, 2, 1, 0});
  }
}

TEST_CASE("of equal scores the leftmost pair goes first") {
  reference::TokenizerParts parts;
  parts.tokens = {"a", "b", "c", "bc", "ab"};
  parts.scores = {-9, -9, -9, -1, -1};
  CHECK(Tokenizer{parts}.encode("abc") == std::vector<int>{4, 2});
  parts.scores = {-9, -9, -9, -1, -2};
  CHECK(Tokenizer{parts}.encode("abc") == std::vector<int>{0, 3});
  parts.scores.back() = -0.5F;
  CHECK(Tokenizer{parts}.encode("abc") == std::vector<int>{4, 2});
}

TEST_CASE("a character that is no token is unknown, its bytes, or dropped") {
  reference::TokenizerParts parts;
  parts.tokens = {"a", "?", "<0xC3>", "<0xA4>"};
  const auto tokens = [&] { return Tokenizer{parts}.encode("axya\xC3\xA4z"); };
  CHECK(tokens() == std::vector<int>{0, 0});
  parts.unknown = 1;
  CHECK(tokens() == std::vector<int>{0, 1, 1, 0, 1, 1});
  parts.fuse_unknown = true;
  CHECK(tokens() == std::vector<int>{0, 1, 0, 1});
  parts.byte_fallback = true;
  CHECK(tokens() == std::vector<int>{0, 1, 0, 2, 3, 1});
}

TEST_CASE("a long piece takes n log n steps" * doctest::skip(!reference::have_icu())) {
  // A quadratic one would take minutes.
  const auto tokenizer = Tokenizer::load(goldens + "llama2");
  const std::string text(1 << 20, 'a');
  CHECK(tokenizer.decode(tokenizer.encode(text)) == text);
}

TEST_CASE("threads share one tokenizer" * doctest::skip(!reference::have_icu())) {
  const auto tokenizer = Tokenizer::load(goldens + "qwen2");
  const std::vector<std::string> texts = golden_texts();
  std::vector<std::vector<int>> alone;
  for (const std::string& text : texts) alone.push_back(tokenizer.encode(text));
  std::vector<int> wrong(4);
  std::vector<std::thread> threads;
  for (int& count : wrong) {
    threads.emplace_back([&] {
      for (std::size_t i = 0; i < texts.size(); ++i) count += tokenizer.encode(texts[i]) != alone[i];
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == std::vector<int>(4));
}

}  // namespace
