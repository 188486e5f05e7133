// SPDX-License-Identifier: Apache-2.0
//
// Names and shapes of a Hugging Face checkpoint, and how they fill LlamaWeights. Everything that
// can be checked by config.json and the headers of the files is checked before a weight is read.
#include <algorithm>
#include <cstddef>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#if __has_include(<unistd.h>)
#include <unistd.h>
#endif

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/json_text.hpp>
#include <reference_model/checkpoint.hpp>
#include <reference_model/gguf_model.hpp>
#include <reference_model/llama.hpp>
#include <reference_model/weight_source.hpp>

namespace kvpolicy::reference {
namespace {

constexpr const char* head_name = "lm_head.weight";

struct WantedTensor {
  std::string name;
  std::vector<std::size_t> shape;
  std::vector<float>* values;  // where a vector is written, as float
  WeightMatrix* matrix;        // or a matrix, in the format that was asked for
};

std::vector<WantedTensor> wanted_tensors(const LlamaConfig& c, bool own_head, LlamaWeights& weights) {
  std::vector<WantedTensor> wanted;
  const auto norm = [&](std::vector<float>& values, const std::string& name) {
    wanted.push_back({name + ".weight", {c.hidden}, &values, nullptr});
  };
  const auto linear = [&](Linear& layer, const std::string& name, std::size_t inputs, std::size_t outputs,
                          bool bias) {
    wanted.push_back({name + ".weight", {outputs, inputs}, nullptr, &layer.weight});
    if (bias) wanted.push_back({name + ".bias", {outputs}, &layer.bias, nullptr});
  };
  const std::size_t q_width = c.q_heads * c.head_dim;
  const std::size_t kv_width = c.kv_heads * c.head_dim;
  linear(weights.embedding, "model.embed_tokens", c.hidden, c.vocabulary, false);
  weights.layers.resize(c.layers);
  for (std::size_t i = 0; i < c.layers; ++i) {
    const std::string at = "model.layers." + std::to_string(i) + ".";
    LlamaLayer& layer = weights.layers[i];
    norm(layer.attention_norm, at + "input_layernorm");
    linear(layer.q, at + "self_attn.q_proj", c.hidden, q_width, c.qkv_bias);
    linear(layer.k, at + "self_attn.k_proj", c.hidden, kv_width, c.qkv_bias);
    linear(layer.v, at + "self_attn.v_proj", c.hidden, kv_width, c.qkv_bias);
    if (c.qk_norm) {
      wanted.push_back({at + "self_attn.q_norm.weight", {c.head_dim}, &layer.q_norm, nullptr});
      wanted.push_back({at + "self_attn.k_norm.weight", {c.head_dim}, &layer.k_norm, nullptr});
    }
    linear(layer.o, at + "self_attn.o_proj", q_width, c.hidden, c.o_bias);
    norm(layer.mlp_norm, at + "post_attention_layernorm");
    linear(layer.gate, at + "mlp.gate_proj", c.hidden, c.intermediate, c.mlp_bias);
    linear(layer.up, at + "mlp.up_proj", c.hidden, c.intermediate, c.mlp_bias);
    linear(layer.down, at + "mlp.down_proj", c.intermediate, c.hidden, c.mlp_bias);
  }
  norm(weights.norm, "model.norm");
  if (own_head) linear(weights.head, "lm_head", c.hidden, c.vocabulary, false);
  return wanted;
}

/// A tensor that this model does not read (a query norm, a bias that config.json denies) means that
/// the checkpoint belongs to another model.
void refuse_leftovers(const WeightSource& checkpoint, const std::vector<WantedTensor>& wanted,
                      const std::string& folder) {
  std::vector<std::string_view> known;
  for (const WantedTensor& tensor : wanted) known.push_back(tensor.name);
  std::ranges::sort(known);
  for (const std::string& name : checkpoint.names()) {
    const bool redundant = name.ends_with("rotary_emb.inv_freq");  // found in old checkpoints
    require<FormatError>(redundant || std::ranges::binary_search(known, name), folder, ": tensor ",
                         io::in_quotes(name),
                         " has no place in the model that its config.json or metadata describes");
  }
}

/// Bytes of memory of this machine; infinite where the system does not say.
double machine_memory() {
#if defined(_SC_PHYS_PAGES) && defined(_SC_PAGE_SIZE)
  const long pages = ::sysconf(_SC_PHYS_PAGES);
  const long page = ::sysconf(_SC_PAGE_SIZE);
  if (pages > 0 && page > 0) return static_cast<double>(pages) * static_cast<double>(page);
#endif
  return std::numeric_limits<double>::infinity();
}

/// A sparse file can have any size while it takes little disk, so a config.json may ask for more
/// memory than the machine has. Allocating it would end the process. Mapped weights count too: each
/// token would read them from the disk again.
void require_memory(const WeightSource& checkpoint, const std::vector<WantedTensor>& wanted,
                    const LoadOptions& options, const std::string& folder) {
  double bytes = 0;  // a double is exact enough and cannot overflow
  for (const WantedTensor& tensor : wanted) {
    const WeightFormat format = tensor.matrix == nullptr
                                    ? WeightFormat::float32
                                    : options.weights.value_or(checkpoint.format(tensor.name));
    double numbers = 1;
    for (const std::size_t size : tensor.shape) numbers *= static_cast<double>(size);
    bytes += numbers * static_cast<double>(bytes_of(format));
    if (format == WeightFormat::int8) bytes += static_cast<double>(tensor.shape[0]) * sizeof(float);
  }
  constexpr double gigabyte = 1e9;
  require(bytes <= machine_memory(), folder, ": its weights take ", bytes / gigabyte, " GB as ",
          options.weights ? name_of(*options.weights) : "stored", ", this machine has ",
          machine_memory() / gigabyte, " GB of memory");
}

struct OpenModel {
  LlamaConfig config;
  std::unique_ptr<WeightSource> weights;
};

OpenModel open_model(const std::string& path) {
  if (!is_gguf(path)) return {load_llama_config(path), std::make_unique<Checkpoint>(path)};
  auto file = std::make_unique<GgufWeights>(path);
  LlamaConfig config = file->config();
  return {std::move(config), std::move(file)};
}

}  // namespace

Llama Llama::load(const std::string& path, const LoadOptions& options) {
  auto [config, source] = open_model(path);
  const WeightSource& checkpoint = *source;
  // A checkpoint with tied embeddings may contain the output layer nevertheless.
  const bool own_head = !config.tied_embeddings || checkpoint.contains(head_name);
  LlamaWeights weights;
  const std::vector<WantedTensor> wanted = wanted_tensors(config, own_head, weights);
  for (const WantedTensor& tensor : wanted) checkpoint.check(tensor.name, tensor.shape);
  refuse_leftovers(checkpoint, wanted, path);
  require_memory(checkpoint, wanted, options, path);
  for (const WantedTensor& tensor : wanted) {
    if (tensor.matrix != nullptr) {
      *tensor.matrix = checkpoint.matrix(tensor.name, tensor.shape[0], tensor.shape[1], options.weights);
    } else {
      *tensor.values = checkpoint.read(tensor.name, tensor.shape);
    }
  }
  if (config.tied_embeddings && own_head) {
    // As in transformers, the weights in the file decide, whatever config.json says.
    config.tied_embeddings = weights.head.weight == weights.embedding.weight;
    if (config.tied_embeddings) weights.head = Linear{};
  }
  for_each_linear(weights, [&](Linear& layer) { layer.round_activations = options.round_activations; });
  return Llama{std::move(config), std::move(weights)};
}

}  // namespace kvpolicy::reference
