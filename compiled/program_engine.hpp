// SPDX-License-Identifier: Apache-2.0
//
// The CPU engine and the caches over it, for the build's own programs: declared here and compiled once, with
// the flags of those programs (target kvpolicy_program_engine). Tuning and threads of a program's own are
// compiled where they are named.
#pragma once

#include <kvpolicy/compiled/policies.hpp>
#include <kvpolicy/cpu.hpp>

/// SPEC is `template` or `extern template`.
#define KVPOLICY_PROGRAM_ENGINE(SPEC)                                              \
  SPEC class kvpolicy::cpu::HWY_NAMESPACE::Worker<kvpolicy::cpu::DefaultTuning>;   \
  SPEC class kvpolicy::cpu::HWY_NAMESPACE::Engine<kvpolicy::cpu::SerialFor>;       \
  KVPOLICY_PROGRAM_OPENMP_ENGINE(SPEC)
#ifdef _OPENMP
#define KVPOLICY_PROGRAM_OPENMP_ENGINE(SPEC) \
  SPEC class kvpolicy::cpu::HWY_NAMESPACE::Engine<kvpolicy::cpu::OpenMpFor>;
#else
#define KVPOLICY_PROGRAM_OPENMP_ENGINE(SPEC)
#endif
#define KVPOLICY_PROGRAM_CACHE(SPEC, E) SPEC class kvpolicy::KvCache<E, kvpolicy::cpu::Engine<>>;

KVPOLICY_PROGRAM_ENGINE(extern template)
KVPOLICY_PROGRAM_CACHE(extern template, float)
KVPOLICY_PROGRAM_CACHE(extern template, kvpolicy::half)
KVPOLICY_PROGRAM_CACHE(extern template, kvpolicy::bfloat16)
