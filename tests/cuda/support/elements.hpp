// SPDX-License-Identifier: Apache-2.0
//
// The element types that kernels and the device cache are tested for. What differs between them is a conversion and a
// tolerance, and every one takes as long again to compile and to run: under KVPOLICY_TEST_HALF_ALONE what runs for both
// runs for half alone. What takes bfloat16 for variety, one breadth of a head or the other, keeps it.
#pragma once

#include <kvpolicy/core/dtype.hpp>

namespace test {

#ifdef KVPOLICY_TEST_HALF_ALONE
#define KVPOLICY_KERNEL_ELEMENTS kvpolicy::half
/// The element type that a test takes besides half: half, with other random numbers.
using OtherElement = kvpolicy::half;
#else
#define KVPOLICY_KERNEL_ELEMENTS kvpolicy::half, kvpolicy::bfloat16
using OtherElement = kvpolicy::bfloat16;
#endif

}  // namespace test
