// SPDX-License-Identifier: Apache-2.0
//
// The element types and head dimensions that kernels and the device cache are tested for. What differs between them is a
// conversion, a tolerance or a tile, and every one takes as long again to compile and to run: under
// KVPOLICY_TEST_FEW_KERNELS half stands for all elements, 64 and 128 for all head dimensions.
#pragma once

#include <kvpolicy/core/dtype.hpp>

namespace test {

#ifdef KVPOLICY_TEST_FEW_KERNELS
#define KVPOLICY_KERNEL_ELEMENTS kvpolicy::float16
/// The element type that a test takes besides half: half, with other random numbers.
using OtherElement = kvpolicy::float16;
inline constexpr bool tests_every_kernel = false;
#else
#define KVPOLICY_KERNEL_ELEMENTS kvpolicy::float16, kvpolicy::bfloat16
using OtherElement = kvpolicy::bfloat16;
inline constexpr bool tests_every_kernel = true;
#endif

/// Whether the large kernels are compiled for this head dimension.
template <int HeadDim>
inline constexpr bool tests_head_dim = tests_every_kernel || HeadDim == 64 || HeadDim == 128;
/// The head dimension that a test takes besides 64 and 128: or 64.
template <int HeadDim>
inline constexpr int other_head_dim = tests_head_dim<HeadDim> ? HeadDim : 64;

}  // namespace test
