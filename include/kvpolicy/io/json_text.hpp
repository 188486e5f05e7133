// SPDX-License-Identifier: Apache-2.0
//
// Reads JSON from files that may be damaged or hostile. Some things that nlohmann::json accepts are errors
// here: a key given twice, values nested without limit, and more values than a plan can have. Every error
// says where it is, in a line that fits a terminal.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy::io {

/// A parsed value.
using Json = nlohmann::json;
/// The same with the keys of objects in the order of the text.
using OrderedJson = nlohmann::ordered_json;

/// The position of the byte at `offset`, as "line 3, column 14".
[[nodiscard]] inline std::string place_in_text(std::string_view text, std::size_t offset) {
  const std::string_view before = text.substr(0, offset);
  std::size_t line = 1;
  for (const char c : before) line += c == '\n' ? 1 : 0;
  const std::size_t newline = before.rfind('\n');
  const std::size_t column = newline == std::string_view::npos ? before.size() + 1 : before.size() - newline;
  return message("line ", line, ", column ", column);
}

/// The first `most` bytes of `text`, made safe for a terminal and an error message: without control bytes
/// or half characters, and with an ellipsis if something was cut off.
[[nodiscard]] inline std::string shortened(std::string_view text, std::size_t most) {
  std::size_t end = std::min(most, text.size());
  const auto inside_character = [&] { return (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U; };
  while (end > 0 && end < text.size() && inside_character()) --end;
  std::string out;
  for (const char c : text.substr(0, end)) {
    const auto byte = static_cast<unsigned char>(c);
    out += byte < 0x20 || byte == 0x7f ? '?' : c;
  }
  return out + (text.size() > most ? "…" : "");
}

/// `text` in quotes, shortened.
[[nodiscard]] inline std::string in_quotes(std::string_view text) {
  return std::string{'\''}.append(shortened(text, 60)).append(1, '\'');
}

/// Describes a JSON value for an error message: its kind and, if it is short, the value.
template <class AnyJson>
[[nodiscard]] std::string shown(const AnyJson& value) {
  if (value.is_string()) {
    return std::string{"the string "}.append(in_quotes(value.template get_ref<const std::string&>()));
  }
  if (value.is_array()) return message("an array of ", value.size());
  if (value.is_object()) return message("an object of ", value.size());
  return value.dump();
}

/// An iterator that also stores how far the parser has read, because the parser itself does not report
/// where it met a key.
class TrackedIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  TrackedIterator(const char* at, const char** latest) : at_{at}, latest_{latest} {}
  reference operator*() const { return *at_; }
  TrackedIterator& operator++() {
    *latest_ = ++at_;
    return *this;
  }
  TrackedIterator operator++(int) {
    const TrackedIterator old = *this;
    ++*this;
    return old;
  }
  friend bool operator==(const TrackedIterator& a, const TrackedIterator& b) { return a.at_ == b.at_; }
  friend bool operator!=(const TrackedIterator& a, const TrackedIterator& b) { return !(a == b); }

 private:
  const char* at_;
  const char** latest_;
};

/// The limits for a JSON text.
struct JsonLimits {
  std::size_t deepest = 16;  ///< arrays and objects inside one another
  /// Values and keys in total. A value that takes two bytes of text takes 16 when parsed, a key over a
  /// hundred: this many numbers take as much memory as the largest text file.
  std::size_t most_values = std::size_t{1} << 22;
  /// Keys of one object: OrderedJson goes through them all for each that it adds or finds.
  std::size_t most_keys = std::numeric_limits<std::size_t>::max();
  /// Memory of the parsed values, about: `{}` takes 50 times its text.
  std::size_t most_bytes = std::numeric_limits<std::size_t>::max();
};

namespace detail {

/// Builds the values that nlohmann::json's parser reads (its SAX interface), within limits. The parser's own callback goes through a
/// whole array again after each object in it.
template <class AnyJson, class Refuse>
class JsonBuilder {
 public:
  JsonBuilder(const JsonLimits& limits, const Refuse& refuse) : limits_{limits}, refuse_{refuse} {}

