// SPDX-License-Identifier: Apache-2.0
//
// Draws the next token on a device, where the logits are: what reference::Sampler does on the host, without waiting, so
// that a captured step can feed the next one.
#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

#include <kvpolicy/cuda/memory.hpp>
#include <reference_model/cuda/kernels/choices.cuh>
#include <reference_model/sampler.hpp>

namespace kvpolicy::reference {

/// Temperature, top-k and top-p as Sampler has them, ties to the lower token. The n-th choice takes the n-th number of
/// the seed's stream (splitmix64), so a seed gives the same tokens in every run and in graphs; they are others than the
/// host's for the same seed, whose generator is another one. Not thread-safe.
class DeviceSampler {
 public:
  /// @throws ConfigError as Sampler, or for a temperature of 0: CudaLlama::choose_likeliest does that; ShapeError for
  /// no tokens or 2^31 and more, std::bad_alloc, DeviceError
  DeviceSampler(const SamplerConfig& config, std::size_t vocabulary,
                gpu::MemoryResource* memory = gpu::default_memory(), cudaStream_t stream = nullptr);
  DeviceSampler(const DeviceSampler&) = delete;
  DeviceSampler& operator=(const DeviceSampler&) = delete;
  ~DeviceSampler();

  [[nodiscard]] const SamplerConfig& config() const { return config_; }
  [[nodiscard]] std::size_t vocabulary() const { return vocabulary_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

  /// Puts the choice of a token by logits [vocabulary] on the stream: no_token if a logit is NaN or +infinity, or all
  /// are -infinity. Can be captured; each launch draws again. @throws DeviceError
  void choose(const float* logits, const gpu::llama::Choices& choices, cudaStream_t stream);

 private:
  struct Room {
    std::size_t bytes = 0;
    float* logits = nullptr;  // [vocabulary], sorted
    int* sorted = nullptr;    // [vocabulary], their tokens
    int* tokens = nullptr;    // [vocabulary], in order
    long long* draws = nullptr;
    std::byte* scratch = nullptr;
  };
  [[nodiscard]] Room lay_out(std::byte* start) const;

  SamplerConfig config_;
  std::size_t vocabulary_;
  std::size_t scratch_bytes_;
  std::size_t bytes_ = 0;
  gpu::DeviceBuffer memory_;
  Room room_;
  gpu::StreamOrder order_;
};

}  // namespace kvpolicy::reference
