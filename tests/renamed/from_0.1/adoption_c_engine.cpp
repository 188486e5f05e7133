// SPDX-License-Identifier: Apache-2.0
//
// The C++ file between an engine in C and its cache.
// needs: cpu
#include <cstddef>
#include <cstdio>
#include <exception>
#include <string>

#include <kvpolicy/cpu.hpp>
#include <kvpolicy/duo.hpp>
namespace block_11 {

using Window = kvpolicy::SinkRecentCache<kvpolicy::DenseStorage<kvpolicy::bfloat16>>;
using Plan = kvpolicy::HeadPlan<kvpolicy::bfloat16>;

struct kv_cache {
  kvpolicy::cpu::KvCache<kvpolicy::bfloat16> cache;
  std::string error;
};

// Converts C's int; a negative number becomes too large for anything, and is refused.
inline std::size_t size(int number) { return static_cast<std::size_t>(number); }

// Returns null if the cache cannot be made. With `recent` 0 every head keeps every row.
extern "C" kv_cache* kv_new(int layers, int heads, int kv_heads, int head_dim, int sinks, int recent) {
  try {
    Plan plan{kvpolicy::ModelShape{size(layers), size(heads), size(kv_heads), size(head_dim)}};
    for (std::size_t layer = 0; recent != 0 && layer < size(layers); ++layer) {
      for (std::size_t head = 0; head < size(kv_heads); ++head) {
        plan.set(layer, head, Window::Config{.sinks = size(sinks), .recent = size(recent)});
      }
    }
    return new kv_cache{kvpolicy::cpu::KvCache<kvpolicy::bfloat16>{plan}, {}};
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kv_new: %s\n", error.what());
    return nullptr;
  }
}

// One token of one layer. Returns 0, or -1 with the layer unchanged and the reason in kv_error.
extern "C" int kv_step(kv_cache* kv, int layer, const float* q, const float* k, const float* v, float* out) {
  try {
    const kvpolicy::ModelShape& shape = kv->cache.plan().shape();
    kv->cache.step(size(layer), kvpolicy::TensorView{q, 1, shape.q_heads, shape.head_dim},
                   kvpolicy::TensorView{k, 1, shape.kv_heads, shape.head_dim},
                   kvpolicy::TensorView{v, 1, shape.kv_heads, shape.head_dim},
                   kvpolicy::TensorView{out, 1, shape.q_heads, shape.head_dim});
    return 0;
  } catch (const std::exception& error) {
    kv->error = error.what();
    return -1;
  }
}

// Begins a new text. Returns 0, or -1 as above.
extern "C" int kv_clear(kv_cache* kv) {
  try {
    kv->cache.clear();
    return 0;
  } catch (const std::exception& error) {
    kv->error = error.what();
    return -1;
  }
}

extern "C" const char* kv_error(const kv_cache* kv) { return kv->error.c_str(); }
extern "C" std::size_t kv_bytes(const kv_cache* kv) { return kv->cache.bytes(); }
extern "C" void kv_free(kv_cache* kv) { delete kv; }

}  // namespace block_11
