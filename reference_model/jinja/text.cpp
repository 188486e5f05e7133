// SPDX-License-Identifier: Apache-2.0
#include <reference_model/jinja/text.hpp>

#include <algorithm>

#include <kvpolicy/core/error.hpp>
#include <reference_model/utf8.hpp>

namespace kvpolicy::reference::jinja {

namespace {
void grow(std::string& to, std::string_view more) {
  require(to.size() + more.size() <= most_bytes, "the chat template: a text has more than ", most_bytes,
          " bytes");
  to += more;
}
}  // namespace

void append(Text& to, const Text& more) {
  const std::size_t offset = to.text.size();
  grow(to.text, more.text);
  for (const ByteRange range : more.given) {
    const ByteRange moved{range.begin + offset, range.end + offset};
    if (!to.given.empty() && to.given.back().end == moved.begin) {
      to.given.back().end = moved.end;
    } else {
      to.given.push_back(moved);
    }
  }
}

void append(Text& to, std::string_view more) { grow(to.text, more); }

Text part(const Text& text, ByteRange range) {
  Text out{text.text.substr(range.begin, range.end - range.begin)};
  auto next = std::ranges::upper_bound(text.given, range.begin, {}, &ByteRange::end);
  for (; next != text.given.end() && next->begin < range.end; ++next) {
    out.given.push_back(
        {std::max(next->begin, range.begin) - range.begin, std::min(next->end, range.end) - range.begin});
  }
  return out;
}

void mark_like(Text& text, const Text& from) {
  text.given.clear();
  if (!from.given.empty() && !text.text.empty()) text.given.push_back({0, text.text.size()});
}

std::vector<std::size_t> character_starts(std::string_view text) {
  std::vector<std::size_t> starts;
  starts.reserve(text.size() + 1);
  for (std::size_t at = 0; at < text.size(); at += first_character(text.substr(at)).bytes)
    starts.push_back(at);
  starts.push_back(text.size());
  return starts;
}

bool is_python_space(char32_t code) noexcept {
  return (code >= 0x09 && code <= 0x0D) || (code >= 0x1C && code <= 0x20) || code == 0x85 || code == 0xA0 ||
         code == 0x1680 || (code >= 0x2000 && code <= 0x200A) || code == 0x2028 || code == 0x2029 ||
         code == 0x202F || code == 0x205F || code == 0x3000;
}

ByteRange stripped(std::string_view text, const std::optional<std::string>& set, Side side) {
  const auto goes = [&](std::string_view character) {
    return set ? set->find(character) != set->npos : is_python_space(first_code(character));
  };
  ByteRange left{0, text.size()};
  while (side != Side::right && left.begin < left.end) {
    const std::size_t bytes = first_character(text.substr(left.begin)).bytes;
    if (!goes(text.substr(left.begin, bytes))) break;
    left.begin += bytes;
  }
  while (side != Side::left && left.begin < left.end) {
    const std::size_t last = last_character(text.substr(0, left.end));
    if (!goes(text.substr(last, left.end - last))) break;
    left.end = last;
  }
  return left;
}

}  // namespace kvpolicy::reference::jinja
