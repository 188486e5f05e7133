// SPDX-License-Identifier: Apache-2.0
#include "cuda_sequence.hpp"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

// The head dimensions of the Llama family. Kernels for all dimensions would take nvcc minutes more.
#ifndef KVPOLICY_CUDA_HEAD_DIMS
#define KVPOLICY_CUDA_HEAD_DIMS 64, 128
#endif
#include <kvpolicy/cuda/kv_cache.hpp>
#include <reference_model/cuda/graph.hpp>
#include <reference_model/cuda/llama.hpp>
#include <reference_model/cuda/run.hpp>

namespace kvpolicy::tools {
namespace {

using Plan = HeadPlan<bfloat16>;
using Cache = gpu::KvCache<bfloat16>;

/// Shared by all sequences of a model. Members are destroyed in reverse order: device memory
/// first, then the stream on which it is freed.
struct Shared {
  explicit Shared(const reference::Llama& llama)
      : device{gpu::Device::current()},
        model{llama, {}, stream},
        engine{
            std::make_shared<gpu::Engine<bfloat16>>(llama.config().shape(), gpu::default_memory(), stream)} {}

  gpu::Device device;
  reference::Stream stream;
  reference::CudaLlama model;
  std::shared_ptr<gpu::Engine<bfloat16>> engine;
};

bool compresses_by_itself(const Plan& plan) {
  bool found = false;
  plan.for_each_head([&](std::size_t, std::size_t, const HeadSettings<bfloat16>& settings) {
    found = found || settings.compresses_by_itself();
  });
  return found;
}

class CudaSequence final : public Sequence {
 public:
  CudaSequence(std::shared_ptr<Shared> shared, Cache cache)
      : shared_{std::move(shared)}, cache_{std::move(cache)} {}

  [[nodiscard]] std::unique_ptr<Sequence> fork() const override {
    return std::make_unique<CudaSequence>(shared_, cache_.fork(shared_->stream));
  }

  std::vector<float> prefill(std::span<const int> tokens, std::size_t chunk, const Report& report) override {
    return reference::prefill(shared_->model, cache_, tokens, chunk, report, {}, shared_->stream);
  }

  std::vector<float> decode(int token, const Reading& reading) override {
    if (!decoder_ || reading != decodes_) {
      constexpr std::size_t answer = 16;  // a graph pays off for texts longer than that
      decodes_ = reading;
      decoder_.emplace(shared_->model, cache_,
                       reference::DecodeOptions{
                           .attend = {.read = reading.read, .refresh_selection = reading.refresh_each_step},
                           .graph = !compresses_by_itself(cache_.plan()),
                           .steps_before_graph = answer},
                       shared_->stream);
    }
    return decoder_->step(token);
  }

  std::vector<float> score(std::span<const int> tokens) override {
    return reference::step(shared_->model, cache_, tokens, reference::LogitsOf::all, {}, shared_->stream);
  }

  void compress() override {
    cache_.compress(shared_->stream);
    // Waits for the GPU, so that a caller who measures time measures the work too.
    gpu::check(cudaStreamSynchronize(shared_->stream), "cudaStreamSynchronize");
  }

  [[nodiscard]] std::size_t tokens() const override { return cache_.tokens(); }
  [[nodiscard]] std::size_t bytes() const override { return cache_.bytes(); }

  [[nodiscard]] std::vector<std::size_t> head_bytes() const override {
    std::vector<std::size_t> bytes;
    for (std::size_t layer = 0; layer < cache_.plan().shape().layers; ++layer) {
      for (std::size_t head = 0; head < cache_.plan().shape().kv_heads; ++head) {
        bytes.push_back(row_bytes(gpu::served_rule(cache_.plan(), layer, head), layer, head, Read::all));
      }
    }
    return bytes;
  }

  [[nodiscard]] std::size_t bytes_read(const Reading& reading) const override {
    const ModelShape& shape = cache_.plan().shape();
    std::size_t total = 0;
    for (std::size_t layer = 0; layer < shape.layers; ++layer) {
      for (std::size_t head = 0; head < shape.kv_heads; ++head) {
        const HeadRule settings = gpu::served_rule(cache_.plan(), layer, head);
        total += row_bytes(settings, layer, head, reading.read);
        if (reading.refresh_each_step && settings.chunk > 0) {
          total += (gpu::has_min_max_summary(settings) ? 2 : 1) * (cache_.tokens() / settings.chunk) *
                   shape.head_dim * sizeof(bfloat16);
        }
      }
    }
    return total;
  }

 private:
  // Bytes of the rows of one head that `read` shows.
  [[nodiscard]] std::size_t row_bytes(const HeadRule& settings, std::size_t layer, std::size_t head,
                                      Read read) const {
    const auto rows = cache_.rows(layer, head, read, 0, shared_->stream);
    const auto quantized = static_cast<std::size_t>(std::ranges::count(rows.quantized, true));
    const std::size_t dense = 2 * cache_.plan().shape().head_dim * sizeof(bfloat16);
    return (rows.quantized.size() - quantized) * dense + quantized * quantized_row_bytes(settings);
  }

  // Codes, scales and zeros of one row's key and value: the bytes of a page over its rows.
  [[nodiscard]] std::size_t quantized_row_bytes(const HeadRule& settings) const {
    const gpu::StoreContext context{.head_dim = cache_.plan().shape().head_dim,
                                    .page_rows = cache_.options().page_rows};
    return gpu::HeadGeometry{settings, context, false}.packed_page_bytes() / context.page_rows;
  }

  std::shared_ptr<Shared> shared_;
  Cache cache_;
  std::optional<reference::Decoder<Cache>> decoder_;
  Reading decodes_;  // the reading that the decoder was made for
};

std::string name_of([[maybe_unused]] const gpu::Device& device) {
#if defined(__CUDACC__)
  cudaDeviceProp properties{};
  gpu::check(cudaGetDeviceProperties(&properties, device.id), "cudaGetDeviceProperties");
  return properties.name;
#else
  return "host emulation of tests/simt";
#endif
}

}  // namespace

Device open_cuda_device(const reference::Llama& model) {
  auto shared = std::make_shared<Shared>(model);
  return {.about = name_of(shared->device),
          .make_sequence = [shared, &model](Plan plan) -> std::unique_ptr<Sequence> {
            reference::limit_windows(plan, model.config());
            return std::make_unique<CudaSequence>(shared,
                                                  Cache{std::move(plan), {}, shared->stream, shared->engine});
          }};
}

}  // namespace kvpolicy::tools
