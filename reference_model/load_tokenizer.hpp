// SPDX-License-Identifier: Apache-2.0
//
// The tokenizer of a model, whatever it comes as.
#pragma once

#include <string>

#include <reference_model/tokenizer/tokenizer.hpp>

namespace kvpolicy::reference {

/// `path` is a Hugging Face folder or a GGUF file. @throws as Tokenizer::load and parts_of_gguf
[[nodiscard]] Tokenizer load_tokenizer(const std::string& path);

}  // namespace kvpolicy::reference
