// SPDX-License-Identifier: Apache-2.0
//
// Highway as the CPU engine uses it: static dispatch, so the instruction set is whatever the
// including translation unit is compiled for. Everything that depends on it lives in
// HWY_NAMESPACE: units compiled with different flags then hold different functions, not two
// versions of one.
#pragma once

// Highway 1.0 takes SSE4, AVX2 and AVX-512 only together with AES, which x86-64-v2 to v4 do not name,
// and falls back to SSSE3 without a word. Nothing here needs AES.
#if !defined(HIGHWAY_HWY_BASE_H_) && defined(__SSE4_2__) && !defined(__AES__) && \
    !defined(HWY_DISABLE_PCLMUL_AES)
#define HWY_DISABLE_PCLMUL_AES
#define KVPOLICY_DEFINED_HWY_DISABLE_PCLMUL_AES
#endif

// Highway 1.0 also refuses to compile for what has all of its AVX3_DL (Ice Lake's instructions and
// AVX-VNNI: Sapphire Rapids and later) unless that target was asked for.
#if !defined(HIGHWAY_HWY_BASE_H_) && defined(__AVXVNNI__) && defined(__AVX512VBMI2__) && \
    !defined(HWY_WANT_AVX3_DL)
#define HWY_WANT_AVX3_DL
#define KVPOLICY_DEFINED_HWY_WANT_AVX3_DL
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

// The macros are the includer's: they go once Highway has read them.
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
// each of its files. What lies between these two macros is compiled for the file's own instruction set;
// everything else, the standard library and core/ included, for the flags, so that all files of a program
// hold the same functions. Clang does not count lambdas among what lies between, so each that uses vectors
// says so itself. In all other programs the flags name the instruction set, and the macros are empty.
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
