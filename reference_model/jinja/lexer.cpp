// SPDX-License-Identifier: Apache-2.0
//
// A template's text in tokens. White space around tags follows Jinja's manual: a minus strips all of it, trim_blocks takes the line
// break after a tag that does not print, lstrip_blocks the spaces before one that begins its line, and a plus keeps both.
#include <algorithm>
#include <array>
#include <utility>

#include <kvpolicy/core/error.hpp>
#include <reference_model/jinja/syntax.hpp>
#include <reference_model/utf8.hpp>

namespace kvpolicy::reference::jinja {
namespace {

constexpr bool is_digit(char c) { return c >= '0' && c <= '9'; }
constexpr bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
         static_cast<unsigned char>(c) >= 0x80;
}
constexpr bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

void append_character(std::string& out, char32_t code) {
  const auto byte = [&](char32_t bits) { out += static_cast<char>(static_cast<unsigned char>(bits)); };
  if (code < 0x80) return byte(code);
  if (code < 0x800) {
    byte(0xC0U | code >> 6U);
  } else {
    if (code < 0x10000) {
      byte(0xE0U | code >> 12U);
    } else {
      byte(0xF0U | code >> 18U);
      byte(0x80U | (code >> 12U & 0x3FU));
    }
    byte(0x80U | (code >> 6U & 0x3FU));
  }
  byte(0x80U | (code & 0x3FU));
}

class Lexer {
 public:
  explicit Lexer(std::string source) : source_{std::move(source)} {}

  std::vector<Token> run() {
    while (at_ < source_.size()) data();
    add(TokenKind::end, "");
    return std::move(tokens_);
  }

 private:
  template <class... Parts>
  [[noreturn]] void fail_here(const Parts&... parts) const {
    fail<FormatError>("the chat template, line ", line_, ": ", parts...);
  }

  [[nodiscard]] std::string_view rest() const { return std::string_view{source_}.substr(at_); }
  void add(TokenKind kind, std::string text) { tokens_.push_back({kind, line_, std::move(text)}); }
  void move(std::size_t bytes) {
    line_ += static_cast<std::size_t>(std::ranges::count(rest().substr(0, bytes), '\n'));
    at_ += bytes;
  }
  void skip_spaces() {
    while (at_ < source_.size() && is_space(source_[at_])) move(1);
  }

  /// Text up to the next tag, and the tag.
  void data() {
    std::size_t tag = at_;
    while (true) {
      tag = source_.find('{', tag);
      if (tag == source_.npos || tag + 1 >= source_.size()) {
        tag = source_.size();
        break;
      }
      const char next = source_[tag + 1];
      if (next == '{' || next == '%' || next == '#') break;
      ++tag;
    }
    const bool has_tag = tag < source_.size();
    const char sign = has_tag && tag + 2 < source_.size() ? source_[tag + 2] : ' ';
    std::string_view text = std::string_view{source_}.substr(at_, tag - at_);
    if (has_tag && sign == '-') {
      text = text.substr(0, stripped(text, {}, Side::right).end);
    } else if (has_tag && sign != '+' && source_[tag + 1] != '{') {
      const std::size_t line_begin = text.rfind('\n') + 1;  // 0 if there is no line break
      const std::string_view last = text.substr(line_begin);
      const bool begins_line = line_begin > 0 || at_ == 0 || source_[at_ - 1] == '\n';
      if (begins_line && std::ranges::all_of(last, is_space)) text = text.substr(0, line_begin);
    }
    if (!text.empty()) add(TokenKind::data, std::string{text});
    move(tag - at_);
    if (!has_tag) return;
    const char kind = source_[at_ + 1];
    move(2);
    if (sign == '-' || sign == '+') move(1);
    if (kind == '#') return comment();
    if (kind == '%' && raw()) return;
    add(kind == '{' ? TokenKind::print_begin : TokenKind::block_begin, "");
    code(kind == '{' ? '}' : '%');
  }

