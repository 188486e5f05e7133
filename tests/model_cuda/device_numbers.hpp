// SPDX-License-Identifier: Apache-2.0
//
// Numbers in device memory for a test.
#pragma once

#include <cstddef>
#include <random>
#include <vector>

#include <cuda_runtime_api.h>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/memory.hpp>
#include <kvpolicy/cuda/runtime.hpp>

namespace kvpolicy::reference {

template <class T>
class DeviceNumbers {
 public:
  explicit DeviceNumbers(const std::vector<T>& numbers) : DeviceNumbers(numbers.size()) {
    gpu::check(cudaMemcpy(data(), numbers.data(), count_ * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  /// Not initialised: NaN under the emulation.
  explicit DeviceNumbers(std::size_t count)
      : count_{count}, block_{gpu::allocate(gpu::default_memory(), count * sizeof(T), nullptr)} {}

  [[nodiscard]] T* data() const { return reinterpret_cast<T*>(block_.get()); }
  template <class U>
  [[nodiscard]] U* as() const {
    return reinterpret_cast<U*>(block_.get());
  }
  [[nodiscard]] std::vector<T> get() const {
    std::vector<T> numbers(count_);
    gpu::check(cudaMemcpy(numbers.data(), data(), count_ * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return numbers;
  }

 private:
  std::size_t count_;
  gpu::DeviceBuffer block_;
};

[[nodiscard]] inline std::vector<float> random_floats(std::size_t count, unsigned seed,
                                                      float largest = 2.0F) {
  std::mt19937 bits{seed};
  std::uniform_real_distribution<float> number{-largest, largest};
  std::vector<float> numbers(count);
  for (float& x : numbers) x = number(bits);
  return numbers;
}

[[nodiscard]] inline std::vector<bfloat16> random_bfloat16(std::size_t count, unsigned seed,
                                                           float largest = 2.0F) {
  std::vector<bfloat16> numbers;
  for (const float x : random_floats(count, seed, largest)) numbers.push_back(bfloat16{x});
  return numbers;
}

/// The largest change of a number by rounding to bfloat16, plus a little for the sums before it.
[[nodiscard]] inline double rounding(double x) { return (x < 0 ? -x : x) * 0x1.1p-8 + 1e-6; }

}  // namespace kvpolicy::reference
