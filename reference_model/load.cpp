// SPDX-License-Identifier: Apache-2.0
//
// Names and shapes of a Hugging Face checkpoint, and how they fill LlamaWeights.
#include <algorithm>
#include <array>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/json_text.hpp>
#include <reference_model/checkpoint.hpp>
#include <reference_model/llama.hpp>

namespace kvpolicy::reference {
namespace {

class Loader {
 public:
  explicit Loader(const std::string& folder) : folder_{folder}, checkpoint_{folder} {}

  std::vector<float> norm(const std::string& name, std::size_t size) {
    return read(name + ".weight", std::array{size});
  }

  Linear linear(const std::string& name, std::size_t inputs, std::size_t outputs, bool bias) {
    Linear layer{.inputs = inputs, .outputs = outputs, .weight = {}, .bias = {}};
    layer.weight = read(name + ".weight", std::array{outputs, inputs});
    if (bias) layer.bias = read(name + ".bias", std::array{outputs});
    return layer;
  }

  /// A tensor that nobody asked for (a query norm, a bias that config.json denies) means that the
  /// checkpoint is of a model other than the one computed.
  void refuse_leftovers(bool tied) const {
    for (const std::string& name : checkpoint_.names()) {
      // Old checkpoints carry the frequencies, and tied ones may carry a copy of the embedding.
      const bool redundant =
          name.ends_with("rotary_emb.inv_freq") || (tied && name == "lm_head.weight");
      require<FormatError>(redundant || taken_.contains(name), folder_, ": tensor ",
                           io::in_quotes(name),
                           " has no place in the model that config.json describes");
    }
  }

 private:
  std::vector<float> read(const std::string& name, std::span<const std::size_t> shape) {
    taken_.insert(name);
    return checkpoint_.read(name, shape);
  }

  std::string folder_;
  Checkpoint checkpoint_;
  std::set<std::string> taken_;
};

}  // namespace

Llama Llama::load(const std::string& folder) {
  const LlamaConfig c = load_llama_config(folder);
  const std::size_t q_width = c.q_heads * c.head_dim;
  const std::size_t kv_width = c.kv_heads * c.head_dim;
  Loader loader{folder};
  LlamaWeights weights;
  weights.embedding = loader.linear("model.embed_tokens", c.hidden, c.vocabulary, false);
  for (std::size_t i = 0; i < c.layers; ++i) {
    const std::string at = "model.layers." + std::to_string(i) + ".";
    LlamaLayer layer;
    layer.attention_norm = loader.norm(at + "input_layernorm", c.hidden);
    layer.q = loader.linear(at + "self_attn.q_proj", c.hidden, q_width, c.qkv_bias);
    layer.k = loader.linear(at + "self_attn.k_proj", c.hidden, kv_width, c.qkv_bias);
    layer.v = loader.linear(at + "self_attn.v_proj", c.hidden, kv_width, c.qkv_bias);
    layer.o = loader.linear(at + "self_attn.o_proj", q_width, c.hidden, c.o_bias);
    layer.mlp_norm = loader.norm(at + "post_attention_layernorm", c.hidden);
    layer.gate = loader.linear(at + "mlp.gate_proj", c.hidden, c.intermediate, c.mlp_bias);
    layer.up = loader.linear(at + "mlp.up_proj", c.hidden, c.intermediate, c.mlp_bias);
    layer.down = loader.linear(at + "mlp.down_proj", c.intermediate, c.hidden, c.mlp_bias);
    weights.layers.push_back(std::move(layer));
  }
  weights.norm = loader.norm("model.norm", c.hidden);
  if (!c.tied_embeddings) weights.head = loader.linear("lm_head", c.hidden, c.vocabulary, false);
  loader.refuse_leftovers(c.tied_embeddings);
  return Llama{c, std::move(weights)};
}

}  // namespace kvpolicy::reference
