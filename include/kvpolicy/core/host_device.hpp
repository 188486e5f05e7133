// SPDX-License-Identifier: Apache-2.0
//
// Marks functions that kernels call as well as the host, and defines the integer arithmetic that the
// standard library offers to the host only.
#pragma once

/// @cond
#if defined(__CUDACC__)
#define KVPOLICY_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define KVPOLICY_HOST_DEVICE inline
#endif
/// @endcond

namespace kvpolicy::detail {

template <class Int>
[[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int smaller(Int a, Int b) {
  return a < b ? a : b;
}
template <class Int>
[[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int larger(Int a, Int b) {
  return a > b ? a : b;
}
/// a - b, or 0 if b is larger.
template <class Int>
[[nodiscard]] KVPOLICY_HOST_DEVICE constexpr Int minus(Int a, Int b) {
  return a > b ? a - b : 0;
}

}  // namespace kvpolicy::detail
