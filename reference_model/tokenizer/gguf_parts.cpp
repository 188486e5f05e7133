// SPDX-License-Identifier: Apache-2.0
#include <reference_model/tokenizer/gguf_parts.hpp>

#include <algorithm>
#include <string>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/json_text.hpp>
#include <reference_model/tokenizer/byte_pair_encoding.hpp>
#include <reference_model/tokenizer/pre_tokenizer.hpp>

namespace kvpolicy::reference {
namespace {

constexpr const char* qwen2_pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* llama3_pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

enum TokenType : std::int64_t { unknown_token = 2, control_token = 3, added_token = 4 };

/// Byte-level BPE. The file only names the expression by which text is split.
void read_byte_level(const GgufTokenizer& gguf, TokenizerParts& parts) {
  auto& splits = parts.pre_tokenizer.splits;
  if (gguf.pre == "gpt-2") {
    splits.push_back({std::string{gpt2_pattern}});
  } else if (gguf.pre == "smollm") {
    splits.push_back({"\\p{N}"});
    splits.push_back({std::string{gpt2_pattern}});
  } else if (gguf.pre == "llama-bpe" || gguf.pre == "llama3" || gguf.pre == "llama-v3") {
    splits.push_back({llama3_pattern});
    parts.ignore_merges = true;
  } else if (gguf.pre == "qwen2") {
    splits.push_back({qwen2_pattern});
    parts.normalizer.push_back({.kind = NormalizerStep::Kind::nfc});
  } else {
    fail<FormatError>(parts.origin, ": tokenizer.ggml.pre is ", io::in_quotes(gguf.pre),
                      ", which is not known; known are gpt-2, smollm, llama-bpe, qwen2");
  }
  parts.pre_tokenizer.byte_level = true;
  parts.decoder.byte_level = true;
  // Without merges every letter would be a token of its own.
  const auto is_one_character = [](const std::string& token) {
    return std::ranges::count_if(
               token, [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; }) <= 1;
  };
  for (std::size_t id = 0; gguf.merges.empty() && id < gguf.tokens.size(); ++id) {
    const bool is_found_whole =
        id < gguf.token_types.size() && gguf.token_types[id] != 1 && gguf.token_types[id] != 6;
    require<FormatError>(is_found_whole || is_one_character(gguf.tokens[id]), parts.origin,
                         ": has no tokenizer.ggml.merges, by which letters become the token ",
                         io::in_quotes(gguf.tokens[id]));
  }
  for (std::size_t i = 0; i < gguf.merges.size(); ++i) {
    parts.merges.push_back(split_merge(gguf.merges[i], i, parts.origin));
  }
}

void read_scored(const GgufTokenizer& gguf, TokenizerParts& parts) {
  parts.scores.assign(gguf.scores.begin(), gguf.scores.end());
  require<FormatError>(parts.scores.size() == parts.tokens.size(), parts.origin, ": has ",
                       parts.scores.size(), " tokenizer.ggml.scores for ", parts.tokens.size(), " tokens");
  const bool space_in_front = gguf.add_space_prefix.value_or(true);
  if (space_in_front) {
    parts.normalizer.push_back({NormalizerStep::Kind::prepend, "", false, std::string{space_mark}});
  }
  parts.normalizer.push_back({NormalizerStep::Kind::replace, " ", false, std::string{space_mark}});
  parts.byte_fallback = true;
  parts.fuse_unknown = true;
  if (gguf.unknown) parts.unknown = static_cast<int>(*gguf.unknown);
  parts.decoder = {.byte_fallback = true,
                   .replaced = std::string{space_mark},
                   .replacement = " ",
                   .strip_spaces = space_in_front ? std::size_t{1} : 0,
                   .strip_replaced_only = true};
}

}  // namespace

TokenizerParts parts_of_gguf(const GgufTokenizer& gguf, std::string_view origin) {
  TokenizerParts parts;
  parts.origin = origin;
  parts.tokens = gguf.tokens;
  parts.chat_template = gguf.chat_template;
  const std::size_t count = gguf.tokens.size();
  for (const auto& [name, id] :
       {std::pair{"bos_token", gguf.bos}, {"eos_token", gguf.eos}, {"unk_token", gguf.unknown}}) {
    if (id && *id < count) parts.named_tokens.emplace(name, gguf.tokens[*id]);
  }
  require<FormatError>(gguf.token_types.empty() || gguf.token_types.size() == count, origin, ": has ",
                       gguf.token_types.size(), " tokenizer.ggml.token_type for ", count, " tokens");
  for (std::size_t id = 0; id < gguf.token_types.size(); ++id) {
    const std::int64_t type = gguf.token_types[id];
    if (type != unknown_token && type != control_token && type != added_token) continue;
    parts.added.push_back(
        {.id = static_cast<int>(id), .special = type != added_token, .outside_model = true});
  }
  bool add_bos = false;
  if (gguf.model == "gpt2") {
    read_byte_level(gguf, parts);
    add_bos = parts.ignore_merges;  // Llama 3
  } else if (gguf.model == "llama") {
    read_scored(gguf, parts);
    add_bos = true;
  } else {
    fail<FormatError>(origin, ": tokenizer.ggml.model is ", io::in_quotes(gguf.model),
                      ", which is not implemented; known are gpt2 and llama");
  }
  if (gguf.bos) parts.bos = static_cast<int>(*gguf.bos);
  if (gguf.eos) parts.ends.push_back(static_cast<int>(*gguf.eos));
  if (gguf.add_bos.value_or(add_bos) && parts.bos) parts.prefix.push_back(*parts.bos);
  if (gguf.add_eos.value_or(false) && gguf.eos) parts.suffix.push_back(parts.ends.front());
  return parts;
}

}  // namespace kvpolicy::reference
