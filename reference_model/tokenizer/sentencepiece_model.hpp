// SPDX-License-Identifier: Apache-2.0
//
// Reads tokenizer.model with the SentencePiece library: its BPE and unigram models.
#pragma once

#include <filesystem>
#include <memory>
#include <utility>

#include <reference_model/tokenizer/parts.hpp>
#include <reference_model/tokenizer/token_model.hpp>

namespace kvpolicy::reference {

/// Whether this program was built with SentencePiece.
[[nodiscard]] bool have_sentencepiece() noexcept;

/// What the file says of its tokens, and a model that encodes with the library.
/// @throws FormatError for a file that the library refuses; ConfigError in a build without the
/// library
[[nodiscard]] std::pair<TokenizerParts, std::unique_ptr<const TokenModel>> read_sentencepiece(
    const std::filesystem::path& path);

}  // namespace kvpolicy::reference
