// SPDX-License-Identifier: Apache-2.0
//
// An engine built without exceptions: attention with both engines, then an error. The macro
// KVPOLICY_THROW handles it, or, if undefined (-DDEFAULT_HANDLER), a message and abort().
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <vector>

namespace engine {
[[noreturn]] inline void panic(const std::exception& error) {
  std::printf("panic: %s\n", error.what());
  std::fflush(stdout);
  std::_Exit(42);
}
}  // namespace engine

#ifndef DEFAULT_HANDLER
#define KVPOLICY_THROW(error) ::engine::panic(error)
#endif
#include <kvpolicy/cpu.hpp>
#include <kvpolicy/kvpolicy.hpp>

#ifdef __cpp_exceptions
#error "this test is about -fno-exceptions"
#endif

namespace {

template <class Cache>
bool attends(Cache cache) {
  const std::vector<float> q(4 * 64, 0.5F);
  const std::vector<float> k(2 * 64, 0.25F);
  const std::vector<float> v(2 * 64, 3.0F);
  std::vector<float> out(q.size());
  cache.step(/*layer=*/0, kvpolicy::TensorView{q.data(), 1, 4, 64}, kvpolicy::TensorView{k.data(), 1, 2, 64},
             kvpolicy::TensorView{v.data(), 1, 2, 64}, kvpolicy::TensorView{out.data(), 1, 4, 64});
  bool right = cache.tokens() == 1;
  for (const float number : out) right = right && number == 3.0F;
  return right;
}

}  // namespace

int main() {
  const kvpolicy::ModelShape shape{.layers = 1, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
  const auto plan = kvpolicy::duo_plan(shape, {1, 2, {0.9, 0.1}}, {.sinks = 4, .recent = 8});
  if (!attends(kvpolicy::DuoCache<float>{plan})) return 1;
  if (!attends(kvpolicy::cpu::KvCache<float>{plan})) return 2;

  kvpolicy::DuoCache<float> cache{plan};
  const std::vector<float> row(4 * 64);
  cache.append(/*layer=*/1, kvpolicy::TensorView{row.data(), 1, 2, 64},
               kvpolicy::TensorView{row.data(), 1, 2, 64});  // there is layer 0 only
  return 3;
}
