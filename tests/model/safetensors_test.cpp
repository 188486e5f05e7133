// SPDX-License-Identifier: Apache-2.0
//
// Valid and invalid files: every error in a file is a FormatError that names the file, the tensor and the
// value.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>
#include <reference_model/checkpoint.hpp>
#include <reference_model/safetensors.hpp>

#include "support/temporary_folder.hpp"

namespace kvpolicy::reference::safetensors_test {
namespace {

std::span<const std::byte> bytes_of_text(const std::string& text) { return std::as_bytes(std::span(text)); }

/// A file with this header and this number of data bytes.
std::string file_of(const std::string& header, std::size_t data_bytes) {
  const std::uint64_t length = header.size();
  std::string file(sizeof(length), '\0');
  std::memcpy(file.data(), &length, sizeof(length));
  return file + header + std::string(data_bytes, '\0');
}

/// The parser's error for a file, or an empty string if it accepts the file.
std::string refusal(const std::string& file) {
  try {
    (void)parse_safetensors(bytes_of_text(file), "x.safetensors");
  } catch (const FormatError& error) {
    const std::string text = error.what();
    CHECK_MESSAGE(text.starts_with("x.safetensors: "), text);
    return text;
  }
  return "";
}

/// Checks that the file is refused with a message that contains all of these parts.
void refuses(const std::string& file, const std::vector<std::string>& parts) {
  const std::string text = refusal(file);
  for (const std::string& part : parts) {
    CHECK_MESSAGE(text.find(part) != std::string::npos, "'" << text << "' lacks '" << part << "'");
  }
}

std::string tensor(const std::string& name, const std::string& dtype, const std::string& shape,
                   const std::string& offsets) {
  return "\"" + name + R"(":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets +
         "}";
}

TEST_CASE("a valid file is read: names, types, shapes, metadata, padding") {
  const std::string header = R"({"__metadata__":{"format":"pt"},)" + tensor("b", "F32", "[2,3]", "[0,24]") +
                             "," + tensor("a", "BF16", "[4]", "[24,32]") + "," +
                             tensor("scalar", "I64", "[]", "[32,40]") + "," +
                             tensor("empty", "F16", "[0,7]", "[40,40]") + "}   ";
  const std::string file = file_of(header, 40);
  const SafetensorsHeader parsed = parse_safetensors(bytes_of_text(file), "x");
  CHECK(parsed.tensors.size() == 4);
  CHECK(parsed.metadata.at("format") == "pt");
  CHECK(parsed.data_begin == 8 + header.size());
  CHECK(parsed.tensors.at("b").shape == std::vector<std::size_t>{2, 3});
  CHECK(parsed.tensors.at("b").elements() == 6);
  CHECK(parsed.tensors.at("a").type == TensorType::bf16);
  CHECK(parsed.tensors.at("a").begin == 24);
  CHECK(parsed.tensors.at("scalar").elements() == 1);
  CHECK(parsed.tensors.at("empty").elements() == 0);
  CHECK(refusal(file_of("{}", 0)).empty());
}

TEST_CASE("truncated files are refused wherever they end") {
  refuses("", {"has 0 bytes", "8-byte header length"});
  refuses(std::string(7, '\0'), {"has 7 bytes"});
  const std::string whole = file_of("{" + tensor("a", "F32", "[4]", "[0,16]") + "}", 16);
  CHECK(refusal(whole).empty());
  for (std::size_t length = 0; length < whole.size(); ++length) {
    CHECK_FALSE(refusal(whole.substr(0, length)).empty());
  }
  refuses(whole.substr(0, whole.size() - 1), {"'a'", "[0, 16]", "15 bytes"});
  refuses(whole.substr(0, 20), {"runs past the end"});
}

TEST_CASE("an absurd header length is refused before memory is allocated") {
  std::string file = file_of("{}", 0);
  const auto with_length = [&](std::uint64_t length) {
    std::memcpy(file.data(), &length, sizeof(length));
    return file;
  };
  refuses(with_length(std::numeric_limits<std::uint64_t>::max()),
          {"18446744073709551615", "absurd", "100000000"});
  refuses(with_length(100'000'001), {"100000001", "absurd"});
  refuses(with_length(100'000'000), {"runs past the end"});
  refuses(with_length(3), {"header length 3", "2 bytes"});
  refuses(with_length(0), {"does not begin with '{'"});
}

TEST_CASE("a header with the wrong JSON is refused") {
  refuses(file_of("", 0), {"does not begin with '{'"});
  refuses(file_of(" {}", 0), {"does not begin with '{'"});
  refuses(file_of("[]", 0), {"does not begin with '{'"});
  refuses(file_of("{", 0), {"x.safetensors: line 1"});
  refuses(file_of("{}{}", 0), {"x.safetensors: line 1"});
  refuses(file_of("{\"a\":NaN}", 0), {"x.safetensors: line 1"});
  refuses(file_of("{\"a\":1e999}", 0), {"x.safetensors: line 1"});
  refuses(file_of("{\"\xff\":1}", 0), {"x.safetensors: line 1"});
  refuses(file_of("{\"a\":1}", 0), {"'a'", "dtype, shape and data_offsets"});
  refuses(file_of("{\"a\":" + std::string(100'000, '['), 0), {"nested deeper than 4"});
  refuses(file_of("{\"a\":{\"dtype\":[[[1]]]}}", 0), {"nested deeper than 4"});
  refuses(file_of(R"({"__metadata__":{"a":1}})", 0), {"__metadata__", "'a'"});
  refuses(file_of(R"({"__metadata__":[]})", 0), {"__metadata__"});
}

TEST_CASE("names and fields that occur twice are refused") {
  const std::string a = tensor("a", "U8", "[1]", "[0,1]");
  refuses(file_of("{" + a + "," + a + "}", 1), {"the key 'a' is given twice"});
  refuses(file_of(R"({"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", 1),
          {"the key 'dtype' is given twice"});
  refuses(file_of(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":0}})", 1),
          {"exactly dtype, shape and data_offsets"});
}

TEST_CASE("impossible types and shapes are refused") {
  const auto one = [](const std::string& dtype, const std::string& shape, const std::string& offsets,
                      std::size_t bytes) {
    return file_of("{" + tensor("a", dtype, shape, offsets) + "}", bytes);
  };
  refuses(one("F33", "[1]", "[0,4]", 4), {"'a'", "F33", "BF16"});
  refuses(one("f32", "[1]", "[0,4]", 4), {"f32", "F32"});
  refuses(file_of(R"({"a":{"dtype":3,"shape":[1],"data_offsets":[0,1]}})", 1), {"dtype"});
  refuses(one("F32", "4", "[0,4]", 4), {"shape is not a list"});
  refuses(one("F32", "[-1]", "[0,4]", 4), {"shape holds '-1'", "whole numbers"});
  refuses(one("F32", "[1.0]", "[0,4]", 4), {"shape holds '1.0'"});
  refuses(one("F32", "[\"1\"]", "[0,4]", 4), {"shape holds"});
  refuses(one("F32", "[18446744073709551616]", "[0,4]", 4), {"shape holds"});
  refuses(one("F32", "[2]", "[0,4]", 4), {"'[2]' of F32 needs 8 bytes", "span 4"});
  refuses(one("F32", "[1]", "[0,8]", 8), {"needs 4 bytes", "span 8"});
  // 2^32 * 2^32 and 2^62 * 4 wrap to 0.
  refuses(one("U8", "[4294967296,4294967296]", "[0,0]", 0), {"more elements than can be counted"});
  refuses(one("F32", "[4611686018427387904]", "[0,0]", 0), {"more elements than can be counted"});
  CHECK(refusal(one("U8", "[0,4294967296,4294967296]", "[0,0]", 0)).empty());
}

TEST_CASE("byte ranges that leave the data, overlap or leave gaps are refused") {
  const auto one = [](const std::string& offsets) {
    return file_of("{" + tensor("a", "U8", "[4]", offsets) + "}", 4);
  };
  CHECK(refusal(one("[0,4]")).empty());
  refuses(one("[4,8]"), {"'a'", "[4, 8]", "past the 4 bytes"});
  refuses(one("[4,0]"), {"[4, 0]", "end before they begin"});
  refuses(one("[18446744073709551612,0]"), {"end before they begin"});
  refuses(one("[0,18446744073709551615]"), {"past the 4 bytes"});
  refuses(one("[-4,0]"), {"data_offsets holds '-4'"});
  refuses(one("[0]"), {"not a pair"});
  refuses(one("[0,2,4]"), {"not a pair"});
  const auto two = [](const std::string& first, const std::string& second, std::size_t bytes) {
    return file_of("{" + tensor("a", "U8", "[4]", first) + "," + tensor("b", "U8", "[4]", second) + "}",
                   bytes);
  };
  CHECK(refusal(two("[4,8]", "[0,4]", 8)).empty());
  refuses(two("[0,4]", "[0,4]", 4), {"'b'", "begins at byte 0", "inside"});
  refuses(two("[0,4]", "[3,7]", 7), {"'b'", "begins at byte 3", "ends at 4"});
  refuses(two("[0,4]", "[5,9]", 9), {"'b'", "begins at byte 5, expected 4"});
  refuses(two("[1,5]", "[5,9]", 9), {"'a'", "begins at byte 1, expected 0"});
  refuses(two("[0,4]", "[4,8]", 9), {"cover 8 of 9"});
}

TEST_CASE("names in errors are safe for a terminal") {
  const std::string name = "\\u001b[2J" + std::string(5000, 'n');
  const std::string text = refusal(file_of("{" + tensor(name, "U8", "[4]", "[0,5]") + "}", 5));
  CHECK(text.size() < 1000);
  CHECK(text.find('\x1b') == std::string::npos);
}

TEST_CASE("a written file is read back, from memory and from disk") {
  const std::vector<float> values{0.0F, -1.5F, 3.25F, 65504.0F};
  std::vector<float16> halves;
  std::vector<bfloat16> shorts;
  for (const float value : values) {
    halves.emplace_back(value);
    shorts.emplace_back(value);
  }
  const std::vector<TensorToWrite> tensors{
      {"f32", TensorType::f32, {2, 2}, std::as_bytes(std::span(values))},
      {"f16", TensorType::f16, {4}, std::as_bytes(std::span(halves))},
      {"bf16", TensorType::bf16, {1, 4}, std::as_bytes(std::span(shorts))},
      {"empty", TensorType::i8, {0}, {}},
  };
  const testing::TemporaryFolder folder;
  const std::string path = folder / "a.safetensors";
  write_safetensors(path, tensors, {{"made by", "a test"}});
  SafetensorsFile file(path);
  CHECK(file.header().data_begin % 8 == 0);
  CHECK(file.header().metadata.at("made by") == "a test");
  CHECK(file.read_floats("f32") == values);
  CHECK(file.read_floats("f16") == values);
  CHECK(file.read_floats("bf16") ==
        std::vector<float>{0.0F, -1.5F, 3.25F, static_cast<float>(bfloat16(65504.0F))});
  CHECK(file.read_bytes("empty").empty());
  CHECK(file.entry("bf16").shape == std::vector<std::size_t>{1, 4});
  CHECK_THROWS_WITH_AS((void)file.read_floats("empty"),
                       (path + ": tensor 'empty': dtype is I8, expected F32, F16 or BF16").c_str(),
                       FormatError);
  CHECK_THROWS_WITH_AS((void)file.read_floats("none"), (path + ": has no tensor 'none'").c_str(),
                       FormatError);
  CHECK(file.read_floats("f32") == values);  // an error does not affect later reads

  const std::vector<TensorToWrite> twice{tensors[3], tensors[3]};
  CHECK_THROWS_AS((void)serialize_safetensors(twice), FormatError);
  const std::vector<TensorToWrite> lying{{"a", TensorType::f32, {2}, {}}};
  CHECK_THROWS_AS((void)serialize_safetensors(lying), FormatError);
  CHECK_THROWS_AS(write_safetensors(folder / "no/such/folder", {}), StorageError);
}

TEST_CASE("missing files, folders, and files truncated after they were opened are refused") {
  const testing::TemporaryFolder folder;
  CHECK_THROWS_AS(SafetensorsFile(folder / "missing.safetensors"), FormatError);
  CHECK_THROWS_AS(SafetensorsFile(folder.path().string()), FormatError);
  folder.write("empty.safetensors", "");
  CHECK_THROWS_AS(SafetensorsFile(folder / "empty.safetensors"), FormatError);
  const std::string name = folder / "cut.safetensors";
  folder.write("cut.safetensors", file_of("{" + tensor("a", "U8", "[90000]", "[0,90000]") + "}", 90000));
  SafetensorsFile file(name);
  std::filesystem::resize_file(name, 50000);
  CHECK_THROWS_AS((void)file.read_bytes("a"), FormatError);
}

TEST_CASE("a checkpoint is one file, or shards with a correct index") {
  const testing::TemporaryFolder folder;
  const auto refused = [&](const std::string& part) {
    try {
      (void)Checkpoint(folder.path().string());
    } catch (const FormatError& error) {
      const std::string text = error.what();
      CHECK_MESSAGE(text.find(part) != std::string::npos, text);
      return true;
    }
    return false;
  };
  CHECK_THROWS_AS(Checkpoint(folder / "nowhere"), FormatError);
  CHECK(refused("neither model.safetensors nor"));
  const auto index = [&](const std::string& json) { folder.write("model.safetensors.index.json", json); };
  index("{");
  CHECK(refused("parse error"));
  index("[]");
  CHECK(refused("weight_map"));
  index(R"({"weight_map":{"a":3}})");
  CHECK(refused("is not the name of a file"));
  for (const std::string name : {"../one.safetensors", "/etc/passwd", "", "..", "a\\\\b"}) {
    index(R"({"weight_map":{"a":")" + name + R"("}})");
    CHECK(refused("is not the name of a file"));
  }
  index(R"({"weight_map":{"a":"one.safetensors"}})");
  CHECK(refused("one.safetensors: there is no such file"));
  folder.write("one.safetensors", file_of("{" + tensor("b", "F32", "[1]", "[0,4]") + "}", 4));
  CHECK(refused("does not hold it"));
  index(R"({"weight_map":{"b":"one.safetensors","b":"one.safetensors"}})");
  CHECK(refused("'b' is given twice"));
  index(R"({"weight_map":{"b":"one.safetensors"}})");
  Checkpoint checkpoint(folder.path().string());
  CHECK(checkpoint.names() == std::vector<std::string>{"b"});
  const std::vector<std::size_t> shape{1};
  CHECK(checkpoint.read("b", shape) == std::vector<float>{0.0F});
  CHECK_THROWS_AS((void)checkpoint.read("b", std::vector<std::size_t>{1, 1}), FormatError);
  CHECK_THROWS_AS((void)checkpoint.read("c", shape), FormatError);

  CHECK_THROWS_AS(checkpoint.check("c", shape), FormatError);
  CHECK_THROWS_AS(checkpoint.check("b", std::vector<std::size_t>{1, 1}), FormatError);
  CHECK_NOTHROW(checkpoint.check("b", shape));

  const std::vector<float> bad{1.0F, std::numeric_limits<float>::quiet_NaN()};
  const std::vector<TensorToWrite> tensors{{"w", TensorType::f32, {2}, std::as_bytes(std::span(bad))}};
  write_safetensors(folder / "model.safetensors", tensors);  // a single file has priority
  Checkpoint single(folder.path().string());
  CHECK_THROWS_WITH_AS((void)single.read("w", std::vector<std::size_t>{2}),
                       ((folder / "model.safetensors") + ": tensor 'w': element 1 is nan, "
                                                         "expected finite values")
                           .c_str(),
                       FormatError);
}

}  // namespace
}  // namespace kvpolicy::reference::safetensors_test
