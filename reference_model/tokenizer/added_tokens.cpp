// SPDX-License-Identifier: Apache-2.0
#include <reference_model/tokenizer/added_tokens.hpp>

#include <algorithm>
#include <utility>

#include <reference_model/tokenizer/unicode.hpp>
#include <reference_model/utf8.hpp>

namespace kvpolicy::reference {
void AddedTokens::add(const AddedToken& token, std::string spelling) {
  auto& list = by_first_byte_[static_cast<unsigned char>(spelling.front())];
  const auto shorter = std::find_if(
      list.begin(), list.end(), [&](const Entry& entry) { return entry.spelling.size() < spelling.size(); });
  list.insert(shorter, {token, std::move(spelling)});
}

bool AddedTokens::special_in(std::string_view text) const {
  for (std::size_t at = 0; at < text.size(); ++at) {
    for (const Entry& entry : by_first_byte_[static_cast<unsigned char>(text[at])]) {
      if (entry.token.special && text.substr(at).starts_with(entry.spelling)) return true;
    }
  }
  return false;
}

bool AddedTokens::touches_word(std::string_view text, std::size_t begin, std::size_t end) {
  return (begin > 0 && is_word_character(first_code(text.substr(last_character(text.substr(0, begin)))))) ||
         (end < text.size() && is_word_character(first_code(text.substr(end))));
}

std::size_t AddedTokens::without_spaces_before(std::string_view text, std::size_t done, std::size_t begin) {
  while (begin > done) {
    const std::size_t last = last_character(text.substr(0, begin));
    if (last < done || !is_white_space(first_code(text.substr(last)))) break;
    begin = last;
  }
  return begin;
}

std::size_t AddedTokens::without_spaces_after(std::string_view text, std::size_t end) {
  while (end < text.size() && is_white_space(first_code(text.substr(end)))) {
    end += first_character(text.substr(end)).bytes;
  }
  return end;
}

}  // namespace kvpolicy::reference
