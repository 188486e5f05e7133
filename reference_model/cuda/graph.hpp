// SPDX-License-Identifier: Apache-2.0
//
// A CUDA stream, and a CUDA graph: work that is recorded from a stream once and launched many
// times.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

#include <cuda_runtime_api.h>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/cuda/runtime.hpp>

namespace kvpolicy::reference {

class Stream {
 public:
  Stream() { gpu::check(cudaStreamCreate(&stream_), "cudaStreamCreate"); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { static_cast<void>(cudaStreamDestroy(stream_)); }
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

class Graph {
 public:
  Graph() = default;

  /// Records what `work()` puts on `stream`; nothing of it runs yet.
  /// @throws ConfigError for the default stream, which cannot be recorded; DeviceError for work
  /// that cannot be recorded; what `work` throws
  template <class Work>
  Graph(cudaStream_t stream, Work work) {
    require(stream != nullptr && stream != cudaStreamLegacy && stream != cudaStreamPerThread,
            "Graph: the default stream cannot be captured; make one with cudaStreamCreate");
    gpu::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    cudaGraph_t recorded = nullptr;
    try {
      work();
    } catch (...) {
      static_cast<void>(cudaStreamEndCapture(stream, &recorded));
      static_cast<void>(cudaGetLastError());
      destroy(recorded);
      throw;
    }
    gpu::check(cudaStreamEndCapture(stream, &recorded), "cudaStreamEndCapture");
    cudaGraphExec_t executable = nullptr;
    const cudaError_t made = cudaGraphInstantiate(&executable, recorded, 0);
    destroy(recorded);
    gpu::check(made, "cudaGraphInstantiate");
    executable_.reset(executable);
  }

  [[nodiscard]] explicit operator bool() const { return executable_ != nullptr; }

  /// @throws DeviceError
  void launch(cudaStream_t stream) const {
    gpu::check(cudaGraphLaunch(executable_.get(), stream), "cudaGraphLaunch");
  }

 private:
  static void destroy(cudaGraph_t graph) {
    if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
  }
  struct Destroy {
    void operator()(cudaGraphExec_t graph) const { static_cast<void>(cudaGraphExecDestroy(graph)); }
  };
  std::unique_ptr<std::remove_pointer_t<cudaGraphExec_t>, Destroy> executable_;
};

}  // namespace kvpolicy::reference
