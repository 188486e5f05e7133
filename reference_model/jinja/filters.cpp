// SPDX-License-Identifier: Apache-2.0
//
// Jinja's filters and tests; tojson as transformers has it.
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <span>

#include <kvpolicy/core/error.hpp>
#include <reference_model/jinja/interpreter.hpp>
#include <reference_model/utf8.hpp>

namespace kvpolicy::reference::jinja {
namespace {

constexpr bool is_upper(char c) { return c >= 'A' && c <= 'Z'; }
constexpr bool is_lower(char c) { return c >= 'a' && c <= 'z'; }

/// Calls itself with all filters and tests that compare, or match text, without regard to case.
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

/// In order, a merge at a time; counts its comparisons.
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

/// Python's rules for letters beyond ASCII are not here.
Text in_ascii(Interpreter& run, const Value& value, std::string_view what, char (*of)(char c, bool begins)) {
  Text text = run.text_of(value, what);
  bool begins = true;
  for (char& c : text.text) {
    if (static_cast<unsigned char>(c) >= 0x80) {
      refuse(what, " of letters beyond ASCII is not carried out");
    }
    const bool letter = is_upper(c) || is_lower(c);
    c = of(c, begins);
    begins = !letter;
  }
  run.charge(text.text.size() / 64);
  return text;
}
constexpr char raised(char c, bool /*begins*/) { return is_lower(c) ? static_cast<char>(c - 'a' + 'A') : c; }
constexpr char lowered(char c, bool /*begins*/) { return is_upper(c) ? static_cast<char>(c - 'A' + 'a') : c; }

std::size_t length_of(const Value& value, std::string_view what) {
  if (value.is_undefined()) return 0;
  if (const Text* text = value.text()) return character_starts(text->text).size() - 1;
  if (const Dict* dict = value.dict()) return dict->items.size();
  if (value.list() == nullptr || value.list()->kind == ListKind::stream)
    refuse(what, " of a ", value.type(), ", which has none");
  return value.list()->items.size();
}

Value number_of(const Value& value, const Value& otherwise, bool whole) {
  if (value.is_undefined()) refuse_undefined(value);
  if (value.is_number()) {
    if (!whole) return Value{real_of(value)};
    if (!value.is<double>()) return Value{static_cast<std::int64_t>(real_of(value))};
    if (!(std::abs(value.as<double>()) < 9e18)) return otherwise;
    return Value{static_cast<std::int64_t>(value.as<double>())};
  }
  if (value.text() == nullptr) return otherwise;
  std::string_view text = value.text()->text;
  const ByteRange inner = stripped(text, {}, Side::both);
  text = text.substr(inner.begin, inner.end - inner.begin);
  if (text.find('_') != text.npos) refuse("a number written with '_' is not carried out");
  if (text.starts_with('+') && text.size() > 1 && text[1] != '-') text.remove_prefix(1);
  const char* end = text.data() + text.size();
  if (whole) {
    std::int64_t number = 0;
    const auto read = std::from_chars(text.data(), end, number);
    if (read.ec == std::errc{} && read.ptr == end) return Value{number};
    if (read.ec == std::errc::result_out_of_range) refuse("a number does not fit 64 bits");
  }
  double number = 0.0;
  const auto read = std::from_chars(text.data(), end, number);
  if (read.ec != std::errc{} || read.ptr != end || text.empty()) return otherwise;
  if (!whole) return Value{number};
  return std::abs(number) < 9e18 ? Value{static_cast<std::int64_t>(number)} : otherwise;
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

Text replaced(Interpreter& run, const Text& text, const Text& from, const Text& to, std::int64_t most) {
  Text out;
  std::size_t at = 0;
  if (from.text.empty()) {  // Python puts it around every character
    const std::vector<std::size_t> starts = character_starts(text.text);
    for (std::size_t i = 0; i < starts.size(); ++i) {
      if (most != 0) append(out, to);
      if (most > 0) --most;
      if (i + 1 < starts.size()) append(out, part(text, {starts[i], starts[i + 1]}));
    }
    return out;
  }
  while (most != 0) {
    const std::size_t found = text.text.find(from.text, at);
    if (found == text.text.npos) break;
    append(out, part(text, {at, found}));
    append(out, to);
    at = found + from.text.size();
    run.charge(1);
    if (most > 0) --most;
  }
  append(out, part(text, {at, text.text.size()}));
  run.charge(out.text.size() / 64);
  return out;
}

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

Value Interpreter::filter(std::string_view name, const Value& value, const Arguments& given) {
  const Level level{*this};
  charge(1);
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

bool Interpreter::test(std::string_view name, const Value& value, const Arguments& given) {
  const Level level{*this};
  charge(1);
  Asked asked{"the test '" + std::string{name} + "'", given};
  const auto other = [&](std::string_view parameter) {
    Value found = asked.need(parameter);
    asked.end();
    return found;
  };
  if (name == "eq" || name == "equalto" || name == "==") return equal(value, other("other"));
  if (name == "ne" || name == "!=") return !equal(value, other("other"));
  if (name == "lt" || name == "lessthan" || name == "<") return order(value, other("other")) < 0;
  if (name == "gt" || name == "greaterthan" || name == ">") return order(value, other("other")) > 0;
  if (name == "le" || name == "<=") return order(value, other("other")) <= 0;
  if (name == "ge" || name == ">=") return order(value, other("other")) >= 0;
  if (name == "in") return contains(other("seq"), value);
  if (name == "sameas") {
    const Value same = other("other");
    const bool simple = (value.is<bool>() && same.is<bool>()) || (value.is_none() && same.is_none());
    const bool other_kind = value.type() != same.type();
    if (!simple && !other_kind) refuse(asked.what(), " with a ", value.type(), " is not carried out");
    return simple && equal(value, same);
  }
  if (name == "divisibleby") return !arithmetic("%", value, other("num")).truth();
  asked.end();
  const List* list = value.list();
  if (name == "defined") return !value.is_undefined();
  if (name == "undefined") return value.is_undefined();
  if (name == "none") return value.is_none();
  if (name == "boolean") return value.is<bool>();
  if (name == "true") return value.is<bool>() && value.as<bool>();
  if (name == "false") return value.is<bool>() && !value.as<bool>();
  if (name == "integer") return value.is<std::int64_t>();
  if (name == "float") return value.is<double>();
  if (name == "number") return value.is_number();
  if (name == "string") return value.text() != nullptr;
  if (name == "mapping") return value.dict() != nullptr;
  if (name == "iterable")
    return value.text() != nullptr || value.dict() != nullptr || list != nullptr || value.is_undefined() ||
           value.is<Loop*>();
  if (name == "sequence") {
    return value.text() != nullptr || value.dict() != nullptr || value.is_undefined() ||
           (list != nullptr && list->kind != ListKind::view && list->kind != ListKind::stream);
  }
  if (name == "callable")
    return value.is_undefined() || value.is<Builtin>() || value.is<const Macro*>() ||
           value.method() != nullptr || value.is<Loop*>();
  if (name == "odd" || name == "even") {
    return equal(arithmetic("%", value, Value{std::int64_t{2}}), Value{std::int64_t{name == "odd" ? 1 : 0}});
  }
  if (name == "lower" || name == "upper") {
    return text_method(printed(value), name == "lower" ? "islower" : "isupper", {}).truth();
  }
  fail<FormatError>("the chat template uses the test '", name, "', which is not carried out");
}

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
  Asked asked{"'." + name + "()'", given};
  const auto needed_text = [&](std::string_view parameter) {
    return text_of(asked.need(parameter), asked.what());
  };
  if (name == "strip" || name == "lstrip" || name == "rstrip") {
    const auto characters = asked.text("chars");
    asked.end();
    const Side side = name == "strip" ? Side::both : name == "lstrip" ? Side::left : Side::right;
    charge(text.text.size() / 64);
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
    return Value{std::move(out)};
  }
  if (name == "format") return Value{brace_format(*this, text, given)};
  if (name == "find" || name == "rfind" || name == "index" || name == "count") {
    const Text sought = needed_text("sub");
    asked.end();
    charge(text.text.size() / 64 + 1);
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

Text percent_format(Interpreter& run, const Text& format, const Value& values) {
  const List* tuple = values.list();
  const bool many = tuple != nullptr && tuple->kind == ListKind::tuple;
  std::size_t next = 0;
  Text out;
  std::size_t at = 0;
  while (at < format.text.size()) {
    const std::size_t mark = std::min(format.text.find('%', at), format.text.size());
    append(out, part(format, {at, mark}));
    if (mark == format.text.size()) break;
    const char kind = mark + 1 < format.text.size() ? format.text[mark + 1] : ' ';
    at = mark + 2;
    if (kind == '%') {
      append(out, "%");
      continue;
    }
    if (kind != 's' && kind != 'd' && kind != 'r') {
      fail<FormatError>("the chat template: of the fields of '%', only %s, %d, %r and %% are carried out");
    }
    if (many ? next >= tuple->items.size() : next > 0) refuse("'%' has more fields than values");
    const Value& value = many ? tuple->items[next] : values;
    ++next;
    if (kind == 'd' && !value.is_number()) refuse("%d with a ", value.type(), ", must be a number");
    if (kind == 'd') {
      append(out, printed(number_of(value, Value{std::int64_t{0}}, true)));
    } else if (kind == 'r') {
      append_shown(out, value);
    } else {
      append(out, printed(value));
    }
  }
  if (many ? next < tuple->items.size()
           : next == 0 && values.dict() == nullptr && (tuple == nullptr || !tuple->is_plain()))
    refuse("'%' has fewer fields than values");
  run.charge(out.text.size() / 64);
  return out;
}

Text brace_format(Interpreter& run, const Text& format, const Arguments& values) {
  Text out;
  std::size_t next = 0;
  for (std::size_t at = 0; at < format.text.size();) {
    const char c = format.text[at];
    const bool doubled = at + 1 < format.text.size() && format.text[at + 1] == c;
    if ((c == '{' || c == '}') && doubled) {
      append(out, std::string_view{&c, 1});
      at += 2;
    } else if (c == '{') {
      const std::size_t end = format.text.find('}', at);
      if (end == format.text.npos) refuse("'.format()': a field does not end");
      const std::string field = format.text.substr(at + 1, end - at - 1);
      std::size_t place = next;
      const auto read = std::from_chars(field.data(), field.data() + field.size(), place);
      const auto named = std::ranges::find(values.named, field, [](const auto& one) { return one.first; });
      const Value* value = nullptr;
      if (field.empty() || (read.ec == std::errc{} && read.ptr == field.data() + field.size())) {
        if (place < values.places.size()) value = &values.places[place];
        ++next;
      } else if (named != values.named.end()) {
        value = &named->second;
      } else if (field.find_first_of(".[!:") != field.npos) {
        fail<FormatError>("the chat template: the field '{", field, "}' of '.format()' is not carried out");
      }
      if (value == nullptr) refuse("'.format()' has no value for '{", field, "}'");
      append(out, printed(*value));
      at = end + 1;
    } else if (c == '}') {
      refuse("'.format()': a '}' closes nothing");
    } else {
      const std::size_t end = std::min(format.text.find_first_of("{}", at), format.text.size());
      append(out, part(format, {at, end}));
      at = end;
    }
  }
  run.charge(out.text.size() / 64);
  return out;
}

}  // namespace kvpolicy::reference::jinja
