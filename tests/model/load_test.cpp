// SPDX-License-Identifier: Apache-2.0
//
// Folders whose config.json and weights contradict each other: what is loaded is what transformers would
// compute, or loading fails.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <iterator>
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
#include "support/temporary_folder.hpp"

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

  const testing::TemporaryFolder folder;
  folder.write("config.json", config.dump());
  Weights weights(from);
  write_safetensors(folder / "model.safetensors", weights.tensors);
  const Llama with_own = Llama::load(folder.path().string());
  CHECK_FALSE(with_own.config().tied_embeddings);
  CHECK(with_own.head().weight == untied.head().weight);
  CHECK(logits_of(with_own) == logits_of(untied));

  // A copy of the embedding gives the same model as no output layer.
  weights["lm_head.weight"].bytes = weights["model.embed_tokens.weight"].bytes;
  write_safetensors(folder / "model.safetensors", weights.tensors);
  const Llama with_copy = Llama::load(folder.path().string());
  CHECK(with_copy.config().tied_embeddings);
  CHECK(with_copy.weights().head.weight.size() == 0);
  std::erase_if(weights.tensors, [](const auto& tensor) { return tensor.name == "lm_head.weight"; });
  write_safetensors(folder / "model.safetensors", weights.tensors);
  const Llama without = Llama::load(folder.path().string());
  CHECK(without.config().tied_embeddings);
  CHECK(logits_of(with_copy) == logits_of(without));
  CHECK(logits_of(without) != logits_of(untied));
}

TEST_CASE("a format that is asked for is that of all matrices, and the logits stay near") {
  const std::string from = golden_folder("sharded_bf16");
  const Llama stored = Llama::load(from);
  CHECK(stored.head().weight.format() == WeightFormat::bfloat16);
  const std::vector<float> wanted = logits_of(stored);
  for (const auto& wish : {std::pair{WeightFormat::float32, 1e-4F}, std::pair{WeightFormat::float16, 1e-2F},
                           std::pair{WeightFormat::int8, 0.3F}}) {
    const WeightFormat format = wish.first;
    CAPTURE(name_of(format));
    const Llama model = Llama::load(from, {.weights = format});
    CHECK(model.parameters() == stored.parameters());
    CHECK(model.weights().embedding.weight.format() == format);
    for (const LlamaLayer& layer : model.weights().layers) {
      CHECK(layer.q.weight.format() == format);
      CHECK(layer.down.weight.format() == format);
    }
    CHECK(largest_error(logits_of(model), wanted) <= wish.second);
  }
}

TEST_CASE("a tensor at an odd address is loaded as well") {
  // A header of odd length, which the format allows, puts every tensor at an odd address.
  const std::string from = golden_folder("tied_d64");
  std::ifstream file(from + "/model.safetensors", std::ios::binary);
  std::string text{std::istreambuf_iterator<char>{file}, {}};
  std::uint64_t length = 0;
  std::memcpy(&length, text.data(), sizeof length);
  text.insert(sizeof length + length, 1, ' ');
  ++length;
  std::memcpy(text.data(), &length, sizeof length);
  const testing::TemporaryFolder folder;
  folder.write("config.json", config_of(from).dump());
  folder.write("model.safetensors", text);
  CHECK(logits_of(Llama::load(folder.path().string())) == logits_of(Llama::load(from)));
}

TEST_CASE("weights that are quantised, or are quantised when they are loaded, are refused") {
  const std::string from = golden_folder("mha_d64");
  const testing::TemporaryFolder folder;
  std::filesystem::copy(from + "/model.safetensors", folder / "model.safetensors");
  Json config = config_of(from);
  config["quantization_config"] = {{"quant_method", "bitsandbytes"}, {"load_in_4bit", true}};
  folder.write("config.json", config.dump());
  CHECK_THROWS_WITH_AS(
      (void)Llama::load(folder.path().string()),
      ((folder / "config.json") + ": quantization_config asks for weights quantised by "
                                  "'bitsandbytes', which this model does not compute: use the unquantised "
                                  "checkpoint")
          .c_str(),
      ConfigError);
  config["quantization_config"] = nullptr;
  folder.write("config.json", config.dump());
  CHECK_NOTHROW((void)Llama::load(folder.path().string()));
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

TEST_CASE("a missing shard, a wrong dtype and a weight that is not finite are named") {
  const testing::TemporaryFolder folder;
  std::filesystem::copy(golden_folder("sharded_bf16"), folder.path());
  std::filesystem::remove(folder / "model-00003-of-00004.safetensors");
  CHECK_THROWS_WITH_AS((void)Llama::load(folder.path().string()),
                       doctest::Contains("model-00003-of-00004.safetensors: there is no such file"),
                       FormatError);

  const testing::TemporaryFolder other;
  const std::string from = golden_folder("mha_d64");
  other.write("config.json", config_of(from).dump());
  const auto refused = [&](const std::string& part, const auto& change) {
    Weights weights(from);
    change(weights);
    write_safetensors(other / "model.safetensors", weights.tensors);
    CHECK_THROWS_WITH_AS((void)Llama::load(other.path().string()), doctest::Contains(part.c_str()),
                         FormatError);
  };
  const std::string name = "model.layers.1.mlp.up_proj.weight";
  refused("tensor '" + name + "': dtype is I32, expected F32, F16 or BF16",
          [&](Weights& weights) { weights[name].type = TensorType::i32; });
  refused("tensor '" + name + "': element 3 is inf", [&](Weights& weights) {
    const float value = INFINITY;
    for (std::size_t i = 0; i < weights.tensors.size(); ++i) {
      if (weights.tensors[i].name != name) continue;
      std::memcpy(weights.bytes[i].data() + 12, &value, sizeof(value));
    }
  });
}

TEST_CASE("a checkpoint of more weights than the machine has memory is refused with both sizes") {
  constexpr std::size_t vocabulary = std::size_t{1} << 24;
  constexpr std::size_t hidden = std::size_t{1} << 16;
  const testing::TemporaryFolder folder;
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
      (void)Llama::load(folder.path().string());
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
