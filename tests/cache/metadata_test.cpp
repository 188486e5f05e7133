// SPDX-License-Identifier: Apache-2.0
//
// The bytes of a cache besides its rows: at most 512 bytes per head in a new cache, and a few bytes per page
// in page tables. The cache's own count must agree with the program's allocations.
#include <doctest/doctest.h>

#include <cstddef>
#include <memory>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/policy/chunk_retrieval_cache.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/h2o_scorer.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/quantized_residual_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>

#include "cache/dump.hpp"
#include "support/memory.hpp"
#include "support/news.hpp"

using namespace kvpolicy;

namespace {

using E = bfloat16;
using Dense = DenseStorage<E>;
using PerToken = PerTokenStorage<E>;
using PerChannel = PerChannelStorage<E>;

constexpr ModelShape llama_3_8b{.layers = 32, .q_heads = 32, .kv_heads = 8, .head_dim = 128};
constexpr std::size_t heads = 256;

// Bookkeeping of a new cache in bytes, for each head.
template <class Policy>
std::size_t bytes_a_head(const typename Policy::Config& config, CacheOptions options = {}) {
  test::CountingResource memory;  // for tails and queries, and for pages
  options.memory = &memory;
  const HeadPlan<E> plan{llama_3_8b, config};
  const std::size_t before = test::live_new_bytes;
  const auto cache = std::make_unique<KvCache<E>>(plan, options);
  // The resource's own list of allocations belongs to the test.
  const std::size_t resource = memory.live_blocks() * 8 * sizeof(void*);
  const std::size_t taken = test::live_new_bytes - before - resource;
  CHECK(cache->overhead_bytes() >= taken * 98 / 100);
  CHECK(cache->overhead_bytes() <= taken * 102 / 100);
  CHECK(cache->overhead_bytes() <= 512 * heads);
  for (std::size_t layer = 0; layer < 32; layer += 31) CHECK(cache->head(layer, 7).overhead_bytes() <= 512);
  return taken / heads;
}

}  // namespace

TEST_CASE("metadata: a new cache takes at most 512 bytes per head") {
  CHECK(bytes_a_head<FullCache<Dense>>({}) <= 512);
  CHECK(bytes_a_head<QuantizedResidualCache<E, Granularity::per_token>>({}) <= 512);
  CHECK(bytes_a_head<QuantizedResidualCache<E, Granularity::per_channel>>({}) <= 512);
  CHECK(bytes_a_head<SinkRecentCache<Dense>>({}) <= 512);
  CHECK(bytes_a_head<SinkRecentCache<Dense>>({.rotary_in_cache = RotaryConfig{}}) <= 512);
  CHECK(bytes_a_head<SinkRecentCache<PerToken>>({.rotary_in_cache = RotaryConfig{}}) <= 512);
  CHECK(bytes_a_head<HeadBudgetCache<Dense>>({}) <= 512);
  CHECK(bytes_a_head<HeadBudgetCache<PerToken>>({}) <= 512);
  CHECK(bytes_a_head<HeadBudgetCache<PerToken, H2oScorer>>({}) <= 512);
  CHECK(bytes_a_head<ChunkRetrievalCache<Dense>>({}) <= 512);
  CHECK(bytes_a_head<ChunkRetrievalCache<PerToken, MinMaxKey>>({}) <= 512);
  CHECK(bytes_a_head<ChunkRetrievalCache<PerChannel, MinMaxKey>>({.chunk = 32}) <= 512);
  CHECK(bytes_a_head<FullCache<Dense>>({}, {.max_rollback = 16, .kept_queries = 32}) <= 512);
}

// A page costs entries in tables and no allocation of its own: 12 bytes in the page table of its plane, up to
// twice that after the table has grown, and its share of a slab.
TEST_CASE("metadata: bytes per page") {
  test::CountingResource memory;
  PagePool pool{&memory};
  const ModelShape shape{.layers = 2, .q_heads = 4, .kv_heads = 4, .head_dim = 64};
  KvCache<E> cache{HeadPlan{shape, FullCache<Dense>::Config{}},
                   {.max_append = 1, .page_rows = 16, .memory = &memory, .pool = &pool}};
  const std::size_t empty = cache.overhead_bytes();
  test::Random random{3};
  test::feed(cache, random, {16 * 100});
  const std::size_t pages = 2 * 8 * 100;
  CHECK(cache.bytes() == pages * 16 * 64 * sizeof(E) + 2 * 4 * 2 * 64 * sizeof(E));
  CHECK(cache.overhead_bytes() - empty <= 2 * 12 * pages + 16 * 16);
  CHECK(pool.overhead_bytes() <= 32 * pages + 4096);
}
