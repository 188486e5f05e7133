// SPDX-License-Identifier: Apache-2.0
#include "cache-inl.hpp"

KVPOLICY_COMPILE_CACHE(float16)
