// SPDX-License-Identifier: Apache-2.0
//
// A plan by name or from a file and the CPU engine, both of which are compiled in the library kvpolicy::compiled. Compiled by
// `./scripts/compile-cost --consumers`.
#include <cstdio>
#include <vector>

#include <kvpolicy/compiled/cache.hpp>

int main(int argc, char** argv) {
  const kvpolicy::ModelShape shape{.layers = 1, .q_heads = 32, .kv_heads = 8, .head_dim = 128};
  const auto plan = argc > 1 ? kvpolicy::compiled::load_plan<float>(argv[1])
                             : kvpolicy::compiled::named_plan<float>("int4", shape);
  kvpolicy::compiled::KvCache<float> cache{plan};
  const kvpolicy::LayerShape layer = plan.shape().layer(0);
  const std::vector<float> q(layer.q_heads * layer.head_dim), k(layer.kv_heads * layer.head_dim);
  std::vector<float> out(q.size());
  cache.step(/*layer=*/0, kvpolicy::TensorView{q.data(), 1, layer.q_heads, layer.head_dim},
             kvpolicy::TensorView{k.data(), 1, layer.kv_heads, layer.head_dim},
             kvpolicy::TensorView{k.data(), 1, layer.kv_heads, layer.head_dim},
             kvpolicy::TensorView{out.data(), 1, layer.q_heads, layer.head_dim});
  std::printf("%g\n", static_cast<double>(out[0]));
}
