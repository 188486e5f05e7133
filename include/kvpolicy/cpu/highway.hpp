// SPDX-License-Identifier: Apache-2.0
//
// Highway as the CPU engine uses it: static dispatch, so the instruction set is the one that the including
// translation unit is compiled for. All code that depends on it is in HWY_NAMESPACE, so units compiled with
// different flags have different functions, not two versions of one.
#pragma once

// Highway 1.0 uses SSE4, AVX2 and AVX-512 only together with AES, which x86-64-v2 to v4 do not include, and
// otherwise silently falls back to SSSE3. The engine does not need AES.
#if !defined(HIGHWAY_HWY_BASE_H_) && defined(__SSE4_2__) && !defined(__AES__) && \
    !defined(HWY_DISABLE_PCLMUL_AES)
#define HWY_DISABLE_PCLMUL_AES
#define KVPOLICY_DEFINED_HWY_DISABLE_PCLMUL_AES
#endif

// Highway 1.0 also refuses to compile for a processor with all of AVX3_DL (Ice Lake's instructions and
// AVX-VNNI: Sapphire Rapids and later) unless that target was requested.
#if !defined(HIGHWAY_HWY_BASE_H_) && defined(__AVXVNNI__) && defined(__AVX512VBMI2__) && \
    !defined(HWY_WANT_AVX3_DL)
#define HWY_WANT_AVX3_DL
#define KVPOLICY_DEFINED_HWY_WANT_AVX3_DL
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

// The includer must not see these macros, so they are undefined after Highway has read them.
#ifdef KVPOLICY_DEFINED_HWY_DISABLE_PCLMUL_AES
#undef HWY_DISABLE_PCLMUL_AES
#undef KVPOLICY_DEFINED_HWY_DISABLE_PCLMUL_AES
#endif
#ifdef KVPOLICY_DEFINED_HWY_WANT_AVX3_DL
#undef HWY_WANT_AVX3_DL
#undef KVPOLICY_DEFINED_HWY_WANT_AVX3_DL
#endif

#if HWY_HAVE_SCALABLE
#error "kvpolicy::cpu keeps vectors in arrays: define HWY_DISABLED_TARGETS to leave out SVE and RVV"
#endif

// kvpolicy::compiled compiles the engine for instruction sets that the compiler's flags do not name, one in
// each of its files. Code between these two macros is compiled for the file's own instruction set.
// Everything else, the standard library and core/ included, is compiled for the flags, so that all files of
// a program have the same functions. Clang does not apply the target to lambdas, so each lambda that uses
// vectors names it. In all other programs the flags name the instruction set, and the macros are empty.
#ifdef KVPOLICY_CPU_RUNTIME_TARGET
#define KVPOLICY_CPU_BEGIN_TARGET HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR KVPOLICY_CPU_RUNTIME_TARGET)
#define KVPOLICY_CPU_END_TARGET HWY_POP_ATTRIBUTES
#define KVPOLICY_CPU_LAMBDA __attribute__((target(HWY_TARGET_STR KVPOLICY_CPU_RUNTIME_TARGET)))
#else
#define KVPOLICY_CPU_BEGIN_TARGET
#define KVPOLICY_CPU_END_TARGET
#define KVPOLICY_CPU_LAMBDA
#endif
#define KVPOLICY_CPU_INLINE_LAMBDA KVPOLICY_CPU_LAMBDA __attribute__((always_inline))