  bool null() { return value(nullptr); }
  bool boolean(bool truth) { return value(truth); }
  bool number_integer(std::int64_t number) { return value(number); }
  bool number_unsigned(std::uint64_t number) { return value(number); }
  bool number_float(double number, const std::string&) { return value(number); }
  bool string(std::string& text) {
    bytes_ += sizeof text + text.size();
    return value(std::move(text));
  }
  bool binary(typename AnyJson::binary_t&) { return false; }  // JSON has none
  bool start_object(std::size_t) { return open(AnyJson::object()); }
  bool start_array(std::size_t) { return open(AnyJson::array()); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }
  bool key(std::string& name) {
    count(sizeof name + name.size() + allocation);
    auto& object = open_.back()->template get_ref<typename AnyJson::object_t&>();
    if (object.size() >= limits_.most_keys) refuse_("an object has more than ", limits_.most_keys, " keys");
    const auto [place, is_new] = object.emplace(name, nullptr);
    if (!is_new) refuse_("the key ", in_quotes(name), " is given twice");
    at_ = &place->second;
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception& error) {
    // The name in "[json.exception.parse_error.101] parse error at line 1, column 2: …" does not help a
    // user. The message quotes the last token in full, however long it is, so it is shortened.
    const std::string_view what = error.what();
    const std::size_t end = what.find("] ");
    refuse_(shortened(what.substr(end == std::string_view::npos ? 0 : end + 2), 240));
    return false;
  }

  [[nodiscard]] AnyJson take() { return std::move(all_); }
  /// `left` may be the limits themselves.
  void take_off(JsonLimits& left) const {
    left.most_values -= values_;
    left.most_bytes -= bytes_;
  }

 private:
  static constexpr std::size_t allocation = 48;  // what one takes besides, and a map's node

