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
constexpr std::int64_t most_range = 100000;  // Jinja's sandbox has this, too

/// Names that Jinja has and that are not carried out.
constexpr std::array<std::string_view, 3> refused_names = {"cycler", "joiner", "lipsum"};

bool asks_for(const Node& node, std::string_view name) {
  if (node.kind == Kind::name && node.names[0] == name) return true;
  return std::ranges::any_of(node.children,
                             [&](const NodePtr& child) { return child && asks_for(*child, name); });
}

}  // namespace

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
