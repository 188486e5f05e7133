// SPDX-License-Identifier: Apache-2.0
//
// A device that runs kernels of warpgroups (kernels/simt_hopper.cuh), for as long as the object lives.
#pragma once

#include <kvpolicy/cuda/kernels/prefill_hopper.cuh>
#include <kvpolicy/cuda/runtime.hpp>

namespace test {

class HopperDevice {
 public:
  HopperDevice(const HopperDevice&) = delete;
  HopperDevice& operator=(const HopperDevice&) = delete;

#if defined(__CUDACC__)
  HopperDevice() {}
  ~HopperDevice() {}
  /// Whether there is one: an emulated device becomes one, a real one is or is not.
  [[nodiscard]] static bool is_there() {
    using kvpolicy::gpu::HopperShape;
    return kvpolicy::gpu::is_compiled_for(&kvpolicy::gpu::prefill_hopper_kernel<kvpolicy::float16, 64>,
                                          HopperShape<64>::threads);
  }
#else
  HopperDevice() : major_{device_.major}, shared_bytes_{device_.max_shared_bytes} {
    device_.major = 9;
    device_.max_shared_bytes = 232448;
  }
  ~HopperDevice() {
    device_.major = major_;
    device_.max_shared_bytes = shared_bytes_;
  }
  [[nodiscard]] static bool is_there() { return true; }

 private:
  kvpolicy::gpu::simt::Device& device_ = kvpolicy::gpu::simt::device();
  int major_;
  int shared_bytes_;
#endif
};

}  // namespace test
