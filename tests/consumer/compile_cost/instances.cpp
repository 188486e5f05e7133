// SPDX-License-Identifier: Apache-2.0
//
// The plans, caches and policies that a program with KVPOLICY_SEPARATE_COMPILATION compiles once. Compiled by
// `./scripts/compile-cost --consumers`.
#include <kvpolicy/instances.hpp>

KVPOLICY_DEFINE_INSTANCES(float)
