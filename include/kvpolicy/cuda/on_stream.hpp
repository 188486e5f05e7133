// SPDX-License-Identifier: Apache-2.0
//
// A device cache together with the stream of all its calls, for code that knows no streams:
// speculative decoding takes it as it takes a cache on the host.
//
//     gpu::OnStream target{cache, stream};
//     SpeculativeDecoder decoder{model, target, draft};
#pragma once

#include <cstddef>
#include <span>

#include <cuda_runtime_api.h>

namespace kvpolicy::gpu {

/// Refers to a cache, which must outlive it. Not synchronised.
template <class Cache>
class OnStream {
 public:
  OnStream(Cache& cache, cudaStream_t stream) : cache_{&cache}, stream_{stream} {}

  [[nodiscard]] Cache& cache() const { return *cache_; }
  [[nodiscard]] cudaStream_t stream() const { return stream_; }

  [[nodiscard]] std::size_t tokens() const { return cache_->tokens(); }
  [[nodiscard]] std::size_t tokens(std::size_t layer) const { return cache_->tokens(layer); }
  [[nodiscard]] std::size_t commit_point() const { return cache_->commit_point(); }
  [[nodiscard]] const auto& options() const { return cache_->options(); }
  [[nodiscard]] const auto& plan() const { return cache_->plan(); }
  [[nodiscard]] bool commit_changes_rows() const { return cache_->commit_changes_rows(); }

  void truncate(std::size_t tokens) { cache_->truncate(tokens, stream_); }
  void accept(std::span<const std::size_t> path) { cache_->accept(path, stream_); }
  void commit() { cache_->commit(stream_); }

 private:
  Cache* cache_;
  cudaStream_t stream_;
};

}  // namespace kvpolicy::gpu
