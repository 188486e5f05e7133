// SPDX-License-Identifier: Apache-2.0
//
// One value for each head of a model. Gates, scores, budgets and kinds of heads, from which plans are made,
// are such tables. Each table's own comment says whether its heads are KV heads or query heads.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy {

/// A `T` for each (layer, head).
template <class T>
class HeadTable {
  static_assert(!std::is_same_v<T, bool>, "HeadTable: use an enum that says what is true or false");

 public:
  HeadTable() = default;
  HeadTable(std::size_t layers, std::size_t heads, const T& value = {})
      : layers_{layers}, heads_{heads}, values_(layers * heads, value) {}
  /// @throws ShapeError unless there are layers x heads values
  HeadTable(std::size_t layers, std::size_t heads, std::vector<T> values)
      : layers_{layers}, heads_{heads}, values_{std::move(values)} {
    require<ShapeError>(values_.size() == layers * heads, "HeadTable: ", values_.size(), " values, must be ",
                        layers, " layers x ", heads, " heads");
  }

  /// A list in braces names each value, also where there is one.
  HeadTable(std::size_t layers, std::size_t heads, std::initializer_list<T> values)
      : HeadTable{layers, heads, std::vector<T>(values)} {}

  [[nodiscard]] std::size_t layers() const { return layers_; }
  [[nodiscard]] std::size_t heads() const { return heads_; }  ///< of one layer

  [[nodiscard]] T& operator()(std::size_t layer, std::size_t head) {
    KVPOLICY_ASSERT(layer < layers_ && head < heads_);
    return values_[layer * heads_ + head];
  }
  [[nodiscard]] const T& operator()(std::size_t layer, std::size_t head) const {
    KVPOLICY_ASSERT(layer < layers_ && head < heads_);
    return values_[layer * heads_ + head];
  }

  /// [layers, heads], one layer after another.
  [[nodiscard]] std::span<T> values() { return values_; }
  [[nodiscard]] std::span<const T> values() const { return values_; }
  [[nodiscard]] std::span<const T> layer(std::size_t layer) const {
    return std::span{values_}.subspan(layer * heads_, heads_);
  }

  friend bool operator==(const HeadTable&, const HeadTable&) = default;

 private:
  std::size_t layers_ = 0;
  std::size_t heads_ = 0;
  std::vector<T> values_;
};

}  // namespace kvpolicy
