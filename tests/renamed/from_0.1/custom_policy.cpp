// SPDX-License-Identifier: Apache-2.0
//
// Runs a user's own policy (custom_policy.hpp) on two engines. The library supplies attention,
// rollback, forks and byte counts. The policy's rule would let a device cache run it as well.
#include <cstdio>
#include <vector>

#include <kvpolicy/cpu.hpp>

#include "custom_policy.hpp"

template <class Engine>
float last_output() {
  const kvpolicy::ModelShape shape{.layers = 1, .q_heads = 2, .kv_heads = 1, .head_dim = 64};
  kvpolicy::KvCache<float, Engine> cache{kvpolicy::HeadPlan{shape, OpeningAndLatest<float>::Config{}}};
  std::vector<float> q(128), kv(64), out(128);
  for (std::size_t token = 0; token < 200; ++token) {
    for (std::size_t i = 0; i < 128; ++i) q[i] = kv[i / 2] = static_cast<float>((token + i) % 7);
    const kvpolicy::TensorView row{kv.data(), 1, 1, 64};
    cache.step(0, kvpolicy::TensorView{q.data(), 1, 2, 64}, row, row,
               kvpolicy::TensorView{out.data(), 1, 2, 64});
  }
  std::printf("%zu tokens, %zu bytes, %f\n", cache.tokens(), cache.bytes(), double{out.back()});
  return out.back();
}

int main() {
  const float difference = last_output<kvpolicy::ScalarEngine>() - last_output<kvpolicy::cpu::Engine<>>();
  return difference < 1e-5F && difference > -1e-5F ? 0 : 1;  // both engines give the same result
}
