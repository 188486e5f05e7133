// SPDX-License-Identifier: Apache-2.0
//
// The settings that config.json of a Hugging Face folder gives for a model of the Llama family:
// LlamaForCausalLM, MistralForCausalLM (sliding windows), MinistralForCausalLM (in some layers), Qwen2ForCausalLM (biases of
// Q, K, V) and Qwen3ForCausalLM (norms of Q and K).
// The rotary settings are read in the spelling of transformers 4 and in that of transformers 5.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/core/rotary.hpp>

namespace kvpolicy::reference {

struct LlamaConfig {
  std::size_t vocabulary = 0;
  std::size_t hidden = 0;
  std::size_t intermediate = 0;
  std::size_t layers = 0;
  std::size_t q_heads = 0;
  std::size_t kv_heads = 0;
  std::size_t head_dim = 0;
  std::size_t max_positions = 0;  ///< As trained; it is not enforced.
  float norm_eps = 1e-6F;
  RotaryConfig rotary;
  bool tied_embeddings = false;  ///< False for a loaded model if the file's output layer differs
                                 ///< from the embedding.
  bool qkv_bias = false;
  bool o_bias = false;
  bool mlp_bias = false;
  bool qk_norm = false;  ///< Each head's query and key is normalised before it is rotated.
  /// For each layer, how many of the latest positions a query sees, its own included; 0 for all of
  /// them. The model leaves this to the cache: `plan.limit_window(layer, window)`.
  std::vector<std::size_t> windows;
  std::vector<int> eos_tokens;

  static constexpr std::size_t most_layers = 4096;

  /// The shape that plans and caches need.
  [[nodiscard]] ModelShape shape() const {
    return {.layers = layers, .q_heads = q_heads, .kv_heads = kv_heads, .head_dim = head_dim};
  }

  /// @throws ConfigError for a size that is zero or absurdly large, KV heads that do not divide the
  /// query heads, an odd head_dim or impossible rotary settings
  void validate() const;
};

/// Reads the text of a config.json; `origin` is named in errors.
/// @throws FormatError if it is not JSON, ConfigError for what the reference model cannot compute
/// (another architecture, activation or rotary scaling, quantised weights) and for missing or
/// impossible values
[[nodiscard]] LlamaConfig parse_llama_config(std::string_view text, std::string_view origin);

/// Reads `path`/config.json, or the metadata of `path` if it is a GGUF file.
/// @throws as above, and for a GGUF file as gguf_llama_config
[[nodiscard]] LlamaConfig load_llama_config(const std::string& path);

}  // namespace kvpolicy::reference
