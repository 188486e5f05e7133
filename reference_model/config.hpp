// SPDX-License-Identifier: Apache-2.0
//
// What config.json of a Hugging Face folder says about a model of the Llama family:
// LlamaForCausalLM, MistralForCausalLM (sliding windows) and Qwen2ForCausalLM (biases of Q, K, V).
// Reads both spellings of the rotary settings, that of transformers 4 and of transformers 5.
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
  std::size_t max_positions = 0;  ///< As trained; nothing here depends on it.
  float norm_eps = 1e-6F;
  RotaryConfig rotary;
  bool tied_embeddings = false;  ///< A loaded model's is false if the file's output layer differs.
  bool qkv_bias = false;
  bool o_bias = false;
  bool mlp_bias = false;
  /// Per layer, the latest positions that a query sees, itself included; 0 for all of them. The
  /// model leaves this to the cache: `plan.limit_window(layer, window)`.
  std::vector<std::size_t> windows;
  std::vector<int> eos_tokens;

  /// What a KV cache needs to know.
  [[nodiscard]] ModelShape shape() const {
    return {.layers = layers, .q_heads = q_heads, .kv_heads = kv_heads, .head_dim = head_dim};
  }

  /// @throws ConfigError for a size that is zero or absurd, heads that do not divide, an odd
  /// head_dim or rotary settings that cannot work.
  void validate() const;
};

/// Reads the text of a config.json; `origin` is named in errors.
/// @throws FormatError if it is not JSON, ConfigError for what this model cannot compute: another
/// architecture, activation or rotary scaling, quantised weights, or a missing or impossible value.
[[nodiscard]] LlamaConfig parse_llama_config(std::string_view text, std::string_view origin);

/// Reads `folder`/config.json. @throws as above.
[[nodiscard]] LlamaConfig load_llama_config(const std::string& folder);

}  // namespace kvpolicy::reference
