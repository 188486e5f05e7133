// SPDX-License-Identifier: Apache-2.0
//
// One run of a template: scopes, what it has made that has a state, and how much it may still do.
#pragma once

#include <cstddef>
#include <ctime>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <reference_model/jinja/syntax.hpp>
#include <reference_model/jinja/value.hpp>

namespace kvpolicy::reference::jinja {

using Names = std::map<std::string, Value, std::less<>>;

/// Names and what they stand for; a name that is not here is sought in the scope around.
struct Scope {
  Names names;
  std::shared_ptr<Scope> around;
};

class Namespace {
 public:
  Names names;
};
class Macro {
 public:
  std::string name;
  std::vector<std::string> parameters;
  std::vector<const Node*> defaults;  ///< of each parameter; null where there is none
  const Node* body = nullptr;
  std::shared_ptr<Scope> scope;  ///< where it was defined
  bool asks_for_caller = false;
};
class Loop {
 public:
  Value items;
  std::size_t at = 0;
  std::size_t depth = 1;
  const Node* node = nullptr;  ///< of a recursive loop
  std::shared_ptr<Scope> scope;
  std::optional<Value> latest;  ///< that loop.changed() has seen
};

/// What a call gives to a function.
struct Arguments {
  std::vector<Value> places;
  std::vector<std::pair<std::string, Value>> named;
};

/// Arguments as a function asks for them.
class Asked {
 public:
  /// `what` names the function in errors, for example "the filter 'join'".
  Asked(std::string what, const Arguments& arguments) : what_{std::move(what)}, arguments_{&arguments} {}

  /// The next parameter's, by its place or its name.
  [[nodiscard]] std::optional<Value> next(std::string_view name);
  [[nodiscard]] Value need(std::string_view name);
  [[nodiscard]] std::optional<std::string> text(std::string_view name);
  [[nodiscard]] std::optional<std::int64_t> integer(std::string_view name);
  [[nodiscard]] bool flag(std::string_view name, bool otherwise = false);
  /// All that are left by their places.
  [[nodiscard]] std::vector<Value> rest();
  /// @throws ConfigError if some argument was not asked for
  void end() const;
  [[nodiscard]] const std::string& what() const { return what_; }

 private:
  std::string what_;
  const Arguments* arguments_;
  std::size_t place_ = 0;
  std::size_t named_ = 0;
};

class Interpreter {
 public:
  Interpreter(Names given, std::optional<std::tm> now, std::size_t steps);

  /// @throws ConfigError
  [[nodiscard]] Text run(const Node& all);

  /// Counts work. @throws ConfigError after too much of it
  void charge(std::size_t steps);
  [[nodiscard]] Value call(const Value& function, const Arguments& arguments);
  [[nodiscard]] Value filter(std::string_view name, const Value& value, const Arguments& arguments);
  [[nodiscard]] bool test(std::string_view name, const Value& value, const Arguments& arguments);
  /// `value.name`, and `value[key]`.
  [[nodiscard]] Value attribute(const Value& value, const std::string& name);
  [[nodiscard]] Value item(const Value& value, const Value& key);
  /// The items of a list, the keys of a dict, the characters of a text.
  [[nodiscard]] std::vector<Value> items_of(const Value& value);
  [[nodiscard]] bool contains(const Value& in, const Value& value);
  /// What a filter gives a text for; @throws ConfigError for another value, and for one that is marked as HTML
  [[nodiscard]] const Text& text_of(const Value& value, std::string_view what);

 private:
  enum class Flow { on, leave_loop, next_item };

  /// One node, call or filter inside of another.
  class Level {
   public:
    explicit Level(Interpreter& run) : run_{&run} {
      if (run_->level_ >= most_levels)
        refuse("more than ", most_levels, " expressions and calls stand in each other");
      ++run_->level_;
    }
    ~Level() { --run_->level_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

   private:
    static constexpr std::size_t most_levels = 600;
    Interpreter* run_;
  };
  using ScopePtr = std::shared_ptr<Scope>;

  Flow execute(const Node& node, const ScopePtr& scope, Text& out);
  Flow each(const Node& node, const ScopePtr& scope, Text& out, const Value& items, std::size_t depth);
  void assign(const Node& target, Value value, const ScopePtr& scope);
  void define(const Node& node, const ScopePtr& scope);
  [[nodiscard]] Value evaluate(const Node& node, const ScopePtr& scope);
  [[nodiscard]] Value arithmetic(const std::string& sign, const Value& a, const Value& b);
  [[nodiscard]] Value slice(const Value& value, const Value& begin, const Value& end, const Value& step);
  [[nodiscard]] Value filtered(const Node* filter, const Value& base, const ScopePtr& scope);
  [[nodiscard]] Arguments arguments(const Node& node, std::size_t first_name, const ScopePtr& scope);
  [[nodiscard]] Value call_macro(const Macro& macro, const Arguments& arguments);
  [[nodiscard]] Value call_builtin(Builtin builtin, const Arguments& arguments);
  [[nodiscard]] Value loop_method(Loop& loop, const std::string& name, const Arguments& arguments);
  [[nodiscard]] Value call_method(const Method& method, const Arguments& arguments);
  [[nodiscard]] Value text_method(const Text& text, const std::string& name, const Arguments& arguments);
  [[nodiscard]] Value dict_method(const Dict& dict, const std::string& name, const Arguments& arguments);
  [[nodiscard]] Value list_method(const List& list, const std::string& name, const Arguments& arguments);

  ScopePtr global_;
  std::optional<std::tm> now_;
  std::size_t steps_;
  std::size_t level_ = 0;
  std::deque<Namespace> spaces_;
  std::deque<Macro> macros_;
  std::deque<Loop> loops_;
};

/// What the sandbox does not show a template.
[[nodiscard]] bool is_unsafe(const Value& value, std::string_view name);
/// Methods that Python's text, dict and list have: a template may ask whether they are defined.
[[nodiscard]] bool has_method(const Value& value, std::string_view name);

}  // namespace kvpolicy::reference::jinja
