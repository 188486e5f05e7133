// SPDX-License-Identifier: Apache-2.0
//
// What expressions do with values: arithmetic, attributes, places, slices, and what a loop goes through.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string_view>

#include <kvpolicy/core/error.hpp>
#include <reference_model/jinja/interpreter.hpp>

namespace kvpolicy::reference::jinja {
namespace {

constexpr std::size_t bytes_of_step = 64;  // of a text that is made

Value checked(bool overflows, const std::int64_t& result) {
  if (overflows) refuse("a number does not fit 64 bits");
  return Value{result};
}

/// What joins a text that is marked as HTML becomes HTML, as Python's Markup has it.
Text escaped(const Text& text) {
  if (text.safe) return text;
  constexpr std::string_view signs = "&<>'\"";
  constexpr std::array<std::string_view, 5> spelled = {"&amp;", "&lt;", "&gt;", "&#39;", "&#34;"};
  Text out;
  std::size_t at = 0;
  while (true) {
    const std::size_t end = std::min(text.text.find_first_of(signs, at), text.text.size());
    append(out, part(text, {at, end}));
    if (end == text.text.size()) return out;
    append(out, spelled[signs.find(text.text[end])]);
    at = end + 1;
  }
}

}  // namespace

Value Interpreter::arithmetic(const std::string& sign, const Value& a, const Value& b) {
  for (const Value* one : {&a, &b}) {
    if (one->is_undefined()) refuse_undefined(*one);
  }
  const auto repeated = [&](const Value& value, const Value& count) -> Value {
    const auto times = static_cast<std::size_t>(std::max<std::int64_t>(0, integer_of(count)));
    if (const Text* text = value.text()) {
      const Text& one = text_of(value, "'*'");
      if (times > 0 && text->text.size() > most_bytes / times)
        refuse("a text has more than ", most_bytes, " bytes");
      charge(times * (one.text.size() / bytes_of_step + 1));
      Text out;
      for (std::size_t i = 0; i < times && !one.text.empty(); ++i) append(out, one);
      return Value{std::move(out)};
    }
    const std::vector<Value>& items = value.list()->items;
    if (times > 0 && items.size() > most_bytes / times) refuse("a list is too long");
    charge(times * items.size() + 1);
    std::vector<Value> out;
    for (std::size_t i = 0; i < times && !items.empty(); ++i)
      out.insert(out.end(), items.begin(), items.end());
    return Value::list(std::move(out), value.list()->kind);
  };
  const auto repeats = [](const Value& value) {
    return value.text() || (value.list() && value.list()->is_plain());
  };
  if (sign == "+" && a.text() && b.text()) {
    const bool safe = a.text()->safe || b.text()->safe;
    Text out = safe ? escaped(*a.text()) : *a.text();
    append(out, safe ? escaped(*b.text()) : *b.text());
    out.safe = safe;
    charge(out.text.size() / bytes_of_step);
    return Value{std::move(out)};
  }
  if (sign == "+" && a.list() && b.list() && a.list()->kind == b.list()->kind && a.list()->is_plain()) {
    std::vector<Value> items = a.list()->items;
    items.insert(items.end(), b.list()->items.begin(), b.list()->items.end());
    charge(items.size());
    return Value::list(std::move(items), a.list()->kind);
  }
  if (sign == "*" && repeats(a) && is_integer(b)) return repeated(a, b);
  if (sign == "*" && repeats(b) && is_integer(a)) return repeated(b, a);
  if (sign == "%" && a.text()) return Value{percent_format(*this, text_of(a, "'%'"), b)};
  if (!a.is_number() || !b.is_number()) refuse("'", sign, "' between a ", a.type(), " and a ", b.type());
  if (is_integer(a) && is_integer(b) && sign != "/") {
    const std::int64_t x = integer_of(a);
    const std::int64_t y = integer_of(b);
    std::int64_t out = 0;
    if (sign == "+") return checked(__builtin_add_overflow(x, y, &out), out);
    if (sign == "-") return checked(__builtin_sub_overflow(x, y, &out), out);
    if (sign == "*") return checked(__builtin_mul_overflow(x, y, &out), out);
    if (sign == "**" && y >= 0) {
      out = 1;
      std::int64_t base = x;
      for (std::int64_t left = y; left > 0; left /= 2) {
        if (left % 2 == 1 && __builtin_mul_overflow(out, base, &out)) return checked(true, out);
        if (left > 1 && __builtin_mul_overflow(base, base, &base)) return checked(true, out);
      }
      return Value{out};
    }
    if (sign != "**") {
      if (y == 0) refuse("a number is divided by zero");
      if (x == std::numeric_limits<std::int64_t>::min() && y == -1) return checked(true, out);
      const std::int64_t rest = x % y;
      const bool moves = rest != 0 && (rest < 0) != (y < 0);  // Python rounds down
      return Value{sign == "//" ? x / y - (moves ? 1 : 0) : rest + (moves ? y : 0)};
    }
  }
  const double x = real_of(a);
  const double y = real_of(b);
  if (sign == "+") return Value{x + y};
  if (sign == "-") return Value{x - y};
  if (sign == "*") return Value{x * y};
  if (y == 0.0 && sign != "**") refuse("a number is divided by zero");
  if (sign == "/") return Value{x / y};
  if (sign == "**") {
    if ((x == 0.0 && y < 0.0) || (x < 0.0 && y != std::floor(y))) refuse("a power has no real value");
    return Value{std::pow(x, y)};
  }
  const double rest = std::fmod(x, y);
  const bool moves = rest != 0.0 && (rest < 0.0) != (y < 0.0);
  return Value{sign == "//" ? std::floor(x / y) : rest + (moves ? y : 0.0)};
}

Value Interpreter::attribute(const Value& value, const std::string& name) {
  if (value.is_undefined()) refuse_undefined(value);
  if (is_unsafe(value, name))
    return Value::undefined("access to '" + name + "' of a " + std::string{value.type()} + " is unsafe");
  if (value.is<Namespace*>()) {
    const Names& names = value.as<Namespace*>()->names;
    if (const auto found = names.find(name); found != names.end()) return found->second;
  } else if (value.is<Loop*>()) {
    const Loop& loop = *value.as<Loop*>();
    const std::vector<Value>& items = loop.items.list()->items;
    const auto number = [](std::size_t n) { return Value{static_cast<std::int64_t>(n)}; };
    if (name == "index") return number(loop.at + 1);
    if (name == "index0") return number(loop.at);
    if (name == "revindex") return number(items.size() - loop.at);
    if (name == "revindex0") return number(items.size() - loop.at - 1);
    if (name == "first") return Value{loop.at == 0};
    if (name == "last") return Value{loop.at + 1 == items.size()};
    if (name == "length") return number(items.size());
    if (name == "depth") return number(loop.depth);
    if (name == "depth0") return number(loop.depth - 1);
    if (name == "previtem")
      return loop.at == 0 ? Value::undefined("there is no previous item") : items[loop.at - 1];
    if (name == "nextitem")
      return loop.at + 1 >= items.size() ? Value::undefined("there is no next item") : items[loop.at + 1];
    if (name == "cycle" || name == "changed")
      return Value{std::make_shared<const Method>(Method{value, name})};
  } else if (value.is<const Macro*>() && name == "name") {
    return Value{value.as<const Macro*>()->name};
  }
  if (has_method(value, name)) return Value{std::make_shared<const Method>(Method{value, name})};
  if (value.dict() != nullptr) {
    if (const Value* found = value.dict()->find(std::string_view{name})) return *found;
  }
  return Value::undefined("a " + std::string{value.type()} + " has no attribute '" + name + "'");
}

Value Interpreter::item(const Value& value, const Value& key) {
  if (value.is_undefined()) refuse_undefined(value);
  if (const Dict* dict = value.dict()) {
    if (const Value* found = dict->find(key)) return *found;
  }
  const auto place = [&](std::size_t size) -> std::optional<std::size_t> {
    const std::int64_t at = integer_of(key);
    const auto count = static_cast<std::int64_t>(size);
    if (at < -count || at >= count) return {};
    return static_cast<std::size_t>(at < 0 ? at + count : at);
  };
  if (const List* list = value.list(); list != nullptr && is_integer(key)) {
    const bool has_places = list->kind != ListKind::view && list->kind != ListKind::stream;
    if (const auto at = place(list->items.size()); at && has_places) return list->items[*at];
  } else if (value.text() != nullptr && is_integer(key)) {
    const Text& text = text_of(value, "'[]'");
    charge(text.text.size() / bytes_of_step);
    const std::vector<std::size_t> starts = character_starts(text.text);
    if (const auto at = place(starts.size() - 1)) return Value{part(text, {starts[*at], starts[*at + 1]})};
  } else if (const Text* name = key.text(); name != nullptr && value.dict() == nullptr) {
    return attribute(value, name->text);
  } else if (name != nullptr && (has_method(value, name->text) || is_unsafe(value, name->text))) {
    return attribute(value, name->text);
  }
  return Value::undefined("a " + std::string{value.type()} + " has no such element");
}

Value Interpreter::slice(const Value& value, const Value& begin, const Value& end, const Value& step) {
  const auto bound = [&](const Value& given, std::int64_t otherwise) {
    if (given.is_none()) return otherwise;
    if (!is_integer(given)) refuse("a slice's bound is a ", given.type(), ", must be a whole number");
    return integer_of(given);
  };
  const std::int64_t by = bound(step, 1);
  if (by == 0) refuse("a slice's step is zero");
  const auto places = [&](std::size_t size) {
    const auto count = static_cast<std::int64_t>(size);
    const auto clamped = [&](const Value& given, std::int64_t otherwise) {
      std::int64_t at = bound(given, otherwise);
      if (given.is_none()) return at;
      if (at < 0) at = at < -count ? -1 : at + count;
      return by > 0 ? std::clamp<std::int64_t>(at, 0, count) : std::clamp<std::int64_t>(at, -1, count - 1);
    };
    const std::int64_t from = clamped(begin, by > 0 ? 0 : count - 1);
    const std::int64_t to = clamped(end, by > 0 ? count : -1);
    std::vector<std::size_t> chosen;
    for (std::int64_t at = from; by > 0 ? at < to : at > to;) {
      chosen.push_back(static_cast<std::size_t>(at));
      if (__builtin_add_overflow(at, by, &at)) break;
    }
    charge(chosen.size() / 8);
    return chosen;
  };
  if (value.is_undefined()) refuse_undefined(value);
  if (value.text() != nullptr) {
    const Text& text = text_of(value, "a slice");
    const std::vector<std::size_t> starts = character_starts(text.text);
    charge(starts.size() / 8);
    Text out;
    for (const std::size_t at : places(starts.size() - 1))
      append(out, part(text, {starts[at], starts[at + 1]}));
    return Value{std::move(out)};
  }
  const List* list = value.list();
  if (list == nullptr || list->kind == ListKind::view || list->kind == ListKind::stream) {
    refuse("a slice of a ", value.type());
  }
  std::vector<Value> out;
  for (const std::size_t at : places(list->items.size())) out.push_back(list->items[at]);
  charge(out.size());
  return Value::list(std::move(out), list->kind);
}

std::vector<Value> Interpreter::items_of(const Value& value) {
  std::vector<Value> items;
  if (const List* list = value.list()) {
    if (list->kind == ListKind::stream) {
      if (list->read == List::Read::all) return {};
      if (list->read == List::Read::some) refuse("a generator is read on, which is not carried out");
      list->read = List::Read::all;
    }
    items = list->items;
  } else if (const Dict* dict = value.dict()) {
    for (const auto& item : dict->items) items.push_back(item.first);
  } else if (value.text() != nullptr) {
    const Text& text = text_of(value, "a loop");
    const std::vector<std::size_t> starts = character_starts(text.text);
    charge(starts.size());
    for (std::size_t i = 0; i + 1 < starts.size(); ++i)
      items.emplace_back(part(text, {starts[i], starts[i + 1]}));
  } else if (!value.is_undefined()) {
    refuse("a ", value.type(), " has no items");
  }
  charge(items.size());
  return items;
}

bool Interpreter::contains(const Value& in, const Value& value) {
  if (in.is_undefined()) return false;
  if (const Text* text = in.text()) {
    if (value.text() == nullptr) refuse("'in' asks for a ", value.type(), " in a text");
    charge(text->text.size() / bytes_of_step);
    return text->text.find(value.text()->text) != std::string::npos;
  }
  if (const Dict* dict = in.dict()) {
    require_hashable(value);
    charge(dict->items.size() - dict->by_text.size());
    return dict->find(value) != nullptr;
  }
  const List* list = in.list();
  if (list == nullptr) refuse("'in' asks for something in a ", in.type());
  if (list->kind == ListKind::stream) {
    if (list->read != List::Read::nothing) refuse("a generator is read on, which is not carried out");
    list->read = List::Read::some;
  }
  charge(list->weight);
  return std::ranges::any_of(list->items, [&](const Value& one) { return equal(one, value); });
}

const Text& Interpreter::text_of(const Value& value, std::string_view what) {
  if (value.is_undefined()) refuse_undefined(value);
  const Text* text = value.text();
  if (text == nullptr) refuse(what, " with a ", value.type(), ", must be a text");
  if (text->safe)
    fail<FormatError>("the chat template: ", what,
                      " with a text that 'safe' marked, which is not carried out");
  return *text;
}

}  // namespace kvpolicy::reference::jinja
