// SPDX-License-Identifier: Apache-2.0
//
// Random operations on caches that are replaced by copies of themselves on the way: by a fork under the same
// plan, through a file, through a file that a host cache opened and wrote again. No model notices.
#include <doctest/doctest.h>

#include <sstream>
#include <utility>
#include <vector>

#include <kvpolicy/cuda/saved_cache.hpp>

#include "cuda/support/device_cache.hpp"
#include "cuda/support/random_device.hpp"

namespace {

template <kvpolicy::Element E, class Base>
struct CopiedBackend : Base {
  using Cache = typename Base::Cache;

  static void replace(test::Random& random, Cache& cache) {
    const auto& plan = cache.plan();
    if (test::below(random, 3) == 0) {
      cache = Cache{cache.fork_as(plan)};
      return;
    }
    std::stringstream file;
    save(cache, file);
    if (test::below(random, 2) == 0) {
      kvpolicy::CacheOptions options;
      options.max_rollback = cache.options().max_rollback;
      options.max_append = cache.options().max_append;
      options.page_rows = 128;  // neither is in the file
      kvpolicy::KvCache<E> host{plan, options};
      load(host, file);
      const std::string bytes = file.str();
      file = {};
      save(host, file);
      CHECK(file.str() == bytes);
    }
    load(cache, file);
  }
};

// A host cache that passes through a device now and then.
template <kvpolicy::Element E>
struct ThroughDevice : test::HostBackend<E> {
  using Cache = typename test::HostBackend<E>::Cache;

  static void replace(test::Random&, Cache& cache) {
    kvpolicy::gpu::CacheOptions options;
    options.max_rollback = cache.options().max_rollback;
    options.max_append = cache.options().max_append;
    std::stringstream file;
    save(kvpolicy::gpu::to_device(cache, options), file);
    load(cache, file);
  }
};

}  // namespace

TEST_CASE("random operations on host caches that go through a device") {
  using E = kvpolicy::float16;
  const test::SmallDevice small;
  std::vector<test::HeadSpec> heads;
  for (test::HeadSpec head : test::device_heads()) {
    // What a compression has quantised of the latest rows comes back as numbers.
    if (head.compress_every > 0 || (head.kind == test::Kind::budget && head.bits > 0)) continue;
    // A chunk that is not full is summarised from its keys as they are by then.
    if (head.kind == test::Kind::retrieval && head.bits > 0 && head.residual < head.chunk) continue;
    head.flush_rows = 1;
    head.returns_rows = false;
    heads.push_back(head);
  }
  std::uint64_t seed = test::more_seeds(5);
  for (const std::size_t max_rollback : std::vector<std::size_t>{0, 5, 70}) {
    kvpolicy::CacheOptions options;
    options.max_rollback = max_rollback;
    options.max_append = 1 + max_rollback;
    options.page_rows = 64;
    std::vector<test::HeadSpec> returning = heads;
    if (max_rollback > 0) std::erase_if(returning, &test::HeadSpec::cannot_return);
    const test::ModelShape shape{1, 2 * returning.size(), returning.size(), 64};
    test::random_operations<E, E, ThroughDevice<E>>(++seed, shape, returning, options, {}, 25);
  }
}

TEST_CASE("random operations on device caches that go through forks and files") {
  using E = kvpolicy::float16;
  test::random_device_sequences<E, CopiedBackend<E, test::DeviceBackend<E>>>(test::more_seeds(3), 25);
}

TEST_CASE("random operations on device caches in slow memory that go through forks and files") {
  using E = test::OtherElement;
  test::random_device_sequences<E, CopiedBackend<E, test::SlowDeviceBackend<E>>>(test::more_seeds(4), 25);
}
