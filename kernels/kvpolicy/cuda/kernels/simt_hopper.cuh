// SPDX-License-Identifier: Apache-2.0
//
// What a Hopper multiprocessor (sm_90a) can do besides simt.cuh: barriers in shared memory, barriers of some warps,
// products that a warpgroup starts and that read their operands from shared memory (wgmma), and registers that warps
// hand each other. A warpgroup is four warps, of which the first one's index is a multiple of 4.
//
// A kernel that uses this is written KVPOLICY_HOPPER_KERNEL, and its body is in `if constexpr (has_warpgroups)`:
// compiled for another target it has no code and takes one warp, so that a launch is refused and `is_compiled_for`
// (cuda/runtime.hpp) says so before.
#pragma once

#include <cstddef>
#include <cstdint>

#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu {

inline constexpr int warpgroup_warps = 4;
inline constexpr int warpgroup_threads = warpgroup_warps * warp_lanes;

/// A barrier in shared memory (an mbarrier): its phases complete when a number of arrivals is reached.
struct alignas(8) SharedBarrier {
  std::uint64_t state;
};

/// What a descriptor of a matrix in shared memory says to a product. Rows of 64 numbers, 128 bytes, lie below each
/// other, each eight of them in 1,024 bytes that begin at a multiple of 1,024, and the chunk of 16 bytes at place c
/// of row r of the eight is at place c ^ r (the swizzle of 128 bytes). `eight_rows_apart`: bytes from eight rows to
/// the next eight; `columns_apart`: bytes from 64 numbers of a row to the next 64, for matrices that are read
/// transposed.
///
/// From one product's numbers to the next one's a descriptor advances by bytes / 16: 16 numbers along a row are 32
/// bytes.
KVPOLICY_HOST_DEVICE constexpr std::uint64_t matrix_descriptor(std::uint32_t address, int columns_apart,
                                                               int eight_rows_apart) {
  constexpr std::uint64_t swizzle_128 = 1;
  const auto field = [](std::uint64_t bytes) { return (bytes & 0x3ffffU) >> 4; };
  return field(address) | field(static_cast<std::uint64_t>(columns_apart)) << 16 |
         field(static_cast<std::uint64_t>(eight_rows_apart)) << 32 | swizzle_128 << 62;
}

}  // namespace kvpolicy::gpu

#if !defined(__CUDACC__)
#include <simt/hopper.hpp>  // defines the names of the rest of this file
#else

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KVPOLICY_HOPPER_KERNEL(threads) __global__ void __launch_bounds__(threads, 1)
#else
#define KVPOLICY_HOPPER_KERNEL(threads) __global__ void __launch_bounds__(kvpolicy::gpu::warp_lanes, 1)
#endif

