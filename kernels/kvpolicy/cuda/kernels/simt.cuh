// SPDX-License-Identifier: Apache-2.0
//
// The machine model of the kernels: a block of warps of 32 lanes with shared memory, warp
// collectives, 16-bit matrix products and asynchronous copies, as in sm_80. Kernels contain no PTX
// and no intrinsics, so the same sources also run, block by block, on the host emulation of the
// test suite (tests/simt), under sanitizers and without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include <kvpolicy/core/host_device.hpp>

namespace kvpolicy::gpu {

/// Words that are moved together. A pointer to this type needs its alignment.
struct alignas(16) Words4 {
  std::uint32_t word[4];
};
struct alignas(8) Words2 {
  std::uint32_t word[2];
};
struct alignas(4) Words1 {
  std::uint32_t word[1];
};

inline constexpr int warp_lanes = 32;

}  // namespace kvpolicy::gpu

#if !defined(__CUDACC__)
// This header defines the same names as the rest of this file; only tests have it on their include
// path.
#include <simt/machine.hpp>
#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <kvpolicy/core/dtype.hpp>

#define KVPOLICY_DEVICE __device__ __forceinline__
/// After the parameters of a lambda. In a kernel of many shapes the compiler no longer inlines every lambda by itself,
/// and the arrays of registers that one refers to go to memory: `./scripts/gpu-instructions` shows a stack.
#define KVPOLICY_INLINE_LAMBDA __attribute__((always_inline))
#define KVPOLICY_KERNEL(threads, blocks_per_multiprocessor) \
  __global__ void __launch_bounds__(threads, blocks_per_multiprocessor)
#define KVPOLICY_GRID_CONSTANT __grid_constant__
#define KVPOLICY_UNROLL _Pragma("unroll")
#define KVPOLICY_NO_UNROLL _Pragma("unroll 1")

namespace kvpolicy::gpu {

// ---- thread indices --------------------------------------------------------------------------
KVPOLICY_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
KVPOLICY_DEVICE int thread_count() { return static_cast<int>(blockDim.x); }
KVPOLICY_DEVICE int lane_index() { return static_cast<int>(threadIdx.x % warp_lanes); }
KVPOLICY_DEVICE int warp_index() { return static_cast<int>(threadIdx.x / warp_lanes); }
KVPOLICY_DEVICE int block_x() { return static_cast<int>(blockIdx.x); }
KVPOLICY_DEVICE int block_y() { return static_cast<int>(blockIdx.y); }
KVPOLICY_DEVICE int grid_x() { return static_cast<int>(gridDim.x); }
KVPOLICY_DEVICE int grid_y() { return static_cast<int>(gridDim.y); }

/// The block's dynamic shared memory, aligned to 1,024 bytes; its size is a launch argument.
KVPOLICY_DEVICE std::byte* shared_memory() {
  extern __shared__ __align__(1024) uint4 kvpolicy_dynamic_shared_memory[];
  return reinterpret_cast<std::byte*>(kvpolicy_dynamic_shared_memory);
}

// ---- the kernel before -----------------------------------------------------------------------
/// The first statement of every thread of a kernel that is launched early (Grid::early): while the kernel before
/// it on the stream still ends (programmatic dependent launch, from Hopper on). After it that kernel is done and what
/// it wrote is seen. The kernel after this one may come as early.
KVPOLICY_DEVICE void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- collectives and atomics -----------------------------------------------------------------
// All lanes of a warp take part in every warp collective.
KVPOLICY_DEVICE void sync_block() { __syncthreads(); }
KVPOLICY_DEVICE void sync_warp() { __syncwarp(); }

template <class T>
KVPOLICY_DEVICE T shuffle(T value, int source_lane) {
  return __shfl_sync(0xffffffffU, value, source_lane);
}
/// The same within each `Width` lanes (a power of two).
template <int Width, class T>
KVPOLICY_DEVICE T shuffle_within(T value, int source_lane) {
  return __shfl_sync(0xffffffffU, value, source_lane, Width);
}
template <class T>
KVPOLICY_DEVICE T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(0xffffffffU, value, mask);
}
/// The value of the lane `delta` below; lanes below `delta` keep their own.
template <class T>
KVPOLICY_DEVICE T shuffle_up(T value, int delta) {
  return __shfl_up_sync(0xffffffffU, value, static_cast<unsigned>(delta));
}
KVPOLICY_DEVICE std::uint32_t ballot(bool vote) { return __ballot_sync(0xffffffffU, vote); }
KVPOLICY_DEVICE bool any(bool vote) { return __any_sync(0xffffffffU, vote) != 0; }

