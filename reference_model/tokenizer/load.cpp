// SPDX-License-Identifier: Apache-2.0
//
// Finds the tokenizer of a model's folder.
#include <filesystem>
#include <system_error>
#include <utility>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/json_text.hpp>
#include <kvpolicy/io/text_file.hpp>
#include <reference_model/tokenizer/neighbours.hpp>
#include <reference_model/tokenizer/sentencepiece_model.hpp>
#include <reference_model/tokenizer/tokenizer.hpp>
#include <reference_model/tokenizer/tokenizer_json.hpp>

namespace kvpolicy::reference {
namespace {

namespace fs = std::filesystem;

constexpr const char* json_file = "tokenizer.json";
constexpr const char* model_file = "tokenizer.model";

bool reads_bytes(const fs::path& folder) {
  const auto config = read_object(folder / "config.json");
  return config && config->value("vocab_size", io::Json{}) == io::Json(256);
}

}  // namespace

bool Tokenizer::is_in(const fs::path& folder) {
  std::error_code ignored;
  return fs::exists(folder / json_file, ignored) || fs::exists(folder / model_file, ignored) ||
         reads_bytes(folder);
}

Tokenizer Tokenizer::load(const fs::path& folder) {
  const fs::path json = folder / json_file;
  const fs::path model = folder / model_file;
  if (fs::exists(json)) {
    TokenizerParts parts = parse_tokenizer_json(io::read_text_file(json), json.string());
    read_neighbours(folder, parts);
    return Tokenizer{std::move(parts)};
  }
  if (fs::exists(model)) {
    auto [parts, pieces] = read_sentencepiece(model);
    read_neighbours(folder, parts);
    return {std::move(parts), std::move(pieces)};
  }
  require<FormatError>(reads_bytes(folder), folder.string(),
                       ": has no tokenizer: neither tokenizer.json nor tokenizer.model is there, and "
                       "only a model of 256 tokens can do without");
  return bytes();
}

}  // namespace kvpolicy::reference
