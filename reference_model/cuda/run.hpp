// SPDX-License-Identifier: Apache-2.0
//
// Runs a Llama on a GPU over a gpu::KvCache:
//
//   auto plan = ...;                                 // a HeadPlan<bfloat16> of the model's shape
//   reference::limit_windows(plan, model.config());  // sliding-window layers, if there are any
//   gpu::KvCache cache{plan, {}, stream};
//   auto logits = reference::prefill(model, cache, prompt, 2048, {}, {}, stream);
//   reference::Decoder decoder{model, cache, {}, stream};
//   auto tokens = decoder.continue_text(200);
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <new>
#include <span>
#include <vector>

#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/error.hpp>
#include <reference_model/cuda/graph.hpp>
#include <reference_model/cuda/llama.hpp>
#include <reference_model/run.hpp>

namespace kvpolicy::reference {

/// Attention that makes steps of a cache; `cache` must outlive it.
/// @throws ShapeError if the cache's plan is of another shape
template <class Cache>
[[nodiscard]] DeviceAttendFn attend_over(const CudaLlama& model, Cache& cache,
                                         const AttendOptions& options = {}) {
  const ModelShape shape = model.config().shape();
  const ModelShape& planned = cache.plan().shape();
  require<ShapeError>(planned == shape, "the plan is for ", planned.layers, " layers of ", planned.q_heads,
                      " query and ", planned.kv_heads, " KV heads of ", planned.head_dim,
                      " channels, the model has ", shape.layers, ", ", shape.q_heads, ", ", shape.kv_heads,
                      " and ", shape.head_dim);
  return [&cache, options](std::size_t layer, TensorView<const bfloat16> q, TensorView<const bfloat16> k,
                           TensorView<const bfloat16> v, TensorView<bfloat16> out,
                           cudaStream_t stream) { cache.step(layer, q, k, v, out, options, stream); };
}

/// Reads tokens that follow those in the cache, returns their logits, and waits for the stream.
/// @throws what forward and the cache throw
template <class Cache>
std::vector<float> step(CudaLlama& model, Cache& cache, std::span<const int> tokens,
                        LogitsOf logits = LogitsOf::last, const AttendOptions& options = {},
                        cudaStream_t stream = nullptr) {
  return model.forward(tokens, cache.tokens(), attend_over(model, cache, options), logits, stream);
}

/// Reads a prompt in chunks of at most `chunk` tokens and returns the logits of its last token.
/// `progress` is called after each chunk, which means waiting for each; without it only the end is
/// waited for. @throws ConfigError for a chunk of 0; otherwise as step
template <class Cache>
std::vector<float> prefill(CudaLlama& model, Cache& cache, std::span<const int> tokens, std::size_t chunk,
                           const reference::Progress& progress = {}, const AttendOptions& options = {},
                           cudaStream_t stream = nullptr) {
  require(chunk > 0, "prefill: chunk is 0, must be at least 1");
  require<ShapeError>(!tokens.empty(), "prefill: no tokens, expected at least 1");
  model.reserve(std::min(chunk, tokens.size()), 1, stream);
  const DeviceAttendFn attend = attend_over(model, cache, options);
  for (std::size_t done = 0; done < tokens.size();) {
    const std::size_t count = std::min(chunk, tokens.size() - done);
    const bool last = done + count == tokens.size();
    model.set_tokens(tokens.subspan(done, count), cache.tokens(), stream);
    model.forward(count, attend, last ? LogitsOf::last : LogitsOf::none, stream);
    done += count;
    if (!progress) continue;
    gpu::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    progress(done, tokens.size());
  }
  return model.download_logits(stream);
}

struct DecodeOptions {
  AttendOptions attend = {};
  /// Draws the tokens; it must outlive the decoder. Null: each is the likeliest.
  DeviceSampler* sampler = nullptr;
  /// Whether to record a step and replay it. Needs a stream that is not the default one, and a plan
  /// without heads that compress by themselves.
  bool graph = true;
  /// Steps before the recording, at least one: a recording costs more than a few steps, and
  /// libraries load kernels at their first launch.
  std::size_t steps_before_graph = 1;
};

/// Decodes token by token. Model and cache must outlive it; other code may use both between calls.
template <class Cache>
class Decoder {
 public:
  Decoder(CudaLlama& model, Cache& cache, const DecodeOptions& options = {}, cudaStream_t stream = nullptr)
      : model_{&model},
        cache_{&cache},
        options_{options},
        stream_{stream},
        attend_{attend_over(model, cache, options.attend)} {
    model.reserve(1, 1, stream);
  }