/// Adds to global or shared memory and returns the old value.
KVPOLICY_DEVICE std::uint32_t atomic_add(std::uint32_t* place, std::uint32_t value) {
  return atomicAdd(place, value);
}
/// Counts this block at a counter in global memory that blocks share, and returns how many came before. Called by one
/// thread after a sync_block: what the block has written to global memory is seen by whoever comes later, and after
/// another sync_block the block sees what those before have written (release and acquire, at the device's scope).
KVPOLICY_DEVICE std::uint32_t arrive(std::uint32_t* counter) {
  std::uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}
/// Reads what another block wrote, bypassing the first-level cache.
KVPOLICY_DEVICE float load_shared_by_blocks(const float* place) { return __ldcg(place); }
KVPOLICY_DEVICE Words2 load_shared_by_blocks(const Words2* place) {
  const uint2 v = __ldcg(reinterpret_cast<const uint2*>(place));
  return {v.x, v.y};
}
KVPOLICY_DEVICE Words4 load_shared_by_blocks(const Words4* place) {
  const uint4 v = __ldcg(reinterpret_cast<const uint4*>(place));
  return {v.x, v.y, v.z, v.w};
}

// ---- memory ----------------------------------------------------------------------------------
/// The second-level cache's policy for rows: they leave it before what every layer needs, page tables, descriptions and
/// weights. A constant for the compiler, which makes it part of the load.
KVPOLICY_DEVICE std::uint64_t rows_leave_first() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
/// Loads row data that is read once, without keeping it in the first-level cache.
KVPOLICY_DEVICE Words4 load_once(const Words4* place) {
  Words4 v;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(place), "l"(rows_leave_first()));
  return v;
}
KVPOLICY_DEVICE Words2 load_once(const Words2* place) {
  Words2 v;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.L2::128B.v2.u32 {%0, %1}, [%2], %3;"
               : "=r"(v.word[0]), "=r"(v.word[1])
               : "l"(place), "l"(rows_leave_first()));
  return v;
}
KVPOLICY_DEVICE Words1 load_once(const Words1* place) {
  Words1 v;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.L2::128B.u32 %0, [%1], %2;"
               : "=r"(v.word[0])
               : "l"(place), "l"(rows_leave_first()));
  return v;
}

KVPOLICY_DEVICE std::uint32_t load_once(const std::uint16_t* place) {
  std::uint16_t v;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.L2::128B.u16 %0, [%1], %2;"
               : "=h"(v)
               : "l"(place), "l"(rows_leave_first()));
  return v;
}

/// Asks the second-level cache for the 128 bytes about an address that is read later. Nothing waits for them.
KVPOLICY_DEVICE void request_line(const void* place) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(place));
}

KVPOLICY_DEVICE std::uint32_t shared_address(const void* place) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(place));
}

/// Copies 16 bytes from global to shared memory, or writes zeros if not `valid` (the source is then
/// not read). The copy is complete after `cp_async_wait`.
KVPOLICY_DEVICE void cp_async_16(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}
KVPOLICY_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;"); }
/// Waits until at most `Pending` of this thread's latest groups are incomplete.
template <int Pending>
KVPOLICY_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// ---- matrices --------------------------------------------------------------------------------
/// Loads four 8x8 matrices of 16-bit numbers. Lane i passes the address of row i % 8 of matrix i /
/// 8 (16 bytes, aligned); register m of lane l gets numbers 2 (l % 4) and + 1 of row l / 4 of
/// matrix m.
KVPOLICY_DEVICE void load_matrix_x4(std::uint32_t (&r)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared_row))
               : "memory");
}
/// The same with each matrix transposed.
KVPOLICY_DEVICE void load_matrix_x4_transposed(std::uint32_t (&r)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared_row))
               : "memory");
}
/// Transposes the 8x8 matrix of 16-bit numbers that the warp holds in one register per lane.
KVPOLICY_DEVICE std::uint32_t transpose_matrix(std::uint32_t r) {
  std::uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(r));
  return out;
}

