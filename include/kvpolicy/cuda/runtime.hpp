// SPDX-License-Identifier: Apache-2.0
//
// The little that the library needs of the CUDA runtime: errors by name, the device's size, and
// launches that are checked.
#pragma once

#include <cstddef>
#include <new>
#include <type_traits>

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

/// The current device.
struct Device {
  int id = 0;
  int multiprocessors = 1;
  std::size_t shared_bytes_of_block = 0;  ///< the most that one block may ask for

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

/// A kernel, and how a block of it is made.
template <class Params>
struct Kernel {
  void (*code)(const Params) = nullptr;  ///< null: there is none
  const char* name = "";                 ///< in messages
  int threads = 128;
  std::size_t shared_bytes = 0;
};
/// `Kernel{code, name, threads, shared_bytes}`, of the parameters that `code` takes.
template <class Params>
Kernel(void (*)(const Params), const char*, int = 128, std::size_t = 0) -> Kernel<Params>;

/// Obtains a kernel's code for the current device, which would otherwise happen at its first launch, and fail where that is
/// recorded in a graph; and lets its blocks have as much shared memory as there is, for the limit is the kernel's,
/// not the launch's, and must not sink below what another thread, or a graph, launches it with. Returns the compute capability
/// (90: 9.0) that the code was written for, before it was assembled for the device.
/// @throws DeviceError if the program has no code of it for the device
template <class Params>
int load_kernel(const Kernel<Params>& kernel) {
#if defined(__CUDACC__)
  const void* function = reinterpret_cast<const void*>(kernel.code);
  cudaFuncAttributes attributes{};
  check_launch(cudaFuncGetAttributes(&attributes, function), kernel.name);
  if (kernel.shared_bytes > 0) {
    int device = 0, most = 0;
    check_launch(cudaGetDevice(&device), kernel.name);
    check_launch(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), kernel.name);
    most -= static_cast<int>(attributes.sharedSizeBytes);  // the code of a caller's own scorer may have some
    check_launch(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, most),
                 kernel.name);
  }
  return attributes.ptxVersion;
#else
  static_cast<void>(kernel);
  return 10 * simt::device().major + simt::device().minor;
#endif
}

/// Code that was written for this compute capability or a later one waits for the kernel before it
/// (wait_for_kernel_before in kernels/simt.cuh), so that it may be launched early.
inline constexpr int first_that_waits = 90;

/// How many blocks of a kernel there are.
struct Grid {
  int x = 1;
  int y = 1;
  /// Programmatic dependent launch: the kernel begins while the one before it on the stream ends, as soon as there is
  /// room, and waits itself (first_that_waits), which hides the time of its launch.
  bool early = false;
};

/// Launches `kernel(params)` on `stream`, once it has been loaded; blocks of up to 48 KB of shared memory need not be.
/// @throws DeviceError if the launch is refused
template <class Params>
void launch(const Kernel<Params>& kernel, const Grid& grid, cudaStream_t stream,
            const std::type_identity_t<Params>& params) {
#if defined(__CUDACC__)
  const void* function = reinterpret_cast<const void*>(kernel.code);
  void* arguments[] = {const_cast<Params*>(&params)};
  const dim3 blocks{static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y)};
  const dim3 threads{static_cast<unsigned>(kernel.threads)};
#if CUDART_VERSION >= 12030  // from here on also in graphs
  if (grid.early) {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = blocks;
    config.blockDim = threads;
    config.dynamicSmemBytes = kernel.shared_bytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = 1;
    return check_launch(cudaLaunchKernelExC(&config, function, arguments), kernel.name);
  }
#endif
  check_launch(cudaLaunchKernel(function, blocks, threads, arguments, kernel.shared_bytes, stream),
               kernel.name);
#else
  check_launch(
      simt::launch(kernel.code, static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y),
                   static_cast<unsigned>(kernel.threads), kernel.shared_bytes, stream, params, grid.early),
      kernel.name);
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
