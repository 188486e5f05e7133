// SPDX-License-Identifier: Apache-2.0
//
// An engine built without RTTI: attention with both engines, policies by their types, and a file as slow memory.
#include <cmath>
#include <cstdio>
#include <vector>

#include <kvpolicy/cpu.hpp>
#include <kvpolicy/kvpolicy.hpp>
#include <kvpolicy/offload/file_resource.hpp>

#if defined(__cpp_rtti) || defined(__GXX_RTTI)
#error "this test is about -fno-rtti"
#endif

namespace {

using Full = kvpolicy::FullCache<kvpolicy::DenseStorage<float>>;
using Window = kvpolicy::SinkRecentCache<kvpolicy::DenseStorage<float>>;

template <class Cache>
bool attends(Cache& cache, std::size_t tokens) {
  const std::vector<float> q(tokens * 4 * 64, 0.5F);
  const std::vector<float> k(tokens * 2 * 64, 0.25F);
  const std::vector<float> v(tokens * 2 * 64, 3.0F);
  std::vector<float> out(q.size());
  cache.step(/*layer=*/0, kvpolicy::TensorView{q.data(), tokens, 4, 64},
             kvpolicy::TensorView{k.data(), tokens, 2, 64}, kvpolicy::TensorView{v.data(), tokens, 2, 64},
             kvpolicy::TensorView{out.data(), tokens, 4, 64});
  for (const float number : out) {
    if (!(std::abs(number - 3.0F) < 1e-5F)) return false;
  }
  return true;
}

}  // namespace

int main() {
  const kvpolicy::ModelShape shape{.layers = 1, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
  const auto plan = kvpolicy::duo_plan(shape, {1, 2, {0.9, 0.1}}, {.sinks = 4, .recent = 8});
  kvpolicy::DuoCache<float> cache{plan};
  if (!attends(cache, 1)) return 1;
  kvpolicy::cpu::KvCache<float> fast{plan};
  if (!attends(fast, 1)) return 2;

  if (cache.policy<Full>(0, 0).rows() != 1 || cache.policy<Window>(0, 1).rows() != 1) return 3;
  try {
    static_cast<void>(cache.policy<Window>(0, 0));
    return 4;
  } catch (const kvpolicy::ConfigError&) {
  }
  // Heads of the same policy and settings share pages, as they do with RTTI.
  kvpolicy::DuoCache<float> longer{plan};
  if (!attends(longer, 64)) return 5;
  if (longer.fork_as(plan).shared_bytes() == 0) return 6;

  kvpolicy::offload::FileResource file{{.folder = "."}};
  kvpolicy::PagePool pool{&file};
  if (pool.provider(0) != &file) return 7;
  kvpolicy::DuoCache<float> offloaded{plan, {.slow_memory = &file}};
  if (!attends(offloaded, 200) || file.live_bytes() == 0) return 8;
  std::puts("no RTTI needed");
}
