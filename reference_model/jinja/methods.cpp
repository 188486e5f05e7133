// SPDX-License-Identifier: Apache-2.0
//
// The methods of texts, dicts and lists.
#include <algorithm>
#include <array>
#include <span>

#include <kvpolicy/core/error.hpp>
#include <reference_model/jinja/text_functions.hpp>
#include <reference_model/utf8.hpp>

namespace kvpolicy::reference::jinja {
namespace {

Value split(Interpreter& run, const Text& text, Asked& asked, bool from_right) {
  const auto separator = asked.text("sep");
  std::int64_t most = asked.integer("maxsplit").value_or(-1);
  asked.end();
  if (separator && separator->empty()) refuse(asked.what(), " with an empty separator");
  std::vector<ByteRange> parts;
  const std::string_view all = text.text;
  if (separator) {
    std::size_t begin = 0;
    std::size_t end = all.size();
    while (most != 0) {
      const std::size_t found =
          from_right ? (end < separator->size() ? all.npos : all.rfind(*separator, end - separator->size()))
                     : all.find(*separator, begin);
      if (found == all.npos) break;
      if (from_right) {
        parts.push_back({found + separator->size(), end});
        end = found;
      } else {
        parts.push_back({begin, found});
        begin = found + separator->size();
      }
      if (most > 0) --most;
      run.charge(1);
    }
    parts.push_back({begin, end});
    if (from_right) std::ranges::reverse(parts);
  } else {  // at white space, which is dropped
    if (from_right && most >= 0) refuse(asked.what(), " with maxsplit and no separator is not carried out");
    std::size_t at = 0;
    while (true) {
      at += stripped(all.substr(at), {}, Side::left).begin;
      if (at >= all.size()) break;
      if (most == 0) {
        parts.push_back({at, stripped(all, {}, Side::right).end});
        break;
      }
      std::size_t end = at;
      while (end < all.size() && !is_python_space(first_code(all.substr(end))))
        end += first_character(all.substr(end)).bytes;
      parts.push_back({at, end});
      at = end;
      if (most > 0) --most;
      run.charge(1);
    }
  }
  std::vector<Value> out;
  for (const ByteRange range : parts) out.emplace_back(part(text, range));
  run.charge(all.size() / 64 + out.size());
  return Value::list(std::move(out));
}

constexpr std::array<std::string_view, 47> text_methods = {
    "capitalize", "casefold",     "center",       "count",   "encode",     "endswith",    "expandtabs",
    "find",       "format",       "format_map",   "index",   "isalnum",    "isalpha",     "isascii",
    "isdecimal",  "isdigit",      "isidentifier", "islower", "isnumeric",  "isprintable", "isspace",
    "istitle",    "isupper",      "join",         "ljust",   "lower",      "lstrip",      "maketrans",
    "partition",  "removeprefix", "removesuffix", "replace", "rfind",      "rindex",      "rjust",
    "rpartition", "rsplit",       "rstrip",       "split",   "splitlines", "startswith",  "strip",
    "swapcase",   "title",        "translate",    "upper",   "zfill"};
constexpr std::array<std::string_view, 6> dict_methods = {"copy",  "fromkeys", "get",
                                                          "items", "keys",     "values"};
constexpr std::array<std::string_view, 3> list_methods = {"copy", "count", "index"};
/// Those that change what they are called on: to the immutable sandbox they are undefined.
constexpr std::array<std::string_view, 5> unsafe_dict_methods = {"clear", "pop", "popitem", "setdefault",
                                                                 "update"};
constexpr std::array<std::string_view, 8> unsafe_list_methods = {"append", "clear",  "extend",  "insert",
                                                                 "pop",    "remove", "reverse", "sort"};

bool is_one_of(std::string_view name, std::span<const std::string_view> names) {
  return std::ranges::find(names, name) != names.end();
}

}  // namespace

bool is_unsafe(const Value& value, std::string_view name) {
  return name.starts_with("__") || (value.dict() != nullptr && is_one_of(name, unsafe_dict_methods)) ||
         (value.list() != nullptr && value.list()->kind == ListKind::list &&
          is_one_of(name, unsafe_list_methods));
}

bool has_method(const Value& value, std::string_view name) {
  if (value.text() != nullptr) return is_one_of(name, text_methods);
  if (value.dict() != nullptr) return is_one_of(name, dict_methods);
  if (value.list() == nullptr) return false;
  if (value.list()->kind == ListKind::list) return is_one_of(name, list_methods);
  return value.list()->kind != ListKind::view && value.list()->kind != ListKind::stream &&
         (name == "count" || name == "index");
}

Value Interpreter::text_method(const Text& text, const std::string& name, const Arguments& given) {
  charge(text.text.size() / 64 + 1);
  Asked asked{"'." + name + "()'", given};
  const auto needed_text = [&](std::string_view parameter) {
    return text_of(asked.need(parameter), asked.what());
  };
  if (name == "strip" || name == "lstrip" || name == "rstrip") {
    const auto characters = asked.text("chars");
    asked.end();
    const Side side = name == "strip" ? Side::both : name == "lstrip" ? Side::left : Side::right;
    return Value{part(text, stripped(text.text, characters, side))};
  }
  if (name == "split" || name == "rsplit") return split(*this, text, asked, name == "rsplit");
  if (name == "startswith" || name == "endswith") {
    const Value sought = asked.need("prefix");
    asked.end();
    const auto holds = [&](const Value& one) {
      const std::string& part_of = text_of(one, asked.what()).text;
      return name == "startswith" ? text.text.starts_with(part_of) : text.text.ends_with(part_of);
    };
    if (sought.list() == nullptr || sought.list()->kind != ListKind::tuple) return Value{holds(sought)};
    return Value{std::ranges::any_of(sought.list()->items, holds)};
  }
  if (name == "replace") {
    const Text from = needed_text("old");
    const Text to = needed_text("new");
    const std::int64_t most = asked.integer("count").value_or(-1);
    asked.end();
    return Value{replaced(*this, text, from, to, most)};
  }
  if (name == "lower" || name == "upper") {
    asked.end();
    return Value{in_ascii(*this, Value{text}, asked.what(), name == "lower" ? lowered : raised)};
  }
  if (name == "title") {
    asked.end();
    return Value{in_ascii(*this, Value{text}, asked.what(),
                          [](char c, bool begins) { return begins ? raised(c, true) : lowered(c, false); })};
  }
  if (name == "capitalize") {
    asked.end();
    Text out = in_ascii(*this, Value{text}, asked.what(), lowered);
    if (!out.text.empty()) out.text.front() = raised(out.text.front(), true);
    return Value{std::move(out)};
  }
  if (name == "join") {
    const Value items = asked.need("iterable");
    asked.end();
    Text out;
    bool first = true;
    for (const Value& one : items_of(items)) {
      if (!first) append(out, text);
      first = false;
      append(out, text_of(one, asked.what()));
    }
    charge(out.text.size() / 64);
    return Value{std::move(out)};
  }
  if (name == "format") return Value{brace_format(*this, text, given)};
  if (name == "find" || name == "rfind" || name == "index" || name == "count") {
    const Text sought = needed_text("sub");
    asked.end();
    if (name == "count") {
      if (sought.text.empty()) return Value{static_cast<std::int64_t>(character_starts(text.text).size())};
      std::int64_t found = 0;
      for (std::size_t at = 0; (at = text.text.find(sought.text, at)) != text.text.npos;
           at += sought.text.size())
        ++found;
      return Value{found};
    }
    const std::size_t at = name == "rfind" ? text.text.rfind(sought.text) : text.text.find(sought.text);
    if (at == text.text.npos && name == "index") refuse(asked.what(), ": the text is not there");
    if (at == text.text.npos) return Value{std::int64_t{-1}};
    return Value{
        static_cast<std::int64_t>(character_starts(std::string_view{text.text}.substr(0, at)).size() - 1)};
  }
  if (name == "removeprefix" || name == "removesuffix") {
    const std::string sought = needed_text("prefix").text;
    asked.end();
    ByteRange left{0, text.text.size()};
    if (name == "removeprefix" && text.text.starts_with(sought)) left.begin = sought.size();
    if (name == "removesuffix" && text.text.ends_with(sought)) left.end -= sought.size();
    return Value{part(text, left)};
  }
  if (name == "partition" || name == "rpartition") {
    const Text separator = needed_text("sep");
    asked.end();
    if (separator.text.empty()) refuse(asked.what(), " with an empty separator");
    const std::size_t at =
        name == "partition" ? text.text.find(separator.text) : text.text.rfind(separator.text);
    std::vector<Value> three;
    if (at == text.text.npos) {
      three = name == "partition" ? std::vector<Value>{Value{text}, Value{""}, Value{""}}
                                  : std::vector<Value>{Value{""}, Value{""}, Value{text}};
    } else {
      const std::size_t end = at + separator.text.size();
      three = {Value{part(text, {0, at})}, Value{part(text, {at, end})},
               Value{part(text, {end, text.text.size()})}};
    }
    return Value::list(std::move(three), ListKind::tuple);
  }
  if (name == "splitlines") {
    const bool keeps = asked.flag("keepends");
    asked.end();
    std::vector<Value> lines;
    const std::string_view all = text.text;
    std::size_t begin = 0;
    for (std::size_t at = 0; at < all.size();) {
      const char32_t code = first_code(all.substr(at));
      std::size_t bytes = first_character(all.substr(at)).bytes;
      const bool ends = (code >= 0x0A && code <= 0x0D) || (code >= 0x1C && code <= 0x1E) || code == 0x85 ||
                        code == 0x2028 || code == 0x2029;
      if (ends) {
        if (code == '\r' && all.substr(at + 1).starts_with('\n')) ++bytes;
        lines.emplace_back(part(text, {begin, keeps ? at + bytes : at}));
        begin = at + bytes;
      }
      at += bytes;
    }
    if (begin < all.size()) lines.emplace_back(part(text, {begin, all.size()}));
    charge(all.size() / 8);
    return Value::list(std::move(lines));
  }
  if (name == "isspace" || name == "isdigit" || name == "isalpha" || name == "isalnum" || name == "islower" ||
      name == "isupper") {
    asked.end();
    bool cased = false;
    bool holds = !text.text.empty();
    for (const char c : text.text) {
      if (static_cast<unsigned char>(c) >= 0x80)
        refuse(asked.what(), " of characters beyond ASCII is not carried out");
      const bool digit = c >= '0' && c <= '9';
      const bool letter = is_lower(c) || is_upper(c);
      cased = cased || letter;
      holds = holds && (name == "isspace"   ? is_python_space(static_cast<char32_t>(c))
                        : name == "isdigit" ? digit
                        : name == "isalpha" ? letter
                        : name == "isalnum" ? letter || digit
                        : name == "islower" ? !is_upper(c)
                                            : !is_lower(c));
    }
    return Value{holds && (cased || (name != "islower" && name != "isupper"))};
  }
  fail<FormatError>("the chat template uses ", asked.what(), " of a text, which is not carried out");
}

Value Interpreter::dict_method(const Dict& dict, const std::string& name, const Arguments& given) {
  Asked asked{"'." + name + "()'", given};
  if (name == "get") {
    const Value key = asked.need("key");
    const Value otherwise = asked.next("default").value_or(Value{None{}});
    asked.end();
    const Value* found = dict.find(key);
    return found != nullptr ? *found : otherwise;
  }
  if (name == "items" || name == "keys" || name == "values") {
    asked.end();
    charge(dict.items.size());
    std::vector<Value> out;
    for (const auto& [key, value] : dict.items) {
      out.push_back(name == "items"  ? Value::list({key, value}, ListKind::tuple)
                    : name == "keys" ? key
                                     : value);
    }
    return Value::list(std::move(out), ListKind::view);
  }
  if (name == "copy") {
    asked.end();
    charge(dict.items.size());
    return Value::dict(dict.items);
  }
  fail<FormatError>("the chat template uses ", asked.what(), " of a dict, which is not carried out");
}

Value Interpreter::list_method(const List& list, const std::string& name, const Arguments& given) {
  Asked asked{"'." + name + "()'", given};
  if (name == "count" || name == "index") {
    const Value sought = asked.need("value");
    asked.end();
    charge(list.weight);
    const auto same = [&](const Value& one) { return equal(one, sought); };
    if (name == "count") return Value{static_cast<std::int64_t>(std::ranges::count_if(list.items, same))};
    const auto found = std::ranges::find_if(list.items, same);
    if (found == list.items.end()) refuse(asked.what(), ": the value is not there");
    return Value{static_cast<std::int64_t>(found - list.items.begin())};
  }
  if (name == "copy") {
    asked.end();
    return Value::list(list.items, list.kind);
  }
  fail<FormatError>("the chat template uses ", asked.what(), " of a list, which is not carried out");
}

}  // namespace kvpolicy::reference::jinja
