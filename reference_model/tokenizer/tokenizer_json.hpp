// SPDX-License-Identifier: Apache-2.0
//
// Reads tokenizer.json, the format of Hugging Face's `tokenizers`: byte-pair encoding, with the
// normalizers, pre-tokenizers, post-processors and decoders of Llama, Mistral, Qwen2 and SmolLM2.
#pragma once

#include <string_view>

#include <reference_model/tokenizer/parts.hpp>

namespace kvpolicy::reference {

/// `origin` is named in errors. Leaves bos, ends and the chat template empty: they are not in this
/// file.
/// @throws FormatError for text that is not such JSON, for unknown keys, and for every kind of
/// normalizer, pre-tokenizer, post-processor, decoder or model that is not implemented, naming
/// those that are
[[nodiscard]] TokenizerParts parse_tokenizer_json(std::string_view text, std::string_view origin);

}  // namespace kvpolicy::reference
