// SPDX-License-Identifier: Apache-2.0
#include <kvpolicy/instances.hpp>

KVPOLICY_DEFINE_INSTANCES(float16)
