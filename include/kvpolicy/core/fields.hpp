// SPDX-License-Identifier: Apache-2.0
//
// The named settings of a type, listed once. A settings type declares
//
//     void fields(FieldVisitor& visit) {
//       visit("sinks", sinks);
//       visit("recent", recent);
//     }
//
// and plan files, saved caches and printed plans go through this list, so a new setting takes one line. A
// setting may be a count, a flag, a number, or an enumerator whose names `names_of` gives:
//
//     [[nodiscard]] constexpr auto names_of(Mask) {
//       return std::array<std::string_view, 2>{"exact", "chunk"};
//     }
#pragma once

#include <concepts>
#include <cstddef>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>

namespace kvpolicy {

class FieldVisitor;

/// A type that lists its named settings.
template <class T>
concept HasFields = requires(T& settings, FieldVisitor& visit) { settings.fields(visit); };

/// Reads or writes the settings of a type, in the order of their list. A visitor that only reads
/// settings leaves them as they are.
class FieldVisitor {
 public:
  FieldVisitor() = default;
  FieldVisitor(const FieldVisitor&) = delete;
  FieldVisitor& operator=(const FieldVisitor&) = delete;
  virtual ~FieldVisitor() = default;

  /// Visits one setting.
  template <class T>
  void operator()(std::string_view name, T& value) {
    if constexpr (std::same_as<T, bool>) {
      flag(name, value);
    } else if constexpr (std::is_enum_v<T>) {
      static constexpr auto names = names_of(T{});
      auto number = static_cast<std::size_t>(value);
      choice(name, number, names);
      value = static_cast<T>(number);
    } else if constexpr (std::same_as<T, std::size_t>) {
      count(name, value);
    } else {
      static_assert(std::same_as<T, double>,
                    "kvpolicy: a setting must be a std::size_t, a bool, a double, an enumeration "
                    "with names_of, or a type with fields(FieldVisitor&)");
      number(name, value);
    }
  }
  /// Visits settings that a plan may lack.
  template <HasFields T>
  void operator()(std::string_view name, std::optional<T>& settings) {
    if (!begin_optional(name, settings.has_value())) {
      settings.reset();
      return;
    }
    if (!settings) settings.emplace();
    settings->fields(*this);
    end();
  }
  /// Visits settings that have a name in common, such as those of a storage.
  template <HasFields T>
  void operator()(std::string_view name, T& settings) {
    begin(name);
    settings.fields(*this);
    end();
  }
  /// Visits a setting that a plan file leaves out if it has the value `usual`.
  template <class T>
  void brief(std::string_view name, T& value, const std::type_identity_t<T>& usual) {
    if (!is_brief() || value != usual) (*this)(name, value);
  }
  /// Visits a setting that was named `before` in older versions. Files with the old name can still be read;
  /// files and messages that are written have the new one.
  template <class T>
  void renamed(std::string_view name, std::string_view before, T& value) {
    (*this)(name_in_use(name, before), value);
  }
  /// Visits a setting that is both `brief` and `renamed`.
  template <class T>
  void brief_renamed(std::string_view name, std::string_view before, T& value,
                     const std::type_identity_t<T>& usual) {
    brief(name_in_use(name, before), value, usual);
  }
  /// Visits a setting that joined its type after caches had been saved without it. Whatever is written
  /// leaves the setting out if it has the value `usual`, so that value must never change.
  template <class T>
  void later(std::string_view name, T& value, const std::type_identity_t<T>& usual) {
    if (is_writing() && value == usual) return;
    joined(name);
    (*this)(name, value);
  }

 protected:
  /// Before a setting that `later` visits: values alone do not tell which of these settings are there.
  virtual void joined(std::string_view /*name*/) {}
  virtual void count(std::string_view name, std::size_t& value) = 0;
  virtual void number(std::string_view name, double& value) = 0;
  virtual void flag(std::string_view name, bool& value) = 0;
  /// Visits a setting that is one of `names`, by its index.
  virtual void choice(std::string_view name, std::size_t& index, std::span<const std::string_view> names) = 0;
  /// Begins settings that have the prefix `name`; they end at `end`.
  virtual void begin(std::string_view name) = 0;
  /// Begins settings that may be missing; `present`: whether the type has them now. Returns whether the
  /// type's settings are visited.
  virtual bool begin_optional(std::string_view name, bool present) = 0;
  virtual void end() = 0;
  /// Whether the visitor writes settings down; otherwise it fills them.
  [[nodiscard]] virtual bool is_writing() const = 0;
  /// The name that a renamed setting has in the visited file or output.
  [[nodiscard]] virtual std::string_view name_in_use(std::string_view name, std::string_view /*before*/) {
    return name;
  }
  /// Whether the visitor leaves out settings that `brief` visits with their usual value.
  [[nodiscard]] virtual bool is_brief() const { return false; }
};

}  // namespace kvpolicy
