// SPDX-License-Identifier: Apache-2.0
//
// What a user's file may say: CUDA's own types and libraries, all names of kvpolicy, and both in one function.
#include <cuda_fp16.h>

#include <cub/device/device_reduce.cuh>
#include <cuda/std/span>

#include <kvpolicy/cuda.hpp>
#include <kvpolicy/duo.hpp>

using namespace kvpolicy;

float largest(const HeadGates& gates, const half* q, const half* k, half* out, float* memory,
              cudaStream_t stream);

float largest(const HeadGates& gates, const half* q, const half* k, half* out, float* memory,
              cudaStream_t stream) {
  const ModelShape shape{.layers = 1, .q_heads = 8, .kv_heads = 2, .head_dim = 64};
  gpu::KvCache<float16> cache{duo_plan<float16>(shape, gates), {}, stream};
  cache.step(0, gpu::view(q, 1, shape.q_heads, shape.head_dim),
             gpu::view(k, 1, shape.kv_heads, shape.head_dim), gpu::view(k, 1, shape.kv_heads, shape.head_dim),
             gpu::view(out, 1, shape.q_heads, shape.head_dim), {}, stream);
  const cuda::std::span<float> numbers{memory, 64};
  std::size_t bytes = 0;
  gpu::check(cub::DeviceReduce::Max(nullptr, bytes, numbers.data(), numbers.data(), 64, stream),
             "cub::DeviceReduce::Max");
  return __half2float(half{1.0F}) + static_cast<float>(float16{static_cast<float>(bytes)});
}
