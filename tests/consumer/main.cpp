// SPDX-License-Identifier: Apache-2.0
//
// The first program of an engine's author: one header, no dependency. The result is known without
// arithmetic, because the first query sees only one row, whose value is its output.
#include <cstddef>
#include <cstdio>
#include <vector>

#include <kvpolicy/duo.hpp>

int main() {
  constexpr std::size_t tokens = 96, q_heads = 4, kv_heads = 2, head_dim = 64;
  const kvpolicy::ModelShape shape{
      .layers = 1, .q_heads = q_heads, .kv_heads = kv_heads, .head_dim = head_dim};
  const kvpolicy::HeadGates gates{shape.layers, kv_heads, {0.9, 0.1}};
  const auto plan = kvpolicy::duo_plan(shape, gates, {.sparsity = 0.5, .sinks = 4, .recent = 8});
  kvpolicy::DuoCache<float> cache{plan};

  const auto numbers = [](std::size_t count, float step) {
    std::vector<float> made(count);
    for (std::size_t i = 0; i < count; ++i) made[i] = step * static_cast<float>(i % 101) - 1.0F;
    return made;
  };
  const auto q = numbers(tokens * q_heads * head_dim, 0.01F);
  const auto k = numbers(tokens * kv_heads * head_dim, 0.02F);
  const auto v = numbers(tokens * kv_heads * head_dim, 0.03F);
  std::vector<float> out(q.size());
  cache.step(/*layer=*/0, kvpolicy::TensorView{q.data(), tokens, q_heads, head_dim},
             kvpolicy::TensorView{k.data(), tokens, kv_heads, head_dim},
             kvpolicy::TensorView{v.data(), tokens, kv_heads, head_dim},
             kvpolicy::TensorView{out.data(), tokens, q_heads, head_dim});

  for (std::size_t head = 0; head < q_heads; ++head) {
    const std::size_t kv_head = head / (q_heads / kv_heads);
    for (std::size_t i = 0; i < head_dim; ++i) {
      const float expected = v[kv_head * head_dim + i];
      if (!(out[head * head_dim + i] == expected)) {
        std::fprintf(stderr, "head %zu, element %zu: %g instead of %g\n", head, i,
                     static_cast<double>(out[head * head_dim + i]), static_cast<double>(expected));
        return 1;
      }
    }
  }
  std::printf("%zu tokens in %zu bytes\n", cache.tokens(), cache.bytes());
  return cache.tokens() == tokens ? 0 : 1;
}
