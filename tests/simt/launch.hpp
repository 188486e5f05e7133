// SPDX-License-Identifier: Apache-2.0
//
// Launches a kernel on the emulation. If a kernel breaks a rule of the machine, the call that runs it throws
// a simt::Fault: this launch, or the graph launch or wait to which the work was deferred.
#pragma once

#include <climits>
#include <cstddef>
#include <functional>
#include <type_traits>

#include <kvpolicy/cuda/kernels/simt.cuh>

#include "device.hpp"
#include "scheduler.hpp"

namespace kvpolicy::gpu::simt {

/// Like cudaLaunchKernel; what a device would refuse is refused with the same error.
template <class Params>
inline cudaError_t launch(void (*kernel)(const Params), unsigned grid_x, unsigned grid_y, unsigned threads,
                          std::size_t shared_bytes, CUstream_st* stream,
                          const std::type_identity_t<Params>& params, bool early = false) {
  static_assert(std::is_trivially_copyable_v<Params> && sizeof(Params) <= 4096,
                "kernel parameters are copied byte by byte, and there are 4 KiB of them");
  if (const cudaError_t error = device().enter()) return error;
  if (grid_x == 0 || grid_y == 0 || threads == 0 || grid_x > INT_MAX || grid_y > 65535 || threads > 1024) {
    return device().answer(cudaErrorInvalidConfiguration);
  }
  if (early && device().major < 9) return device().answer(cudaErrorNotSupported);
  if (shared_bytes > static_cast<std::size_t>(device().max_shared_bytes)) {
    return device().answer(cudaErrorInvalidValue);
  }
  const auto run = [=](const std::function<void()>& before) {
    Launch what;
    what.call = [](const void* function, const void* argument) {
      (*static_cast<void (*const*)(Params)>(function))(*static_cast<const Params*>(argument));
    };
    what.kernel = &kernel;
    what.params = &params;
    what.grid_x = static_cast<int>(grid_x);
    what.grid_y = static_cast<int>(grid_y);
    what.threads = static_cast<int>(threads);
    what.shared_bytes = shared_bytes;
    what.early = early;
    what.before = before ? &before : nullptr;
    idle_grid().run(what);
  };
  return device().submit(stream, Work{run, early ? WorkKind::early_kernel : WorkKind::kernel});
}

}  // namespace kvpolicy::gpu::simt
