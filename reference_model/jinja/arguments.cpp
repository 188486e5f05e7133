// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <reference_model/jinja/interpreter.hpp>

namespace kvpolicy::reference::jinja {

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

}  // namespace kvpolicy::reference::jinja
