// SPDX-License-Identifier: Apache-2.0
//
// The format: values of every type, blocks as PyPI's gguf decodes them, and headers that lie.
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/error.hpp>
#include <reference_model/gguf.hpp>
#include <reference_model/safetensors.hpp>

#include "model/gguf_bytes.hpp"
#include "support/source_dir.hpp"
#include "support/temporary_folder.hpp"

namespace kvpolicy::reference::gguf_test {
namespace {

const std::string goldens = testing::source_dir() + "/tests/model/goldens_gguf/";

TEST_CASE("blocks decode to the floats that PyPI's gguf gives, bit for bit") {
  SafetensorsFile file(goldens + "blocks.safetensors");
  for (const std::uint32_t number : {0U, 1U, 2U, 3U, 8U, 12U, 14U, 30U}) {
    const GgufBlock* block = find_gguf_block(number);
    REQUIRE(block != nullptr);
    CAPTURE(block->name);
    CHECK(gguf_type_name(number) == block->name);
    const std::string name{block->name};
    const std::vector<std::byte> bytes = file.read_bytes(name + ".bytes");
    const std::vector<float> expected = file.read_floats(name + ".floats");
    REQUIRE(expected.size() == 6 * 512);
    std::vector<float> decoded(expected.size());
    decode_gguf(block->type, bytes, decoded);
    CHECK(decoded == expected);

    std::vector<float> too_few(expected.size() - block->elements);
    CHECK_THROWS_AS(decode_gguf(block->type, bytes, too_few), ShapeError);
  }
  CHECK(find_gguf_block(6) == nullptr);
  CHECK(gguf_type_name(6) == "Q5_0");
  CHECK(gguf_type_name(4'000'000'000) == "an unknown type");
}

GgufBytes small() {
  GgufBytes file;
  file.entries = {text_entry("general.architecture", "llama"), uint_entry("llama.block_count", 3)};
  file.tensors = {{"a", {4, 2}, 0, 0}, {"b", {64}, 8, 32}};
  file.data_bytes = 32 + 68;
  return file;
}

TEST_CASE("tensors are found by name, with the longest stride first") {
  for (const std::uint32_t version : {2U, 3U}) {
    GgufBytes file = small();
    file.version = version;
    const std::string text = file.text();
    const GgufHeader header = parse_gguf(as_bytes(text), "small");
    CHECK(header.version == version);
    REQUIRE(header.tensors.size() == 2);
    const GgufTensor& a = header.tensors.at("a");
    CHECK(a.shape == std::vector<std::size_t>{2, 4});
    CHECK(a.bytes == 32);
    CHECK(a.row_bytes() == 16);
    const GgufTensor& b = header.tensors.at("b");
    CHECK(b.type == GgufType::q8_0);
    CHECK(b.bytes == 68);
    CHECK(b.begin == text.size() - 68);
  }
}

TEST_CASE("metadata of every type, alone and in arrays") {
  GgufBytes file;
  const std::string whole = number_bytes<std::uint64_t>(~std::uint64_t{0});
  file.entries = {
      entry_bytes("u8", 0, "\xff"),
      entry_bytes("i8", 1, "\xff"),
      entry_bytes("u16", 2, number_bytes<std::uint16_t>(65535)),
      entry_bytes("i16", 3, number_bytes<std::int16_t>(-3)),
      entry_bytes("u32", 4, number_bytes<std::uint32_t>(4'000'000'000)),
      entry_bytes("i32", 5, number_bytes<std::int32_t>(-5)),
      entry_bytes("f32", 6, number_bytes(0.5F)),
      entry_bytes("yes", 7, "\x01"),
      entry_bytes("text", 8, text_bytes("words")),
      entry_bytes("u64", 10, whole),
      entry_bytes("i64", 11, number_bytes<std::int64_t>(-7)),
      entry_bytes("f64", 12, number_bytes(0.1)),
      entry_bytes("u8s", 9, array_bytes(0, 2, std::string_view{"\x01\xff", 2})),
      entry_bytes("i32s", 9, array_bytes(5, 1, number_bytes<std::int32_t>(-9))),
      entry_bytes("f32s", 9, array_bytes(6, 1, number_bytes(2.5F))),
      entry_bytes("flags", 9, array_bytes(7, 2, std::string_view{"\x01\x00", 2})),
      entry_bytes("texts", 9, array_bytes(8, 2, text_bytes("a") + text_bytes(""))),
      entry_bytes("none", 9, array_bytes(8, 0, "")),
      entry_bytes("larges", 9, array_bytes(10, 1, whole)),
  };
  const std::string text = file.text();
  const GgufHeader header = parse_gguf(as_bytes(text), "values");
  const auto is = [&](const char* key, const GgufValue& value) {
    CAPTURE(key);
    CHECK(header.metadata.at(key) == value);
  };
  is("u8", std::uint64_t{255});
  is("i8", std::int64_t{-1});
  is("u16", std::uint64_t{65535});
  is("i16", std::int64_t{-3});
  is("u32", std::uint64_t{4'000'000'000});
  is("i32", std::int64_t{-5});
  is("f32", 0.5);
  is("yes", true);
  is("text", std::string{"words"});
  is("u64", std::numeric_limits<std::uint64_t>::max());
  is("i64", std::int64_t{-7});
  is("f64", 0.1);
  is("u8s", GgufArray{std::vector<std::uint64_t>{1, 255}});
  is("i32s", GgufArray{std::vector<std::int64_t>{-9}});
  is("f32s", GgufArray{std::vector<double>{2.5}});
  is("flags", GgufArray{std::vector<bool>{true, false}});
  is("texts", GgufArray{std::vector<std::string>{"a", ""}});
  is("none", GgufArray{std::vector<std::string>{}});

  const GgufKeys keys{header, "values"};
  CHECK(keys.size("u16") == 65535);
  CHECK(keys.size("missing", 4) == 4);
  CHECK(keys.number("f32") == 0.5);
  CHECK(keys.number("u8") == 255.0);
  CHECK(keys.flag("yes"));
  CHECK(keys.text("text") == "words");
  CHECK(keys.texts("texts") == std::vector<std::string>{"a", ""});
  CHECK(keys.texts("missing").empty());
  CHECK(keys.numbers("f32s") == std::vector<double>{2.5});
  CHECK(keys.whole_numbers("i32s") == std::vector<std::int64_t>{-9});
  CHECK(keys.whole_numbers("u8s") == std::vector<std::int64_t>{1, 255});
  CHECK(keys.whole_numbers("larges") == std::vector<std::int64_t>{-1});
  CHECK_THROWS_WITH_AS((void)keys.size("missing"), "values: metadata missing is missing", FormatError);
  CHECK_THROWS_WITH_AS((void)keys.size("u32"),
                       "values: metadata u32 is 4000000000, expected a whole number from 0 to 16777216",
                       FormatError);
  CHECK_THROWS_AS((void)keys.size("i16"), FormatError);
  CHECK_THROWS_AS((void)keys.size("text"), FormatError);
  CHECK_THROWS_WITH_AS((void)keys.number("text"), "values: metadata text is 'words', expected a number",
                       FormatError);
  CHECK_THROWS_AS((void)keys.flag("u8"), FormatError);
  CHECK_THROWS_AS((void)keys.text("f64"), FormatError);
  CHECK_THROWS_WITH_AS((void)keys.texts("u8s"),
                       "values: metadata u8s is an array of 2 UINT, expected an array of STRING",
                       FormatError);
  CHECK_THROWS_AS((void)keys.numbers("i32s"), FormatError);
  CHECK_THROWS_AS((void)keys.whole_numbers("f32s"), FormatError);
}

// ---- what is refused -------------------------------------------------------------------------

/// The refusal of the small file after a change, or "" if it is accepted.
std::string refusal(void (*change)(GgufBytes&)) {
  GgufBytes file = small();
  change(file);
  const std::string text = file.text();
  try {
    (void)parse_gguf(as_bytes(text), "f");
  } catch (const FormatError& error) {
    return error.what();
  }
  return "";
}

constexpr std::uint64_t huge = std::uint64_t{1} << 62;

struct Case {
  std::string part;  // of the refusal
  void (*change)(GgufBytes&);
};

void check_refusals(const std::vector<Case>& cases) {
  for (const Case& test : cases) {
    const std::string text = refusal(test.change);
    CAPTURE(test.part);
    CAPTURE(text);
    CHECK(text.find(test.part) != std::string::npos);
    CHECK(text.size() < 400);
  }
}

TEST_CASE("headers that lie are refused by what they lie about") {
  REQUIRE(refusal([](GgufBytes&) {}).empty());
  check_refusals({
      {"does not begin with 'GGUF'", [](GgufBytes& f) { f.magic = "GGJT"; }},
      {"version 1, expected 2 or 3", [](GgufBytes& f) { f.version = 1; }},
      {"version 4, expected", [](GgufBytes& f) { f.version = 4; }},
      {"version 50331648, expected 2 or 3, little endian", [](GgufBytes& f) { f.version = 3U << 24; }},
      {"the count of tensors is 4611686018427387904, but", [](GgufBytes& f) { f.tensor_count = huge; }},
      {"the count of metadata keys is 4611686018427387904", [](GgufBytes& f) { f.key_count = huge; }},
      {"tensor '' has 0 dimensions", [](GgufBytes& f) { f.tensor_count = 3; }},
      {"metadata key 'general.architecture' is given twice",
       [](GgufBytes& f) { f.entries.push_back(f.entries.front()); }},
      {"metadata key 'x' has value type 13",
       [](GgufBytes& f) { f.entries.push_back(entry_bytes("x", 13, "")); }},
      {"metadata key 'x' has value type 13",
       [](GgufBytes& f) { f.entries.push_back(entry_bytes("x", 9, array_bytes(13, 1, "12345678"))); }},
      {"metadata key 'x' is an array of arrays",
       [](GgufBytes& f) {
         f.entries.push_back(entry_bytes("x", 9, array_bytes(9, 1, array_bytes(4, 0, ""))));
       }},
      {"metadata key 'x' is 4611686018427387904, but only",
       [](GgufBytes& f) { f.entries.push_back(entry_bytes("x", 9, array_bytes(0, huge, ""))); }},
      // 60 numbers of 64 bits take more than the bytes that follow, 60 of 8 bits would not.
      {"metadata key 'x' is 60, but only",
       [](GgufBytes& f) { f.entries.push_back(entry_bytes("x", 9, array_bytes(10, 60, ""))); }},
      {"metadata key 'x' needs 4611686018427387904 bytes",
       [](GgufBytes& f) { f.entries.push_back(entry_bytes("x", 8, number_bytes(huge))); }},
      {"metadata key 'x' is 2, expected 0 or 1",
       [](GgufBytes& f) { f.entries.push_back(entry_bytes("x", 7, "\x02")); }},
      {"general.alignment is 24, expected a power of two",
       [](GgufBytes& f) { f.entries.push_back(uint_entry("general.alignment", 24)); }},
      {"general.alignment is 0",
       [](GgufBytes& f) { f.entries.push_back(uint_entry("general.alignment", 0)); }},
      {"general.alignment is 2147483648",
       [](GgufBytes& f) { f.entries.push_back(uint_entry("general.alignment", 1U << 31)); }},
      {"general.alignment is '32', expected a power of two",
       [](GgufBytes& f) { f.entries.push_back(text_entry("general.alignment", "32")); }},
      {"end past the file, which has 0 bytes of data",
       [](GgufBytes& f) { f.entries.push_back(uint_entry("general.alignment", 1U << 20)); }},
      {"tensor 'a' is given twice", [](GgufBytes& f) { f.tensors[1].name = "a"; }},
      {"tensor 'a' has 0 dimensions", [](GgufBytes& f) { f.tensors[0].sizes.clear(); }},
      {"tensor 'a' has 5 dimensions", [](GgufBytes& f) { f.tensors[0].sizes.assign(5, 1); }},
      {"tensor 'a': size 0 of dimension 1", [](GgufBytes& f) { f.tensors[0].sizes[1] = 0; }},
      {"of dimension 1, expected at least 1 and a product that can be counted",
       [](GgufBytes& f) { f.tensors[0].sizes = {std::uint64_t{1} << 32, std::uint64_t{1} << 32}; }},
      {"tensor 'b' has type 6 (Q5_0), expected one of F32, F16,",
       [](GgufBytes& f) { f.tensors[1].type = 6; }},
      {"tensor 'b' has type 99 (an unknown type)", [](GgufBytes& f) { f.tensors[1].type = 99; }},
      {"tensor 'b': rows of 63 numbers are not whole blocks of Q8_0, which have 32",
       [](GgufBytes& f) { f.tensors[1].sizes[0] = 63; }},
      {"tensor 'b': offset 33 is not a multiple of the alignment 32",
       [](GgufBytes& f) { f.tensors[1].offset = 33; }},
      {"tensor 'b': 68 bytes at offset 64 end past the file, which has 100 bytes",
       [](GgufBytes& f) { f.tensors[1].offset = 64; }},
      {"end past the file", [](GgufBytes& f) { f.tensors[1].offset = ~std::uint64_t{31}; }},
      {"end past the file", [](GgufBytes& f) { f.data_bytes -= 1; }},
      {"tensor 'b' begins at byte 192 inside tensor 'a', which ends at 224",
       [](GgufBytes& f) { f.tensors[1].offset = 0; }},
  });
}

TEST_CASE("a file cut anywhere is refused") {
  const std::string text = small().text();
  for (std::size_t size = 0; size < text.size(); ++size) {
    CAPTURE(size);
    const std::string cut = text.substr(0, size);
    CHECK_THROWS_AS((void)parse_gguf(as_bytes(cut), "cut"), FormatError);
  }
}

TEST_CASE("a file of another alignment; one without tensors; one that is missing") {
  GgufBytes file = small();
  file.entries.push_back(uint_entry("general.alignment", 8));
  file.alignment = 8;
  const std::string text = file.text();
  CHECK(parse_gguf(as_bytes(text), "f").tensors.at("a").begin == text.size() - 100);
  CHECK(parse_gguf(as_bytes(GgufBytes{}.text()), "f").tensors.empty());

  const testing::TemporaryFolder folder;
  folder.write("small.gguf", text);
  const GgufFile open{folder / "small.gguf"};
  const auto bytes = open.bytes_of(open.header().tensors.at("b"));
  CHECK(bytes.size() == 68);
  CHECK(bytes.front() == std::byte{0x3c});
  CHECK_THROWS_AS(GgufFile{folder / "none.gguf"}, FormatError);
  CHECK_THROWS_AS(GgufFile{folder.path().string()}, FormatError);
  folder.write("empty.gguf", "");
  CHECK_THROWS_AS(GgufFile{folder / "empty.gguf"}, FormatError);
}

}  // namespace
}  // namespace kvpolicy::reference::gguf_test