  /// Returns `count` tokens: the one that is chosen after the latest forward, and then one after each.
  /// The last token is not fed to the model. @throws as CudaLlama::take_choices and the cache
  [[nodiscard]] std::vector<int> continue_text(std::size_t count) {
    if (count == 0) return {};
    choose();
    run(count - 1);
    return model_->take_choices(stream_);
  }

  /// Puts `count` steps on the stream without waiting. Each step reads the token that the one
  /// before it chose; the first reads the token of CudaLlama::choose, choose_likeliest or set_tokens.
  void run(std::size_t count) {
    cache_->reserve(cache_->tokens() + count, stream_);
    for (; count > 0; --count) advance(choosing_, true);
  }

  /// Makes one step with a given token, returns its logits, and waits for the stream.
  [[nodiscard]] std::vector<float> step(int token) {
    if (cache_->tokens() >= cache_->reserved()) make_room();
    model_->set_tokens(std::array{token}, cache_->tokens(), stream_);
    advance(given_, false);
    return model_->download_logits(stream_);
  }

 private:
  struct Recorded {
    std::size_t steps = 0;  // steps made before the recording
    std::size_t reserved = 0;
    std::size_t room = 0;
    Graph graph;
  };

  // A graph lasts as long as the room that was reserved before it, so the longer a text becomes the more pages are reserved at
  // once: twice as many each time, up to the rows of 16, and one where there is no memory for as many.
  void make_room() {
    const std::size_t page = cache_->options().page_rows;
    const std::size_t most = cache_->options().max_tokens;
    const auto reserve = [&](std::size_t pages) {
      const std::size_t tokens = (cache_->tokens() / page + pages) * page;
      cache_->reserve(most == 0 ? tokens : std::max(std::min(tokens, most), cache_->tokens() + 1), stream_);
    };
    try {
      reserve(pages_);
    } catch (const std::bad_alloc&) {
      if (pages_ == 1) throw;
      pages_ = 1;
      reserve(1);
      return;
    }
    pages_ = std::min<std::size_t>(2 * pages_, 16);
  }
  void advance(Recorded& recorded, bool chooses) {
    if (!options_.graph || recorded.steps < std::max<std::size_t>(options_.steps_before_graph, 1)) {
      put_on_stream(chooses);
      ++recorded.steps;
      return;
    }
    if (!recorded.graph || recorded.reserved != cache_->reserved() ||
        recorded.room != model_->room_version()) {
      recorded.graph = {};
      recorded.graph = Graph{stream_, [&] { put_on_stream(chooses); }};
      recorded.reserved = cache_->reserved();
      recorded.room = model_->room_version();
    }
    cache_->replayed(1, 1, options_.attend.refresh_selection);
    recorded.graph.launch(stream_);
  }
  void put_on_stream(bool chooses) {
    model_->forward(1, attend_, LogitsOf::last, stream_);
    if (chooses) choose();
  }
  void choose() {
    options_.sampler == nullptr ? model_->choose_likeliest(stream_)
                                : model_->choose(*options_.sampler, stream_);
  }

  CudaLlama* model_;
  Cache* cache_;
  DecodeOptions options_;
  cudaStream_t stream_;
  DeviceAttendFn attend_;
  std::size_t pages_ = 1;  // that `step` reserves next
  Recorded choosing_;
  Recorded given_;
};

}  // namespace kvpolicy::reference
