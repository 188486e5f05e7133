// SPDX-License-Identifier: Apache-2.0
//
// Names every shipped policy, all of which instances.cpp compiles. The first query sees one row, whose value is its output.
#include <cstdio>
#include <vector>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>

namespace {

int steps = 0;
int wrong = 0;

void step(const kvpolicy::HeadSettings<float>& settings) {
  const kvpolicy::ModelShape shape{.layers = 1, .q_heads = 2, .kv_heads = 1, .head_dim = 64};
  kvpolicy::KvCache<float> cache{kvpolicy::HeadPlan<float>{shape, settings}};
  const std::vector<float> q(2 * 64, 0.5F), k(64, 0.25F), v(64, 3.0F);
  std::vector<float> out(q.size());
  cache.step(/*layer=*/0, kvpolicy::TensorView{q.data(), 1, 2, 64}, kvpolicy::TensorView{k.data(), 1, 1, 64},
             kvpolicy::TensorView{v.data(), 1, 1, 64}, kvpolicy::TensorView{out.data(), 1, 2, 64});
  const bool right = cache.tokens() == 1 && cache.bytes() > 0 && out.front() == 3.0F && out.back() == 3.0F;
  if (!right) std::printf("%s: %g\n", settings.names().shown().c_str(), static_cast<double>(out.front()));
  wrong += right ? 0 : 1;
  ++steps;
}

template <kvpolicy::KvPolicy P>
void step() {
  typename P::Config config;
  if constexpr (requires { config.chunk; }) config.chunk = 32;  // rows that share scales stay together
  step(config);
}

}  // namespace

#define STEP(E, ...) step<__VA_ARGS__>();

int main() {
  using namespace kvpolicy;
  KVPOLICY_FOR_SHIPPED_POLICIES(STEP, float)
  if (shipped_policies<float>().names().size() != static_cast<std::size_t>(steps)) ++wrong;
  std::printf("%d policies, %d wrong\n", steps, wrong);
  return wrong;
}
