// SPDX-License-Identifier: Apache-2.0
//
// Views of device tensors in CUDA's own number types, as the cache takes them.
#pragma once

#include <cstddef>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <kvpolicy/core/tensor_view.hpp>

namespace kvpolicy::gpu {

/// Our name of one of CUDA's 16-bit types, const or not.
template <class T>
using element_of = std::conditional_t<
    std::is_const_v<T>,
    const std::conditional_t<std::is_same_v<std::remove_const_t<T>, __half>, float16, bfloat16>,
    std::conditional_t<std::is_same_v<T, __half>, float16, bfloat16>>;

/// A view of numbers of CUDA's own types; strides in elements.
template <class T>
  requires std::is_same_v<std::remove_const_t<T>, __half> ||
           std::is_same_v<std::remove_const_t<T>, __nv_bfloat16>
[[nodiscard]] TensorView<element_of<T>> view(T* data, Extent tokens, Extent heads, Extent head_dim,
                                             Extent token_stride, Extent head_stride) {
  return {reinterpret_cast<element_of<T>*>(data), tokens, heads, head_dim, token_stride, head_stride};
}
/// Contiguous [tokens, heads, head_dim].
template <class T>
  requires std::is_same_v<std::remove_const_t<T>, __half> ||
           std::is_same_v<std::remove_const_t<T>, __nv_bfloat16>
[[nodiscard]] TensorView<element_of<T>> view(T* data, Extent tokens, Extent heads, Extent head_dim) {
  return view(data, tokens, heads, head_dim, heads * head_dim, head_dim);
}

}  // namespace kvpolicy::gpu
