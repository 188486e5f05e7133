// SPDX-License-Identifier: Apache-2.0
//
// Rows of 16-bit numbers on the device, random or poisoned.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/tensor_view.hpp>
#include <kvpolicy/cuda/memory.hpp>
#include <kvpolicy/cuda/runtime.hpp>

namespace kvpolicy::bench {

/// A device tensor of 16-bit numbers.
class Tensor16 {
 public:
  Tensor16(std::size_t count, cudaStream_t stream)
      : count_{count}, memory_{gpu::allocate(gpu::default_memory(), count * sizeof(bfloat16), stream)} {}

  [[nodiscard]] bfloat16* data() const { return reinterpret_cast<bfloat16*>(memory_.get()); }
  [[nodiscard]] std::size_t count() const { return count_; }

  /// Fills it with uniformly distributed numbers of mean 0 and variance 1, which spreads logits as
  /// in a trained model.
  void randomize(std::uint64_t seed, cudaStream_t stream) const;
  /// Fills it with NaN, so that an element that is never written is found.
  void poison(cudaStream_t stream) const {
    gpu::check(cudaMemsetAsync(memory_.get(), 0xff, count_ * sizeof(bfloat16), stream), "cudaMemsetAsync");
  }
  /// How many of its numbers are NaN. Waits for the stream.
  [[nodiscard]] std::size_t nans(cudaStream_t stream) const;

  [[nodiscard]] TensorView<bfloat16> view(std::size_t heads, std::size_t head_dim) const {
    return {data(), count_ / heads / head_dim, heads, head_dim};
  }

 private:
  [[nodiscard]] std::uint16_t* bits() const { return reinterpret_cast<std::uint16_t*>(memory_.get()); }

  std::size_t count_;
  gpu::DeviceBuffer memory_;
};

}  // namespace kvpolicy::bench
