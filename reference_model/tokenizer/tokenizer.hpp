// SPDX-License-Identifier: Apache-2.0
//
// Text to tokens and back, for the models that the reference Llama runs:
//
//   const auto tokenizer = reference::Tokenizer::load(folder);
//   const std::vector<int> tokens = tokenizer.encode("The capital of France is");
//   reference::TextStream text{tokenizer};
//   for (int token : answer) std::cout << text.next(token);
//
// The tokens are those of Hugging Face's `tokenizers` and of SentencePiece. docs/tokenizers.md
// lists what is supported; anything else that a file asks for is refused by name. Text is UTF-8.
// Where it is broken, U+FFFD stands for it, as after Python's decode(errors="replace"); only byte
// models read the bytes themselves.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <reference_model/byte_range.hpp>
#include <reference_model/tokenizer/parts.hpp>
#include <reference_model/tokenizer/token_model.hpp>

namespace kvpolicy::reference {

struct EncodeOptions {
  bool add_special = true;    ///< Adds what the model's texts begin and end with, usually a bos token.
  bool parse_special = true;  ///< "<|im_end|>" in the text is the special token; otherwise it is text.
  /// Parts of the text in which special tokens are never parsed, for example what a user typed into
  /// a chat.
  std::span<const ByteRange> literal = {};
};

struct DecodeOptions {
  bool skip_special = true;  ///< Special tokens have no text; otherwise they are spelled out.
};

/// A value that is cheap to copy: copies share one immutable tokenizer. All members may be called
/// from several threads at once.
class Tokenizer {
 public:
  /// Reads the tokenizer of a model's folder: tokenizer.json or, without it, tokenizer.model; bos,
  /// ends and chat template also come from tokenizer_config.json, generation_config.json,
  /// config.json and chat_template.jinja. Without either, a model whose config.json says vocab_size
  /// 256 reads bytes.
  /// @throws FormatError for a file that is missing, damaged or inconsistent, and for a kind of
  /// tokenizer that is not implemented; ConfigError if this program was built without a library
  /// that it needs
  [[nodiscard]] static Tokenizer load(const std::filesystem::path& folder);

  /// Whether the folder has one of the three: a file that `load` reads, or a config.json by which
  /// the model reads bytes. @throws FormatError for a config.json that is damaged
  [[nodiscard]] static bool is_in(const std::filesystem::path& folder);

  /// Byte-pair encoding from its parts, for example a GGUF file's.
  /// @throws FormatError for parts that contradict each other
  explicit Tokenizer(TokenizerParts parts);

  /// Any other model that turns text into the tokens that `parts` describes.
  Tokenizer(TokenizerParts parts, std::unique_ptr<const TokenModel> model);

  /// 256 tokens: the bytes.
  [[nodiscard]] static Tokenizer bytes();

  /// @throws ConfigError if a pattern takes too long on this text; ShapeError for 2^30 bytes or
  /// more, or if there are literal ranges that are not inside the text or the text is not UTF-8
  [[nodiscard]] std::vector<int> encode(std::string_view text, const EncodeOptions& options = {}) const;

  /// Valid UTF-8; bytes that are not become U+FFFD. A row of a model's embedding that has no token (`most_padding`) can
  /// be sampled like any other and says nothing. @throws ShapeError for a token outside both
  [[nodiscard]] std::string decode(std::span<const int> tokens, const DecodeOptions& options = {}) const;

  /// How many tokens there are; their numbers are 0 to vocabulary() - 1.
  [[nodiscard]] std::size_t vocabulary() const noexcept;
  /// How the file spells a token. @throws ShapeError for a token outside the vocabulary
  [[nodiscard]] const std::string& token_text(int token) const;
  /// The token that the file spells so.
  [[nodiscard]] std::optional<int> find(std::string_view token_text) const;
  [[nodiscard]] bool is_special(int token) const;

  [[nodiscard]] std::optional<int> bos() const noexcept;
  /// All tokens that end a text or a turn, sorted.
  [[nodiscard]] std::span<const int> ends() const noexcept;
  [[nodiscard]] bool is_end(int token) const noexcept;
  /// The Jinja text of the folder; empty if there is none. chat_template.hpp renders it.
  [[nodiscard]] const std::string& chat_template() const noexcept;
  /// The spellings of special tokens by the names that templates have for them, for example "bos_token".
  [[nodiscard]] const std::map<std::string, std::string>& named_tokens() const noexcept;

  /// Checks that this tokenizer can belong to a model with so many rows in its embedding. Models
  /// round that number up, so up to `most_padding` rows may be without a token.
  /// @throws FormatError with both numbers
  void require_fits(std::size_t model_vocabulary) const;
  static constexpr std::size_t most_padding = 1024;

 private:
  friend class TextStream;
  struct State;
  std::shared_ptr<const State> state_;
};

/// Turns tokens into text one by one. A character that is spread over several tokens comes out with
/// the last of them.
class TextStream {
 public:
  explicit TextStream(Tokenizer tokenizer, const DecodeOptions& options = {});

  /// The text that this token completes; may be empty. @throws ShapeError as Tokenizer::decode
  [[nodiscard]] std::string next(int token);
  /// U+FFFD if the tokens ended inside a character, else nothing. After it the stream is as new.
  [[nodiscard]] std::string finish();

 private:
  Tokenizer tokenizer_;
  DecodeOptions options_;
  std::string pending_;  // the beginning of a character
  bool first_ = true;
  std::size_t spaces_to_strip_;
};

}  // namespace kvpolicy::reference
