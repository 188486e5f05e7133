// SPDX-License-Identifier: Apache-2.0
//
// Jinja's filters; tojson as transformers has it.
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <span>

#include <kvpolicy/core/error.hpp>
#include <reference_model/jinja/text_functions.hpp>
#include <reference_model/utf8.hpp>

namespace kvpolicy::reference::jinja {
namespace {

/// What filters compare: texts in lower case, unless they keep it.
Value folded(Interpreter& run, const Value& value, bool keeps_case) {
  return keeps_case || value.text() == nullptr ? value : run.filter("lower", value, {});
}

/// `value.a.b`, as filters name what they look at: "a.b", or a place. What is not there is `otherwise`.
Value at_path(Interpreter& run, Value value, const Value& path, const Value& otherwise = {}) {
  const auto step = [&](const Value& key) {
    value = run.item(value, key);
    if (value.is_undefined() && !otherwise.is_undefined()) value = otherwise;
  };
  if (path.is<std::int64_t>()) {
    step(path);
    return value;
  }
  std::string_view rest = run.text_of(path, "attribute").text;
  while (true) {
    const std::string_view name = rest.substr(0, rest.find('.'));
    std::int64_t place = 0;
    const auto read = std::from_chars(name.data(), name.data() + name.size(), place);
    const bool number = read.ec == std::errc{} && read.ptr == name.data() + name.size();
    step(number ? Value{place} : Value{std::string{name}});
    if (name.size() == rest.size()) return value;
    rest.remove_prefix(name.size() + 1);
  }
}

/// What filters that give a generator go through: to them, what counts as false is empty.
std::vector<Value> items_or_none(Interpreter& run, const Value& value) {
  return value.truth() ? run.items_of(value) : std::vector<Value>{};
}

/// select, reject, selectattr and rejectattr.
Value chosen(Interpreter& run, std::string_view name, const Value& value, const Arguments& given) {
  const bool by_attribute = name.ends_with("attr");
  const bool keeps = name.starts_with("select");
  Asked asked{"the filter '" + std::string{name} + "'", given};
  std::vector<Value> places = given.places;
  Value path;
  if (by_attribute) {
    if (places.empty()) refuse(asked.what(), " needs an attribute's name");
    path = places.front();
    places.erase(places.begin());
  }
  std::string test;
  Arguments rest{{}, given.named};
  if (!places.empty()) {
    test = run.text_of(places.front(), asked.what()).text;
    rest.places.assign(places.begin() + 1, places.end());
  }
  std::vector<Value> out;
  for (Value& one : items_or_none(run, value)) {
    const Value looked_at = by_attribute ? at_path(run, one, path) : one;
    const bool holds = test.empty() ? looked_at.truth() : run.test(test, looked_at, rest);
    if (holds == keeps) out.push_back(std::move(one));
  }
  return Value::list(std::move(out), ListKind::stream);
}

Value mapped(Interpreter& run, const Value& value, const Arguments& given) {
  std::vector<Value> out;
  if (given.places.empty()) {
    Asked asked{"the filter 'map'", given};
    const Value path = asked.need("attribute");
    const auto otherwise = asked.next("default");
    asked.end();
    for (const Value& one : items_or_none(run, value)) {
      out.push_back(at_path(run, one, path, otherwise.value_or(Value{})));
    }
  } else {
    const std::string name = run.text_of(given.places.front(), "the filter 'map'").text;
    const Arguments rest{{given.places.begin() + 1, given.places.end()}, given.named};
    for (const Value& one : items_or_none(run, value)) out.push_back(run.filter(name, one, rest));
  }
  return Value::list(std::move(out), ListKind::stream);
}

/// In order; counts its comparisons.
template <class Before>
void sort(Interpreter& run, std::vector<Value>& items, Before before) {
  run.charge(items.size() * 8);
  std::stable_sort(items.begin(), items.end(), [&](const Value& a, const Value& b) {
    run.charge(1 + std::min(weight_of(a), weight_of(b)));
    return before(a, b);
  });
}

Value sorted(Interpreter& run, const Value& value, Asked& asked) {
  const bool reverse = asked.flag("reverse");
  const bool keeps_case = asked.flag("case_sensitive");
  const auto path = asked.next("attribute");
  asked.end();
  if (path && path->text() != nullptr && path->text()->text.find(',') != std::string::npos) {
    refuse(asked.what(), " by several attributes is not carried out");
  }
  std::vector<Value> items = run.items_of(value);
  std::vector<Value> keys;
  for (const Value& one : items) {
    keys.push_back(folded(run, path && !path->is_none() ? at_path(run, one, *path) : one, keeps_case));
  }
  std::vector<Value> places;
  for (std::size_t i = 0; i < items.size(); ++i) places.emplace_back(static_cast<std::int64_t>(i));
  const auto key = [&](const Value& place) -> const Value& {
    return keys[static_cast<std::size_t>(place.as<std::int64_t>())];
  };
  sort(run, places, [&](const Value& a, const Value& b) {
    return reverse ? order(key(b), key(a)) < 0 : order(key(a), key(b)) < 0;
  });
  std::vector<Value> out;
  for (const Value& place : places) out.push_back(items[static_cast<std::size_t>(place.as<std::int64_t>())]);
  return Value::list(std::move(out));
}

Value dict_sorted(Interpreter& run, const Value& value, Asked& asked) {
  const bool keeps_case = asked.flag("case_sensitive");
  const std::string by = asked.text("by").value_or("key");
  const bool reverse = asked.flag("reverse");
  asked.end();
  if (by != "key" && by != "value") refuse(asked.what(), ": by is '", by, "', must be 'key' or 'value'");
  if (value.dict() == nullptr) refuse(asked.what(), " of a ", value.type(), ", must be a dict");
  std::vector<Value> pairs;
  for (const auto& [key, item] : value.dict()->items)
    pairs.push_back(Value::list({key, item}, ListKind::tuple));
  const std::size_t place = by == "key" ? 0 : 1;
  const auto key = [&](const Value& pair) { return folded(run, pair.list()->items[place], keeps_case); };
  sort(run, pairs, [&](const Value& a, const Value& b) {
    return reverse ? order(key(b), key(a)) < 0 : order(key(a), key(b)) < 0;
  });
  return Value::list(std::move(pairs));
}

Value joined(Interpreter& run, const Value& value, Asked& asked) {
  const auto between = asked.next("d");
  const auto path = asked.next("attribute");
  asked.end();
  const Text separator = between ? printed(*between) : Text{};
  Text out;
  bool first = true;
  for (const Value& one : run.items_of(value)) {
    if (!first) append(out, separator);
    first = false;
    const Value shown = path && !path->is_none() ? at_path(run, one, *path) : one;
    run.charge(weight_of(shown));
    append(out, printed(shown));
  }
  run.charge(out.text.size() / 64);
  return Value{std::move(out)};
}

Value indented(Interpreter& run, const Value& value, Asked& asked) {
  const auto width = asked.next("width");
  const bool first = asked.flag("first");
  const bool blank = asked.flag("blank");
  asked.end();
  if (width && width->is<std::int64_t>() && width->as<std::int64_t>() > 1000)
    refuse(asked.what(), " by more than 1000");
  const std::string by = !width ? std::string(4, ' ')
                         : width->text() != nullptr
                             ? width->text()->text
                             : std::string(static_cast<std::size_t>(std::max<std::int64_t>(
                                               0, width->is<std::int64_t>() ? width->as<std::int64_t>() : 0)),
                                           ' ');
  const Text& text = run.text_of(value, asked.what());
  // Python splits the text, with a line break behind it, at all that it takes for the end of a line.
  if (text.text.find_first_of("\v\f\x1c\x1d\x1e") != std::string::npos ||
      text.text.find("\xC2\x85") != std::string::npos ||
      text.text.find("\xE2\x80\xA8") != std::string::npos ||
      text.text.find("\xE2\x80\xA9") != std::string::npos || text.text.find('\r') != std::string::npos) {
    refuse(asked.what(), " of a text with rare line breaks is not carried out");
  }
  Text out;
  std::size_t at = 0;
  for (std::size_t line = 0;; ++line) {
    const std::size_t end = std::min(text.text.find('\n', at), text.text.size());
    if (line > 0) append(out, "\n");
    if ((line == 0 ? first : true) && (blank || end > at || (line == 0 && first))) append(out, by);
    append(out, part(text, {at, end}));
    if (end == text.text.size()) break;
    at = end + 1;
  }
  run.charge(out.text.size() / 64);
  return Value{std::move(out)};
}

Value as_json(Interpreter& run, const Value& value, Asked& asked) {
  JsonStyle style;
  style.ascii = asked.flag("ensure_ascii");
  const auto indent = asked.next("indent");
  const auto separators = asked.next("separators");
  style.sorted = asked.flag("sort_keys");
  asked.end();
  if (indent && indent->is<std::int64_t>()) {
    style.indent = static_cast<int>(std::clamp<std::int64_t>(indent->as<std::int64_t>(), 0, 100));
    style.item_separator = ",";
  } else if (indent && !indent->is_none()) {
    refuse(asked.what(), ": indent is a ", indent->type(), ", must be a whole number");
  }
  if (separators && !separators->is_none()) {
    const std::vector<Value> two = run.items_of(*separators);
    if (two.size() != 2) refuse(asked.what(), ": separators are ", two.size(), " values, must be two");
    style.item_separator = run.text_of(two[0], asked.what()).text;
    style.key_separator = run.text_of(two[1], asked.what()).text;
  }
  run.charge(8 * weight_of(value));
  Text out;
  append_json(out, value, style);
  return Value{std::move(out)};
}

std::size_t length_of(const Value& value, std::string_view what) {
  if (value.is_undefined()) return 0;
  if (const Text* text = value.text()) return character_starts(text->text).size() - 1;
  if (const Dict* dict = value.dict()) return dict->items.size();
  if (value.list() == nullptr || value.list()->kind == ListKind::stream)
    refuse(what, " of a ", value.type(), ", which has none");
  return value.list()->items.size();
}

Value rounded(const Value& value, Asked& asked) {
  const std::int64_t precision = asked.integer("precision").value_or(0);
  const std::string method = asked.text("method").value_or("common");
  asked.end();
  if (!value.is_number()) refuse(asked.what(), " of a ", value.type(), ", must be a number");
  if (precision < 0 || precision > 15) refuse(asked.what(), " to ", precision, " digits is not carried out");
  const double scale = std::pow(10.0, static_cast<double>(precision));
  const double number = real_of(value);
  if (method == "ceil") return Value{std::ceil(number * scale) / scale};
  if (method == "floor") return Value{std::floor(number * scale) / scale};
  if (method != "common") refuse(asked.what(), ": method is '", method, "', must be common, ceil or floor");
  // Python rounds the exact decimal expansion, halves to even.
  std::array<char, 400> digits{};
  const auto written = std::to_chars(digits.data(), digits.data() + digits.size(), number,
                                     std::chars_format::fixed, static_cast<int>(precision));
  double out = 0.0;
  std::from_chars(digits.data(), written.ptr, out);
  return value.is<double>() ? Value{out} : number_of(value, Value{}, true);
}

}  // namespace

Value Interpreter::filter(std::string_view name, const Value& value, const Arguments& given) {
  const Level level{*this};
  charge(1 + (value.text() != nullptr ? weight_of(value) : 0));
  Asked asked{"the filter '" + std::string{name} + "'", given};
  const auto text = [&]() -> const Text& { return text_of(value, asked.what()); };
  const auto alone = [&] { asked.end(); };
  const auto soft = [&](const Value& one) {  // what many filters take in place of a text
    if (one.text() != nullptr) return one;
    charge(weight_of(one));
    return Value{printed(one)};
  };
  if (name == "tojson") return as_json(*this, value, asked);
  if (name == "select" || name == "reject" || name == "selectattr" || name == "rejectattr")
    return chosen(*this, name, value, given);
  if (name == "map") return mapped(*this, value, given);
  if (name == "default" || name == "d") {
    const Value otherwise = asked.next("default_value").value_or(Value{""});
    const bool for_false = asked.flag("boolean");
    alone();
    return value.is_undefined() || (for_false && !value.truth()) ? otherwise : value;
  }
  if (name == "length" || name == "count") {
    alone();
    return Value{static_cast<std::int64_t>(length_of(value, asked.what()))};
  }
  if (name == "trim") {
    const auto characters = asked.text("chars");
    alone();
    const Value as_text = soft(value);
    const Text& all = text_of(as_text, asked.what());
    return Value{part(all, stripped(all.text, characters, Side::both))};
  }
  if (name == "string") {
    alone();
    return soft(value);
  }
  if (name == "safe") {
    alone();
    Text out = printed(value);
    out.safe = true;
    return Value{std::move(out)};
  }
  if (name == "join") return joined(*this, value, asked);
  if (name == "list") {
    alone();
    return Value::list(items_of(value));
  }
  if (name == "items") {
    alone();
    if (value.is_undefined()) return Value::list({}, ListKind::stream);
    if (value.dict() == nullptr) refuse(asked.what(), " of a ", value.type(), ", must be a dict");
    std::vector<Value> pairs;
    for (const auto& [key, item] : value.dict()->items)
      pairs.push_back(Value::list({key, item}, ListKind::tuple));
    charge(pairs.size());
    return Value::list(std::move(pairs), ListKind::stream);
  }
  if (name == "lower" || name == "upper") {
    alone();
    return Value{in_ascii(*this, soft(value), asked.what(), name == "lower" ? lowered : raised)};
  }
  if (name == "capitalize") {
    alone();
    const Value as_text = soft(value);
    return text_method(text_of(as_text, asked.what()), "capitalize", {});
  }
  if (name == "title") {  // other words than those of Python's title()
    alone();
    Text out = in_ascii(*this, soft(value), asked.what(), lowered);
    bool begins = true;
    for (char& c : out.text) {
      if (begins) c = raised(c, true);
      begins = is_python_space(static_cast<char32_t>(c)) ||
               std::string_view{"-({[<"}.find(c) != std::string_view::npos;
    }
    return Value{std::move(out)};
  }
  if (name == "replace") {
    const Value from = soft(asked.need("old"));
    const Value to = soft(asked.need("new"));
    const std::int64_t most = asked.integer("count").value_or(-1);
    alone();
    const Value as_text = soft(value);
    return Value{replaced(*this, text_of(as_text, asked.what()), text_of(from, asked.what()),
                          text_of(to, asked.what()), most)};
  }
  if (name == "indent") return indented(*this, value, asked);
  if (name == "sort") return sorted(*this, value, asked);
  if (name == "dictsort") return dict_sorted(*this, value, asked);
  if (name == "first" || name == "last") {
    alone();
    if (const List* list = value.list(); list != nullptr && list->kind == ListKind::stream) {
      if (name == "last" || list->read != List::Read::nothing)
        refuse(asked.what(), " of a generator is not carried out");
      list->read = List::Read::some;
      return list->items.empty() ? Value::undefined("No first item, sequence was empty.")
                                 : list->items.front();
    }
    std::vector<Value> items = items_of(value);
    if (items.empty()) return Value::undefined("there is no " + std::string{name} + " item");
    return name == "first" ? items.front() : items.back();
  }
  if (name == "min" || name == "max") {
    const bool keeps_case = asked.flag("case_sensitive");
    const auto path = asked.next("attribute");
    alone();
    std::optional<std::pair<Value, Value>> best;
    for (const Value& one : items_of(value)) {
      const Value key =
          folded(*this, path && !path->is_none() ? at_path(*this, one, *path) : one, keeps_case);
      if (!best || (name == "min" ? order(key, best->first) < 0 : order(key, best->first) > 0))
        best = {key, one};
    }
    return best ? best->second : Value::undefined("No aggregated item, sequence was empty.");
  }
  if (name == "sum") {
    const auto path = asked.next("attribute");
    Value total = asked.next("start").value_or(Value{std::int64_t{0}});
    alone();
    for (const Value& one : items_of(value)) {
      total = arithmetic("+", total, path && !path->is_none() ? at_path(*this, one, *path) : one);
    }
    return total;
  }
  if (name == "unique") {
    const bool keeps_case = asked.flag("case_sensitive");
    const auto path = asked.next("attribute");
    alone();
    std::vector<Value> keys;
    std::vector<Value> out;
    for (const Value& one : items_of(value)) {
      Value key = folded(*this, path && !path->is_none() ? at_path(*this, one, *path) : one, keeps_case);
      require_hashable(key);
      charge(keys.size() * (weight_of(key) + 1));
      if (std::ranges::any_of(keys, [&](const Value& earlier) { return equal(earlier, key); })) continue;
      keys.push_back(std::move(key));
      out.push_back(one);
    }
    return Value::list(std::move(out), ListKind::stream);
  }
  if (name == "reverse") {
    alone();
    if (value.text() != nullptr) return slice(value, Value{None{}}, Value{None{}}, Value{std::int64_t{-1}});
    std::vector<Value> items = items_of(value);
    std::ranges::reverse(items);
    return Value::list(std::move(items), ListKind::stream);
  }
  if (name == "int" || name == "float") {
    const bool whole = name == "int";
    const Value otherwise = asked.next("default").value_or(whole ? Value{std::int64_t{0}} : Value{0.0});
    alone();
    return number_of(value, otherwise, whole);
  }
  if (name == "abs") {
    alone();
    if (!value.is_number()) refuse(asked.what(), " of a ", value.type(), ", must be a number");
    return real_of(value) < 0 ? arithmetic("-", Value{std::int64_t{0}}, value)
           : value.is<bool>() ? Value{static_cast<std::int64_t>(value.as<bool>())}
                              : value;
  }
  if (name == "round") return rounded(value, asked);
  if (name == "attr") {
    const Value of = asked.need("name");
    alone();
    const std::string& attribute_name = text_of(of, asked.what()).text;
    if (value.dict() != nullptr && !has_method(value, attribute_name)) {
      return Value::undefined("a dict has no attribute '" + attribute_name + "'");
    }
    return attribute(value, attribute_name);
  }
  if (name == "format")
    return Value{percent_format(*this, text(), Value::list(asked.rest(), ListKind::tuple))};
  fail<FormatError>("the chat template uses the filter '", name, "', which is not carried out");
}

}  // namespace kvpolicy::reference::jinja
