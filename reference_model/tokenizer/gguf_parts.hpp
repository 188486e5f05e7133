// SPDX-License-Identifier: Apache-2.0
//
// The tokenizer of a GGUF file: byte-level BPE ("gpt2") and SentencePiece's BPE by scores
// ("llama").
#pragma once

#include <string_view>

#include <reference_model/gguf_model.hpp>
#include <reference_model/tokenizer/parts.hpp>

namespace kvpolicy::reference {

/// `origin` is named in errors.
/// @throws FormatError for another kind of model, a name of a pre-tokenizer that is not known, and
/// lists of different lengths
[[nodiscard]] TokenizerParts parts_of_gguf(const GgufTokenizer& gguf, std::string_view origin);

}  // namespace kvpolicy::reference
