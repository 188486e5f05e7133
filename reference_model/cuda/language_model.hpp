// SPDX-License-Identifier: Apache-2.0
//
// The CUDA Llama as kvpolicy::LanguageModel, for speculative decoding over gpu::KvCache:
//
//   reference::CudaLlamaReader target{model};
//   gpu::OnStream on_stream{cache, stream};
//   SpeculativeDecoder decoder{target, on_stream, draft, options};
//
// Draft tokens are verified on the host: each call waits for its stream and copies its logits to
// the host.
#pragma once

#include <cstddef>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/cuda/on_stream.hpp>
#include <kvpolicy/speculation/language_model.hpp>
#include <reference_model/cuda/llama.hpp>
#include <reference_model/cuda/run.hpp>

namespace kvpolicy::reference {

/// The model must outlive it. Not thread-safe, like the model.
class CudaLlamaReader {
 public:
  explicit CudaLlamaReader(CudaLlama& model) : model_{&model} {}

  [[nodiscard]] std::size_t vocabulary() const { return model_->config().vocabulary; }

  /// In calls of at most the cache's `max_append` tokens, queries read the call's own rows as they
  /// are stored.
  /// @throws as reference::step on a device
  template <class Cache>
  [[nodiscard]] std::vector<float> read(gpu::OnStream<Cache>& on_stream, const ModelCall& call) const {
    Cache& cache = on_stream.cache();
    const cudaStream_t stream = on_stream.stream();
    const std::size_t rows = call.tokens.size();
    const bool apart = rows <= cache.options().max_append;
    model_->reserve(rows, call.logits == LogitsOf::all ? rows : 1, stream);
    if (call.attend.tree == nullptr) {
      model_->set_tokens(call.tokens, cache.tokens(), stream);
    } else {
      model_->set_tokens(call.tokens, call.positions(cache.tokens()), stream);
    }
    const DeviceAttendFn whole = attend_over(*model_, cache, call.attend);
    const DeviceAttendFn halves = [&](std::size_t layer, TensorView<const bfloat16> q,
                                      TensorView<const bfloat16> k, TensorView<const bfloat16> v,
                                      TensorView<bfloat16> out, cudaStream_t s) {
      cache.append(layer, k, v, call.attend, s);
      cache.attend(layer, q, out, call.attend, s);
    };
    model_->forward(rows, apart ? halves : whole, call.logits, stream);
    if (call.logits == LogitsOf::none) return {};
    return model_->download_logits(stream);
  }

 private:
  CudaLlama* model_;
};

}  // namespace kvpolicy::reference
