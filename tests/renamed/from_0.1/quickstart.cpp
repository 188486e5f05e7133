// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <vector>

#include <kvpolicy/duo.hpp>

int main() {
  // One layer of Llama-3-8B's shape. A gate for each KV head says how much it retrieves: the upper
  // half keep every row, the others keep 64 opening rows and a window of 256.
  const kvpolicy::ModelShape shape{.layers = 1, .q_heads = 32, .kv_heads = 8, .head_dim = 128};
  const kvpolicy::HeadGates gates{1, 8, {0.9, 0.1, 0.8, 0.0, 0.2, 1.0, 0.3, 0.7}};
  const auto plan = kvpolicy::duo_plan(shape, gates, {.sparsity = 0.5, .sinks = 64, .recent = 256});
  kvpolicy::DuoCache<float> cache{plan};
  const auto full = kvpolicy::uniform_plan<kvpolicy::FullCache<kvpolicy::DenseStorage<float>>>(shape);

  // A prompt in chunks of 256 tokens, then one token: the same call. Keys come rotated (RoPE).
  for (const std::size_t tokens : {256U, 256U, 256U, 256U, 1U}) {
    const std::vector<float> q(tokens * 32 * 128, 0.5F);  // [tokens, heads, head_dim], as k, v, out
    const std::vector<float> k(tokens * 8 * 128, 0.25F), v(tokens * 8 * 128, 3.0F);
    std::vector<float> out(q.size());
    cache.step(/*layer=*/0, kvpolicy::TensorView{q.data(), tokens, 32, 128},
               kvpolicy::TensorView{k.data(), tokens, 8, 128}, kvpolicy::TensorView{v.data(), tokens, 8, 128},
               kvpolicy::TensorView{out.data(), tokens, 32, 128});
    std::printf("%4zu tokens: %zu bytes, with every row kept %zu\n", cache.tokens(), cache.bytes(),
                full.memory(cache.tokens()).total());
  }
}
