// SPDX-License-Identifier: Apache-2.0
#include <kvpolicy/cpu/instances.hpp>

KVPOLICY_DEFINE_CPU_CACHES(float)
KVPOLICY_DEFINE_CPU_CACHES(float16)
