// SPDX-License-Identifier: Apache-2.0
//
// The engine for AVX-512 with VNNI, which multiplies low-bit codes: Intel since Cascade Lake, AMD since
// Zen 4. Processors with AVX-512 but without VNNI (Skylake) use AVX2.
#include "any_engine.hpp"

#define KVPOLICY_COMPILED_TARGET HWY_AVX3
#define KVPOLICY_COMPILED_MAKE make_avx512
#define KVPOLICY_CPU_RUNTIME_TARGET ",avx512vnni"
#define KVPOLICY_CPU_RUNTIME_VNNI
#define HWY_TARGET_INCLUDE "one_target-inl.hpp"
#include <hwy/foreach_target.h>
