// SPDX-License-Identifier: Apache-2.0
//
// What the files beside a tokenizer's own say of it: tokenizer_config.json, special_tokens_map.json, added_tokens.json,
// generation_config.json, config.json and chat_template.jinja.
#pragma once

#include <filesystem>
#include <optional>

#include <kvpolicy/io/json_text.hpp>
#include <reference_model/tokenizer/parts.hpp>

namespace kvpolicy::reference {

/// A JSON file of one object; nothing if it is not there. @throws FormatError for a damaged file or another value
[[nodiscard]] std::optional<io::Json> read_object(const std::filesystem::path& path);

/// Adds what they say to `parts`. A token that they name is found in texts whole, and one that the tokenizer's own file lacks follows its
/// last one, as in transformers; a model may be without a row for it.
/// @throws FormatError for damaged files, and for a setting that contradicts the tokenizer's own file
void read_neighbours(const std::filesystem::path& folder, TokenizerParts& parts);

}  // namespace kvpolicy::reference
