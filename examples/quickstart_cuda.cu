// SPDX-License-Identifier: Apache-2.0
//
// One layer on a GPU: half of the KV heads keep every row, the others sinks and the latest rows. A
// prompt is read in chunks; then one decode step is captured in a CUDA graph and replayed while the
// text grows.
#include <cstdio>
#include <vector>

#include <kvpolicy/cuda.hpp>
#include <kvpolicy/duo.hpp>

using namespace kvpolicy;

namespace {

constexpr std::size_t q_heads = 8, kv_heads = 2, head_dim = 64;

void check(cudaError_t status) { gpu::check(status, "a CUDA call"); }

// Device memory for [tokens, heads, head_dim], filled with numbers from -1 to 1.
float16* device_tensor(std::size_t tokens, std::size_t heads) {
  std::vector<float16> numbers(tokens * heads * head_dim);
  unsigned seed = 1;
  for (float16& number : numbers) {
    seed = seed * 1664525U + 1013904223U;
    number = float16{static_cast<float>(seed >> 8) * 0x1p-23F - 1.0F};
  }
  void* memory = nullptr;
  check(cudaMalloc(&memory, numbers.size() * sizeof(float16)));
  check(cudaMemcpy(memory, numbers.data(), numbers.size() * sizeof(float16), cudaMemcpyHostToDevice));
  return static_cast<float16*>(memory);
}

void decode(cudaStream_t stream) {
  const ModelShape shape{.layers = 1, .q_heads = q_heads, .kv_heads = kv_heads, .head_dim = head_dim};
  const HeadGates gates{1, kv_heads, {0.9, 0.1}};
  const auto plan = duo_plan<float16>(shape, gates, {.sparsity = 0.5, .sinks = 16, .recent = 64});
  gpu::KvCache cache{plan, {}, stream};
  cache.reserve(512, stream);

  constexpr std::size_t chunk = 100;
  float16* q = device_tensor(chunk, q_heads);
  float16* k = device_tensor(chunk, kv_heads);
  float16* v = device_tensor(chunk, kv_heads);
  float16* out = device_tensor(chunk, q_heads);
  const auto step = [&](std::size_t tokens) {
    cache.step(0, TensorView<const float16>{q, tokens, q_heads, head_dim},
               TensorView<const float16>{k, tokens, kv_heads, head_dim},
               TensorView<const float16>{v, tokens, kv_heads, head_dim},
               TensorView<float16>{out, tokens, q_heads, head_dim}, {}, stream);
  };
  for (int i = 0; i < 3; ++i) step(chunk);
  step(1);  // loads the decode kernels, which cannot be loaded during a capture

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  step(1);  // is recorded, does not run
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&replay, graph, 0));
  for (int i = 0; i < 100; ++i) {
    cache.replayed();                        // throws if the step was not reserved
    check(cudaGraphLaunch(replay, stream));  // an engine would change q, k and v between launches
  }
  check(cudaStreamSynchronize(stream));

  std::printf("%zu tokens in %.0f KB of keys and values; without the plan %.0f KB\n", cache.tokens(),
              static_cast<double>(cache.bytes()) / 1e3,
              static_cast<double>(512 * kv_heads * head_dim * 2 * sizeof(float16)) / 1e3);
  check(cudaGraphExecDestroy(replay));
  check(cudaGraphDestroy(graph));
  for (float16* tensor : {q, k, v, out}) check(cudaFree(tensor));
}

}  // namespace

int main() {
  try {
    cudaStream_t stream = nullptr;
    static_cast<void>(gpu::Device::current());  // throws an error that says what is
                                                // missing
    check(cudaStreamCreate(&stream));
    decode(stream);
    check(cudaStreamDestroy(stream));
  } catch (const DeviceError& error) {
    std::printf("%s\n", error.what());
  }
}
