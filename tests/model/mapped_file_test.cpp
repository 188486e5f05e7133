// SPDX-License-Identifier: Apache-2.0
//
// A file as bytes: what is mapped, what happens to the file afterwards, and how much memory a model takes
// whose weights stay in their file.
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <doctest/doctest.h>

#include <kvpolicy/core/error.hpp>
#include <reference_model/llama.hpp>
#include <reference_model/mapped_file.hpp>
#include <reference_model/safetensors.hpp>

#include "support/sanitizer.hpp"
#include "support/temporary_folder.hpp"

namespace kvpolicy::reference::mapped_file_test {
namespace {

std::string text_of_bytes(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

TEST_CASE("the bytes of a file, also after its name is gone") {
  const testing::TemporaryFolder folder;
  folder.write("file", "0123456789");
  const MappedFile file{folder / "file"};
  CHECK(file.path() == folder / "file");
  CHECK(file.size() == 10);
  CHECK(text_of_bytes(file.bytes(3, 4)) == "3456");
  CHECK(file.bytes(10, 0).empty());
  file.release(file.bytes(0, 10));
  CHECK(text_of_bytes(file.bytes(0, 10)) == "0123456789");
  folder.write("other", "abcdefghij");
  std::filesystem::rename(folder / "other", folder / "file");  // the file is replaced as a whole
  CHECK(text_of_bytes(file.bytes(0, 10)) == "0123456789");
  std::filesystem::remove(folder / "file");
  CHECK(text_of_bytes(file.bytes(0, 10)) == "0123456789");
}

TEST_CASE("ranges outside the file are refused, however large") {
  const testing::TemporaryFolder folder;
  folder.write("file", "0123456789");
  const MappedFile file{folder / "file"};
  CHECK_THROWS_WITH_AS((void)file.bytes(8, 3),
                       (folder / "file" + ": has 10 bytes, bytes 8 to 8 + 3 were asked for").c_str(),
                       FormatError);
  CHECK_THROWS_AS((void)file.bytes(11, 0), FormatError);
  CHECK_THROWS_AS((void)file.bytes(1, static_cast<std::size_t>(-1)), FormatError);
  CHECK_THROWS_AS((void)file.bytes(static_cast<std::uint64_t>(-1), 1), FormatError);
}

TEST_CASE("an empty file has no bytes; a missing one, a folder and a shortened one are refused") {
  const testing::TemporaryFolder folder;
  folder.write("empty", "");
  const MappedFile empty{folder / "empty"};
  CHECK(empty.size() == 0);
  CHECK(empty.bytes(0, 0).empty());
  CHECK_THROWS_AS((void)empty.bytes(0, 1), FormatError);
  CHECK_THROWS_AS(MappedFile{folder / "missing"}, FormatError);
  CHECK_THROWS_AS(MappedFile{folder.path().string()}, FormatError);
  folder.write("file", "0123456789");
  const MappedFile file{folder / "file"};
  std::filesystem::resize_file(folder / "file", 4);
  CHECK_THROWS_AS((void)file.bytes(0, 2), FormatError);
}

/// Kilobytes of this process by a name of /proc/self/status, 0 where there is no such file.
std::size_t kilobytes(const std::string& name) {
  std::ifstream file{"/proc/self/status"};
  for (std::string word; file >> word;) {
    if (word != name + ":") continue;
    std::size_t value = 0;
    file >> value;
    return value;
  }
  return 0;
}

TEST_CASE("weights as they are stored take no memory besides their file") {
#ifdef KVPOLICY_TEST_ASAN
  return;  // freed memory is kept
#endif
  if (kilobytes("RssAnon") == 0) return;
  constexpr std::size_t vocabulary = 8000, hidden = 512;
  const testing::TemporaryFolder folder;
  folder.write("config.json", R"({"architectures": ["LlamaForCausalLM"], "vocab_size": 8000,
      "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 1, "num_attention_heads": 8,
      "num_key_value_heads": 8, "tie_word_embeddings": true})");
  const std::vector<std::byte> zeros(vocabulary * hidden * 2);
  const auto tensor = [&](const std::string& name, std::vector<std::size_t> shape) {
    const std::size_t count =
        std::accumulate(shape.begin(), shape.end(), std::size_t{2}, std::multiplies<>{});
    return TensorToWrite{name, TensorType::bf16, std::move(shape), std::span{zeros}.first(count)};
  };
  const std::string layer = "model.layers.0.";
  write_safetensors(folder / "model.safetensors",
                    std::vector{tensor("model.embed_tokens.weight", {vocabulary, hidden}),
                                tensor(layer + "input_layernorm.weight", {hidden}),
                                tensor(layer + "self_attn.q_proj.weight", {hidden, hidden}),
                                tensor(layer + "self_attn.k_proj.weight", {hidden, hidden}),
                                tensor(layer + "self_attn.v_proj.weight", {hidden, hidden}),
                                tensor(layer + "self_attn.o_proj.weight", {hidden, hidden}),
                                tensor(layer + "post_attention_layernorm.weight", {hidden}),
                                tensor(layer + "mlp.gate_proj.weight", {2048, hidden}),
                                tensor(layer + "mlp.up_proj.weight", {2048, hidden}),
                                tensor(layer + "mlp.down_proj.weight", {hidden, 2048}),
                                tensor("model.norm.weight", {hidden})});
  const std::size_t numbers = vocabulary * hidden + 4 * hidden * hidden + 3 * 2048 * hidden;
  const auto added = [&](const LoadOptions& options, std::size_t bytes) {
#ifdef __GLIBC__
    malloc_trim(0);  // memory that earlier cases have freed would be used without being counted
#endif
    const std::size_t before = kilobytes("RssAnon");
    const Llama model = Llama::load(folder.path().string(), options);
    CHECK(model.weight_bytes() == bytes + 3 * hidden * sizeof(float));
    const std::size_t after = kilobytes("RssAnon");
    return after > before ? after - before : 0;
  };
  CHECK(added({}, 2 * numbers) < 1000);
  const std::size_t rows = vocabulary + 5 * hidden + 2 * 2048;
  const std::size_t int8_kb = added({.weights = WeightFormat::int8}, numbers + rows * sizeof(float));
  CHECK(int8_kb > numbers / 2048);
  CHECK(int8_kb < numbers / 1024 + 2000);
  CHECK(added({.weights = WeightFormat::float32}, 4 * numbers) > 2 * numbers / 1024);
}

}  // namespace
}  // namespace kvpolicy::reference::mapped_file_test
