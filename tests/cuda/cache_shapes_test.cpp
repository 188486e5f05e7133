// SPDX-License-Identifier: Apache-2.0
//
// Which models a device cache serves: layers may differ in their windows; what has no kernel is
// refused by name.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <kvpolicy/cuda/batch.hpp>

#include "cuda/support/device_cache.hpp"
#include "cuda/support/random_device.hpp"

using namespace kvpolicy;
using test::contains;
using test::thrown;

namespace {

using Plan = HeadPlan<float16>;
using Cache = gpu::KvCache<float16>;

ModelShape changed(LayerShape layer) {
  ModelShape shape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
  shape.change(1) = layer;
  return shape;
}

std::string refused(const ModelShape& shape) {
  const std::string error = thrown<ConfigError>([&] { const Cache cache{Plan{shape}}; });
  CHECK(thrown<ConfigError>([&] { static_cast<void>(gpu::memory_of(Plan{shape}, 9)); }).empty() ==
        error.empty());
  return error;
}

#if !defined(__CUDACC__)
// Sets the shared memory that a block of the emulated device may have.
class BlockMemory {
 public:
  explicit BlockMemory(int bytes) : before_{device_.max_shared_bytes} { set(bytes); }
  BlockMemory(const BlockMemory&) = delete;
  BlockMemory& operator=(const BlockMemory&) = delete;
  ~BlockMemory() { set(before_); }
  void set(int bytes) { device_.max_shared_bytes = bytes; }

 private:
  gpu::simt::Device& device_ = gpu::simt::device();
  int before_;
};
#endif

}  // namespace

TEST_CASE("a model without kernels is refused with the layer and what it has") {
  CHECK(refused(changed({4, 2, 64})).empty());
  CHECK(refused(changed({.q_heads = 4, .kv_heads = 2, .head_dim = 64, .window = 9})).empty());
  CHECK(contains(refused(changed({4, 2, 64, 128})),
                 "layer 1 has 4 query heads, 2 KV heads of 64 channels and values of 128"));
  CHECK(contains(refused(changed({4, 1, 64})), "layer 1 has 4 query heads, 1 KV heads of 64"));
  CHECK(contains(refused(changed({4, 2, 72})), "layer 1 has 4 query heads, 2 KV heads of 72"));
  CHECK(contains(refused(changed({})), "layer 1 has 0 query heads, 0 KV heads"));
  CHECK(contains(refused(changed({.q_heads = 4, .reads = 0})), "reads another layer's cache"));
  CHECK(contains(refused(changed({.q_heads = 4, .kv_heads = 2, .head_dim = 64, .softcap = 2.0F})),
                 "a soft cap of 2"));
  const std::string uncompiled =
      thrown<ConfigError>([] { const Cache cache{Plan{ModelShape{1, 2, 1, 72}}}; });
  CHECK(contains(uncompiled, "head_dim is 72, kernels were compiled for 64"));
}

#if !defined(__CUDACC__)
TEST_CASE("a call brings as many KV heads as a block of the device has shared memory for") {
  const test::SmallDevice small;
  constexpr std::size_t block = 41 << 10;
  BlockMemory memory{block};
  const auto model_with = [](std::size_t kv_heads) {
    return ModelShape{.layers = 1, .q_heads = kv_heads, .kv_heads = kv_heads, .head_dim = 64};
  };
  const std::size_t most = gpu::Engine<float16>{model_with(1)}.most_heads();
  const auto bytes = [](std::size_t count) {
    const int n = static_cast<int>(count);
    return std::max(gpu::decode_shared_bytes<float16, 64, 1, true>(n),
                    gpu::decode_shared_bytes<float16, 64, 2, true>(n));
  };
  CHECK(bytes(most) <= block);
  CHECK(bytes(most + 1) > block);
  REQUIRE(most < gpu::Engine<float16>::max_heads);
  const std::string too_many = " must be at most " + std::to_string(most);
  CHECK(contains(thrown<ConfigError>([&] { const gpu::Engine<float16> engine{model_with(most + 1)}; }),
                 too_many));
  const auto pairs = std::make_shared<gpu::Engine<float16>>(model_with(2));
  const std::string sequences = "must be 1 to " + std::to_string(most / 2);
  CHECK(thrown<ConfigError>([&] { const gpu::Batch<float16> batch{pairs, most / 2}; }).empty());
  CHECK(contains(thrown<ConfigError>([&] { const gpu::Batch<float16> batch{pairs, most / 2 + 1}; }),
                 sequences));

  kvpolicy::gpu::CacheOptions options;
  options.max_append = 9;
  // One head with codes, and the whole call is served by the kernel that needs most memory.
  std::vector<test::HeadSpec> heads(most, test::device_heads()[0]);
  heads[0] = test::device_heads()[1];
  test::random_operations<float16, float16, test::DeviceBackend<float16>>(6, model_with(most), heads, options,
                                                                          {}, 8);

  memory.set(16 << 10);
  CHECK(contains(
      thrown<DeviceError>([&] { const gpu::Engine<float16> engine{model_with(1)}; }),
      "may have 16384 bytes of shared memory, head_dim 64 needs " + std::to_string(bytes(1)) + " or more"));
}
#endif

TEST_CASE("random operations where layers differ in their windows") {
  // The four numbers mean nothing where each layer is described.
  const ModelShape shape{
      .layers = 2, .per_layer = {{4, 2, 64}, {.q_heads = 4, .kv_heads = 2, .head_dim = 64, .window = 24}}};
  const std::vector<test::HeadSpec> all = test::device_heads();
  const test::HeadSpec window = *std::ranges::find(all, test::Kind::window, &test::HeadSpec::kind);
  std::vector<test::HeadSpec> heads{all[0], all[1], window, window};
  heads[2].sinks = 0;
  heads[2].recent = 24;
  heads[3].sinks = 4;
  heads[3].recent = 20;
  kvpolicy::gpu::CacheOptions options;
  options.max_rollback = 5;
  options.max_append = 9;
  test::random_operations<float16, float16, test::DeviceBackend<float16>>(5, shape, heads, options, {}, 40);
}