namespace kvpolicy::gpu {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
inline constexpr bool has_warpgroups = true;
#else
inline constexpr bool has_warpgroups = false;
#endif

// ---- barriers --------------------------------------------------------------------------------
/// Called by one thread, before a sync_block.
KVPOLICY_DEVICE void mbarrier_init(SharedBarrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}
/// Counts one arrival in the current phase. What the thread has done before is seen by those who wait for the phase.
KVPOLICY_DEVICE void mbarrier_arrive(SharedBarrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
/// Waits until the latest phase of this parity is complete; phases are numbered from 0. To wait for parity 1 of a new
/// barrier does not wait.
KVPOLICY_DEVICE void mbarrier_wait(SharedBarrier* barrier, int parity) {
  std::uint32_t complete = 0;
  do {  // each attempt waits for a while by itself
    asm volatile(
        "{\n.reg .pred complete;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
        "selp.u32 %0, 1, 0, complete;\n}"
        : "=r"(complete)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (complete == 0);
}

/// A barrier of `threads` threads, whole warps: waits until as many have come. Barriers are numbered 1 to 15.
KVPOLICY_DEVICE void named_barrier_sync(int barrier, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
/// Comes, and does not wait.
KVPOLICY_DEVICE void named_barrier_arrive(int barrier, int threads) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/// What this thread has written to shared memory, by stores and by copies that have arrived, is seen by products of
/// threads that it meets afterwards.
KVPOLICY_DEVICE void fence_shared_for_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- registers -------------------------------------------------------------------------------
/// Gives back registers of a thread above `Count`. Called by all threads of a warpgroup; so is the other.
template <int Count>
KVPOLICY_DEVICE void lower_register_limit() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}
/// Waits until others have given back what `Count` takes.
template <int Count>
KVPOLICY_DEVICE void raise_register_limit() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

// ---- products --------------------------------------------------------------------------------
// A product belongs to its thread's open group. Until the group has been waited for, nobody reads or writes its
// registers or changes its operands in shared memory; further products may add to the same accumulators.

/// Keeps the compiler from moving what it knows of these registers past this place.
template <int Rows>
KVPOLICY_DEVICE void hold_registers(float (&numbers)[Rows][4]) {
  KVPOLICY_UNROLL
  for (int i = 0; i < Rows; ++i) {
    asm volatile(""
                 : "+f"(numbers[i][0]), "+f"(numbers[i][1]), "+f"(numbers[i][2]),
                   "+f"(numbers[i][3])::"memory");
  }
}
template <int Rows>
KVPOLICY_DEVICE void hold_registers(std::uint32_t (&words)[Rows][4]) {
  KVPOLICY_UNROLL
  for (int i = 0; i < Rows; ++i) {
    asm volatile("" : "+r"(words[i][0]), "+r"(words[i][1]), "+r"(words[i][2]), "+r"(words[i][3])::"memory");
  }
}

/// Comes between the last access to registers and the first product that uses them, which are named here.
template <class... Registers>
KVPOLICY_DEVICE void wgmma_fence(Registers&... registers) {
  (hold_registers(registers), ...);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
/// Closes the group.
KVPOLICY_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until at most `Pending` of this thread's latest groups are incomplete. Named are the registers of the groups
/// that complete.
template <int Pending, class... Registers>
KVPOLICY_DEVICE void wgmma_wait(Registers&... registers) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
  (hold_registers(registers), ...);
}

// Operands of the instructions: the accumulators' numbers in the text, and themselves.
#define KVPOLICY_D(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define KVPOLICY_D_TEXT_64                                                                      \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define KVPOLICY_D_64                                                                                      \
  KVPOLICY_D(0), KVPOLICY_D(1), KVPOLICY_D(2), KVPOLICY_D(3), KVPOLICY_D(4), KVPOLICY_D(5), KVPOLICY_D(6), \
      KVPOLICY_D(7)
#define KVPOLICY_D_TEXT_96                                                                          \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "     \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, " \
  "%39, %40, %41, %42, %43, %44, %45, %46, %47}"
#define KVPOLICY_D_96                                                                                      \
  KVPOLICY_D(0), KVPOLICY_D(1), KVPOLICY_D(2), KVPOLICY_D(3), KVPOLICY_D(4), KVPOLICY_D(5), KVPOLICY_D(6), \
      KVPOLICY_D(7), KVPOLICY_D(8), KVPOLICY_D(9), KVPOLICY_D(10), KVPOLICY_D(11)
#define KVPOLICY_D_TEXT_128                                                                         \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "     \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, " \
  "%39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, " \
  "%58, %59, %60, %61, %62, %63}"
#define KVPOLICY_D_128                                                                                     \
  KVPOLICY_D(0), KVPOLICY_D(1), KVPOLICY_D(2), KVPOLICY_D(3), KVPOLICY_D(4), KVPOLICY_D(5), KVPOLICY_D(6), \
      KVPOLICY_D(7), KVPOLICY_D(8), KVPOLICY_D(9), KVPOLICY_D(10), KVPOLICY_D(11), KVPOLICY_D(12),         \
      KVPOLICY_D(13), KVPOLICY_D(14), KVPOLICY_D(15)
// The numbers of the operands that follow the accumulators are those that the text needs.
#define KVPOLICY_WGMMA_SHARED(columns, type, a_number, b_number, add_number)                         \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #add_number                                  \
               ", 0;\n"                                                                              \
               "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type                 \
               " " KVPOLICY_D_TEXT_##columns ", %" #a_number ", %" #b_number ", add, 1, 1, 0, 0;\n}" \
               : KVPOLICY_D_##columns                                                                \
               : "l"(a), "l"(b), "n"(Add ? 1 : 0))
#define KVPOLICY_WGMMA_REGISTERS(columns, type, a0, a1, a2, a3, b_number)                              \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type                   \
               " " KVPOLICY_D_TEXT_##columns ", {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b_number \
                                             ", 1, 1, 1, 1;"                                           \
               : KVPOLICY_D_##columns                                                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

/// Starts d += a b, or d = a b without `Add`, for a [64, 16] and b [16, Columns], both as rows of 16 numbers along `k`
/// (b by its columns) that descriptors find. Of d, warp w of the warpgroup has rows 16 w .. 16 w + 15, laid out as
/// multiply_add's, d[n] being columns 8 n .. 8 n + 7.
template <Element E, int Columns, bool Add, int All>
KVPOLICY_DEVICE void wgmma(float (&d)[All][4], std::uint64_t a, std::uint64_t b) {
  static_assert(All == Columns / 8 && (Columns == 96 || Columns == 128));
  constexpr bool bf16 = encoding_of<E> == Encoding::bfloat16;
  if constexpr (Columns == 96 && bf16) KVPOLICY_WGMMA_SHARED(96, "bf16", 48, 49, 50);
  if constexpr (Columns == 96 && !bf16) KVPOLICY_WGMMA_SHARED(96, "f16", 48, 49, 50);
  if constexpr (Columns == 128 && bf16) KVPOLICY_WGMMA_SHARED(128, "bf16", 64, 65, 66);
  if constexpr (Columns == 128 && !bf16) KVPOLICY_WGMMA_SHARED(128, "f16", 64, 65, 66);
}
/// Starts d += a b for a in registers, warp by warp as multiply_add's, and b transposed: its rows of `Columns`
/// numbers lie below each other. `First`: the first of the accumulators' columns, in eights.
template <Element E, int Columns, int First, int All>
KVPOLICY_DEVICE void wgmma_transposed(float (&all)[All][4], const std::uint32_t (&a)[4], std::uint64_t b) {
  static_assert(First + Columns / 8 <= All && (Columns == 64 || Columns == 128));
  constexpr bool bf16 = encoding_of<E> == Encoding::bfloat16;
  float(*const d)[4] = all + First;
  if constexpr (Columns == 64 && bf16) KVPOLICY_WGMMA_REGISTERS(64, "bf16", 32, 33, 34, 35, 36);
  if constexpr (Columns == 64 && !bf16) KVPOLICY_WGMMA_REGISTERS(64, "f16", 32, 33, 34, 35, 36);
  if constexpr (Columns == 128 && bf16) KVPOLICY_WGMMA_REGISTERS(128, "bf16", 64, 65, 66, 67, 68);
  if constexpr (Columns == 128 && !bf16) KVPOLICY_WGMMA_REGISTERS(128, "f16", 64, 65, 66, 67, 68);
}

#undef KVPOLICY_WGMMA_SHARED
#undef KVPOLICY_WGMMA_REGISTERS
#undef KVPOLICY_D
#undef KVPOLICY_D_TEXT_64
#undef KVPOLICY_D_64
#undef KVPOLICY_D_TEXT_96
#undef KVPOLICY_D_96
#undef KVPOLICY_D_TEXT_128
#undef KVPOLICY_D_128

}  // namespace kvpolicy::gpu

#endif
