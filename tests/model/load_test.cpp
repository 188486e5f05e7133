// SPDX-License-Identifier: Apache-2.0
//
// Folders whose config.json and weights contradict each other: what is loaded is what transformers would
// compute, or loading fails.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <kvpolicy/core/error.hpp>
#include <reference_model/llama.hpp>
#include <reference_model/safetensors.hpp>

#include "model/dense_attention.hpp"
#include "model/golden.hpp"
#include "model/temporary_folder.hpp"

namespace kvpolicy::reference::load_test {
namespace {

using Json = nlohmann::json;

Json config_of(const std::string& folder) {
  std::ifstream file(folder + "/config.json");
  return Json::parse(file);
}

/// The tensors of a folder, which a test changes and writes elsewhere.
struct Weights {
  explicit Weights(const std::string& folder) {
    SafetensorsFile file(folder + "/model.safetensors");
    for (const auto& [name, entry] : file.header().tensors) {
      bytes.push_back(file.read_bytes(name));
      tensors.push_back({name, entry.type, entry.shape, bytes.back()});
    }
  }
  TensorToWrite& operator[](const std::string& name) {
    for (TensorToWrite& tensor : tensors) {
      if (tensor.name == name) return tensor;
    }
    throw FormatError("there is no " + name);
  }

  std::deque<std::vector<std::byte>> bytes;
  std::vector<TensorToWrite> tensors;
};

std::vector<float> logits_of(const Llama& model) {
  const std::vector<int> tokens{1, 7, 42, 3, 60, 11};
  DenseCache cache{model.config()};
  return all_logits(model, tokens, 0, cache.attend());
}

TEST_CASE("an output layer in the file is used even if config.json says it is tied") {
  const std::string from = golden_folder("mha_d64");
  const Llama untied = Llama::load(from);
  REQUIRE(untied.weights().head.weight != untied.weights().embedding.weight);
  Json config = config_of(from);
  config["tie_word_embeddings"] = true;

  const TemporaryFolder folder;
  folder.write("config.json", config.dump());
  Weights weights(from);
  write_safetensors(folder / "model.safetensors", weights.tensors);
  const Llama with_own = Llama::load(folder.path());
  CHECK_FALSE(with_own.config().tied_embeddings);
  CHECK(with_own.head().weight == untied.head().weight);
  CHECK(logits_of(with_own) == logits_of(untied));

  // A copy of the embedding gives the same model as no output layer.
  weights["lm_head.weight"].bytes = weights["model.embed_tokens.weight"].bytes;
  write_safetensors(folder / "model.safetensors", weights.tensors);
  const Llama with_copy = Llama::load(folder.path());
  CHECK(with_copy.config().tied_embeddings);
  CHECK(with_copy.weights().head.weight.size() == 0);
  std::erase_if(weights.tensors,
                [](const auto& tensor) { return tensor.name == "lm_head.weight"; });
  write_safetensors(folder / "model.safetensors", weights.tensors);
  const Llama without = Llama::load(folder.path());
  CHECK(without.config().tied_embeddings);
  CHECK(logits_of(with_copy) == logits_of(without));
  CHECK(logits_of(without) != logits_of(untied));
}

TEST_CASE("weights that are quantised, or are quantised when they are loaded, are refused") {
  const std::string from = golden_folder("mha_d64");
  const TemporaryFolder folder;
  std::filesystem::copy(from + "/model.safetensors", folder / "model.safetensors");
  Json config = config_of(from);
  config["quantization_config"] = {{"quant_method", "bitsandbytes"}, {"load_in_4bit", true}};
  folder.write("config.json", config.dump());
  CHECK_THROWS_WITH_AS(
      (void)Llama::load(folder.path()),
      (folder.path() + "/config.json: quantization_config asks for weights quantised by "
                       "'bitsandbytes', which this model does not compute: use the unquantised "
                       "checkpoint")
          .c_str(),
      ConfigError);
  config["quantization_config"] = nullptr;
  folder.write("config.json", config.dump());
  CHECK_NOTHROW((void)Llama::load(folder.path()));
}

/// Writes a sparse file of these tensors in bfloat16, all zeros, which takes no space on the disk. Returns
/// false if the file system does not support such a large file.
bool write_sparse(const std::string& path,
                  const std::vector<std::pair<std::string, std::vector<std::size_t>>>& tensors) {
  Json header;
  std::uint64_t end = 0;
  for (const auto& [name, shape] : tensors) {
    std::uint64_t bytes = 2;
    for (const std::size_t size : shape) bytes *= size;
    header[name] = {{"dtype", "BF16"}, {"shape", shape}, {"data_offsets", {end, end + bytes}}};
    end += bytes;
  }
  const std::string text = header.dump();
  const std::uint64_t length = text.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), sizeof length);
  file << text;
  file.close();
  std::error_code error;
  std::filesystem::resize_file(path, sizeof length + length + end, error);
  return !error;
}

TEST_CASE("a checkpoint of more weights than the machine has memory is refused with both sizes") {
  constexpr std::size_t vocabulary = std::size_t{1} << 24;
  constexpr std::size_t hidden = std::size_t{1} << 16;
  const TemporaryFolder folder;
  const Json config{{"architectures", {"LlamaForCausalLM"}},
                    {"vocab_size", vocabulary},
                    {"hidden_size", hidden},
                    {"intermediate_size", 64},
                    {"num_hidden_layers", 1},
                    {"num_attention_heads", 1},
                    {"head_dim", 64},
                    {"tie_word_embeddings", true}};
  folder.write("config.json", config.dump());
  const std::string layer = "model.layers.0.";
  std::vector<std::pair<std::string, std::vector<std::size_t>>> tensors{
      {"model.embed_tokens.weight", {vocabulary, hidden}},
      {layer + "input_layernorm.weight", {hidden}},
      {layer + "self_attn.q_proj.weight", {64, hidden}},
      {layer + "self_attn.k_proj.weight", {64, hidden}},
      {layer + "self_attn.v_proj.weight", {64, hidden}},
      {layer + "self_attn.o_proj.weight", {hidden, 64}},
      {layer + "post_attention_layernorm.weight", {hidden}},
      {layer + "mlp.gate_proj.weight", {64, hidden}},
      {layer + "mlp.up_proj.weight", {64, hidden}},
      {layer + "mlp.down_proj.weight", {hidden, 64}},
      {"model.norm.weight", {hidden}}};
  const auto says = [&](const char* part) {
    try {
      (void)Llama::load(folder.path());
    } catch (const Error& error) {
      const std::string text = error.what();
      CHECK_MESSAGE(text.find(part) != std::string::npos, text);
      return;
    }
    FAIL_CHECK("loaded");
  };
  if (!write_sparse(folder / "model.safetensors", tensors)) {
    MESSAGE("skipped: the file system has no files of 2 TiB");
    return;
  }
  says("its weights take 2199.");
  says(" GB as stored, this machine has ");
  // A shape that does not fit config.json is detected before the first weight is read.
  tensors.back().second = {hidden + 1};
  REQUIRE(write_sparse(folder / "model.safetensors", tensors));
  says("tensor 'model.norm.weight': shape is '[65537]', config.json needs [65536]");
  tensors.back().second = {hidden};
  tensors.push_back({"model.more.weight", {3}});
  REQUIRE(write_sparse(folder / "model.safetensors", tensors));
  says("tensor 'model.more.weight' has no place in the model");
}

}  // namespace
}  // namespace kvpolicy::reference::load_test
