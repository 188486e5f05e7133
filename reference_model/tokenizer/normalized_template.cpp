// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <string_view>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/json_text.hpp>
#include <reference_model/tokenizer/chat_template.hpp>
#include <reference_model/tokenizer/pre_tokenizer.hpp>

namespace kvpolicy::reference {
namespace {

constexpr std::string_view white_space = " \t\r\n\v\f";

/// The code of a tag: white space outside of texts dropped, texts in single quotes, escapes
/// resolved.
std::string normalized_code(std::string_view code) {
  std::string out;
  char quote = 0;
  for (std::size_t i = 0; i < code.size(); ++i) {
    const char c = code[i];
    if (quote == 0) {
      if (c == '\'' || c == '"') {
        quote = c;
        out += '\'';
      } else if (white_space.find(c) == white_space.npos) {
        out += c;
      }
    } else if (c == '\\' && i + 1 < code.size()) {
      const char escaped = code[++i];
      out += escaped == 'n' ? '\n' : escaped == 't' ? '\t' : escaped;
    } else if (c == quote) {
      quote = 0;
      out += '\'';
    } else {
      out += c;
    }
  }
  for (const std::string_view key : {"role", "content"}) {
    std::string item = "['";
    item.append(key).append("']");
    out = with_replaced(out, item, std::string{"."}.append(key));
  }
  return out;
}

/// Where the tag ends that `rest` begins with: after its "}}", "%}" or "#}", which texts may
/// contain.
std::size_t end_of_tag(std::string_view rest) {
  const char kind = rest[1] == '{' ? '}' : rest[1];
  char quote = 0;
  for (std::size_t i = 2; i + 1 < rest.size(); ++i) {
    if (quote != 0) {
      if (rest[i] == '\\') {
        ++i;
      } else if (rest[i] == quote) {
        quote = 0;
      }
    } else if (rest[i] == kind && rest[i + 1] == '}') {
      return i + 2;
    } else if (kind != '#' && (rest[i] == '\'' || rest[i] == '"')) {
      quote = rest[i];
    }
  }
  fail<FormatError>("the chat template has a tag that does not end: ", io::in_quotes(rest));
}

/// What is left of the text between two tags, as Jinja trims it with trim_blocks and lstrip_blocks.
std::string_view printed_text(std::string_view text, std::string_view before, std::string_view after) {
  const bool cut =
      (before.size() > 2 && before[before.size() - 3] == '-') || (after.size() > 2 && after[2] == '-');
  if (cut && text.find_first_not_of(white_space) == text.npos) return {};
  if (!before.empty() && !before.starts_with("{{") && text.starts_with('\n')) text.remove_prefix(1);
  if (!after.empty() && !after.starts_with("{{")) {
    const std::size_t last = text.find_last_not_of(" \t");
    if (last == text.npos || text[last] == '\n') text = text.substr(0, last + 1);
  }
  if (after.empty() && text.ends_with('\n')) text.remove_suffix(1);
  return text;
}

}  // namespace

std::string normalized_template(std::string_view jinja) {
  std::string out;
  std::string_view before;
  while (true) {
    std::size_t begin = 0;
    while (begin < jinja.size() && !jinja.substr(begin).starts_with("{{") &&
           !jinja.substr(begin).starts_with("{%") && !jinja.substr(begin).starts_with("{#")) {
      ++begin;
    }
    const std::string_view rest = jinja.substr(begin);
    const std::string_view tag = rest.empty() ? rest : rest.substr(0, end_of_tag(rest));
    const std::string_view text = printed_text(jinja.substr(0, begin), before, tag);
    require<FormatError>(text.empty(),
                         "the chat template prints text between its tags: ", io::in_quotes(text));
    if (tag.empty()) return out;
    std::string_view code = tag.substr(2, tag.size() - 4);
    if (code.starts_with('-') || code.starts_with('+')) code.remove_prefix(1);
    if (code.ends_with('-') || code.ends_with('+')) code.remove_suffix(1);
    if (tag[1] == '{') out.append("{").append(normalized_code(code)).append("}");
    if (tag[1] == '%') out.append("%").append(normalized_code(code)).append("%");
    before = tag;
    jinja = rest.substr(tag.size());
  }
}

}  // namespace kvpolicy::reference
