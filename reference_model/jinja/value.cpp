// SPDX-License-Identifier: Apache-2.0
#include <reference_model/jinja/value.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include <reference_model/utf8.hpp>

namespace kvpolicy::reference::jinja {
namespace {

std::size_t depth_of(const Value& value) {
  if (const List* list = value.list()) return list->depth;
  if (const Dict* dict = value.dict()) return dict->depth;
  return 0;
}

void hold(std::size_t& depth, std::size_t& weight, const Value& value) {
  constexpr std::size_t most_weight = std::size_t{1} << 40U;  // parts may be shared
  weight = std::min(weight + 1 + weight_of(value), most_weight);
  depth = std::max(depth, depth_of(value) + 1);
  if (depth > Value::most_depth)
    refuse("values are nested ", depth, " deep, at most ", Value::most_depth, " can be");
}

/// Python's repr of a float: the shortest digits that give it back.
std::string shown_real(double number) {
  if (std::isnan(number)) return "nan";
  if (std::isinf(number)) return number < 0 ? "-inf" : "inf";
  std::array<char, 32> digits{};
  const auto scientific =
      std::to_chars(digits.data(), digits.data() + digits.size(), number, std::chars_format::scientific);
  const std::string_view text{digits.data(), static_cast<std::size_t>(scientific.ptr - digits.data())};
  int exponent = 0;
  const std::size_t mark = text.find('e');
  const std::size_t sign = text[mark + 1] == '+' ? 2 : 1;
  std::from_chars(text.data() + mark + sign, text.data() + text.size(), exponent);
  if (number == 0.0 || (exponent >= -4 && exponent < 16)) {
    std::array<char, 64> plain{};
    const auto end =
        std::to_chars(plain.data(), plain.data() + plain.size(), number, std::chars_format::fixed);
    std::string out{plain.data(), end.ptr};
    return out.find('.') == out.npos ? out + ".0" : out;
  }
  return std::string{text};
}

/// Characters that Python's repr writes as escapes, beyond ASCII: white space other than a space, and what has no picture.
bool has_no_picture(char32_t code) {
  return (code >= 0x7F && code <= 0xA0) || code == 0xAD || code == 0x1680 ||
         (code >= 0x2000 && code <= 0x200F) || (code >= 0x2028 && code <= 0x202F) ||
         (code >= 0x205F && code <= 0x206F) || code == 0x3000 || code == 0xFEFF ||
         (code >= 0xE000 && code <= 0xF8FF) || (code >= 0xFFF0 && code <= 0xFFFB) || code >= 0xE0000;
}

void append_hex(std::string& out, char32_t code, int digits) {
  constexpr std::string_view hex = "0123456789abcdef";
  for (int shift = 4 * (digits - 1); shift >= 0; shift -= 4)
    out += hex[(code >> static_cast<unsigned>(shift)) & 15U];
}

void append_shown_text(Text& out, const Text& text) {
  if (text.safe) refuse("a text that 'safe' marked is printed in a list, which is not carried out");
  const bool single = text.text.find('\'') == std::string::npos || text.text.find('"') != std::string::npos;
  const char quote = single ? '\'' : '"';
  Text inside;
  for (std::size_t at = 0; at < text.text.size();) {
    const std::string_view rest = std::string_view{text.text}.substr(at);
    const std::size_t bytes = first_character(rest).bytes;
    const char32_t code = first_code(rest);
    std::string& to = inside.text;
    if (code == static_cast<char32_t>(quote) || code == '\\') {
      to.append(1, '\\').append(rest.substr(0, 1));
    } else if (code == '\n' || code == '\r' || code == '\t') {
      to.append(code == '\n' ? "\\n" : code == '\r' ? "\\r" : "\\t");
    } else if (code < 0x20 || (code < 0x100 && has_no_picture(code))) {
      append_hex(to.append("\\x"), code, 2);
    } else if (has_no_picture(code)) {
      append_hex(to.append(code < 0x10000 ? "\\u" : "\\U"), code, code < 0x10000 ? 4 : 8);
    } else {
      to.append(rest.substr(0, bytes));
    }
    at += bytes;
  }
  mark_like(inside, text);
  out.text += quote;
  append(out, inside);
  out.text += quote;
}

void append_json_text(Text& out, const Text& text, bool ascii) {
  Text inside;
  std::string& to = inside.text;
  for (std::size_t at = 0; at < text.text.size();) {
    const std::string_view rest = std::string_view{text.text}.substr(at);
    const std::size_t bytes = first_character(rest).bytes;
    const char32_t code = first_code(rest);
    constexpr std::string_view named = "\"\\\n\r\t\b\f";
    constexpr std::string_view letters = "\"\\nrtbf";
    if (const std::size_t which = code < 0x80 ? named.find(static_cast<char>(code)) : named.npos;
        which != named.npos) {
      to.append(1, '\\').append(1, letters[which]);
    } else if (code < 0x20 || (ascii && code > 0x7E && code < 0x10000)) {
      append_hex(to.append("\\u"), code, 4);
    } else if (ascii && code >= 0x10000) {
      append_hex(to.append("\\u"), 0xD7C0 + (code >> 10U), 4);
      append_hex(to.append("\\u"), 0xDC00 + (code & 0x3FFU), 4);
    } else {
      to.append(rest.substr(0, bytes));
    }
    at += bytes;
  }
  mark_like(inside, text);
  out.text += '"';
  append(out, inside);
  out.text += '"';
}

/// A key of JSON is a text; Python writes numbers and none as such.
Text json_key(const Value& key) {
  if (const Text* text = key.text()) return *text;
  Text out;
  append_json(out, key, {});
  return out;
}

}  // namespace

const Value* Dict::find(std::string_view key) const {
  const auto found = by_text.find(key);
  return found == by_text.end() ? nullptr : &items[found->second].second;
}

std::size_t Dict::place_of(const Value& key) const {
  if (const Text* text = key.text()) {
    const auto found = by_text.find(text->text);
    return found == by_text.end() ? items.size() : found->second;
  }
  if (by_text.size() == items.size()) return items.size();
  const auto found = std::ranges::find_if(items, [&](const auto& item) { return equal(item.first, key); });
  return static_cast<std::size_t>(found - items.begin());
}

const Value* Dict::find(const Value& key) const {
  const std::size_t place = place_of(key);
  return place == items.size() ? nullptr : &items[place].second;
}

Value Value::undefined(std::string why) {
  Value value;
  value.held_ = Undefined{std::make_shared<const std::string>(std::move(why))};
  return value;
}

Value Value::list(std::vector<Value> items, ListKind kind) {
  auto list = std::make_shared<List>();
  for (const Value& item : items) hold(list->depth, list->weight, item);
  list->items = std::move(items);
  list->kind = kind;
  Value value;
  value.held_ = std::shared_ptr<const List>{std::move(list)};
  return value;
}

Value Value::dict(std::vector<std::pair<Value, Value>> items) {
  auto dict = std::make_shared<Dict>();
  dict->items.reserve(items.size());
  for (auto& [key, item] : items) {
    hold(dict->depth, dict->weight, item);
    if (!key.text() && !key.is_number() && !key.is_none()) {
      refuse("a dict has a ", key.type(), " as a key; texts, numbers and none can be keys");
    }
    if (const std::size_t place = dict->place_of(key); place < dict->items.size()) {
      dict->items[place].second = std::move(item);
      continue;
    }
    dict->items.emplace_back(std::move(key), std::move(item));
    if (dict->items.size() - dict->by_text.size() > most_other_keys) {
      refuse("a dict has more than ", most_other_keys, " keys that are no texts");
    }
    if (const Text* text = dict->items.back().first.text())
      dict->by_text.emplace(text->text, dict->items.size() - 1);
  }
  Value value;
  value.held_ = std::shared_ptr<const Dict>{std::move(dict)};
  return value;
}

bool Value::truth() const {
  if (is_undefined() || is_none()) return false;
  if (is_number()) return real_of(*this) != 0.0;
  if (const Text* held = text()) return !held->text.empty();
  if (const List* held = list()) return held->kind == ListKind::stream || !held->items.empty();
  if (const Dict* held = dict()) return !held->items.empty();
  return true;
}

std::string_view Value::type() const {
  constexpr std::array<std::string_view, 13> names = {"undefined", "none",  "bool", "int",    "float",
                                                      "str",       "list",  "dict", "method", "function",
                                                      "namespace", "macro", "loop"};
  constexpr std::array<std::string_view, 5> kinds = {"list", "tuple", "range", "view of a dict", "generator"};
  return list() != nullptr ? kinds[static_cast<std::size_t>(list()->kind)] : names[held_.index()];
}

std::size_t weight_of(const Value& value) {
  constexpr std::size_t bytes_of_part = 64;
  if (const Text* text = value.text()) return text->text.size() / bytes_of_part;
  if (const List* list = value.list()) return list->weight;
  return value.dict() != nullptr ? value.dict()->weight : 0;
}

void require_hashable(const Value& value) {
  const bool is_tuple = value.list() != nullptr && value.list()->kind == ListKind::tuple;
  if (is_tuple) std::ranges::for_each(value.list()->items, require_hashable);
  if (value.dict() != nullptr || (value.list() != nullptr && !is_tuple)) {
    refuse("a ", value.type(), " cannot be sought in a dict");
  }
}

void refuse_undefined(const Value& value) {
  const auto& why = value.as<Undefined>().why;
  refuse(why != nullptr ? std::string_view{*why} : "a value is undefined");
}

double real_of(const Value& number) {
  if (number.is<bool>()) return number.as<bool>() ? 1.0 : 0.0;
  if (number.is<double>()) return number.as<double>();
  return static_cast<double>(number.as<std::int64_t>());
}

bool equal(const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) {
    if (a.is<std::int64_t>() && b.is<std::int64_t>()) return a.as<std::int64_t>() == b.as<std::int64_t>();
    return real_of(a) == real_of(b);
  }
  if (a.text() && b.text()) return a.text()->text == b.text()->text;
  if (a.list() && b.list()) {
    for (const Value* one : {&a, &b}) {
      if (!one->list()->is_plain()) refuse("a ", one->type(), " is compared, which is not carried out");
    }
    return a.list()->kind == b.list()->kind && std::ranges::equal(a.list()->items, b.list()->items, equal);
  }
  if (a.dict() && b.dict()) {
    if (a.dict()->items.size() != b.dict()->items.size()) return false;
    return std::ranges::all_of(a.dict()->items, [&](const auto& item) {
      const Value* other = b.dict()->find(item.first);
      return other != nullptr && equal(item.second, *other);
    });
  }
  if (a.is<Builtin>() && b.is<Builtin>()) return a.as<Builtin>() == b.as<Builtin>();
  if (a.is<Namespace*>() && b.is<Namespace*>()) return a.as<Namespace*>() == b.as<Namespace*>();
  if (a.is<const Macro*>() && b.is<const Macro*>()) return a.as<const Macro*>() == b.as<const Macro*>();
  return (a.is_none() && b.is_none()) || (a.is_undefined() && b.is_undefined());
}

