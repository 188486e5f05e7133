// SPDX-License-Identifier: Apache-2.0
//
// An object of a tokenizer's JSON files, read by key. A key whose value is null counts as missing,
// as in `tokenizers`.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/json_text.hpp>
#include <reference_model/tokenizer/parts.hpp>

namespace kvpolicy::reference {

class Section {
 public:
  /// @throws FormatError if `value` is not an object.
  Section(const io::Json& value, std::string where) : object_{value, std::move(where)} {}

  [[nodiscard]] const std::string& where() const { return object_.where(); }
  [[nodiscard]] std::string where(std::string_view key) const { return object_.where(key); }

  const io::Json* find(const char* key) {
    const io::Json* found = object_.find(key);
    return found == nullptr || found->is_null() ? nullptr : found;
  }
  [[nodiscard]] const io::Json& at(const char* key) { return object_.at(key); }
  [[nodiscard]] const std::string& text(const char* key) { return object_.text(key); }
  [[nodiscard]] std::size_t count(const char* key, std::size_t most = max_vocabulary) {
    return object_.count(key, most);
  }
  bool flag_or(const char* key, bool otherwise) {
    return find(key) == nullptr ? otherwise : object_.flag_or(key, otherwise);
  }
  [[nodiscard]] Section section(const char* key) { return {object_.at(key), where(key)}; }
  /// The objects of an array.
  [[nodiscard]] std::vector<Section> sections(const char* key) {
    const io::Json& array = object_.at(key);
    require<FormatError>(array.is_array(), where(key), ": must be an array, is ", io::shown(array));
    std::vector<Section> all;
    for (const io::Json& item : array) all.emplace_back(item, message(where(key), ", ", all.size()));
    return all;
  }
  void refuse_others() const { object_.refuse_others(); }
  [[noreturn]] void refuse_type(std::string_view type, std::string_view known) const {
    fail<FormatError>(where(), ": the type ", io::in_quotes(type),
                      " is not implemented; known here: ", known);
  }

 private:
  io::JsonObject object_;
};

}  // namespace kvpolicy::reference
