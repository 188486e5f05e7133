// SPDX-License-Identifier: Apache-2.0
//
// One step of a cache over the CPU engine. Compiled by `./scripts/compile-cost --consumers`.
#include <cstdio>
#include <vector>

#include <kvpolicy/cpu.hpp>

int main() {
  const kvpolicy::ModelShape shape{.layers = 1, .q_heads = 32, .kv_heads = 8, .head_dim = 128};
  kvpolicy::cpu::KvCache<float> cache{kvpolicy::HeadPlan<float>{shape}};
  const std::vector<float> q(32 * 128, 0.5F), k(8 * 128, 0.25F);
  std::vector<float> out(q.size());
  cache.step(/*layer=*/0, kvpolicy::TensorView{q.data(), 1, 32, 128},
             kvpolicy::TensorView{k.data(), 1, 8, 128}, kvpolicy::TensorView{k.data(), 1, 8, 128},
             kvpolicy::TensorView{out.data(), 1, 32, 128});
  std::printf("%g\n", static_cast<double>(out[0]));
}