int order(const Value& a, const Value& b) {
  const auto sign = [](const auto& x, const auto& y) { return x < y ? -1 : y < x ? 1 : 0; };
  if (a.is_number() && b.is_number()) {
    if (a.is<std::int64_t>() && b.is<std::int64_t>()) return sign(a.as<std::int64_t>(), b.as<std::int64_t>());
    return sign(real_of(a), real_of(b));
  }
  if (a.text() && b.text())
    return sign(a.text()->text, b.text()->text);  // UTF-8 has the order of its characters
  if (a.list() && b.list() && a.list()->kind == b.list()->kind && a.list()->is_plain()) {
    const auto& x = a.list()->items;
    const auto& y = b.list()->items;
    const auto [at, other] = std::ranges::mismatch(x, y, equal);
    if (at == x.end() || other == y.end()) return sign(x.size(), y.size());
    return order(*at, *other);
  }
  refuse("a ", a.type(), " and a ", b.type(), " have no order");
}

Text printed(const Value& value) {
  if (value.is_undefined()) return {};
  if (const Text* text = value.text()) return *text;
  Text out;
  append_shown(out, value);
  return out;
}

void append_shown(Text& out, const Value& value) {
  if (value.is_undefined()) {
    append(out, "Undefined");
  } else if (value.is_none()) {
    append(out, "None");
  } else if (value.is<bool>()) {
    append(out, value.as<bool>() ? "True" : "False");
  } else if (value.is<std::int64_t>()) {
    append(out, std::to_string(value.as<std::int64_t>()));
  } else if (value.is<double>()) {
    append(out, shown_real(value.as<double>()));
  } else if (const Text* text = value.text()) {
    append_shown_text(out, *text);
  } else if (const List* list = value.list(); list != nullptr && list->is_plain()) {
    const bool is_tuple = list->kind == ListKind::tuple;
    append(out, is_tuple ? "(" : "[");
    for (std::size_t i = 0; i < list->items.size(); ++i) {
      if (i > 0) append(out, ", ");
      append_shown(out, list->items[i]);
    }
    append(out, is_tuple ? (list->items.size() == 1 ? ",)" : ")") : "]");
  } else if (const Dict* dict = value.dict()) {
    append(out, "{");
    for (std::size_t i = 0; i < dict->items.size(); ++i) {
      if (i > 0) append(out, ", ");
      append_shown(out, dict->items[i].first);
      append(out, ": ");
      append_shown(out, dict->items[i].second);
    }
    append(out, "}");
  } else {
    refuse("a ", value.type(), " is printed, which has no text");
  }
}

