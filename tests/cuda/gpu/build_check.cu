// SPDX-License-Identifier: Apache-2.0
//
// Everything a cache can launch, for half and one head dimension: compiled where nvcc is found,
// also where nothing can run it.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <kvpolicy/cuda.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>

using Plan = kvpolicy::HeadPlan<kvpolicy::float16>;
using Cache = kvpolicy::gpu::KvCache<kvpolicy::float16>;

kvpolicy::gpu::CachedRows use(const Plan& plan, const __half* q, const __half* k, __half* out,
                              cudaStream_t stream);

kvpolicy::gpu::CachedRows use(const Plan& plan, const __half* q, const __half* k, __half* out,
                              cudaStream_t stream) {
  using kvpolicy::gpu::view;
  const kvpolicy::ModelShape& shape = plan.shape();
  kvpolicy::gpu::PinnedMemory pinned;
  Cache cache{plan, {.max_rollback = 8, .slow_memory = &pinned}, stream};
  cache.reserve(1024, stream);
  const auto queries = view(q, 1, shape.q_heads, shape.head_dim);
  const auto rows = view(k, 1, shape.kv_heads, shape.head_dim);
  const auto result = view(out, 1, shape.q_heads, shape.head_dim);
  cache.step(0, queries, rows, rows, result, {.read = kvpolicy::Read::selected}, stream);
  cache.append(0, rows, rows, stream);
  cache.attend(0, queries, result, {}, stream);
  cache.truncate(1, stream);
  kvpolicy::TokenTree tree;
  tree.add(kvpolicy::TokenTree::text);
  cache.step(0, queries, rows, rows, result, {.tree = &tree}, stream);
  cache.accept(std::vector<std::size_t>{0}, stream);
  cache.commit(stream);
  cache.compress(stream);
  Cache other = cache.fork(stream);
  kvpolicy::gpu::Batch<kvpolicy::float16> batch{cache.engine(), 2};
  const std::vector<kvpolicy::BatchSequence<Cache>> sequences{{&other, {}}};
  batch.step(0, sequences, std::vector<std::int32_t>{0, 1}, queries, rows, rows, result, stream);
  kvpolicy::gpu::SeatedBatch<kvpolicy::float16> seated{cache.engine(), 1};
  seated.seat(0, other, kvpolicy::Read::selected, stream);
  seated.replayed();
  seated.step(0, queries, rows, rows, result, {}, stream);
  return other.rows(0, 0);
}
