// SPDX-License-Identifier: Apache-2.0
//
// Sequences of random operations on device caches that between them have every kind of head.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include <kvpolicy/plan/shipped_policies.hpp>

#include "cuda/support/device_backend.hpp"
#include "cuda/support/elements.hpp"

namespace test {

struct DeviceCase {
  std::size_t group, kv_heads, layers, max_rollback, max_append, page_rows;
};

// Several sequences that between them have every head, rollback, page size and group.
template <kvpolicy::Element E, class Backend = DeviceBackend<E>>
void random_device_sequences(std::uint64_t seed, std::size_t operations) {
  const std::vector<DeviceCase> cases{{1, 7, 1, 0, 1, 64}, {2, 4, 1, 0, 40, 64},  {7, 3, 1, 1, 1, 128},
                                      {4, 4, 1, 5, 9, 64}, {2, 3, 2, 70, 70, 64}, {16, 2, 1, 3, 2, 64}};
  const std::vector<HeadSpec> all = device_heads();
  std::size_t next = seed;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const DeviceCase& one = cases[i];
    CAPTURE(i);
    const ModelShape shape{one.layers, one.group * one.kv_heads, one.kv_heads, 64};
    std::vector<HeadSpec> heads;
    for (; heads.size() < shape.kv_head_count(); ++next) {
      const HeadSpec& spec = all[next % all.size()];
      if (!spec.cannot_return() || one.max_rollback == 0) heads.push_back(spec);
    }
    Logits logits;
    if (i % 2 == 1) logits.scale = 0.2F;
    if (i % 3 == 1) logits.softcap = 5.0F;
    if (i % 3 == 2) {
      for (std::size_t h = 0; h < shape.q_heads; ++h)
        logits.sinks.push_back(0.1F * static_cast<float>(h) - 1.0F);
    }
    kvpolicy::gpu::CacheOptions options;
    options.max_rollback = one.max_rollback;
    options.max_append = one.max_append;
    options.page_rows = one.page_rows;
    options.latest_rows = i % 3 * 80;
    options.launches = i % 2 == 0 ? kvpolicy::gpu::Launches::joint : kvpolicy::gpu::Launches::separate;
    random_operations<E, E, Backend>(seed * 1000 + i, shape, heads, options, logits, operations);
  }
}

// Other sequences of operations, by hand: KVPOLICY_TEST_SEED=7 test_cuda
inline std::uint64_t more_seeds(std::uint64_t usual) {
  const char* seed = std::getenv("KVPOLICY_TEST_SEED");
  return seed == nullptr ? usual : std::strtoull(seed, nullptr, 10);
}

}  // namespace test
