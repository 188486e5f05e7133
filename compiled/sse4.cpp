// SPDX-License-Identifier: Apache-2.0
//
// The engine for SSE4 (x86-64-v2).
#include "any_engine.hpp"

#define KVPOLICY_COMPILED_TARGET HWY_SSE4
#define KVPOLICY_COMPILED_MAKE make_sse4
#define KVPOLICY_CPU_RUNTIME_TARGET ""
#define HWY_TARGET_INCLUDE "one_target-inl.hpp"
#include <hwy/foreach_target.h>
