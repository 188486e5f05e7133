// SPDX-License-Identifier: Apache-2.0
//
// The engine for the instruction set of the compiler's flags, which every processor of the architecture
// has.
#include "any_engine.hpp"

#define HWY_COMPILE_ONLY_STATIC
#define KVPOLICY_COMPILED_TARGET HWY_STATIC_TARGET
#define KVPOLICY_COMPILED_MAKE make_baseline
#include "one_target-inl.hpp"
