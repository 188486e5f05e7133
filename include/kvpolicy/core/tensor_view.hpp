// SPDX-License-Identifier: Apache-2.0
//
// Views of a caller's queries, keys, values or outputs of one layer: [tokens, heads, head_dim] with
// any token and head stride and an inner stride of 1. A view does not own memory.
#pragma once

#include <concepts>
#include <cstddef>
#include <type_traits>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>

namespace kvpolicy {

/// An extent or a stride, from any integer type, because engines often count in int.
class Extent {
 public:
  /// @throws ShapeError for a negative number
  template <std::integral Integer>
  constexpr Extent(Integer count) : count_{static_cast<std::size_t>(count)} {
    if constexpr (std::signed_integral<Integer>) {
      if (count < 0) fail<ShapeError>("TensorView: an extent or stride is ", count, ", must not be negative");
    }
  }
  constexpr operator std::size_t() const { return count_; }

 private:
  std::size_t count_;
};

/// A caller's tensor [tokens, heads, head_dim].
/// Strides are counted in elements. `T` may be const.
template <class T>
  requires Element<std::remove_const_t<T>>
struct TensorView {
  T* data = nullptr;
  std::size_t tokens = 0;
  std::size_t heads = 0;
  std::size_t head_dim = 0;
  std::size_t token_stride = 0;
  std::size_t head_stride = 0;

  constexpr TensorView() = default;

  /// Contiguous [tokens, heads, head_dim].
  /// @throws ShapeError for a negative number; the next constructor throws the same
  constexpr TensorView(T* data_, Extent tokens_, Extent heads_, Extent head_dim_)
      : TensorView{data_, tokens_, heads_, head_dim_, heads_ * head_dim_, head_dim_} {}

  constexpr TensorView(T* data_, Extent tokens_, Extent heads_, Extent head_dim_, Extent token_stride_,
                       Extent head_stride_)
      : data{data_},
        tokens{tokens_},
        heads{heads_},
        head_dim{head_dim_},
        token_stride{token_stride_},
        head_stride{head_stride_} {}

  /// A mutable view converts to a const view.
  template <class U>
    requires(!std::is_same_v<U, T> && std::is_same_v<const U, T>)
  constexpr TensorView(const TensorView<U>& other)
      : TensorView{other.data,     other.tokens,       other.heads,
                   other.head_dim, other.token_stride, other.head_stride} {}

  [[nodiscard]] constexpr T* row(std::size_t token, std::size_t head) const {
    return data + token * token_stride + head * head_stride;
  }

  /// The tokens [first, first + count).
  [[nodiscard]] constexpr TensorView slice(std::size_t first, std::size_t count) const {
    return {data + first * token_stride, count, heads, head_dim, token_stride, head_stride};
  }
};

/// The same view with an element type that is known only at run time; engines take this one.
template <class Byte>
  requires std::same_as<std::remove_const_t<Byte>, std::byte>
struct AnyTensor {
  Byte* data = nullptr;
  Encoding encoding = Encoding::float32;
  std::size_t tokens = 0;
  std::size_t heads = 0;
  std::size_t head_dim = 0;
  std::size_t token_stride = 0;  ///< in elements
  std::size_t head_stride = 0;   ///< in elements

  AnyTensor() = default;

  template <class T>
    requires std::is_const_v<Byte> || (!std::is_const_v<T>)
  explicit AnyTensor(const TensorView<T>& view)
      : encoding{encoding_of<std::remove_const_t<T>>},
        tokens{view.tokens},
        heads{view.heads},
        head_dim{view.head_dim},
        token_stride{view.token_stride},
        head_stride{view.head_stride} {
    if constexpr (std::is_const_v<Byte>) {
      data = reinterpret_cast<const std::byte*>(view.data);
    } else {
      data = reinterpret_cast<std::byte*>(view.data);
    }
  }

  [[nodiscard]] Byte* row(std::size_t token, std::size_t head) const {
    return data + (token * token_stride + head * head_stride) * (bits_of(encoding) / 8);
  }
};

/// A tensor that is only read.
using ConstTensor = AnyTensor<const std::byte>;
/// A tensor that is written.
using MutableTensor = AnyTensor<std::byte>;

}  // namespace kvpolicy
