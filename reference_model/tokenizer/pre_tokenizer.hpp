// SPDX-License-Identifier: Apache-2.0
//
// Cuts a text into the pieces inside which tokens are merged. A token never reaches beyond its
// piece.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <reference_model/tokenizer/parts.hpp>
#include <reference_model/tokenizer/unicode.hpp>

namespace kvpolicy::reference {

class PreTokenizer {
 public:
  /// @throws FormatError, naming `origin`, for a pattern that cannot be compiled
  PreTokenizer(const PreTokenizerParts& parts, std::string_view origin);

  /// Calls `take(piece)` for each piece of `text`, spelled in the alphabet of the model's tokens.
  /// `at_start` says whether the whole text begins here.
  template <class Take>
  void split(std::string_view text, bool at_start, Take take) const {
    const std::string changed = with_spaces(text, at_start);
    std::string piece;
    if (steps_.empty()) {
      spell(changed, piece);
      if (!piece.empty()) take(std::string_view{piece});
      return;
    }
    const std::u16string units = to_utf16(changed);
    std::string bytes;
    for (const TextRange range : ranges(units)) {
      bytes.clear();
      append_utf8(std::u16string_view{units}.substr(range.begin, range.end - range.begin), bytes);
      piece.clear();
      spell(bytes, piece);
      take(std::string_view{piece});
    }
  }

 private:
  struct Step {
    Pattern pattern;
    SplitBehaviour behaviour;
    bool invert;
  };

  [[nodiscard]] std::string with_spaces(std::string_view text, bool at_start) const;
  [[nodiscard]] std::vector<TextRange> ranges(std::u16string_view text) const;
  void spell(std::string_view text, std::string& piece) const;

  PrependSpace prepend_;
  bool metaspace_;
  bool byte_level_;
  std::vector<Step> steps_;
};

/// The expression of GPT-2, which byte-level pre-tokenizers use unless they name another.
inline constexpr std::string_view gpt2_pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

/// The character that stands for a space in SentencePiece's tokens, U+2581.
inline constexpr std::string_view space_mark = "\xE2\x96\x81";

/// `text` with each `from` replaced by `to`.
[[nodiscard]] std::string with_replaced(std::string_view text, std::string_view from, std::string_view to);

}  // namespace kvpolicy::reference
