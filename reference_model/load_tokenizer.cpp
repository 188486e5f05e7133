// SPDX-License-Identifier: Apache-2.0
#include <reference_model/load_tokenizer.hpp>

#include <reference_model/gguf_model.hpp>
#include <reference_model/tokenizer/gguf_parts.hpp>

namespace kvpolicy::reference {

bool has_tokenizer(const std::string& path) {
  if (!is_gguf(path)) return Tokenizer::is_in(path);
  return GgufFile{path}.header().metadata.contains("tokenizer.ggml.model");
}

Tokenizer load_tokenizer(const std::string& path) {
  if (!is_gguf(path)) return Tokenizer::load(path);
  return Tokenizer{parts_of_gguf(gguf_tokenizer(GgufFile{path}), path)};
}

}  // namespace kvpolicy::reference
