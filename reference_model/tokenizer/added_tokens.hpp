// SPDX-License-Identifier: Apache-2.0
//
// Finds added tokens in a text: special ones, such as the end of a turn, and others that a
// tokenizer was given besides its model. At each position the longest counts.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <reference_model/tokenizer/parts.hpp>

namespace kvpolicy::reference {

/// A part of a text: an added token, or text between such tokens.
struct TextPart {
  std::string_view text;
  std::optional<int> token;
};

class AddedTokens {
 public:
  /// Adds a token that is spelled so; `spelling` must not be empty.
  void add(const AddedToken& token, std::string spelling);

  /// Cuts `text`, which must be UTF-8, into its parts. `special_counts(begin)` says whether a
  /// special token that begins at this byte is one; otherwise it is text. Where an added token is
  /// not taken, because it is text or a part of a word, no shorter one is looked for in it,
  /// as in `tokenizers`.
  template <class SpecialCounts>
  [[nodiscard]] std::vector<TextPart> split(std::string_view text, SpecialCounts special_counts) const {
    std::vector<TextPart> parts;
    std::size_t done = 0;
    for (std::size_t at = 0; at < text.size();) {
      const Entry* found = longest_at(text.substr(at));
      if (found == nullptr) {
        ++at;
        continue;
      }
      std::size_t begin = at;
      std::size_t end = at + found->spelling.size();
      at = end;
      if (found->token.special && !special_counts(begin)) continue;
      if (found->token.single_word && touches_word(text, begin, end)) continue;
      if (found->token.lstrip) begin = without_spaces_before(text, done, begin);
      if (found->token.rstrip) end = without_spaces_after(text, end);
      if (done < begin) parts.push_back({text.substr(done, begin - done), {}});
      parts.push_back({text.substr(begin, end - begin), found->token.id});
      at = done = end;
    }
    if (done < text.size()) parts.push_back({text.substr(done), {}});
    return parts;
  }

  /// Whether `text` has the spelling of a special token in it.
  [[nodiscard]] bool special_in(std::string_view text) const;

 private:
  struct Entry {
    AddedToken token;
    std::string spelling;
  };

  [[nodiscard]] const Entry* longest_at(std::string_view text) const noexcept {
    for (const Entry& entry : by_first_byte_[static_cast<unsigned char>(text.front())]) {
      if (text.starts_with(entry.spelling)) return &entry;
    }
    return nullptr;
  }
  [[nodiscard]] static bool touches_word(std::string_view text, std::size_t begin, std::size_t end);
  [[nodiscard]] static std::size_t without_spaces_before(std::string_view text, std::size_t done,
                                                         std::size_t begin);
  [[nodiscard]] static std::size_t without_spaces_after(std::string_view text, std::size_t end);

  std::array<std::vector<Entry>, 256> by_first_byte_;  // each list from the longest to the shortest
};

}  // namespace kvpolicy::reference