  /// Past the end of a tag with this inner character, whose sign decides about the white space that follows.
  bool end_of_tag(char inner) {
    const std::string_view text = rest();
    const bool sign = text.starts_with('-') || (text.starts_with('+') && inner != '}');
    if (text.size() < (sign ? 3U : 2U) || text[sign ? 1 : 0] != inner || text[sign ? 2 : 1] != '}')
      return false;
    const bool strips = text.starts_with('-');
    move(sign ? 3 : 2);
    if (strips) {
      while (at_ < source_.size()) {
        const std::string_view after = rest();
        if (!is_python_space(first_code(after))) break;
        move(first_character(after).bytes);
      }
    } else if (!sign && inner != '}' && rest().starts_with('\n')) {
      move(1);
    }
    return true;
  }

  void comment() {
    while (at_ < source_.size()) {
      if (end_of_tag('#')) return;
      move(1);
    }
    fail_here("a comment does not end");
  }

  /// {% raw %}, after its "{%".
  bool raw() {
    std::size_t at = at_;
    const auto word = [&](std::string_view name) {
      while (at < source_.size() && is_space(source_[at])) ++at;
      if (!std::string_view{source_}.substr(at).starts_with(name)) return false;
      at += name.size();
      while (at < source_.size() && is_space(source_[at])) ++at;
      return true;
    };
    if (!word("raw")) return false;
    const bool strips = at < source_.size() && source_[at] == '-';
    if (!std::string_view{source_}.substr(at).starts_with(strips ? "-%}" : "%}")) return false;
    move(at + (strips ? 3 : 2) - at_);
    if (strips) skip_spaces();
    for (std::size_t end = at_; (end = source_.find("{%", end)) != source_.npos; end += 2) {
      at = end + 2;
      const char sign = at < source_.size() ? source_[at] : ' ';
      if (sign == '-' || sign == '+') ++at;
      if (!word("endraw")) continue;
      std::string_view text = std::string_view{source_}.substr(at_, end - at_);
      if (sign == '-') text = text.substr(0, stripped(text, {}, Side::right).end);
      if (sign != '-' && sign != '+') {
        const std::size_t line_begin = text.rfind('\n') + 1;
        if (line_begin > 0 && std::ranges::all_of(text.substr(line_begin), is_space))
          text = text.substr(0, line_begin);
      }
      if (!text.empty()) add(TokenKind::data, std::string{text});
      move(at - at_);
      if (!end_of_tag('%')) fail_here("endraw does not end");
      return true;
    }
    fail_here("a raw block does not end");
  }

  /// The tokens of a tag, and its end.
  void code(char inner) {
    std::size_t open = 0;  // brackets, in which a tag does not end
    while (true) {
      skip_spaces();
      if (at_ >= source_.size()) fail_here("a tag does not end");
      if (open == 0) {
        const std::size_t line = line_;
        if (end_of_tag(inner)) {
          tokens_.push_back({inner == '}' ? TokenKind::print_end : TokenKind::block_end, line, ""});
          return;
        }
      }
      const char c = source_[at_];
      if (c == '\'' || c == '"') {
        quoted(c);
      } else if (is_digit(c)) {
        number();
      } else if (is_letter(c)) {
        std::size_t end = at_;
        while (end < source_.size() && (is_letter(source_[end]) || is_digit(source_[end]))) ++end;
        add(TokenKind::name, source_.substr(at_, end - at_));
        move(end - at_);
      } else {
        sign(open);
      }
    }
  }

  void sign(std::size_t& open) {
    constexpr std::array<std::string_view, 27> signs = {"==", "!=", "<=", ">=", "//", "**", "+", "-", "*",
                                                        "/",  "%",  "~",  "<",  ">",  "(",  ")", "[", "]",
                                                        "{",  "}",  "|",  ",",  ".",  ":",  "=", ";", "&"};
    const auto found =
        std::ranges::find_if(signs, [&](std::string_view one) { return rest().starts_with(one); });
    if (found == signs.end())
      fail_here("'", rest().substr(0, first_character(rest()).bytes), "' is no sign of a template");
    if (*found == "(" || *found == "[" || *found == "{") ++open;
    if ((*found == ")" || *found == "]" || *found == "}") && open-- == 0)
      fail_here("'", *found, "' closes nothing");
    add(TokenKind::sign, std::string{*found});
    move(found->size());
  }

