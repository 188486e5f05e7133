// SPDX-License-Identifier: Apache-2.0
//
// The kernels, which a program compiles once instead of in each file that makes an engine. Give all files the definition
// KVPOLICY_SEPARATE_KERNELS, and let files of their own, which a build compiles side by side, define what the program uses:
//
//     #include <kvpolicy/cuda/instances.hpp>
//     KVPOLICY_DEFINE_COMMON_KERNELS()
//     KVPOLICY_DEFINE_KERNELS(kvpolicy::bfloat16, 128)
//
// Below, E is float16 or bfloat16, and D each number of KVPOLICY_CUDA_HEAD_DIMS, which is the same in all files. Where D is 64 or
// 128 rows may be quantised, and that takes most of the time; a program with KVPOLICY_EXACT_ROWS_ONLY in all files
// has no kernels for it, and needs neither the macros with PACKED nor bounds. What is not defined the linker names.
#pragma once

#include <kvpolicy/cuda/kernel_tables-inl.hpp>

/// What writes, moves and scores rows.
#define KVPOLICY_DEFINE_ROW_KERNELS(E, D)  \
  namespace kvpolicy::gpu::detail {        \
  template RowKernels row_kernels<E, D>(); \
  }
/// Attention to exact rows, and how much they get.
#define KVPOLICY_DEFINE_EXACT_KERNELS(E, D)                         \
  namespace kvpolicy::gpu::detail {                                 \
  template Kernel<AttendParams> decode_kernel_of<E, D, 1, false>(); \
  template Kernel<AttendParams> decode_kernel_of<E, D, 2, false>(); \
  template PrefillKernel prefill_kernel_of<E, D, false>();          \
  template PrefillKernel prefill_hopper_kernel_of<E, D>();          \
  template ObserveKernels observe_kernels<E, D, false>();           \
  }
/// The same where some are quantised; decode for 8 and 16 columns (COLUMN_TILES 1 and 2) apart, for it takes longest.
#define KVPOLICY_DEFINE_PACKED_DECODE(E, D, COLUMN_TILES)                     \
  namespace kvpolicy::gpu::detail {                                           \
  template Kernel<AttendParams> decode_kernel_of<E, D, COLUMN_TILES, true>(); \
  }
/// Attention of many queries, where some rows are quantised.
#define KVPOLICY_DEFINE_PACKED_PREFILL(E, D)              \
  namespace kvpolicy::gpu::detail {                       \
  template PrefillKernel prefill_kernel_of<E, D, true>(); \
  }
/// How much attention rows get, where some are quantised.
#define KVPOLICY_DEFINE_PACKED_OBSERVE(E, D)             \
  namespace kvpolicy::gpu::detail {                      \
  template ObserveKernels observe_kernels<E, D, true>(); \
  }
/// Bounds of rows in halves (Read::bounded).
#define KVPOLICY_DEFINE_BOUND_KERNELS(E, D)                \
  namespace kvpolicy::gpu::detail {                        \
  template Kernel<BoundParams> bound_kernel_of<E, D, 1>(); \
  template Kernel<BoundParams> bound_kernel_of<E, D, 2>(); \
  }
/// What is the same for all E and D, once in a program.
#define KVPOLICY_DEFINE_COMMON_KERNELS()                \
  namespace kvpolicy::gpu::detail {                     \
  template const CommonKernels& common_kernels<void>(); \
  }
/// All that E and D have, where nobody waits for the compiler.
#define KVPOLICY_DEFINE_KERNELS(E, D)    \
  KVPOLICY_DEFINE_ROW_KERNELS(E, D)      \
  KVPOLICY_DEFINE_EXACT_KERNELS(E, D)    \
  KVPOLICY_DEFINE_PACKED_DECODE(E, D, 1) \
  KVPOLICY_DEFINE_PACKED_DECODE(E, D, 2) \
  KVPOLICY_DEFINE_PACKED_PREFILL(E, D)   \
  KVPOLICY_DEFINE_PACKED_OBSERVE(E, D)   \
  KVPOLICY_DEFINE_BOUND_KERNELS(E, D)
