// SPDX-License-Identifier: Apache-2.0
//
// Jinja's tests: what stands after `is`.
#include <kvpolicy/core/error.hpp>
#include <reference_model/jinja/interpreter.hpp>

namespace kvpolicy::reference::jinja {

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

}  // namespace kvpolicy::reference::jinja
