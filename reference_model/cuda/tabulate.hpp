// SPDX-License-Identifier: Apache-2.0
//
// Numbers of a function of their index, and counts of numbers, on a device: Thrust's tabulate and count_if, and on the
// emulation plain loops in the stream's order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>

#include <cuda_runtime_api.h>

#include <kvpolicy/cuda/runtime.hpp>

#if defined(__CUDACC__)
#include <thrust/count.h>
#include <thrust/device_ptr.h>
#include <thrust/execution_policy.h>
#include <thrust/tabulate.h>
#endif

namespace kvpolicy::reference {

/// Sets numbers[i] to function(i), i from 0 to count - 1, without waiting. @throws DeviceError
template <class T, class Function>
void tabulate(T* numbers, std::size_t count, Function function, cudaStream_t stream) {
#if defined(__CUDACC__)
  const thrust::device_ptr<T> first{numbers};
  thrust::tabulate(thrust::cuda::par_nosync.on(stream), first, first + static_cast<std::ptrdiff_t>(count),
                   function);
  gpu::check(cudaGetLastError(), "thrust::tabulate");
#else
  struct Job {
    T* numbers;
    std::size_t count;
    Function function;
  };
  const auto run = [](void* given) {
    const std::unique_ptr<Job> job{static_cast<Job*>(given)};
    for (std::size_t i = 0; i < job->count; ++i) job->numbers[i] = job->function(static_cast<long long>(i));
  };
  gpu::check(cudaLaunchHostFunc(stream, run, std::make_unique<Job>(Job{numbers, count, function}).release()),
             "cudaLaunchHostFunc");
#endif
}

/// How many of the numbers `test` is true of. Waits for the stream. @throws DeviceError
template <class T, class Test>
[[nodiscard]] std::size_t count_of(const T* numbers, std::size_t count, Test test, cudaStream_t stream) {
#if defined(__CUDACC__)
  const thrust::device_ptr<const T> first{numbers};
  const auto found =
      thrust::count_if(thrust::cuda::par.on(stream), first, first + static_cast<std::ptrdiff_t>(count), test);
#else
  gpu::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  const auto found = std::count_if(numbers, numbers + count, test);
#endif
  return static_cast<std::size_t>(found);
}

}  // namespace kvpolicy::reference
