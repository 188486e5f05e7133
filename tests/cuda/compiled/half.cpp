// SPDX-License-Identifier: Apache-2.0
#include "cuda/compiled/instances.hpp"

KVPOLICY_DEVICE_CACHE(template, kvpolicy::float16)
