// SPDX-License-Identifier: Apache-2.0
//
// The device of a bench and its published limits, to which times are compared.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <string_view>

#include <cuda_runtime_api.h>

#include <kvpolicy/cuda/memory.hpp>
#include <kvpolicy/cuda/runtime.hpp>

namespace kvpolicy::bench {

struct DeviceInfo {
  std::string name = "host emulation of tests/simt";
  std::string driver = "none";
  std::string target = "host";  ///< what the kernels were compiled for
  int multiprocessors = 1;
  std::size_t l2_bytes = 0;
  std::size_t memory_bytes = 0;
  double bytes_per_second = 1e12;  ///< nominal memory bandwidth
  double flops_per_second = 1e12;  ///< nominal dense bfloat16 products; 0 where unknown
  std::string limits = "made up";  ///< source of the two numbers
};

/// Published limits of the cards for which goals are stated (docs/performance.md).
struct NominalLimits {
  std::string_view name;  ///< part of the device's name; the first entry that matches is used
  double gigabytes_per_second;
  double teraflops;
};
inline constexpr std::array nominal_limits{
    NominalLimits{"H200", 4800, 989},           NominalLimits{"H100 PCIe", 2039, 756},
    NominalLimits{"H100 NVL", 3938, 835},       NominalLimits{"H100", 3352, 989},
    NominalLimits{"A100 80GB PCIe", 1935, 312}, NominalLimits{"A100-PCIE-40GB", 1555, 312},
    NominalLimits{"A100-SXM4-40GB", 1555, 312}, NominalLimits{"A100", 2039, 312},
};

/// Describes the current device. @throws DeviceError if there is no device that the kernels were
/// compiled for
[[nodiscard]] inline DeviceInfo device_info() {
  const gpu::Device device = gpu::Device::current();
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    gpu::check(cudaDeviceGetAttribute(&value, which, device.id), "cudaDeviceGetAttribute");
    return value;
  };
  DeviceInfo info;
  info.multiprocessors = device.multiprocessors;
  info.l2_bytes = static_cast<std::size_t>(attribute(cudaDevAttrL2CacheSize));
  std::size_t free_bytes = 0;
  gpu::check(cudaMemGetInfo(&free_bytes, &info.memory_bytes), "cudaMemGetInfo");
#if defined(__CUDACC__)
  cudaDeviceProp properties;
  gpu::check(cudaGetDeviceProperties(&properties, device.id), "cudaGetDeviceProperties");
  info.name = properties.name;
  int version = 0;
  gpu::check(cudaDriverGetVersion(&version), "cudaDriverGetVersion");
  info.driver = "CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  info.target = "sm_" + std::to_string(properties.major) + std::to_string(properties.minor) +
                ", compiled by nvcc " + std::to_string(__CUDACC_VER_MAJOR__) + "." +
                std::to_string(__CUDACC_VER_MINOR__);
  const auto* known = std::ranges::find_if(nominal_limits, [&](const NominalLimits& limits) {
    return info.name.find(limits.name) != std::string::npos;
  });
  if (known != nominal_limits.end()) {
    info.bytes_per_second = known->gigabytes_per_second * 1e9;
    info.flops_per_second = known->teraflops * 1e12;
    info.limits = "published for this card";
  } else {
    // Each bit of the bus makes two transfers per clock (kHz). The runtime does not report the rate
    // of products.
    info.bytes_per_second =
        2e3 * attribute(cudaDevAttrMemoryClockRate) * attribute(cudaDevAttrGlobalMemoryBusWidth) / 8;
    info.flops_per_second = 0.0;
    info.limits = "memory clock and bus width of the device";
  }
#endif
  return info;
}

}  // namespace kvpolicy::bench
