// SPDX-License-Identifier: Apache-2.0
//
// Which kernel a prompt goes to on an emulated Hopper device, and that a cache says the same by either.
#include <doctest/doctest.h>

#if !defined(__CUDACC__)  // a device is what it is

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "cuda/support/device_cache.hpp"
#include "cuda/support/hopper_device.hpp"

using namespace kvpolicy;
using test::DeviceCache;
using test::DeviceChunk;
using test::DevicePlan;
using test::HeadSpec;
using test::Kind;

namespace {

constexpr double rounding = test::DeviceBackend<kvpolicy::float16>::out_error;
constexpr ModelShape shape{1, 12, 6, 64};

DevicePlan plan_of(const std::vector<HeadSpec>& heads) {
  return test::plan_of<kvpolicy::float16>(shape, heads);
}
DevicePlan exact_plan() {
  return plan_of({{},
                  {.kind = Kind::window, .sinks = 4, .recent = 37},
                  {.kind = Kind::window, .sinks = 5, .recent = 64, .in_cache = true},
                  {.kind = Kind::budget, .budget = 30, .window = 8},
                  {.kind = Kind::window, .sinks = 140, .recent = 1},
                  {}});
}

// What two sequences say: a prompt in parts, alone and together, then steps of few tokens.
std::vector<float> outputs(const DevicePlan& plan, bool hopper) {
  const test::SmallDevice small;
  std::unique_ptr<test::HopperDevice> device;
  if (hopper) device = std::make_unique<test::HopperDevice>();
  const auto engine = std::make_shared<gpu::Engine<kvpolicy::float16>>(shape);
  CHECK(engine->uses_warpgroups() == hopper);
  gpu::Batch<kvpolicy::float16> batch{engine, 2};
  DeviceCache first{plan, {}, nullptr, engine};
  DeviceCache second{plan, {.page_rows = 64}, nullptr, engine};
  test::Random random{3};
  std::vector<float> all;
  for (const std::size_t tokens : {300U, 70U}) {
    const DeviceChunk<> chunk{random, shape, tokens};
    chunk.step(first, 0);
    const auto results = chunk.results();
    all.insert(all.end(), results.begin(), results.end());
  }
  using Sequence = BatchSequence<DeviceCache>;
  const std::vector<Sequence> sequences{{&first, {}}, {&second, {}}};
  for (const auto& [one, other] : {std::pair{40, 190}, {1, 33}, {50, 2}}) {
    const auto tokens = static_cast<std::size_t>(one + other);
    const DeviceChunk<> chunk{random, shape, tokens};
    const std::vector<std::int32_t> indptr{0, one, one + other};
    using E = kvpolicy::float16;
    CHECK(batch
              .step(0, sequences, indptr, chunk.rows<const E>(chunk.q.data(), shape.q_heads, 0, tokens),
                    chunk.rows<const E>(chunk.k.data(), shape.kv_heads, 0, tokens),
                    chunk.rows<const E>(chunk.v.data(), shape.kv_heads, 0, tokens),
                    chunk.rows<E>(chunk.out.data(), shape.q_heads, 0, tokens))
              .empty());
    test::succeed(cudaStreamSynchronize(nullptr));
    for (const E number : chunk.out.download()) all.push_back(static_cast<float>(number));
  }
  return all;
}

}  // namespace

TEST_CASE("prompts of exact heads are served by Hopper's kernel, and say what the other one says") {
  const std::vector<float> hopper = outputs(exact_plan(), true);
  const std::vector<float> other = outputs(exact_plan(), false);
  CHECK(test::largest_difference(hopper, other) <= rounding);
  CHECK(hopper != other);  // tiles of other sizes are added up in another order
}

TEST_CASE("prompts of layers in which some head packs are served by the other kernel") {
  const DevicePlan plan = plan_of({{}, {.bits = 4, .residual = 5}, {}, {}, {.bits = 8, .residual = 0}, {}});
  CHECK(test::same_bits(outputs(plan, true), outputs(plan, false)));
}

TEST_CASE(
    "Hopper's kernel is for devices of compute capability 9.0 with room for its tiles, and head_dims it is "
    "written for") {
  const test::SmallDevice small;
  const auto uses = [](std::size_t head_dim) {
    return gpu::Engine<kvpolicy::float16>{ModelShape{1, 2, 1, head_dim}}.uses_warpgroups();
  };
  auto& device = gpu::simt::device();
  CHECK_FALSE(uses(64));
  const test::HopperDevice hopper;
  CHECK(uses(64));
  device.max_shared_bytes = 100 << 10;
  CHECK_FALSE(uses(64));
  device.max_shared_bytes = 232448;
  device.major = 10;
  CHECK_FALSE(uses(64));
}

#endif
