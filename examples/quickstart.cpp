// SPDX-License-Identifier: Apache-2.0
//
// One layer of Llama-3-8B's shape: half of the KV heads keep everything, half keep the sinks and
// the latest rows. Plain float arrays in, attention out.
#include <cstdio>
#include <random>
#include <vector>

#include <kvpolicy/duo.hpp>

int main() {
  const kvpolicy::ModelShape shape{.layers = 1, .q_heads = 32, .kv_heads = 8, .head_dim = 128};

  // A gate per KV head says how much it retrieves; published ones load with <kvpolicy/io/...>.
  const kvpolicy::HeadGates gates{1, 8, {0.9, 0.1, 0.8, 0.0, 0.2, 1.0, 0.3, 0.7}};
  const auto plan = kvpolicy::duo_plan(shape, gates, {.sparsity = 0.5, .sinks = 64, .recent = 256});
  kvpolicy::DuoCache<float> cache{plan};

  std::mt19937 random{1};
  std::normal_distribution<float> normal;
  const auto draw = [&](std::size_t numbers) {
    std::vector<float> drawn(numbers);
    for (float& number : drawn) number = normal(random);
    return drawn;
  };

  // Prefill 1,024 tokens in chunks of 256, then decode 4: the same call. Keys come rotated.
  constexpr std::size_t calls[] = {256, 256, 256, 256, 1, 1, 1, 1};
  for (const std::size_t tokens : calls) {
    const auto q = draw(tokens * 32 * 128);
    const auto k = draw(tokens * 8 * 128);
    const auto v = draw(tokens * 8 * 128);
    std::vector<float> out(q.size());  // [tokens, heads, head_dim], as q
    cache.step(/*layer=*/0, kvpolicy::TensorView{q.data(), tokens, 32, 128},
               kvpolicy::TensorView{k.data(), tokens, 8, 128},
               kvpolicy::TensorView{v.data(), tokens, 8, 128},
               kvpolicy::TensorView{out.data(), tokens, 32, 128});
    std::printf("%4zu tokens: %5.2f MB of keys and values\n", cache.tokens(),
                static_cast<double>(cache.bytes()) / 1e6);
  }
  const auto full = kvpolicy::HeadPlan<kvpolicy::FullCache<kvpolicy::DenseStorage<float>>>{shape};
  std::printf("without the plan: %.2f MB\n",
              static_cast<double>(full.memory(cache.tokens()).total()) / 1e6);
}
