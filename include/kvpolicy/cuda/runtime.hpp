// SPDX-License-Identifier: Apache-2.0
//
// The little that the library needs of the CUDA runtime: errors by name, the device's size, and
// launches that are checked.
#pragma once

#include <cstddef>
#include <new>

#include <cuda_runtime_api.h>

#include <kvpolicy/core/error.hpp>
#if !defined(__CUDACC__)
#if __has_include(<simt/launch.hpp>)
#include <simt/launch.hpp>  // the host emulation of the test suite
#else
#error "kvpolicy::cuda launches kernels: include it in a file that nvcc compiles (.cu)"
#endif
#endif

namespace kvpolicy::gpu {

/// Turns a failed launch into an error that names it.
/// @throws DeviceError
inline void check_launch(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // the next call must not find it
  fail<DeviceError>("kvpolicy::cuda: ", what, " failed: ", cudaGetErrorName(status), " (",
                    cudaGetErrorString(status), ")");
}
/// Turns a failed call of the CUDA runtime into an error that names it.
/// @throws std::bad_alloc if the device's memory ran out, DeviceError for everything else.
inline void check(cudaError_t status, const char* what) {
  if (status == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    throw_error(std::bad_alloc{});
  }
  check_launch(status, what);
}

/// Whether a device of this compute capability (90: 9.0) runs kernels that were compiled for Hopper or later, which
/// wait for the kernel before them: an older target's, compiled for the device when they are loaded, do not.
[[nodiscard]] constexpr bool has_kernels_that_wait(int capability) {
#if !defined(__CUDACC__)
  return capability >= 90;
#elif defined(__CUDA_ARCH_LIST__)
  for (const int target : {__CUDA_ARCH_LIST__}) {
    if (target >= 900 && target <= 10 * capability) return true;
  }
  return false;
#else
  return false;
#endif
}

/// The current device.
struct Device {
  int id = 0;
  int multiprocessors = 1;
  std::size_t shared_bytes_of_block = 0;  ///< the most that one block may ask for
  bool launches_early = false;            ///< whether LaunchShape::early may be set

  /// @throws DeviceError where there is no device, or one older than the kernels are written for.
  [[nodiscard]] static Device current() {
    int count = 0;
    const cudaError_t found = cudaGetDeviceCount(&count);
    if (found != cudaSuccess || count == 0) {
      static_cast<void>(cudaGetLastError());
      fail<DeviceError>("kvpolicy::cuda: no CUDA device: ",
                        found == cudaSuccess ? "none is installed" : cudaGetErrorString(found),
                        "; kvpolicy::cpu serves the same plans without one");
    }
    Device device;
    check(cudaGetDevice(&device.id), "cudaGetDevice");
    const auto attribute = [&](cudaDeviceAttr which) {
      int value = 0;
      check(cudaDeviceGetAttribute(&value, which, device.id), "cudaDeviceGetAttribute");
      return value;
    };
    const int major = attribute(cudaDevAttrComputeCapabilityMajor);
    require<DeviceError>(major >= 8, "kvpolicy::cuda: device ", device.id, " has compute capability ", major,
                         ".", attribute(cudaDevAttrComputeCapabilityMinor),
                         ", the kernels need 8.0 or newer (A100, RTX 30 and later)");
    device.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
    device.launches_early = has_kernels_that_wait(10 * major + attribute(cudaDevAttrComputeCapabilityMinor));
    device.shared_bytes_of_block =
        static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
    return device;
  }
};

/// Whether the stream's calls are being recorded into a graph. @throws DeviceError
[[nodiscard]] inline bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

/// How a kernel is spread over the device.
struct LaunchShape {
  int grid_x = 1;
  int grid_y = 1;
  int threads = 128;
  std::size_t shared_bytes = 0;
  /// Programmatic dependent launch: the kernel begins while the one before it on the stream ends, as soon as there is
  /// room, and waits itself (wait_for_kernel_before in kernels/simt.cuh), which hides the time of its launch.
  bool early = false;
};

/// Launches `kernel(params)` on `stream`. @throws DeviceError if the launch is refused.
template <class Params>
void launch(void (*kernel)(const Params), const LaunchShape& shape, cudaStream_t stream, const Params& params,
            const char* name) {
#if defined(__CUDACC__)
  constexpr std::size_t without_asking = 48 * 1024;
  const void* function = reinterpret_cast<const void*>(kernel);
  if (shape.shared_bytes > without_asking) {
    // As much as there is: the limit is the kernel's, not the launch's, and must not sink below what
    // another thread, or a captured graph, launches it with.
    int device = 0;
    int most = 0;
    check_launch(cudaGetDevice(&device), name);
    check_launch(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), name);
    check_launch(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, most), name);
  }
  void* arguments[] = {const_cast<Params*>(&params)};
  const dim3 grid{static_cast<unsigned>(shape.grid_x), static_cast<unsigned>(shape.grid_y)};
  const dim3 block{static_cast<unsigned>(shape.threads)};
#if CUDART_VERSION >= 12030  // from here on also in graphs
  if (shape.early) {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = 1;
    return check_launch(cudaLaunchKernelExC(&config, function, arguments), name);
  }
#endif
  check_launch(cudaLaunchKernel(function, grid, block, arguments, shape.shared_bytes, stream), name);
#else
  check_launch(
      simt::launch(kernel, static_cast<unsigned>(shape.grid_x), static_cast<unsigned>(shape.grid_y),
                   static_cast<unsigned>(shape.threads), shape.shared_bytes, stream, params, shape.early),
      name);
#endif
}

/// Whether the device's code of a kernel takes blocks of `threads` threads. That of a kernel for Hopper's warpgroups
/// (kernels/simt_hopper.cuh) does where the program was compiled for sm_90a and the device is one.
template <class Params>
[[nodiscard]] bool is_compiled_for([[maybe_unused]] void (*kernel)(const Params),
                                   [[maybe_unused]] int threads) {
#if defined(__CUDACC__)
  cudaFuncAttributes attributes{};
  if (cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // the next call must not find it
    return false;
  }
  return attributes.maxThreadsPerBlock >= threads;
#else
  return simt::device().major == 9 && simt::device().minor == 0;
#endif
}

}  // namespace kvpolicy::gpu
