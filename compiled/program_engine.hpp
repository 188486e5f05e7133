// SPDX-License-Identifier: Apache-2.0
//
// The CPU engine and the caches over it, for the build's own programs: declared here and compiled once, with
// the flags of those programs (target kvpolicy_program_engine). Tuning and threads of a program's own are
// compiled where they are named.
#pragma once

#include <kvpolicy/compiled/policies.hpp>
#include <kvpolicy/cpu.hpp>

/// SPEC is `template` or `extern template`.
#define KVPOLICY_PROGRAM_ENGINE(SPEC)                                            \
  SPEC class kvpolicy::cpu::HWY_NAMESPACE::Worker<kvpolicy::cpu::DefaultTuning>; \
  SPEC class kvpolicy::cpu::HWY_NAMESPACE::Engine<kvpolicy::cpu::SerialFor>;     \
  KVPOLICY_PROGRAM_OPENMP_ENGINE(SPEC)
#ifdef _OPENMP
#define KVPOLICY_PROGRAM_OPENMP_ENGINE(SPEC) \
  SPEC class kvpolicy::cpu::HWY_NAMESPACE::Engine<kvpolicy::cpu::OpenMpFor>;
#else
#define KVPOLICY_PROGRAM_OPENMP_ENGINE(SPEC)
#endif

KVPOLICY_PROGRAM_ENGINE(extern template)

namespace kvpolicy {

KVPOLICY_CACHE_INSTANCE(extern template, float, cpu::Engine<>)
KVPOLICY_CACHE_INSTANCE(extern template, half, cpu::Engine<>)
KVPOLICY_CACHE_INSTANCE(extern template, bfloat16, cpu::Engine<>)

}  // namespace kvpolicy
