// SPDX-License-Identifier: Apache-2.0
//
// A language model with its tokenizer: what the tools run. Bytes are a tokenizer like any other, so
// no tool knows whether a model reads bytes or words.
//
//   const auto model = TextModel::load(folder);
//   const std::vector<int> tokens = model.encode("The capital of France is");
//   const auto cache = make_sequence(model.llama(), plan);
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <reference_model/llama.hpp>
#include <reference_model/repeat_request.hpp>
#include <reference_model/tokenizer/tokenizer.hpp>

namespace kvpolicy::tools {

class TextModel {
 public:
  /// Loads a Hugging Face folder or a GGUF file. Where it has no tokenizer and the model is not one
  /// of 256 tokens, texts are refused, and tokens are shown by number: "12 7 ".
  /// @throws FormatError, ConfigError as Llama::load and Tokenizer::load, and for a tokenizer that
  /// is another model's
  [[nodiscard]] static TextModel load(const std::string& folder, const reference::LoadOptions& options = {});

  /// @throws FormatError for a tokenizer that is another model's
  TextModel(reference::Llama llama, reference::Tokenizer tokenizer);

  [[nodiscard]] const reference::Llama& llama() const noexcept { return llama_; }
  [[nodiscard]] const reference::LlamaConfig& config() const noexcept { return llama_.config(); }
  [[nodiscard]] const reference::Tokenizer& tokenizer() const noexcept { return tokenizer_; }

  /// @throws ConfigError where the model has no tokenizer
  void require_reads_texts() const;

  /// Tokens that only a file beside the tokenizer names may have no row in the model's embedding.
  /// @throws ConfigError for such a token
  void require_rows(std::span<const int> tokens) const;

  /// The tokens of a whole text, with those that the model's texts begin with.
  /// @throws ConfigError where the model has no tokenizer, and as require_rows
  [[nodiscard]] std::vector<int> encode(std::string_view text) const;

  /// The tokens of a text that goes on after `before`. They are those of both texts together where
  /// that leaves the tokens of `before` as they are; otherwise the text is encoded by itself.
  [[nodiscard]] std::vector<int> encode_after(std::string_view before, std::string_view text) const;

  /// The words with which KVzip asks a model to repeat its context. @throws as encode
  [[nodiscard]] reference::RepeatRequest repeat_request() const;

  /// How many tokens of `tokens`, those of `text`, end at or before the byte `at`.
  [[nodiscard]] std::size_t tokens_before(std::span<const int> tokens, std::string_view text,
                                          std::size_t at) const;

  /// The mean over the beginning of a text; 1 for a model that reads bytes.
  [[nodiscard]] double bytes_per_token(std::string_view text) const;

  /// Valid UTF-8, as Tokenizer::decode.
  [[nodiscard]] std::string decode(std::span<const int> tokens) const { return tokenizer_.decode(tokens); }

  /// The tokens that end a text, by the tokenizer or by config.json; sorted.
  [[nodiscard]] const std::vector<int>& ends() const noexcept { return ends_; }
  [[nodiscard]] bool is_end(int token) const;

  /// The tokens whose text contains `text`.
  [[nodiscard]] std::vector<int> tokens_with(std::string_view text) const;

 private:
  reference::Llama llama_;
  reference::Tokenizer tokenizer_;
  std::vector<int> ends_;
};

/// What a token adds to a text that does not begin with it; U+FFFD for parts of characters.
[[nodiscard]] std::string text_of_token(const reference::Tokenizer& tokenizer, int token);

/// Whether a text has reached an end, by its tokens so far.
using Stops = std::function<bool(std::span<const int>)>;

/// True once the text contains `stop`, if it is asked after each token. Empty for an empty `stop`.
[[nodiscard]] Stops stops_at(const reference::Tokenizer& tokenizer, const std::string& stop);

}  // namespace kvpolicy::tools
