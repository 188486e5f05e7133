// SPDX-License-Identifier: Apache-2.0
//
// Whether a program compiles plans, caches and policies once (kvpolicy/instances.hpp) or in each file that names them.
#pragma once

/// INSTANCE(extern template, E) for each element type E; nothing where every file compiles what it names.
#ifdef KVPOLICY_SEPARATE_COMPILATION
#define KVPOLICY_DECLARE_INSTANCES(INSTANCE) \
  INSTANCE(extern template, float)           \
  INSTANCE(extern template, float16)         \
  INSTANCE(extern template, bfloat16)
#else
#define KVPOLICY_DECLARE_INSTANCES(INSTANCE)
#endif