/// d += a b for a [16, 16] and b [16, 8] of E, d in float. With g = lane / 4 and t = lane % 4: a[0]
/// holds row g, columns 2t and 2t + 1; a[1] row g + 8; a[2], a[3] the same eight columns on; b0
/// rows 2t, 2t + 1 of column g, b1 rows 2t + 8, 2t + 9; d[0], d[1] row g, columns 2t and 2t + 1;
/// d[2], d[3] row g + 8.
template <Element E>
KVPOLICY_DEVICE void multiply_add(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                  std::uint32_t b1) {
  if constexpr (encoding_of<E> == Encoding::bfloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// ---- numbers ---------------------------------------------------------------------------------
/// 2^x to about 2 units in the last place; exactly 0 for -infinity.
KVPOLICY_DEVICE float exp2_approximate(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}
/// A program that is compiled with --use_fast_math (or -ftz, -prec-sqrt) does not assemble: subnormal numbers would count as
/// zeros, and codes would not have the bits that the host gives them. nvcc defines no macro that says so; the compiler's
/// answer to libdevice's question is a constant, and the call of a function that nobody defines is left, or is not.
extern "C" __device__ int __nvvm_reflect(const char*);
extern "C" __device__ void kvpolicy_is_not_to_be_compiled_with_use_fast_math();
KVPOLICY_DEVICE void refuse_fast_math() {
  if (__nvvm_reflect("__CUDA_FTZ") != 0 || __nvvm_reflect("__CUDA_PREC_SQRT") == 0) {
    kvpolicy_is_not_to_be_compiled_with_use_fast_math();
  }
}
KVPOLICY_DEVICE float exp2_exact(float x) {
  refuse_fast_math();
  return exp2f(x);
}
KVPOLICY_DEVICE float log2_exact(float x) {
  refuse_fast_math();
  return log2f(x);
}
/// 1 / x to about 1 unit in the last place.
KVPOLICY_DEVICE float reciprocal_approximate(float x) {
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}
/// a b, rounded by itself and not as part of a multiply-add.
KVPOLICY_DEVICE float rounded_product(float a, float b) { return __fmul_rn(a, b); }
/// a / b, rounded to nearest whatever -prec-div says.
KVPOLICY_DEVICE float rounded_quotient(float a, float b) { return __fdiv_rn(a, b); }
KVPOLICY_DEVICE float inverse_square_root(float x) { return rsqrtf(x); }
/// Rounded to nearest.
KVPOLICY_DEVICE double square_root(double x) { return sqrt(x); }
/// e^x to about 1 unit in the last place; exactly 0 for -infinity.
KVPOLICY_DEVICE double exponential(double x) { return exp(x); }
/// Sine and cosine of an angle in double, because positions may be millions.
KVPOLICY_DEVICE void sine_cosine(double angle, float& sine, float& cosine) {
  // Whole turns are subtracted in double. The rest is small and needs no range reduction with a
  // stack.
  const double turns = angle * 0.15915494309189535;
  sincospif(2.0F * static_cast<float>(turns - rint(turns)), &sine, &cosine);
}

/// The upper 32 bits of the product.
KVPOLICY_DEVICE std::uint32_t multiply_high(std::uint32_t a, std::uint32_t b) { return __umulhi(a, b); }
KVPOLICY_DEVICE std::uint32_t count_bits(std::uint32_t x) { return static_cast<std::uint32_t>(__popc(x)); }
KVPOLICY_DEVICE std::uint32_t bits_of_float(float x) { return __float_as_uint(x); }
KVPOLICY_DEVICE float float_of_bits(std::uint32_t x) { return __uint_as_float(x); }

/// Converts one 16-bit number to float.
template <Element E>
KVPOLICY_DEVICE float to_float(std::uint16_t bits) {
  if constexpr (encoding_of<E> == Encoding::bfloat16) {
    return __uint_as_float(static_cast<std::uint32_t>(bits) << 16);
  } else {
    return __half2float(__ushort_as_half(bits));
  }
}
/// Converts float to a 16-bit number, rounded to nearest even.
template <Element E>
KVPOLICY_DEVICE std::uint16_t from_float(float x) {
  if constexpr (encoding_of<E> == Encoding::bfloat16) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
  } else {
    return __half_as_ushort(__float2half_rn(x));
  }
}
/// Converts two floats to two 16-bit numbers, with `low` in the low half.
template <Element E>
KVPOLICY_DEVICE std::uint32_t pack(float low, float high) {
  if constexpr (encoding_of<E> == Encoding::bfloat16) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&v);
  } else {
    const __half2 v = __floats2half2_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&v);
  }
}
/// a b + c on two halves, rounded once.
KVPOLICY_DEVICE std::uint32_t half2_multiply_add(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t out;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}
/// A word without a value, for places of an array that nothing will read: they need no register then to keep what they
/// held before.
KVPOLICY_DEVICE std::uint32_t unset_word() {
  std::uint32_t out;
  asm("" : "=r"(out));
  return out;
}
/// Byte i of the result is byte `selector >> 4 i & 7` of the eight bytes of b:a.
KVPOLICY_DEVICE std::uint32_t permute_bytes(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
  return __byte_perm(a, b, selector);
}

}  // namespace kvpolicy::gpu
#endif

namespace kvpolicy::gpu {

/// A number of this lane, of which the compiler knows nothing. What follows from it is computed where
/// it is used, and not before a loop over heads, where it would take a register or be spilled. Called
/// by all lanes.
KVPOLICY_DEVICE int unforeseen(int number) { return shuffle(number, lane_index()); }

}  // namespace kvpolicy::gpu
