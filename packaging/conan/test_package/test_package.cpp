// SPDX-License-Identifier: Apache-2.0
//
// Runs one layer under DuoAttention's plan, with each requested component of the package.
#include <cstdio>
#include <vector>

#include <kvpolicy/duo.hpp>
#ifdef WITH_CPU
#include <kvpolicy/cpu.hpp>
#endif
#ifdef WITH_IO
#include <kvpolicy/io/plan_json.hpp>
#endif
#ifdef WITH_FORMAT
#include <kvpolicy/format.hpp>
#endif

namespace {

template <class Cache>
bool attends(Cache cache, const char* engine) {
  const std::vector<float> q(4 * 64, 0.5F);
  const std::vector<float> k(2 * 64, 0.25F);
  const std::vector<float> v(2 * 64, 3.0F);
  std::vector<float> out(q.size());
  cache.step(/*layer=*/0, kvpolicy::TensorView{q.data(), 1, 4, 64}, kvpolicy::TensorView{k.data(), 1, 2, 64},
             kvpolicy::TensorView{v.data(), 1, 2, 64}, kvpolicy::TensorView{out.data(), 1, 4, 64});
  // There is only one row, so the output is its value, whatever the weights.
  bool right = cache.tokens() == 1;
  for (const float number : out) right = right && number == 3.0F;
  std::printf("%s: %s\n", engine, right ? "right" : "wrong");
  return right;
}

}  // namespace

int main() {
  const kvpolicy::ModelShape shape{.layers = 1, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
  const auto plan = kvpolicy::duo_plan(shape, {1, 2, {0.9, 0.1}}, {.sinks = 4, .recent = 8});
  bool right = attends(kvpolicy::DuoCache<float>{plan}, "plain engine");
#ifdef WITH_CPU
  right = attends(kvpolicy::cpu::KvCache<float>{plan}, "CPU engine") && right;
#endif
#ifdef WITH_IO
  const bool same = kvpolicy::io::parse_plan(kvpolicy::io::format_plan(plan)) == plan;
  std::printf("plan file: %s\n", same ? "right" : "wrong");
  right = same && right;
#endif
#ifdef WITH_FORMAT
  const bool named = fmt::format("{}", shape) == "1 layer, 4 query heads, 2 KV heads of 64";
  std::printf("text: %s\n", named ? "right" : "wrong");
  right = named && right;
#endif
  return right ? 0 : 1;
}
