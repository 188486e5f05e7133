// SPDX-License-Identifier: Apache-2.0
#include "text_model.hpp"

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include <fmt/format.h>

#include <kvpolicy/core/error.hpp>
#include <reference_model/load_tokenizer.hpp>

#include "files.hpp"

namespace kvpolicy::tools {
namespace {

// How much of a text decides on the tokens of what follows it.
constexpr std::size_t context_bytes = 64;

// Takes the part of a tokenizer where the model has none.
class NoTexts final : public reference::TokenModel {
 public:
  NoTexts(std::string folder, std::size_t vocabulary) : folder_{std::move(folder)}, vocabulary_{vocabulary} {}

  void encode(std::string_view, bool, std::vector<int>&) const override {
    throw ConfigError{message(folder_, ": the model has a vocabulary of ", vocabulary_,
                              " and no tokenizer (tokenizer.json or tokenizer.model), so it cannot "
                              "read a text: give a prompt as --tokens N,N,...")};
  }

 private:
  std::string folder_;
  std::size_t vocabulary_;
};

reference::Tokenizer tokenizer_of(const std::string& folder, std::size_t vocabulary) {
  if (reference::has_tokenizer(folder)) return reference::load_tokenizer(folder);
  reference::TokenizerParts parts;
  parts.origin = folder;
  for (std::size_t token = 0; token < vocabulary; ++token) {
    parts.tokens.push_back(fmt::format("{} ", token));
  }
  return {std::move(parts), std::make_unique<NoTexts>(folder, vocabulary)};
}

// The end of a text, from the beginning of a character on.
std::string_view end_of(std::string_view text) {
  std::size_t first = text.size() - std::min(text.size(), context_bytes);
  while (first < text.size() && (static_cast<unsigned char>(text[first]) & 0xC0U) == 0x80U) ++first;
  return text.substr(first);
}

}  // namespace

reference::RepeatRequest TextModel::repeat_request() const {
  require_reads_texts();
  return reference::repeat_request([&](std::string_view words) {
    return tokenizer_.encode(words, {.add_special = false, .parse_special = false});
  });
}

TextModel TextModel::load(const std::string& folder, const reference::LoadOptions& options) {
  require_model_folder(folder);
  auto llama = reference::Llama::load(folder, options);
  auto tokenizer = tokenizer_of(folder, llama.config().vocabulary);
  return {std::move(llama), std::move(tokenizer)};
}

TextModel::TextModel(reference::Llama llama, reference::Tokenizer tokenizer)
    : llama_{std::move(llama)}, tokenizer_{std::move(tokenizer)}, ends_{llama_.config().eos_tokens} {
  tokenizer_.require_fits(llama_.config().vocabulary);
  ends_.insert(ends_.end(), tokenizer_.ends().begin(), tokenizer_.ends().end());
  std::ranges::sort(ends_);
  ends_.erase(std::unique(ends_.begin(), ends_.end()), ends_.end());
}

void TextModel::require_reads_texts() const { static_cast<void>(encode(" ")); }

void TextModel::require_rows(std::span<const int> tokens) const {
  const auto rows = static_cast<int>(config().vocabulary);
  const auto missing = std::ranges::find_if(tokens, [&](int token) { return token >= rows; });
  if (missing == tokens.end()) return;
  throw ConfigError{message("the text has the token ", tokenizer_.token_text(*missing),
                            ", which is named beside the tokenizer, but the model has no row for it: it has ",
                            rows, " tokens")};
}

std::vector<int> TextModel::encode(std::string_view text) const {
  std::vector<int> tokens = tokenizer_.encode(text);
  require_rows(tokens);
  return tokens;
}

std::vector<int> TextModel::encode_after(std::string_view before, std::string_view text) const {
  constexpr reference::EncodeOptions plain{.add_special = false, .parse_special = false};
  std::string both{end_of(before)};
  const std::vector<int> first = tokenizer_.encode(both, plain);
  both += text;
  const std::vector<int> tokens = tokenizer_.encode(both, plain);
  if (!std::ranges::equal(first, std::span{tokens}.first(std::min(first.size(), tokens.size())))) {
    return tokenizer_.encode(text, plain);
  }
  return {tokens.begin() + static_cast<std::ptrdiff_t>(first.size()), tokens.end()};
}

std::size_t TextModel::tokens_before(std::span<const int> tokens, std::string_view text,
                                     std::size_t at) const {
  const std::vector<int> front = encode(text.substr(0, at));
  return static_cast<std::size_t>(std::ranges::mismatch(front, tokens).in1 - front.begin());
}

double TextModel::bytes_per_token(std::string_view text) const {
  constexpr std::size_t sample = 1 << 15;
  const std::string_view some = text.substr(0, sample);
  const std::size_t tokens = encode_after({}, some).size();
  return static_cast<double>(some.size()) / static_cast<double>(std::max<std::size_t>(tokens, 1));
}

bool TextModel::is_end(int token) const { return std::ranges::binary_search(ends_, token); }

std::vector<int> TextModel::tokens_with(std::string_view text) const {
  std::vector<int> found;
  for (std::size_t i = 0; i < tokenizer_.vocabulary(); ++i) {
    const int token = static_cast<int>(i);
    if (text_of_token(tokenizer_, token).find(text) != std::string::npos) found.push_back(token);
  }
  return found;
}

std::string text_of_token(const reference::Tokenizer& tokenizer, int token) {
  // The first token of a text may lose its space.
  const std::array twice{token, token};
  return tokenizer.decode(twice).substr(tokenizer.decode(std::span{twice}.first(1)).size());
}

Stops stops_at(const reference::Tokenizer& tokenizer, const std::string& stop) {
  if (stop.empty()) return {};
  return [tokenizer, stop](std::span<const int> tokens) {
    // The latest token completes the stop text, so this many tokens hold all of it, and a beginning
    // of their text that may be broken.
    const std::size_t held = stop.size() + 4;
    const std::string text = tokenizer.decode(tokens.last(std::min(tokens.size(), held)));
    return text.find(stop) != std::string::npos;
  };
}

}  // namespace kvpolicy::tools
