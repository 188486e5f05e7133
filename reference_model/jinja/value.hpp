// SPDX-License-Identifier: Apache-2.0
//
// What a template's expressions are worth: Python's values, as far as templates of conversations use them. Texts, lists and
// dicts do not change once they are made (transformers renders templates in Jinja's immutable sandbox), so they are shared
// freely and cannot hold themselves. What has a state (a namespace, a loop, a macro's scope) belongs to the run of the template.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include <reference_model/jinja/text.hpp>

namespace kvpolicy::reference::jinja {

class Value;
class Namespace;
class Macro;
class Loop;

/// A name that stands for nothing. It prints nothing and is empty; nothing else can be done with it.
struct Undefined {
  std::shared_ptr<const std::string> why;  ///< what an error says, for example "'tools' is undefined"
};
struct None {};
/// What a template may call without having defined it.
enum class Builtin : std::uint8_t { dict, make_namespace, raise_exception, range, strftime_now };

/// What of Python's a row of values is. Only lists and tuples are printed, compared and written as JSON.
enum class ListKind : std::uint8_t {
  list,
  tuple,
  range,
  view,    ///< of a dict: has a length and no places
  stream,  ///< what filters such as `map` give: can be read once
};
struct List {
  std::vector<Value> items;
  ListKind kind = ListKind::list;
  std::size_t depth = 1;
  std::size_t weight = 1;  ///< how much work it is to go through all that it holds (weight_of)
  /// How much of a stream was read. (Streams belong to one run of a template.)
  mutable enum class Read : std::uint8_t { nothing, some, all } read = Read::nothing;

  [[nodiscard]] bool is_plain() const { return kind == ListKind::list || kind == ListKind::tuple; }
};
/// Keeps the order in which its items came.
struct Dict {
  std::vector<std::pair<Value, Value>> items;
  std::unordered_map<std::string_view, std::size_t> by_text;  ///< where the items are whose keys are texts
  std::size_t depth = 1;
  std::size_t weight = 1;

  /// Where the item with this key is; the number of items if there is none.
  [[nodiscard]] std::size_t place_of(const Value& key) const;
  [[nodiscard]] const Value* find(std::string_view key) const;
  [[nodiscard]] const Value* find(const Value& key) const;
};
/// A value's method, for example `message.content.strip`.
struct Method;

class Value {
 public:
  Value() = default;
  Value(None) : held_{None{}} {}
  Value(bool truth) : held_{truth} {}
  Value(std::int64_t number) : held_{number} {}
  Value(double number) : held_{number} {}
  Value(Text text) : held_{std::make_shared<const Text>(std::move(text))} {}
  Value(std::string text) : Value{Text{std::move(text)}} {}
  Value(const char* text) : Value{std::string{text}} {}
  Value(std::shared_ptr<const Text> text) : held_{std::move(text)} {}
  Value(std::shared_ptr<const Method> method) : held_{std::move(method)} {}
  Value(Builtin builtin) : held_{builtin} {}
  Value(Namespace* space) : held_{space} {}
  Value(const Macro* macro) : held_{macro} {}
  Value(Loop* loop) : held_{loop} {}

  static Value undefined(std::string why);
  /// @throws ConfigError if values would be nested more than `most_depth` deep
  static Value list(std::vector<Value> items, ListKind kind = ListKind::list);
  /// A later item with an earlier one's key takes its place. @throws as list, and for keys that cannot be such
  static Value dict(std::vector<std::pair<Value, Value>> items);
  static constexpr std::size_t most_depth = 100;
  /// Keys that are no texts, which are sought one by one.
  static constexpr std::size_t most_other_keys = 1000;

  template <class T>
  [[nodiscard]] bool is() const {
    return std::holds_alternative<T>(held_);
  }
  [[nodiscard]] bool is_undefined() const { return is<Undefined>(); }
  [[nodiscard]] bool is_none() const { return is<None>(); }
  [[nodiscard]] bool is_number() const { return is<bool>() || is<std::int64_t>() || is<double>(); }
  [[nodiscard]] const Text* text() const { return pointer<Text>(); }
  [[nodiscard]] const List* list() const { return pointer<List>(); }
  [[nodiscard]] const Dict* dict() const { return pointer<Dict>(); }
  [[nodiscard]] const Method* method() const { return pointer<Method>(); }
  template <class T>
  [[nodiscard]] const T& as() const {
    return std::get<T>(held_);
  }

  [[nodiscard]] bool truth() const;
  /// Python's name of its type, for errors.
  [[nodiscard]] std::string_view type() const;

 private:
  template <class T>
  [[nodiscard]] const T* pointer() const {
    const auto* found = std::get_if<std::shared_ptr<const T>>(&held_);
    return found != nullptr ? found->get() : nullptr;
  }

  std::variant<Undefined, None, bool, std::int64_t, double, std::shared_ptr<const Text>,
               std::shared_ptr<const List>, std::shared_ptr<const Dict>, std::shared_ptr<const Method>,
               Builtin, Namespace*, const Macro*, Loop*>
      held_;
};

struct Method {
  Value of;
  std::string name;
};

/// A value's parts, and a part more for every 64 bytes of text: the steps that comparing or printing it takes.
[[nodiscard]] std::size_t weight_of(const Value& value);
/// @throws ConfigError that says why the value is undefined
[[noreturn]] void refuse_undefined(const Value& value);

/// What can be a key of a dict: not lists and dicts, which Python can change. @throws ConfigError
void require_hashable(const Value& value);

/// Python's `==`.
[[nodiscard]] bool equal(const Value& a, const Value& b);
/// Below zero, zero or above, as Python orders numbers, texts and lists. @throws ConfigError for others
[[nodiscard]] int order(const Value& a, const Value& b);
/// A number as a double; truths are 0 and 1.
[[nodiscard]] double real_of(const Value& number);
/// Python's truths are whole numbers, too.
[[nodiscard]] inline bool is_integer(const Value& value) {
  return value.is<bool>() || value.is<std::int64_t>();
}
[[nodiscard]] inline std::int64_t integer_of(const Value& value) {
  return value.is<bool>() ? static_cast<std::int64_t>(value.as<bool>()) : value.as<std::int64_t>();
}

/// Python's str(): how a value is printed. @throws ConfigError for what has no text of its own, for example a function
[[nodiscard]] Text printed(const Value& value);
/// Python's repr(), by which lists and dicts print what they hold.
void append_shown(Text& out, const Value& value);
/// As a literal of JSON as Python's json.dumps writes it. `indent` below 0: on one line.
struct JsonStyle {
  int indent = -1;
  bool ascii = false;
  bool sorted = false;
  std::string item_separator = ", ";
  std::string key_separator = ": ";
};
void append_json(Text& out, const Value& value, const JsonStyle& style, int level = 0);

/// The template did what cannot be done, or refuses the conversation. @throws ConfigError
template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts);

}  // namespace kvpolicy::reference::jinja

#include <kvpolicy/core/error.hpp>

namespace kvpolicy::reference::jinja {

template <class... Parts>
void refuse(const Parts&... parts) {
  fail<ConfigError>("the chat template: ", parts...);
}

}  // namespace kvpolicy::reference::jinja
