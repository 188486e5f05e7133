// SPDX-License-Identifier: Apache-2.0
//
// What only Hopper runs, for every head dimension that it is written for: compiled where nvcc is found, also where
// nothing can run it.
#include <kvpolicy/cuda/kernels/prefill_hopper.cuh>

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "compile this for sm_90a"
#endif

namespace kvpolicy::gpu {
template __global__ void prefill_hopper_kernel<float16, 64>(const __grid_constant__ AttendParams);
template __global__ void prefill_hopper_kernel<bfloat16, 128>(const __grid_constant__ AttendParams);
template __global__ void prefill_hopper_kernel<float16, 256>(const __grid_constant__ AttendParams);
}  // namespace kvpolicy::gpu
