// SPDX-License-Identifier: Apache-2.0
//
// Some heads of a call's tensors, and their numbers as caches keep them.
#pragma once

#include <cstddef>
#include <vector>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/tensor_view.hpp>

namespace kvpolicy::reference {

template <class T>
[[nodiscard]] TensorView<T> heads_of(TensorView<T> all, std::size_t first, std::size_t count) {
  all.data += first * all.head_stride;
  all.heads = count;
  return all;
}

/// All numbers, contiguous, rounded to E. @throws std::bad_alloc
template <Element E, class T>
[[nodiscard]] std::vector<E> rounded(const TensorView<T>& all) {
  std::vector<E> copied;
  copied.reserve(all.tokens * all.heads * all.head_dim);
  for (std::size_t token = 0; token < all.tokens; ++token) {
    for (std::size_t head = 0; head < all.heads; ++head) {
      const T* row = all.row(token, head);
      for (std::size_t i = 0; i < all.head_dim; ++i) copied.push_back(E{static_cast<float>(row[i])});
    }
  }
  return copied;
}

}  // namespace kvpolicy::reference
