// SPDX-License-Identifier: Apache-2.0
//
// What ICU does for the tokenizers: regular expressions, normal forms and classes of characters. No
// other file includes ICU. In a build without it, a tokenizer that needs one of these is refused
// with a sentence that names the package.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace kvpolicy::reference {

/// Whether this program was built with ICU.
[[nodiscard]] bool have_icu() noexcept;

/// [begin, end) in UTF-16 units.
struct TextRange {
  std::size_t begin = 0;
  std::size_t end = 0;
};

/// @pre `text` is UTF-8
[[nodiscard]] std::u16string to_utf16(std::string_view text);
void append_utf8(std::u16string_view text, std::string& out);

enum class NormalForm { nfc, nfd, nfkc, nfkd };
/// @throws ConfigError in a build without ICU
[[nodiscard]] std::string normalized(std::string_view text, NormalForm form);

[[nodiscard]] bool is_white_space(char32_t character);
/// Whether it can be part of a word: a letter, a mark, a decimal digit or a connector such as "_".
[[nodiscard]] bool is_word_character(char32_t character);

/// A regular expression, compiled once. Several threads may match with one pattern.
class Pattern {
 public:
  /// `literal` takes the expression as the text to be found.
  /// @throws FormatError, naming `origin`, for an expression that ICU refuses; ConfigError without
  /// ICU
  Pattern(std::string_view expression, std::string_view origin, bool literal = false);
  ~Pattern();
  Pattern(Pattern&&) noexcept;
  Pattern& operator=(Pattern&&) noexcept;

  /// Calls `take(range, is_match)` for every match and for all text between matches, piece after
  /// piece, in the order of the text, and `piece_done()` after each piece. Each piece is matched by
  /// itself: an expression does not look beyond it. Empty matches are left out.
  /// @throws ConfigError if an expression takes too long or too much memory on this text
  template <class Take, class PieceDone>
  void split(std::u16string_view text, const std::vector<TextRange>& pieces, Take take,
             PieceDone piece_done) const {
    struct Calls {
      Take& take;
      PieceDone& piece_done;
    } calls{take, piece_done};
    each(
        text, pieces, &calls,
        [](void* to, TextRange range, bool is_match) { static_cast<Calls*>(to)->take(range, is_match); },
        [](void* to) { static_cast<Calls*>(to)->piece_done(); });
  }

  /// `text` with each match replaced by `content`, which is taken as it stands.
  [[nodiscard]] std::string replaced(std::string_view text, std::string_view content) const;

 private:
  using TakeCall = void (*)(void*, TextRange, bool);
  using DoneCall = void (*)(void*);
  void each(std::u16string_view text, const std::vector<TextRange>& pieces, void* to, TakeCall take,
            DoneCall piece_done) const;

  struct Compiled;
  std::unique_ptr<Compiled> compiled_;
};

}  // namespace kvpolicy::reference
