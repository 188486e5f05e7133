// SPDX-License-Identifier: Apache-2.0
//
// Caches over the CPU engine that a program with KVPOLICY_SEPARATE_COMPILATION compiles once. Compiled by
// `./scripts/compile-cost --consumers`.
#include <kvpolicy/cpu/instances.hpp>

KVPOLICY_DEFINE_CPU_CACHES(float)
