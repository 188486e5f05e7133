// SPDX-License-Identifier: Apache-2.0
//
// Decode over quantised rows of 128 channels, which the kernel's own tests run; no test has an engine for them.
#include <kvpolicy/cuda/instances.hpp>

KVPOLICY_DEFINE_PACKED_DECODE(kvpolicy::bfloat16, 128, 1)
KVPOLICY_DEFINE_PACKED_DECODE(kvpolicy::bfloat16, 128, 2)
