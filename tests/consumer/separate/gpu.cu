// SPDX-License-Identifier: Apache-2.0
//
// A user's file for nvcc: CUDA's own types and libraries, all names of kvpolicy, and both in one function. Its kernels are compiled
// elsewhere (kernels.cu).
#include <cstdio>
#include <vector>

#include <cuda_fp16.h>

#include <cub/device/device_reduce.cuh>
#include <cuda/std/span>

#include <kvpolicy/cuda.hpp>
#include <kvpolicy/duo.hpp>

using namespace kvpolicy;

constexpr ModelShape shape{.layers = 1, .q_heads = 8, .kv_heads = 2, .head_dim = 64};

/// One token's attention to itself, which is its value: the largest number of it.
float largest(const half* q, const half* k, half* out, cudaStream_t stream) {
  gpu::KvCache<float16> cache{duo_plan<float16>(shape, HeadGates{1, 2, {0.9, 0.1}}), {}, stream};
  cache.step(0, gpu::view(q, 1, shape.q_heads, shape.head_dim),
             gpu::view(k, 1, shape.kv_heads, shape.head_dim), gpu::view(k, 1, shape.kv_heads, shape.head_dim),
             gpu::view(out, 1, shape.q_heads, shape.head_dim), {}, stream);
  const cuda::std::span<half> numbers{out, shape.q_heads * shape.head_dim};
  const auto count = static_cast<int>(numbers.size());
  std::size_t bytes = 0;
  gpu::check(cub::DeviceReduce::Max(nullptr, bytes, numbers.data(), numbers.data(), count, stream),
             "cub::DeviceReduce::Max");
  const gpu::DeviceBuffer scratch = gpu::allocate(gpu::default_memory(), bytes, stream);
  gpu::check(cub::DeviceReduce::Max(scratch.get(), bytes, numbers.data(), numbers.data(), count, stream),
             "cub::DeviceReduce::Max");
  half most;
  gpu::check(cudaMemcpyAsync(&most, numbers.data(), sizeof most, cudaMemcpyDeviceToHost, stream),
             "cudaMemcpyAsync");
  gpu::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  return __half2float(most);
}

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("skipped: no CUDA device");
    return 0;
  }
  std::vector<half> numbers(shape.q_heads * shape.head_dim, __float2half(0.25F));
  numbers[7] = __float2half(1.5F);
  const std::size_t bytes = numbers.size() * sizeof(half);
  const gpu::DeviceBuffer rows = gpu::allocate(gpu::default_memory(), bytes, nullptr);
  const gpu::DeviceBuffer out = gpu::allocate(gpu::default_memory(), bytes, nullptr);
  gpu::check(cudaMemcpyAsync(rows.get(), numbers.data(), bytes, cudaMemcpyHostToDevice, nullptr),
             "cudaMemcpyAsync");
  const auto* row = reinterpret_cast<const half*>(rows.get());
  const float found = largest(row, row, reinterpret_cast<half*>(out.get()), nullptr);
  std::printf("the largest number is %g\n", static_cast<double>(found));
  return found == 1.5F ? 0 : 1;
}
