// SPDX-License-Identifier: Apache-2.0
#include "cuda/compiled/instances.hpp"

#include <kvpolicy/cuda/instances.hpp>

KVPOLICY_DEVICE_CACHE(template, kvpolicy::bfloat16)
KVPOLICY_DEFINE_KERNELS(kvpolicy::bfloat16, 64)