  void number() {
    const auto digits = [&](std::size_t from) {
      while (from < source_.size() && (is_digit(source_[from]) || source_[from] == '_')) ++from;
      return from;
    };
    std::size_t end = digits(at_);
    bool real = false;
    if (end + 1 < source_.size() && source_[end] == '.' && is_digit(source_[end + 1])) {
      real = true;
      end = digits(end + 1);
    }
    if (end < source_.size() && (source_[end] == 'e' || source_[end] == 'E')) {
      std::size_t exponent = end + 1;
      if (exponent < source_.size() && (source_[exponent] == '+' || source_[exponent] == '-')) ++exponent;
      if (exponent < source_.size() && is_digit(source_[exponent])) {
        real = true;
        end = digits(exponent);
      }
    }
    if (end < source_.size() && is_letter(source_[end]))
      fail_here("'", rest().substr(0, end - at_ + 1), "' is no number");
    std::string text = source_.substr(at_, end - at_);
    std::erase(text, '_');
    add(real ? TokenKind::real : TokenKind::integer, std::move(text));
    move(end - at_);
  }

  void quoted(char quote) {
    const std::size_t line = line_;
    std::string out;
    move(1);
    while (true) {
      if (at_ >= source_.size()) fail_here("a text does not end");
      const char c = source_[at_];
      if (c == quote) break;
      if (c != '\\') {
        out += c;
        move(1);
        continue;
      }
      move(1);
      if (at_ >= source_.size()) fail_here("a text does not end");
      escape(out);
    }
    move(1);
    tokens_.push_back({TokenKind::text, line, std::move(out)});
  }

  /// Python's escapes, after the backslash.
  void escape(std::string& out) {
    const char c = source_[at_];
    constexpr std::string_view letters = "abfnrtv\\'\"\n";
    constexpr std::string_view meant = "\a\b\f\n\r\t\v\\'\"";
    if (const std::size_t which = letters.find(c); which != letters.npos) {
      if (which < meant.size()) out += meant[which];
      move(1);
      return;
    }
    const std::size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    char32_t code = 0;
    if (digits > 0) {
      for (std::size_t i = 1; i <= digits; ++i) {
        const char digit = at_ + i < source_.size() ? source_[at_ + i] : ' ';
        const std::size_t value = std::string_view{"0123456789abcdefABCDEF"}.find(digit);
        if (value == std::string_view::npos) fail_here("\\", c, " needs ", digits, " hexadecimal digits");
        code = code << 4U | static_cast<char32_t>(value < 16 ? value : value - 6);
      }
      if (code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) fail_here("\\", c, " names no character");
      move(digits + 1);
    } else if (c >= '0' && c <= '7') {
      for (int i = 0; i < 3 && at_ < source_.size() && source_[at_] >= '0' && source_[at_] <= '7'; ++i) {
        code = code << 3U | static_cast<char32_t>(source_[at_] - '0');
        move(1);
      }
    } else if (c == 'N') {
      fail_here("\\N{...} is not carried out; write the character");
    } else {
      out += '\\';  // as Python does, with an escape that it does not know
      return;
    }
    append_character(out, code);
  }

  std::string source_;
  std::size_t at_ = 0;
  std::size_t line_ = 1;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokens_of(std::string_view source) {
  std::string text;
  text.reserve(source.size());
  for (std::size_t i = 0; i < source.size(); ++i) {
    if (source[i] != '\r') {
      text += source[i];
    } else if (i + 1 == source.size() || source[i + 1] != '\n') {
      text += '\n';
    }
  }
  if (text.ends_with('\n')) text.pop_back();
  require<FormatError>(valid_utf8(text) == text, "the chat template is not UTF-8");
  return Lexer{std::move(text)}.run();
}

}  // namespace kvpolicy::reference::jinja
