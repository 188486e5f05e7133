// SPDX-License-Identifier: Apache-2.0
#include <kvpolicy/cuda/instances.hpp>

KVPOLICY_DEFINE_COMMON_KERNELS()
KVPOLICY_DEFINE_ROW_KERNELS(kvpolicy::float16, 64)
KVPOLICY_DEFINE_EXACT_KERNELS(kvpolicy::float16, 64)
