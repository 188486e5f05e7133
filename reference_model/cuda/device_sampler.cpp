// SPDX-License-Identifier: Apache-2.0
#include <reference_model/cuda/device_sampler.hpp>

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/cuda/array_carver.hpp>
#include <kvpolicy/cuda/runtime.hpp>
#include <reference_model/cuda/device_sort.hpp>
#include <reference_model/cuda/kernels/draw.cuh>

namespace kvpolicy::reference {
namespace {

SamplerConfig checked(const SamplerConfig& config) {
  static_cast<void>(Sampler{config});
  require(config.temperature > 0.0F,
          "DeviceSampler: temperature is 0, must be above 0; choose_likeliest takes the likeliest token");
  return config;
}
std::size_t checked_vocabulary(std::size_t vocabulary) {
  constexpr std::size_t most = std::size_t{1} << 31;
  require<ShapeError>(vocabulary > 0 && vocabulary < most, "DeviceSampler: the vocabulary has ", vocabulary,
                      " tokens, must have 1 to ", most - 1);
  return vocabulary;
}

}  // namespace

DeviceSampler::DeviceSampler(const SamplerConfig& config, std::size_t vocabulary, gpu::MemoryResource* memory,
                             cudaStream_t stream)
    : config_{checked(config)},
      vocabulary_{checked_vocabulary(vocabulary)},
      scratch_bytes_{sort_bytes(static_cast<int>(vocabulary))},
      bytes_{lay_out(nullptr).bytes},
      memory_{gpu::allocate(memory, bytes_, stream)},
      room_{lay_out(memory_.get())},
      order_{stream} {
  std::vector<int> tokens(vocabulary_);
  std::iota(tokens.begin(), tokens.end(), 0);
  gpu::check(cudaMemcpyAsync(room_.tokens, tokens.data(), tokens.size() * sizeof(int), cudaMemcpyHostToDevice,
                             stream),
             "cudaMemcpyAsync");
  gpu::check(cudaMemsetAsync(room_.draws, 0, sizeof *room_.draws, stream), "cudaMemsetAsync");
  order_.mark();
}
DeviceSampler::~DeviceSampler() { memory_.give_back_on(order_.end()); }

DeviceSampler::Room DeviceSampler::lay_out(std::byte* start) const {
  gpu::ArrayCarver carver{start};
  Room room;
  room.logits = carver.take<float>(vocabulary_);
  room.sorted = carver.take<int>(vocabulary_);
  room.tokens = carver.take<int>(vocabulary_);
  room.draws = carver.take<long long>(1);
  room.scratch = carver.take<std::byte>(scratch_bytes_);
  room.bytes = carver.bytes();
  return room;
}

void DeviceSampler::choose(const float* logits, const gpu::llama::Choices& choices, cudaStream_t stream) {
  const int count = static_cast<int>(vocabulary_);
  sort_pairs(room_.scratch, scratch_bytes_, logits, room_.logits, room_.tokens, room_.sorted, count, stream);
  const std::size_t most = config_.top_k == 0 ? vocabulary_ : std::min(config_.top_k, vocabulary_);
  constexpr float log2_of_e = 1.44269504F;
  constexpr float largest = std::numeric_limits<float>::max();
  order_.enter(stream);
  gpu::launch(gpu::Kernel{gpu::llama::draw_kernel<>, "draw_kernel", gpu::llama::draw_threads,
                          gpu::llama::draw_shared_bytes()},
              {}, stream,
              gpu::llama::DrawParams{.logits = room_.logits,
                                     .tokens = room_.sorted,
                                     .vocabulary = count,
                                     .most = static_cast<int>(most),
                                     .scale_log2 = std::min(log2_of_e / config_.temperature, largest),
                                     .top_p = config_.top_p,
                                     .seed = config_.seed,
                                     .draws = room_.draws,
                                     .choices = choices});
}

}  // namespace kvpolicy::reference
