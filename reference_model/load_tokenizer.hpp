// SPDX-License-Identifier: Apache-2.0
//
// The tokenizer of a model, whether the model is a folder or a GGUF file.
#pragma once

#include <string>

#include <reference_model/tokenizer/tokenizer.hpp>

namespace kvpolicy::reference {

/// Whether the model at `path`, a Hugging Face folder or a GGUF file, has a tokenizer.
/// @throws FormatError for a GGUF file or a config.json that is damaged
[[nodiscard]] bool has_tokenizer(const std::string& path);

/// `path` is a Hugging Face folder or a GGUF file. @throws as Tokenizer::load and parts_of_gguf
[[nodiscard]] Tokenizer load_tokenizer(const std::string& path);

}  // namespace kvpolicy::reference