void append_json(Text& out, const Value& value, const JsonStyle& style, int level) {
  const auto line = [&](int at) {
    if (style.indent >= 0) append(out, "\n" + std::string(static_cast<std::size_t>(style.indent) * at, ' '));
  };
  if (value.is_none()) {
    append(out, "null");
  } else if (value.is<bool>()) {
    append(out, value.as<bool>() ? "true" : "false");
  } else if (value.is<double>() && !std::isfinite(value.as<double>())) {
    append(out, std::isnan(value.as<double>()) ? "NaN" : value.as<double>() < 0 ? "-Infinity" : "Infinity");
  } else if (value.is_number()) {
    append_shown(out, value);
  } else if (const Text* text = value.text()) {
    append_json_text(out, *text, style.ascii);
  } else if (const List* list = value.list(); list != nullptr && list->is_plain()) {
    append(out, "[");
    for (std::size_t i = 0; i < list->items.size(); ++i) {
      if (i > 0) append(out, style.item_separator);
      line(level + 1);
      append_json(out, list->items[i], style, level + 1);
    }
    if (!list->items.empty()) line(level);
    append(out, "]");
  } else if (const Dict* dict = value.dict()) {
    std::vector<const std::pair<Value, Value>*> items;
    for (const auto& item : dict->items) items.push_back(&item);
    if (style.sorted) {
      std::ranges::stable_sort(items,
                               [](const auto* a, const auto* b) { return order(a->first, b->first) < 0; });
    }
    append(out, "{");
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (i > 0) append(out, style.item_separator);
      line(level + 1);
      append_json_text(out, json_key(items[i]->first), style.ascii);
      append(out, style.key_separator);
      append_json(out, items[i]->second, style, level + 1);
    }
    if (!items.empty()) line(level);
    append(out, "}");
  } else {
    refuse("a ", value.type(), " is written as JSON, which has none of that kind");
  }
}

}  // namespace kvpolicy::reference::jinja
