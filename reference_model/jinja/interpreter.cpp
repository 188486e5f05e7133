// SPDX-License-Identifier: Apache-2.0
#include <reference_model/jinja/interpreter.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include <kvpolicy/core/error.hpp>
#include <reference_model/jinja/template.hpp>
#include <reference_model/utf8.hpp>

namespace kvpolicy::reference::jinja {
namespace {

constexpr std::size_t object_steps = 20;     // what has a state stays until the run ends
constexpr std::size_t bytes_of_step = 64;    // of a text that is made
constexpr std::int64_t most_range = 100000;  // Jinja's sandbox has this, too

/// Names that Jinja has and that are not carried out.
constexpr std::array<std::string_view, 3> refused_names = {"cycler", "joiner", "lipsum"};

bool asks_for(const Node& node, std::string_view name) {
  if (node.kind == Kind::name && node.names[0] == name) return true;
  return std::ranges::any_of(node.children,
                             [&](const NodePtr& child) { return child && asks_for(*child, name); });
}

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

std::int64_t integer_of(const Value& value) {
  return value.is<bool>() ? static_cast<std::int64_t>(value.as<bool>()) : value.as<std::int64_t>();
}
bool is_integer(const Value& value) { return value.is<bool>() || value.is<std::int64_t>(); }

}  // namespace

// --- Arguments ---

std::optional<Value> Asked::next(std::string_view name) {
  const auto found =
      std::ranges::find(arguments_->named, name, [](const auto& one) { return std::string_view{one.first}; });
  if (place_ < arguments_->places.size()) {
    if (found != arguments_->named.end()) refuse(what_, " has two arguments '", name, "'");
    return arguments_->places[place_++];
  }
  if (found == arguments_->named.end()) return {};
  ++named_;
  return found->second;
}

Value Asked::need(std::string_view name) {
  auto value = next(name);
  if (!value) refuse(what_, " needs the argument '", name, "'");
  return *value;
}

std::optional<std::string> Asked::text(std::string_view name) {
  const auto value = next(name);
  if (!value || value->is_none()) return {};
  if (value->text() == nullptr)
    refuse(what_, ": the argument '", name, "' is a ", value->type(), ", must be a text");
  return value->text()->text;
}

std::optional<std::int64_t> Asked::integer(std::string_view name) {
  const auto value = next(name);
  if (!value || value->is_none()) return {};
  if (!is_integer(*value))
    refuse(what_, ": the argument '", name, "' is a ", value->type(), ", must be a whole number");
  return integer_of(*value);
}

bool Asked::flag(std::string_view name, bool otherwise) {
  const auto value = next(name);
  return value ? value->truth() : otherwise;
}

std::vector<Value> Asked::rest() {
  std::vector<Value> values;
  while (place_ < arguments_->places.size()) values.push_back(arguments_->places[place_++]);
  return values;
}

void Asked::end() const {
  if (place_ < arguments_->places.size()) refuse(what_, " has more arguments than are carried out");
  if (named_ < arguments_->named.size()) {
    refuse(what_, ": of its arguments with names, '", arguments_->named.back().first,
           "' among them, not all are carried out");
  }
}

// --- The run ---

Interpreter::Interpreter(Names given, std::optional<std::tm> now, std::size_t steps)
    : global_{std::make_shared<Scope>()}, now_{now}, steps_{steps} {
  global_->names = {{"dict", Value{Builtin::dict}},
                    {"namespace", Value{Builtin::make_namespace}},
                    {"raise_exception", Value{Builtin::raise_exception}},
                    {"range", Value{Builtin::range}}};
  if (now_) global_->names.emplace("strftime_now", Value{Builtin::strftime_now});
  for (auto& [name, value] : given) global_->names.insert_or_assign(name, std::move(value));
}

Text Interpreter::run(const Node& all) {
  Text out;
  const auto scope = std::make_shared<Scope>(Scope{{}, global_});
  execute(all, scope, out);
  return out;
}

void Interpreter::charge(std::size_t steps) {
  if (steps > steps_) refuse("it does more than a template may");
  steps_ -= steps;
}

Interpreter::Flow Interpreter::execute(const Node& node, const ScopePtr& scope, Text& out) {
  const Level level{*this};
  charge(1);
  switch (node.kind) {
    case Kind::text: append(out, *node.value.text()); break;
    case Kind::print: {
      const Value value = evaluate(*node.children[0], scope);
      charge(weight_of(value));
      append(out, printed(value));
      break;
    }
    case Kind::block:
      for (const NodePtr& child : node.children) {
        if (const Flow flow = execute(*child, scope, out); flow != Flow::on) return flow;
      }
      break;
    case Kind::scope: return execute(*node.children[0], std::make_shared<Scope>(Scope{{}, scope}), out);
    case Kind::choice:
      for (std::size_t i = 0; i + 1 < node.children.size(); i += 2) {
        if (evaluate(*node.children[i], scope).truth()) return execute(*node.children[i + 1], scope, out);
      }
      if (node.children.size() % 2 == 1) return execute(*node.children.back(), scope, out);
      break;
    case Kind::each:
    case Kind::recursive: return each(node, scope, out, evaluate(*node.children[1], scope), 1);
    case Kind::set: assign(*node.children[0], evaluate(*node.children[1], scope), scope); break;
    case Kind::set_block: {
      Text inside;
      execute(*node.children[1], std::make_shared<Scope>(Scope{{}, scope}), inside);
      const Value value{std::move(inside)};
      assign(*node.children[0], node.children[2] ? filtered(node.children[2].get(), value, scope) : value,
             scope);
      break;
    }
    case Kind::filter_block: {
      Text inside;
      execute(*node.children[0], std::make_shared<Scope>(Scope{{}, scope}), inside);
      append(out, printed(filtered(node.children[1].get(), Value{std::move(inside)}, scope)));
      break;
    }
    case Kind::with: {
      const auto inner = std::make_shared<Scope>(Scope{{}, scope});
      for (std::size_t i = 0; i + 1 < node.children.size(); i += 2) {
        inner->names.insert_or_assign(node.children[i]->names[0], evaluate(*node.children[i + 1], scope));
      }
      return execute(*node.children.back(), inner, out);
    }
    case Kind::macro: define(node, scope); break;
    case Kind::call_block: {
      charge(object_steps);
      Macro& caller = macros_.emplace_back();
      caller.name = "caller";
      caller.parameters = node.names;
      caller.body = node.children[0].get();
      caller.scope = scope;
      for (std::size_t i = 2; i < node.children.size(); ++i)
        caller.defaults.push_back(node.children[i].get());
      const Node& call_node = *node.children[1];
      const Value function = evaluate(*call_node.children[0], scope);
      Arguments given = arguments(call_node, 0, scope);
      given.named.emplace_back("caller", Value{static_cast<const Macro*>(&caller)});
      append(out, printed(call(function, given)));
      break;
    }
    case Kind::break_loop: return Flow::leave_loop;
    case Kind::continue_loop: return Flow::next_item;
    default:
      fail<ConfigError>("the chat template: line ", node.line, " is an expression where a statement must be");
  }
  return Flow::on;
}

Interpreter::Flow Interpreter::each(const Node& node, const ScopePtr& scope, Text& out, const Value& iterable,
                                    std::size_t depth) {
  const Node& target = *node.children[0];
  std::vector<Value> items = items_of(iterable);
  if (const Node* filter = node.children[2].get()) {
    std::erase_if(items, [&](const Value& item) {
      const auto inner = std::make_shared<Scope>(Scope{{}, scope});
      assign(target, item, inner);
      return !evaluate(*filter, inner).truth();
    });
  }
  charge(object_steps);
  Loop& loop = loops_.emplace_back();
  loop.items = Value::list(std::move(items));
  loop.depth = depth;
  loop.node = node.kind == Kind::recursive ? &node : nullptr;
  loop.scope = scope;
  const std::vector<Value>& rows = loop.items.list()->items;
  for (; loop.at < rows.size(); ++loop.at) {
    const auto inner = std::make_shared<Scope>(Scope{{}, scope});
    inner->names.emplace("loop", Value{&loop});
    assign(target, rows[loop.at], inner);
    if (execute(*node.children[3], inner, out) == Flow::leave_loop) return Flow::on;
  }
  if (rows.empty() && node.children[4])
    return execute(*node.children[4], std::make_shared<Scope>(Scope{{}, scope}), out);
  return Flow::on;
}

void Interpreter::assign(const Node& target, Value value, const ScopePtr& scope) {
  if (target.kind == Kind::name) {
    scope->names.insert_or_assign(target.names[0], std::move(value));
  } else if (target.kind == Kind::member) {
    for (const Scope* at = scope.get(); at != nullptr; at = at->around.get()) {
      const auto found = at->names.find(target.names[0]);
      if (found == at->names.end()) continue;
      if (!found->second.is<Namespace*>()) break;
      found->second.as<Namespace*>()->names.insert_or_assign(target.names[1], std::move(value));
      return;
    }
    refuse("'", target.names[0], ".", target.names[1], "' is set, and '", target.names[0],
           "' is no namespace");
  } else {
    const std::vector<Value> items = items_of(value);
    if (items.size() != target.children.size()) {
      refuse("line ", target.line, ": ", items.size(), " values are set to ", target.children.size(),
             " names");
    }
    for (std::size_t i = 0; i < items.size(); ++i) assign(*target.children[i], items[i], scope);
  }
}

void Interpreter::define(const Node& node, const ScopePtr& scope) {
  charge(object_steps);
  Macro& macro = macros_.emplace_back();
  macro.name = node.names[0];
  macro.parameters.assign(node.names.begin() + 1, node.names.end());
  macro.body = node.children[0].get();
  macro.scope = scope;
  macro.asks_for_caller = asks_for(*macro.body, "caller");
  for (std::size_t i = 1; i < node.children.size(); ++i) macro.defaults.push_back(node.children[i].get());
  scope->names.insert_or_assign(macro.name, Value{static_cast<const Macro*>(&macro)});
}

Value Interpreter::evaluate(const Node& node, const ScopePtr& scope) {
  const Level level{*this};
  charge(1);
  const auto child = [&](std::size_t i) { return evaluate(*node.children[i], scope); };
  switch (node.kind) {
    case Kind::constant: return node.value;
    case Kind::name: {
      for (const Scope* at = scope.get(); at != nullptr; at = at->around.get()) {
        if (const auto found = at->names.find(node.names[0]); found != at->names.end()) return found->second;
      }
      if (std::ranges::find(refused_names, node.names[0]) != refused_names.end()) {
        fail<FormatError>("the chat template uses '", node.names[0], "', which is not carried out");
      }
      return Value::undefined("'" + node.names[0] + "' is undefined");
    }
    case Kind::list:
    case Kind::tuple: {
      std::vector<Value> items;
      for (const NodePtr& one : node.children) items.push_back(evaluate(*one, scope));
      return Value::list(std::move(items), node.kind == Kind::tuple ? ListKind::tuple : ListKind::list);
    }
    case Kind::dict: {
      std::vector<std::pair<Value, Value>> items;
      for (std::size_t i = 0; i + 1 < node.children.size(); i += 2)
        items.emplace_back(child(i), child(i + 1));
      return Value::dict(std::move(items));
    }
    case Kind::attribute: return attribute(child(0), node.names[0]);
    case Kind::item: {
      const Value value = child(0);
      return item(value, child(1));
    }
    case Kind::slice: {
      const Value value = child(0);
      const auto bound = [&](std::size_t i) { return node.children[i] ? child(i) : Value{None{}}; };
      const Value begin = bound(1);
      const Value end = bound(2);
      return slice(value, begin, end, bound(3));
    }
    case Kind::call: {
      const Value function = child(0);
      return call(function, arguments(node, 0, scope));
    }
    case Kind::filter: return filtered(&node, Value{}, scope);
    case Kind::test: {
      const Value value = child(0);
      return Value{test(node.names[0], value, arguments(node, 1, scope))};
    }
    case Kind::not_of: return Value{!child(0).truth()};
    case Kind::negative:
    case Kind::positive: {
      const Value value = child(0);
      if (!value.is_number()) refuse("a ", value.type(), " has a sign");
      if (node.kind == Kind::positive) return is_integer(value) ? Value{integer_of(value)} : value;
      return is_integer(value) ? arithmetic("-", Value{std::int64_t{0}}, value) : Value{-value.as<double>()};
    }
    case Kind::both: {
      Value left = child(0);
      return left.truth() ? child(1) : left;
    }
    case Kind::either: {
      Value left = child(0);
      return left.truth() ? left : child(1);
    }
    case Kind::arithmetic: {
      const Value left = child(0);
      return arithmetic(node.names[0], left, child(1));
    }
    case Kind::concat: {
      Text out;
      for (const NodePtr& one : node.children) {
        const Value value = evaluate(*one, scope);
        charge(weight_of(value));
        append(out, printed(value));
      }
      return Value{std::move(out)};
    }
    case Kind::compare: {
      Value left = child(0);
      for (std::size_t i = 0; i < node.names.size(); ++i) {
        Value right = child(i + 1);
        const std::string& sign = node.names[i];
        charge(std::min(weight_of(left), weight_of(right)));
        const bool holds = sign == "=="       ? equal(left, right)
                           : sign == "!="     ? !equal(left, right)
                           : sign == "in"     ? contains(right, left)
                           : sign == "not in" ? !contains(right, left)
                           : sign == "<"      ? order(left, right) < 0
                           : sign == "<="     ? order(left, right) <= 0
                           : sign == ">"      ? order(left, right) > 0
                                              : order(left, right) >= 0;
        if (!holds) return Value{false};
        left = std::move(right);
      }
      return Value{true};
    }
    case Kind::conditional:
      if (child(1).truth()) return child(0);
      return node.children[2] ? child(2)
                              : Value::undefined("the value of an 'if' without an 'else' is undefined");
    default:
      fail<ConfigError>("the chat template: line ", node.line, " is a statement where an expression must be");
  }
}

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

Value Interpreter::filtered(const Node* node, const Value& base, const ScopePtr& scope) {
  const Level level{*this};
  const Node* inner = node->children[0].get();
  const Value value = inner == nullptr              ? base
                      : inner->kind == Kind::filter ? filtered(inner, base, scope)
                                                    : evaluate(*inner, scope);
  return filter(node->names[0], value, arguments(*node, 1, scope));
}

Arguments Interpreter::arguments(const Node& node, std::size_t first_name, const ScopePtr& scope) {
  Arguments given;
  for (std::size_t i = first_name; i < node.names.size(); ++i) {
    Value value = evaluate(*node.children[i - first_name + 1], scope);
    const std::string& name = node.names[i];
    if (name.empty()) {
      given.places.push_back(std::move(value));
    } else if (name == "*") {
      for (Value& one : items_of(value)) given.places.push_back(std::move(one));
    } else if (name == "**") {
      if (value.dict() == nullptr) refuse("'**' with a ", value.type(), ", must be a dict");
      for (const auto& [key, one] : value.dict()->items)
        given.named.emplace_back(text_of(key, "'**'").text, one);
    } else {
      given.named.emplace_back(name, std::move(value));
    }
  }
  return given;
}

// --- What values have ---

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

// --- Calls ---

Value Interpreter::call(const Value& function, const Arguments& given) {
  const Level level{*this};
  if (function.is<const Macro*>()) return call_macro(*function.as<const Macro*>(), given);
  if (function.is<Builtin>()) return call_builtin(function.as<Builtin>(), given);
  if (function.method() != nullptr) return call_method(*function.method(), given);
  if (function.is<Loop*>() && function.as<Loop*>()->node != nullptr) {
    const Loop& loop = *function.as<Loop*>();
    Asked asked{"loop", given};
    const Value items = asked.need("items");
    asked.end();
    Text out;
    each(*loop.node, loop.scope, out, items, loop.depth + 1);
    return Value{std::move(out)};
  }
  if (function.is_undefined()) refuse_undefined(function);
  refuse("a ", function.type(), " is called");
}

Value Interpreter::call_macro(const Macro& macro, const Arguments& given) {
  const auto scope = std::make_shared<Scope>(Scope{{}, macro.scope});
  const std::size_t parameters = macro.parameters.size();
  std::vector<Value> more;
  std::vector<std::pair<Value, Value>> more_named;
  std::vector<bool> has(parameters, false);
  for (std::size_t i = 0; i < given.places.size(); ++i) {
    if (i >= parameters) {
      more.push_back(given.places[i]);
      continue;
    }
    has[i] = true;
    scope->names.insert_or_assign(macro.parameters[i], given.places[i]);
  }
  bool has_caller = false;
  for (const auto& [name, value] : given.named) {
    const auto found = std::ranges::find(macro.parameters, name);
    const auto at = static_cast<std::size_t>(found - macro.parameters.begin());
    if (at < parameters) {
      if (has[at]) refuse("the macro '", macro.name, "' is given '", name, "' twice");
      has[at] = true;
      scope->names.insert_or_assign(name, value);
    } else if (name == "caller" && macro.asks_for_caller) {
      has_caller = true;
      scope->names.insert_or_assign(name, value);
    } else {
      more_named.emplace_back(Value{name}, value);
    }
  }
  if (macro.asks_for_caller && !has_caller &&
      std::ranges::find(macro.parameters, "caller") == macro.parameters.end()) {
    scope->names.insert_or_assign("caller", Value::undefined("No caller defined"));
  }
  if (!more.empty() && !asks_for(*macro.body, "varargs")) {
    refuse("the macro '", macro.name, "' takes not more than ", parameters, " arguments");
  }
  if (!more_named.empty() && !asks_for(*macro.body, "kwargs")) {
    refuse("the macro '", macro.name, "' takes no argument '", more_named.front().first.text()->text, "'");
  }
  scope->names.emplace("varargs", Value::list(std::move(more), ListKind::tuple));
  scope->names.emplace("kwargs", Value::dict(std::move(more_named)));
  for (std::size_t i = 0; i < parameters; ++i) {
    if (has[i]) continue;
    const Node* otherwise = macro.defaults[i];
    scope->names.insert_or_assign(
        macro.parameters[i],
        otherwise != nullptr ? evaluate(*otherwise, scope)
                             : Value::undefined("parameter '" + macro.parameters[i] + "' was not provided"));
  }
  Text out;
  execute(*macro.body, scope, out);
  return Value{std::move(out)};
}

Value Interpreter::call_builtin(Builtin builtin, const Arguments& given) {
  switch (builtin) {
    case Builtin::raise_exception: {
      Asked asked{"raise_exception", given};
      const Text message = printed(asked.need("message"));
      fail<ConfigError>("the chat template refuses the conversation: ", message.text);
    }
    case Builtin::strftime_now: {
      Asked asked{"strftime_now", given};
      const std::string format = text_of(asked.need("format"), "strftime_now").text;
      asked.end();
      std::array<char, 512> out{};
      const std::size_t size = std::strftime(out.data(), out.size(), format.c_str(), &*now_);
      if (size == 0 && !format.empty())
        refuse("strftime_now gives no text, or one of more than ", out.size(), " bytes");
      return Value{std::string{out.data(), size}};
    }
    case Builtin::range: {
      Asked asked{"range", given};
      const std::int64_t first = asked.integer("start").value_or(0);
      const auto second = asked.integer("stop");
      const std::int64_t step = asked.integer("step").value_or(1);
      asked.end();
      if (step == 0) refuse("range with a step of zero");
      const std::int64_t end = second.value_or(first);
      std::vector<Value> numbers;
      for (std::int64_t at = second ? first : 0; step > 0 ? at < end : at > end;) {
        if (static_cast<std::int64_t>(numbers.size()) >= most_range)
          refuse("range has more than ", most_range, " numbers");
        numbers.emplace_back(at);
        if (__builtin_add_overflow(at, step, &at)) break;
      }
      charge(numbers.size());
      return Value::list(std::move(numbers), ListKind::range);
    }
    case Builtin::make_namespace:
    case Builtin::dict: {
      std::vector<std::pair<Value, Value>> items;
      for (const Value& one : given.places) {
        if (one.dict() != nullptr) {
          items.insert(items.end(), one.dict()->items.begin(), one.dict()->items.end());
          continue;
        }
        for (const Value& pair : items_of(one)) {
          const std::vector<Value> two = items_of(pair);
          if (two.size() != 2) refuse("a dict is made of ", two.size(), " values, must be a key and a value");
          items.emplace_back(two[0], two[1]);
        }
      }
      for (const auto& [name, value] : given.named) items.emplace_back(Value{name}, value);
      charge(object_steps + items.size());
      if (builtin == Builtin::dict) return Value::dict(std::move(items));
      Namespace& space = spaces_.emplace_back();
      for (auto& [key, value] : items)
        space.names.insert_or_assign(text_of(key, "namespace").text, std::move(value));
      return Value{&space};
    }
  }
  return {};
}

Value Interpreter::loop_method(Loop& loop, const std::string& name, const Arguments& given) {
  Asked asked{"loop." + name, given};
  std::vector<Value> values = asked.rest();
  asked.end();
  if (name == "cycle") {
    if (values.empty()) refuse("loop.cycle has no values");
    return values[loop.at % values.size()];
  }
  Value now = Value::list(std::move(values), ListKind::tuple);
  const bool same = loop.latest && equal(*loop.latest, now);
  loop.latest = std::move(now);
  return Value{!same};
}

Value Interpreter::call_method(const Method& method, const Arguments& given) {
  if (method.of.is<Loop*>()) return loop_method(*method.of.as<Loop*>(), method.name, given);
  if (method.of.text() != nullptr)
    return text_method(text_of(method.of, "'." + method.name + "'"), method.name, given);
  if (method.of.dict() != nullptr) return dict_method(*method.of.dict(), method.name, given);
  return list_method(*method.of.list(), method.name, given);
}

// --- The template ---

Template::Template(std::string_view source) : all_{parse(source)} {}

Text Template::render(std::map<std::string, Value, std::less<>> names, const RenderOptions& options) const {
  return Interpreter{std::move(names), options.now, options.steps}.run(*all_);
}

}  // namespace kvpolicy::reference::jinja