  void count(std::size_t bytes) {
    if (++values_ > limits_.most_values) refuse_("has more than ", limits_.most_values, " values and keys");
    bytes_ += bytes;
    if (bytes_ > limits_.most_bytes) {
      refuse_("its values take more than ", limits_.most_bytes, " bytes of memory");
    }
  }
  AnyJson* add(AnyJson value) {
    count(2 * sizeof value);  // an array keeps room for more
    if (open_.empty()) return &(all_ = std::move(value));
    if (!open_.back()->is_array()) return &(*at_ = std::move(value));
    open_.back()->push_back(std::move(value));
    return &open_.back()->back();
  }
  bool value(AnyJson value) { return add(std::move(value)) != nullptr; }
  bool open(AnyJson container) {
    if (open_.size() >= limits_.deepest) refuse_("values are nested deeper than ", limits_.deepest);
    bytes_ += allocation;
    open_.push_back(add(std::move(container)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  const JsonLimits& limits_;
  const Refuse& refuse_;
  AnyJson all_;
  std::vector<AnyJson*> open_;  // a container does not change while one inside it is open
  AnyJson* at_ = nullptr;       // where the value of the latest key goes
  std::size_t values_ = 0;
  std::size_t bytes_ = 0;
};

/// Implements the public `parse_json`. `place_in(text, offset)` describes the position of an offset. It
/// reads all text before the offset, so it is only called for a text that is refused.
template <class AnyJson, class PlaceIn>
[[nodiscard]] AnyJson parse_json(std::string_view text, std::string_view origin, const JsonLimits& limits,
                                 PlaceIn place_in, JsonLimits* left = nullptr) {
  require<FormatError>(text.find_first_not_of(" \t\r\n") != std::string_view::npos, origin,
                       ": is empty, must be JSON");
  const char* latest = text.data();
  const auto refuse = [&](const auto&... reason) {
    const auto offset = static_cast<std::size_t>(latest - text.data());
    fail<FormatError>(
        origin, ": ", place_in(text, offset), ": ", reason...,
        origin.ends_with(".tsv")
            ? "; a .tsv of gates belongs to a DuoAttention pattern: give the folder that it is in"
            : "");
  };
  JsonBuilder<AnyJson, decltype(refuse)> builder{limits, refuse};
  if (!AnyJson::sax_parse(TrackedIterator{text.data(), &latest},
                          TrackedIterator{text.data() + text.size(), &latest}, &builder)) {
    refuse("is not JSON");
  }
  if (left != nullptr) builder.take_off(*left);
  return builder.take();
}

}  // namespace detail

/// Reads a JSON text, strictly.
/// @throws FormatError, which begins with `origin` (usually a path), for a text that is empty or not JSON,
/// a number that a double cannot hold, a key given twice in one object, or more than the limits allow.
[[nodiscard]] inline Json parse_json(std::string_view text, std::string_view origin,
                                     const JsonLimits& limits = {}) {
  return detail::parse_json<Json>(text, origin, limits, place_in_text);
}
/// The same, keeping the order of keys; what the text takes is taken off the limits, so that several texts can share them. Wants a
/// limit of keys where the text is not one's own. @throws as parse_json
[[nodiscard]] inline OrderedJson parse_ordered_json(std::string_view text, std::string_view origin,
                                                    JsonLimits& limits) {
  return detail::parse_json<OrderedJson>(text, origin, limits, place_in_text, &limits);
}

/// One object of a file, read by key. Its errors name the path to the value. It can refuse keys that nobody
/// read, because a misspelt setting must not silently become a default.
class JsonObject {
 public:
  /// @throws FormatError if `value` is not an object.
  JsonObject(const Json& value, std::string where) : value_{&value}, where_{std::move(where)} {
    require<FormatError>(value.is_object(), where_, ": must be an object, is ", shown(value));
  }

  [[nodiscard]] const std::string& where() const { return where_; }
  [[nodiscard]] std::string where(std::string_view key) const { return message(where_, ", ", key); }

  /// The value of a key, or null if it is not there.
  [[nodiscard]] const Json* find(const char* key) {
    asked_.insert(key);
    const auto found = value_->find(key);
    return found == value_->end() ? nullptr : &*found;
  }
  [[nodiscard]] const Json& at(const char* key) {
    const Json* found = find(key);
    require<FormatError>(found != nullptr, where_, ": the key '", key, "' is missing");
    return *found;
  }

  /// Reads a whole number of at most `most`.
  [[nodiscard]] std::size_t count(const char* key,
                                  std::size_t most = std::numeric_limits<std::size_t>::max()) {
    return as_count(at(key), where(key), most);
  }
  [[nodiscard]] std::size_t count_or(const char* key, std::size_t otherwise) {
    const Json* found = find(key);
    return found == nullptr ? otherwise
                            : as_count(*found, where(key), std::numeric_limits<std::size_t>::max());
  }
  [[nodiscard]] double number_or(const char* key, double otherwise) {
    const Json* found = find(key);
    if (found == nullptr) return otherwise;
    require<FormatError>(found->is_number(), where(key), ": must be a number, is ", shown(*found));
    return found->get<double>();
  }
  [[nodiscard]] bool flag_or(const char* key, bool otherwise) {
    const Json* found = find(key);
    if (found == nullptr) return otherwise;
    require<FormatError>(found->is_boolean(), where(key), ": must be true or false, is ", shown(*found));
    return found->get<bool>();
  }
  [[nodiscard]] const std::string& text(const char* key) {
    const Json& found = at(key);
    require<FormatError>(found.is_string(), where(key), ": must be a string, is ", shown(found));
    return found.get_ref<const std::string&>();
  }

  /// @throws FormatError if there is a key that was not read.
  void refuse_others() const {
    for (const auto& item : value_->items()) {
      require<FormatError>(asked_.contains(item.key()), where_, ": unknown key ", in_quotes(item.key()),
                           "; known here: ", known());
    }
  }

  [[nodiscard]] static std::size_t as_count(const Json& value, const std::string& where, std::size_t most) {
    require<FormatError>(value.is_number_unsigned(), where, ": must be a whole number, is ", shown(value));
    const auto number = value.get<std::uint64_t>();
    require<FormatError>(number <= most, where, ": is ", number, ", must be at most ", most);
    return static_cast<std::size_t>(number);
  }

 private:
  [[nodiscard]] std::string known() const {
    std::string list;
    for (const std::string& key : asked_) list += (list.empty() ? "" : ", ") + key;
    return list;
  }

  const Json* value_;
  std::string where_;
  std::set<std::string> asked_;
};

}  // namespace kvpolicy::io
