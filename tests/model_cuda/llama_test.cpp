// SPDX-License-Identifier: Apache-2.0
//
// Compares the model on a device with the CPU's logits, over the simplest cache: the goldens of every shape,
// any division into chunks, 8-bit weights, random weights, and invalid calls.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/cuda/runtime.hpp>
#include <reference_model/cuda/llama.hpp>
#include <reference_model/llama.hpp>
#include <reference_model/sampler.hpp>

#include "model/dense_attention.hpp"
#include "model/golden.hpp"
#include "model_cuda/dense_attention.hpp"
#include "model_cuda/models.hpp"

namespace kvpolicy::reference::llama_test {
namespace {

constexpr std::size_t length = 80;  // longer than every sliding window among the goldens

std::vector<float> device_logits(CudaLlama& model, std::span<const int> tokens, std::size_t chunk) {
  DeviceDenseCache cache{model.config()};
  std::vector<float> logits;
  const std::size_t most = chunk == 0 ? tokens.size() : chunk;
  for (std::size_t first = 0; first < tokens.size(); first += most) {
    const auto part = tokens.subspan(first, std::min(most, tokens.size() - first));
    const auto some = model.forward(part, first, cache.attend(), LogitsOf::all);
    logits.insert(logits.end(), some.begin(), some.end());
  }
  return logits;
}

std::vector<float> host_logits(const Llama& model, std::span<const int> tokens) {
  DenseCache cache{model.config()};
  return all_logits(model, tokens, 0, cache.attend());
}

TEST_CASE("logits equal those of the CPU up to the rounding of bfloat16 activations") {
  for (const std::string name : golden_names) {
    CAPTURE(name);
    const Llama model = rounded_to_bfloat16(Llama::load(golden_folder(name)));
    if (model.config().qk_norm) {
      CHECK_THROWS_WITH_AS(CudaLlama{model}, doctest::Contains("norms of queries and keys"), ConfigError);
      continue;
    }
    const std::vector<int> tokens = golden_tokens(name, length);
    CudaLlama device{model};
    check_errors(errors(device_logits(device, tokens, 0), host_logits(model, tokens)), of_bfloat16);
  }
}

TEST_CASE("any division of the prompt gives the same logits") {
  const Llama model = rounded_to_bfloat16(Llama::load(golden_folder("qwen2_bias_gqa7")));
  const std::vector<int> tokens = golden_tokens("qwen2_bias_gqa7", length);
  const auto want = host_logits(model, tokens);
  CudaLlama device{model};
  for (const std::size_t chunk : {1, 7, 64}) {
    CAPTURE(chunk);
    check_errors(errors(device_logits(device, tokens, chunk), want), of_bfloat16);
  }
}

TEST_CASE("logits with 8-bit weights") {
  const Llama model = rounded_to_bfloat16(Llama::load(golden_folder("sharded_bf16")));
  const std::vector<int> tokens = golden_tokens("sharded_bf16", length);
  CudaLlama device{model, {.weights = WeightFormat::int8}};
  check_errors(errors(device_logits(device, tokens, 0), host_logits(model, tokens)), of_int8);
  CHECK(device.weight_bytes() < CudaLlama{model}.weight_bytes());
}

TEST_CASE("logits of the last token are the last row of all logits; none are empty") {
  const Llama model = Llama::load(golden_folder("tied_d64"));
  const std::vector<int> tokens = golden_tokens("tied_d64", length);
  const std::size_t vocabulary = model.config().vocabulary;
  CudaLlama device{model};
  const auto all = device_logits(device, tokens, 0);
  DeviceDenseCache one{model.config()};
  const auto last = device.forward(tokens, 0, one.attend());
  CHECK(last == std::vector<float>(all.end() - static_cast<std::ptrdiff_t>(vocabulary), all.end()));
  DeviceDenseCache other{model.config()};
  CHECK(device.forward(tokens, 0, other.attend(), LogitsOf::none).empty());
  CHECK_THROWS_AS(device.choose_likeliest(), ShapeError);
}

TEST_CASE("a device that feeds itself reads the tokens that a host would feed it") {
  const Llama model = Llama::load(golden_folder("gqa2_d80"));
  const std::vector<int> prompt{3, 1, 4, 1, 5, 9};
  constexpr std::size_t steps = 6;
  CudaLlama device{model};

  DeviceDenseCache cache{model.config()};
  std::vector<int> fed;
  std::vector<std::vector<float>> logits{device.forward(prompt, 0, cache.attend())};
  for (std::size_t i = 0; i < steps; ++i) {
    fed.push_back(likeliest(logits.back()));
    logits.push_back(device.forward(std::vector{fed.back()}, prompt.size() + i, cache.attend()));
  }

  DeviceDenseCache again{model.config()};
  static_cast<void>(device.forward(prompt, 0, again.attend()));
  for (std::size_t i = 0; i < steps; ++i) {
    device.choose_likeliest();
    device.forward(1, again.attend());
    CHECK(device.download_logits() == logits[i + 1]);
  }
  CHECK(device.take_choices() == fed);
  CHECK(device.take_choices().empty());
}

TEST_CASE("logits without a likeliest token are reported when the choices are read") {
  LlamaWeights weights = Llama::load(golden_folder("mha_d64")).weights();
  const LlamaConfig config = Llama::load(golden_folder("mha_d64")).config();
  weights.norm.assign(weights.norm.size(), NAN);
  CudaLlama device{Llama{config, std::move(weights)}};
  DeviceDenseCache cache{config};
  static_cast<void>(device.forward(std::vector{1}, 0, cache.attend()));
  device.choose_likeliest();
  device.forward(1, cache.attend());  // does not read outside the embedding
  CHECK_THROWS_AS(static_cast<void>(device.take_choices()), ShapeError);
  CHECK(device.take_choices().empty());
}

TEST_CASE("invalid calls are refused before anything is launched") {
  const Llama model = Llama::load(golden_folder("mha_d64"));
  CudaLlama device{model};
  DeviceDenseCache cache{model.config()};
  const auto attend = cache.attend();
  CHECK_THROWS_AS(device.forward(1, attend), ShapeError);  // nothing is reserved yet
  device.reserve(3);
  CHECK_THROWS_AS(device.set_tokens({}, 0), ShapeError);
  CHECK_THROWS_AS(device.set_tokens(std::vector{1, 2, 3, 4}, 0), ShapeError);
  CHECK_THROWS_AS(device.set_tokens(std::vector{1, 64}, 0), ShapeError);
  CHECK_THROWS_AS(device.set_tokens(std::vector{1, -1}, 0), ShapeError);
  CHECK_THROWS_AS(device.set_tokens(std::vector{1}, std::size_t{1} << 31), ShapeError);
  CHECK_THROWS_AS(device.forward(0, attend), ShapeError);
  CHECK_THROWS_AS(device.forward(4, attend), ShapeError);
  CHECK_THROWS_AS(device.forward(2, attend, LogitsOf::all), ShapeError);
  LlamaConfig odd = model.config();
  odd.head_dim = 20;
  CHECK_THROWS_AS(static_cast<void>(CudaLlama::random(odd)), ConfigError);
  odd = model.config();
  odd.intermediate = 57;
  CHECK_THROWS_AS(static_cast<void>(CudaLlama::random(odd)), ConfigError);
}

TEST_CASE("a model of random weights gives finite logits, equal for equal seeds") {
  LlamaConfig config = Llama::load(golden_folder("sharded_bf16")).config();
  config.tied_embeddings = false;
  const std::vector<int> tokens{1, 2, 3, 4, 5};
  for (const auto weights : {WeightFormat::bfloat16, WeightFormat::int8}) {
    const auto run = [&](std::uint64_t seed) {
      CudaLlama model = CudaLlama::random(config, {.weights = weights}, seed);
      return device_logits(model, tokens, 0);
    };
    const auto one = run(1);
    CHECK(one.size() == tokens.size() * config.vocabulary);
    CHECK(spread(one) >= 0.5F);
    CHECK(spread(one) <= 2.0F);
    CHECK(one == run(1));
    CHECK(one != run(2));
  }
}

// Counts the bytes and forwards the calls.
class CountingMemory final : public gpu::MemoryResource {
 public:
  void* allocate(std::size_t bytes, cudaStream_t stream) override {
    void* memory = gpu::default_memory()->allocate(bytes, stream);
    ++allocations;
    live += bytes;
    return memory;
  }
  void deallocate(void* memory, std::size_t bytes, cudaStream_t stream) noexcept override {
    live -= bytes;
    gpu::default_memory()->deallocate(memory, bytes, stream);
  }
  std::size_t allocations = 0;
  std::size_t live = 0;
};

TEST_CASE("calls allocate nothing that was reserved, and held memory is counted") {
  const Llama model = Llama::load(golden_folder("sharded_bf16"));
  for (const auto weights : {WeightFormat::bfloat16, WeightFormat::int8}) {
    CountingMemory memory;
    {
      CudaLlama device{model, {.weights = weights, .memory = &memory}};
      CHECK(device.weight_bytes() <= memory.live);
      const std::size_t held = memory.live;
      const std::size_t before = device.activation_bytes();
      device.reserve(40, 40);
      CHECK(memory.live - held == device.activation_bytes() - before);
      const std::size_t asked = memory.allocations;
      DeviceDenseCache cache{model.config()};
      std::vector<int> tokens(40, 7);
      static_cast<void>(device.forward(tokens, 0, cache.attend(), LogitsOf::all));
      tokens.resize(3);
      static_cast<void>(device.forward(tokens, 40, cache.attend()));
      device.choose_likeliest();
      device.forward(1, cache.attend());
      static_cast<void>(device.take_choices());
      CHECK(memory.allocations == asked);
    }
    CHECK(memory.live == 0);
  }
}

#if !defined(__CUDACC__)
TEST_CASE("a failed call of the runtime is a DeviceError and leaks nothing") {
  const Llama model = Llama::load(golden_folder("mha_d64"));
  const std::size_t live = gpu::simt::live_bytes();
  std::uint64_t failures = 0;
  for (std::uint64_t n = 1;; ++n) {
    gpu::simt::fail_after(n);
    try {
      CudaLlama device{model};
      DeviceDenseCache cache{model.config()};
      static_cast<void>(device.forward(std::vector{1, 2}, 0, cache.attend()));
      device.choose_likeliest();
      static_cast<void>(device.take_choices());
      gpu::simt::fail_after(0);
      break;
    } catch (const DeviceError&) {
      ++failures;
    }
    REQUIRE(gpu::simt::live_bytes() == live);
  }
  CHECK(failures > 50);
}

TEST_CASE("without a device the error says so") {
  const Llama model = Llama::load(golden_folder("mha_d64"));
  gpu::simt::device().devices = 0;
  CHECK_THROWS_AS(CudaLlama{model}, DeviceError);
  gpu::simt::device().devices = 1;
}
#endif

}  // namespace
}  // namespace kvpolicy::reference::llama_test
