// SPDX-License-Identifier: Apache-2.0
//
// A model of the Llama family out of a GGUF file: its settings, its weights under the names of
// Hugging Face checkpoints, and the metadata from which a tokenizer can be made. Architectures
// `llama` (Llama and Mistral), `qwen2` and `qwen3` are read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <reference_model/config.hpp>
#include <reference_model/gguf.hpp>
#include <reference_model/weight_source.hpp>

namespace kvpolicy::reference {

/// The model's settings. @throws ConfigError for what the reference model cannot compute (another
/// architecture, experts, a setting that it does not know), FormatError for missing or damaged
/// metadata
[[nodiscard]] LlamaConfig gguf_llama_config(const GgufFile& file);

/// What a file says of its tokenizer (the keys `tokenizer.*`), unchecked but for types.
struct GgufTokenizer {
  std::string model;                      ///< "gpt2": byte-level BPE; "llama": SentencePiece.
  std::string pre;                        ///< Name of the pre-tokenizer; empty if not given.
  std::vector<std::string> tokens;        ///< The index is the token's number; bytes, not necessarily UTF-8.
  std::vector<std::string> merges;        ///< "left right", the first merge first; for "gpt2".
  std::vector<double> scores;             ///< One for each token; for "llama".
  std::vector<std::int64_t> token_types;  ///< 1 normal, 2 unknown, 3 control, 4 added, 5 unused, 6 byte.
  std::optional<std::size_t> bos, eos, unknown;
  std::optional<bool> add_bos, add_eos, add_space_prefix;
  std::string chat_template;  ///< Jinja; empty if not given.
};

/// @throws FormatError for a key of another type, a setting that is not known, or without `tokenizer.ggml.model` and tokens
[[nodiscard]] GgufTokenizer gguf_tokenizer(const GgufFile& file);

class GgufWeights : public WeightSource {
 public:
  /// @throws as GgufFile and gguf_llama_config
  explicit GgufWeights(const std::string& path);

  [[nodiscard]] const LlamaConfig& config() const noexcept { return config_; }
  [[nodiscard]] bool contains(std::string_view name) const override { return names_.contains(name); }
  [[nodiscard]] std::vector<std::string> names() const override;
  void check(std::string_view name, std::span<const std::size_t> shape) const override;
  [[nodiscard]] std::vector<float> read(std::string_view name,
                                        std::span<const std::size_t> shape) const override;
  [[nodiscard]] WeightFormat format(std::string_view name) const override;
  [[nodiscard]] WeightMatrix matrix(std::string_view name, std::size_t rows, std::size_t columns,
                                    std::optional<WeightFormat> wanted) const override;

 private:
  [[nodiscard]] const GgufTensor& tensor(std::string_view name) const;
  /// @throws FormatError unless the first number that is not finite comes after the last one
  void require_finite(std::string_view name, std::size_t first_odd, std::size_t elements) const;
  /// Whether the file has the tensor's rows in the order of llama.cpp's rotation.
  [[nodiscard]] bool reordered(std::string_view name) const;

  std::shared_ptr<const GgufFile> file_;
  LlamaConfig config_;
  std::map<std::string, const GgufTensor*, std::less<>> names_;  // Hugging Face's name -> tensor
};

}  // namespace kvpolicy::reference
