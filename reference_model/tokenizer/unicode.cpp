// SPDX-License-Identifier: Apache-2.0
#include <reference_model/tokenizer/unicode.hpp>

#include <cstdint>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/json_text.hpp>

#ifdef KVPOLICY_WITH_ICU
#include <unicode/normalizer2.h>
#include <unicode/regex.h>
#include <unicode/uchar.h>
#include <unicode/unistr.h>
#include <unicode/utf16.h>
#include <unicode/utf8.h>

namespace kvpolicy::reference {
namespace {

[[nodiscard]] icu::UnicodeString alias_of(std::u16string_view text) {
  require<ShapeError>(text.size() < (std::size_t{1} << 30), "a text of ", text.size(),
                      " UTF-16 units; must be less than 2^30: encode it in parts");
  return {false, text.data(), static_cast<std::int32_t>(text.size())};
}

void require_matched(UErrorCode status) {
  require(U_SUCCESS(status),
          "a tokenizer's pattern takes too long or too much memory on this text: ICU "
          "says ",
          u_errorName(status));
}

}  // namespace

bool have_icu() noexcept { return true; }

std::u16string to_utf16(std::string_view text) {
  std::u16string out;
  out.reserve(text.size());
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(text.data());
  for (std::size_t i = 0; i < text.size();) {
    UChar32 character = 0;
    U8_NEXT_UNSAFE(bytes, i, character);
    if (U_IS_BMP(character)) {
      out.push_back(static_cast<char16_t>(character));
    } else {
      out.push_back(U16_LEAD(character));
      out.push_back(U16_TRAIL(character));
    }
  }
  return out;
}

void append_utf8(std::u16string_view text, std::string& out) {
  for (std::size_t i = 0; i < text.size();) {
    UChar32 character = 0;
    U16_NEXT_UNSAFE(text.data(), i, character);
    char bytes[U8_MAX_LENGTH];
    std::size_t count = 0;
    U8_APPEND_UNSAFE(bytes, count, character);
    out.append(bytes, count);
  }
}

std::string normalized(std::string_view text, NormalForm form) {
  UErrorCode status = U_ZERO_ERROR;
  const icu::Normalizer2* normalizer = form == NormalForm::nfc    ? icu::Normalizer2::getNFCInstance(status)
                                       : form == NormalForm::nfd  ? icu::Normalizer2::getNFDInstance(status)
                                       : form == NormalForm::nfkc ? icu::Normalizer2::getNFKCInstance(status)
                                                                  : icu::Normalizer2::getNFKDInstance(status);
  const std::u16string units = to_utf16(text);
  icu::UnicodeString result;
  if (U_SUCCESS(status)) normalizer->normalize(alias_of(units), result, status);
  require(U_SUCCESS(status), "ICU cannot normalise this text: ", u_errorName(status));
  std::string out;
  append_utf8({result.getBuffer(), static_cast<std::size_t>(result.length())}, out);
  return out;
}

bool is_white_space(char32_t character) { return u_isUWhiteSpace(static_cast<UChar32>(character)) != 0; }

bool is_word_character(char32_t character) {
  const auto code = static_cast<UChar32>(character);
  return u_isUAlphabetic(code) != 0 || u_charType(code) == U_DECIMAL_DIGIT_NUMBER ||
         u_charType(code) == U_CONNECTOR_PUNCTUATION || (U_GET_GC_MASK(code) & U_GC_M_MASK) != 0 ||
         u_hasBinaryProperty(code, UCHAR_JOIN_CONTROL) != 0;
}

struct Pattern::Compiled {
  std::unique_ptr<icu::RegexPattern> pattern;

  [[nodiscard]] std::unique_ptr<icu::RegexMatcher> matcher() const {
    // A hostile file can hold an expression that takes exponential time; a unit of the limit is
    // about a millisecond.
    constexpr std::int32_t longest_match = 1000;
    UErrorCode status = U_ZERO_ERROR;
    std::unique_ptr<icu::RegexMatcher> matcher{pattern->matcher(status)};
    if (U_SUCCESS(status)) matcher->setTimeLimit(longest_match, status);
    require_matched(status);
    return matcher;
  }
};

Pattern::Pattern(std::string_view expression, std::string_view origin, bool literal)
    : compiled_{std::make_unique<Compiled>()} {
  UErrorCode status = U_ZERO_ERROR;
  UParseError where;
  const std::u16string units = to_utf16(expression);
  const std::uint32_t flags = literal ? UREGEX_LITERAL : 0;
  compiled_->pattern.reset(icu::RegexPattern::compile(alias_of(units), flags, where, status));
  require<FormatError>(U_SUCCESS(status), origin, ": the regular expression ", io::in_quotes(expression),
                       " is refused by ICU: ", u_errorName(status));
}

void Pattern::each(std::u16string_view text, const std::vector<TextRange>& pieces, void* to, TakeCall take,
                   DoneCall piece_done) const {
  const auto matcher = compiled_->matcher();
  const icu::UnicodeString alias = alias_of(text);
  matcher->reset(alias);
  UErrorCode status = U_ZERO_ERROR;
  for (const TextRange piece : pieces) {
    matcher->region(static_cast<std::int64_t>(piece.begin), static_cast<std::int64_t>(piece.end), status);
    std::size_t done = piece.begin;
    while (matcher->find(status) != 0 && U_SUCCESS(status)) {
      const auto begin = static_cast<std::size_t>(matcher->start64(status));
      const auto end = static_cast<std::size_t>(matcher->end64(status));
      if (begin == end) continue;
      if (done < begin) take(to, {done, begin}, false);
      take(to, {begin, end}, true);
      done = end;
    }
    require_matched(status);
    if (done < piece.end) take(to, {done, piece.end}, false);
    piece_done(to);
  }
}

std::string Pattern::replaced(std::string_view text, std::string_view content) const {
  const std::u16string units = to_utf16(text);
  std::string out;
  split(
      units, {{0, units.size()}},
      [&](TextRange range, bool is_match) {
        if (is_match) {
          out.append(content);
        } else {
          append_utf8(std::u16string_view{units}.substr(range.begin, range.end - range.begin), out);
        }
      },
      [] {});
  return out;
}

#else
namespace kvpolicy::reference {
namespace {

[[noreturn]] void refuse_without_icu() {
  fail<ConfigError>(
      "this tokenizer needs ICU, and this program was built without it; install libicu-dev "
      "(Debian, "
      "Ubuntu) and build again");
}

}  // namespace

bool have_icu() noexcept { return false; }
std::u16string to_utf16(std::string_view) { refuse_without_icu(); }
void append_utf8(std::u16string_view, std::string&) { refuse_without_icu(); }
std::string normalized(std::string_view, NormalForm) { refuse_without_icu(); }
bool is_white_space(char32_t) { refuse_without_icu(); }
bool is_word_character(char32_t) { refuse_without_icu(); }
struct Pattern::Compiled {};
Pattern::Pattern(std::string_view, std::string_view, bool) { refuse_without_icu(); }
void Pattern::each(std::u16string_view, const std::vector<TextRange>&, void*, TakeCall, DoneCall) const {
  refuse_without_icu();
}
std::string Pattern::replaced(std::string_view, std::string_view) const { refuse_without_icu(); }
#endif

Pattern::~Pattern() = default;
Pattern::Pattern(Pattern&&) noexcept = default;
Pattern& Pattern::operator=(Pattern&&) noexcept = default;

}  // namespace kvpolicy::reference
