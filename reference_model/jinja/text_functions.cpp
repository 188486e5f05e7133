// SPDX-License-Identifier: Apache-2.0
#include <reference_model/jinja/text_functions.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy::reference::jinja {

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
    run.charge(out.text.size() / 64 + starts.size());
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
