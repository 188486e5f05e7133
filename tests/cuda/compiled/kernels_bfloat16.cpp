// SPDX-License-Identifier: Apache-2.0
//
// The kernels of programs whose rows are bfloat16 with 64 channels: the reference model's tests and the tools'.
#include <kvpolicy/cuda/instances.hpp>

KVPOLICY_DEFINE_COMMON_KERNELS()
KVPOLICY_DEFINE_KERNELS(kvpolicy::bfloat16, 64)
