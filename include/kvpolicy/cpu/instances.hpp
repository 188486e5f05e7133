// SPDX-License-Identifier: Apache-2.0
//
// The CPU engine and the caches over it, compiled once in a program (kvpolicy/instances.hpp), in files with the flags of
// those that use them: engines for other instruction sets (-march) and other threads (-fopenmp) are other types.
//
//     #include <kvpolicy/cpu/instances.hpp>
//     KVPOLICY_DEFINE_INSTANCES(float)
//     KVPOLICY_DEFINE_CPU_ENGINE()
//     KVPOLICY_DEFINE_CPU_CACHES(float)  // float16 and bfloat16: likewise
//
// An engine with a ParallelFor of your own, and caches over it, are compiled where they are named; its inner loops are
// those of KVPOLICY_DEFINE_CPU_ENGINE.
#pragma once

#include <kvpolicy/cpu.hpp>
#include <kvpolicy/instances.hpp>

/// Defines the engine on one thread, and on OpenMP's where the file is compiled with OpenMP.
#define KVPOLICY_DEFINE_CPU_ENGINE()       \
  namespace kvpolicy::cpu::HWY_NAMESPACE { \
  KVPOLICY_CPU_ENGINE_INSTANCE(template)   \
  }

/// Defines the caches over `cpu::Engine<>` of rows of element type E.
#define KVPOLICY_DEFINE_CPU_CACHES(E)      \
  namespace kvpolicy {                     \
  KVPOLICY_CPU_CACHE_INSTANCE(template, E) \
  }
