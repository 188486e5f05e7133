// SPDX-License-Identifier: Apache-2.0
//
// A policy of one's own on a device, which knows it by its rule alone: it keeps and reads what it does on the
// host, and what it cannot do is refused there as on the host.
#include <doctest/doctest.h>

#include <cstddef>
#include <initializer_list>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/cuda/saved_cache.hpp>

#include "../../examples/custom_policy.hpp"
#include "cuda/support/device_cache.hpp"

using E = kvpolicy::float16;
using kvpolicy::ModelShape;
using test::DeviceCache;
using test::DeviceChunk;
using test::DevicePlan;
using Mine = OpeningAndLatest<E>;
using Full = kvpolicy::FullCache<kvpolicy::DenseStorage<E>>;

namespace {

constexpr ModelShape shape{1, 6, 3, 64};

DevicePlan own_plan() {
  DevicePlan plan{shape, Mine::Config{.rows = 40, .opening_share = 0.1}};
  plan.set(0, 1, Mine::Config{.rows = 70, .opening_share = 0.9});
  plan.set(0, 2, Full::Config{});
  return plan;
}

// The same numbers on both.
struct TwoChunks {
  test::Chunk<E> host;
  DeviceChunk<> device;

  TwoChunks(test::Random& random, std::size_t tokens) : host{random, shape, tokens}, device{shape, tokens} {
    device.q.upload(flat<E>(host.q));
    device.k.upload(flat<E>(host.k));
    device.v.upload(flat<E>(host.v));
  }
  template <class To, class From>
  static std::vector<To> flat(const test::Tensor<From>& tensor) {
    std::vector<To> all;
    for (std::size_t token = 0; token < tensor.tokens(); ++token) {
      for (std::size_t head = 0; head < tensor.view().heads; ++head) {
        for (const float number : tensor.row(token, head)) all.push_back(To{number});
      }
    }
    return all;
  }
  void step(kvpolicy::KvCache<E>& one, DeviceCache& other) {
    host.step(one, 0);
    device.step(other, 0);
    const std::vector<float> expected = flat<float>(host.out);
    std::vector<float> said = device.results();
    said.resize(expected.size());
    CHECK(test::largest_difference(said, expected) <= test::DeviceBackend<E>::out_error);
  }
};

std::vector<std::int64_t> positions(const kvpolicy::KvCache<E>& cache, std::size_t head) {
  std::vector<std::int64_t> all;
  for (const kvpolicy::Segment& rows : cache.segments(0, head)) {
    for (std::size_t i = 0; i < rows.rows; ++i) all.push_back(rows.position_of(i));
  }
  return all;
}

}  // namespace

TEST_CASE("a policy of one's own does on a device what it does on the host") {
  const test::SmallDevice small;
  for (const std::size_t max_rollback : std::initializer_list<std::size_t>{0, 7}) {
    CAPTURE(max_rollback);
    kvpolicy::CacheOptions options;
    options.max_rollback = max_rollback;
    kvpolicy::KvCache<E> host{own_plan(), options};
    DeviceCache device{own_plan(), {.max_rollback = max_rollback}};
    test::Random random{max_rollback + 1};
    for (std::size_t i = 0; i < 25; ++i) {
      TwoChunks chunk{random,
                      test::below(random, 4) == 0 ? 1 + test::below(random, 80) : 1 + test::below(random, 3)};
      chunk.step(host, device);
      if (test::below(random, 3) == 0) {
        const std::size_t to = host.tokens() - test::below(random, host.tokens() - host.commit_point() + 1);
        host.truncate(to);
        device.truncate(to);
      }
      for (std::size_t head = 0; head < shape.kv_heads; ++head) {
        CHECK(device.rows(0, head).positions == positions(host, head));
      }
    }
  }
}

TEST_CASE("a policy of one's own takes over a text, and goes to the host and back") {
  const test::SmallDevice small;
  kvpolicy::KvCache<E> host{DevicePlan{shape, Full::Config{}}};
  DeviceCache device{DevicePlan{shape, Full::Config{}}};
  test::Random random{5};
  for (const std::size_t tokens : std::initializer_list<std::size_t>{100, 1}) {
    TwoChunks chunk{random, tokens};
    chunk.step(host, device);
  }
  kvpolicy::KvCache<E> own = host.fork_as(own_plan());
  DeviceCache own_device = device.fork_as(own_plan());
  kvpolicy::KvCache<E> copy = kvpolicy::gpu::to_host(own_device);
  DeviceCache back = kvpolicy::gpu::to_device(copy);
  TwoChunks chunk{random, 3};
  chunk.step(own, own_device);
  chunk.step(copy, back);
  for (std::size_t head = 0; head < shape.kv_heads; ++head) {
    CHECK(own_device.rows(0, head).positions == positions(own, head));
    CHECK(back.rows(0, head).positions == positions(own, head));
  }
  CHECK(test::dump_device(back, false) == test::dump_device(own_device, false));
}

TEST_CASE("a policy that cannot be saved is refused on a device before the first byte") {
  const test::SmallDevice small;
  const DeviceCache device{own_plan()};
  const kvpolicy::KvCache<E> host{own_plan()};
  std::ostringstream out;
  const std::string said = test::thrown<kvpolicy::ConfigError>([&] { save(device, out); });
  CHECK(said == test::thrown<kvpolicy::ConfigError>([&] { save(host, out); }));
  CHECK(test::contains(said, "which cannot be saved"));
  CHECK(out.str().empty());
}
