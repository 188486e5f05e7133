// SPDX-License-Identifier: Apache-2.0
//
// The engine for AVX2, FMA and F16C (x86-64-v3).
#include "any_engine.hpp"

#define KVPOLICY_COMPILED_TARGET HWY_AVX2
#define KVPOLICY_COMPILED_MAKE make_avx2
#define KVPOLICY_CPU_RUNTIME_TARGET ""
#define HWY_TARGET_INCLUDE "one_target-inl.hpp"
#include <hwy/foreach_target.h>
