// SPDX-License-Identifier: Apache-2.0
//
// Every policy over every storage that ships. This is the only header that instantiates all of them; a
// program that names the policies it uses does not need it.
#pragma once

#include <kvpolicy/core/separate.hpp>
#include <kvpolicy/plan/policy_registry.hpp>
#include <kvpolicy/policy/chunk_retrieval_cache.hpp>
#include <kvpolicy/policy/expected_attention_scorer.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/h2o_scorer.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/instances.hpp>
#include <kvpolicy/policy/key_diff_scorer.hpp>
#include <kvpolicy/policy/key_norm_scorer.hpp>
#include <kvpolicy/policy/kvzip_scorer.hpp>
#include <kvpolicy/policy/quantized_residual_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>
#include <kvpolicy/policy/tova_scorer.hpp>

/// The shipped policies over rows of type `E` as one list: DO(E, policy) for each. Scorers other than
/// SnapKV's are only combined with dense rows.
#define KVPOLICY_FOR_SHIPPED_POLICIES(DO, E)                       \
  DO(E, FullCache<DenseStorage<E>>)                                \
  DO(E, QuantizedResidualCache<E>)                                 \
  DO(E, QuantizedResidualCache<E, Granularity::per_channel>)       \
  DO(E, SinkRecentCache<DenseStorage<E>>)                          \
  DO(E, SinkRecentCache<PerTokenStorage<E>>)                       \
  DO(E, HeadBudgetCache<DenseStorage<E>>)                          \
  DO(E, HeadBudgetCache<PerTokenStorage<E>>)                       \
  DO(E, HeadBudgetCache<DenseStorage<E>, TovaScorer>)              \
  DO(E, HeadBudgetCache<DenseStorage<E>, H2oScorer>)               \
  DO(E, HeadBudgetCache<DenseStorage<E>, KeyNormScorer>)           \
  DO(E, HeadBudgetCache<DenseStorage<E>, KeyDiffScorer>)           \
  DO(E, HeadBudgetCache<DenseStorage<E>, KvZipScorer>)             \
  DO(E, HeadBudgetCache<DenseStorage<E>, ExpectedAttentionScorer>) \
  DO(E, ChunkRetrievalCache<DenseStorage<E>>)                      \
  DO(E, ChunkRetrievalCache<PerTokenStorage<E>>)                   \
  DO(E, ChunkRetrievalCache<PerChannelStorage<E>>)                 \
  DO(E, ChunkRetrievalCache<DenseStorage<E>, MinMaxKey>)           \
  DO(E, ChunkRetrievalCache<PerTokenStorage<E>, MinMaxKey>)        \
  DO(E, ChunkRetrievalCache<PerChannelStorage<E>, MinMaxKey>)

namespace kvpolicy {

/// Adds one policy to the registry `policies`; undefined again below.
#define KVPOLICY_ADD_POLICY(E, ...) policies.template add<__VA_ARGS__>();

/// A registry of the shipped policies.
template <Element E = float>
[[nodiscard]] PolicyRegistry<E> shipped_policies() {
  PolicyRegistry<E> policies;
  KVPOLICY_FOR_SHIPPED_POLICIES(KVPOLICY_ADD_POLICY, E)
  return policies;
}

#undef KVPOLICY_ADD_POLICY

KVPOLICY_DECLARE_POLICY(HeadBudgetCache, DenseStorage, TovaScorer)
KVPOLICY_DECLARE_POLICY(HeadBudgetCache, DenseStorage, H2oScorer)
KVPOLICY_DECLARE_POLICY(HeadBudgetCache, DenseStorage, KeyNormScorer)
KVPOLICY_DECLARE_POLICY(HeadBudgetCache, DenseStorage, KeyDiffScorer)
KVPOLICY_DECLARE_POLICY(HeadBudgetCache, DenseStorage, KvZipScorer)
KVPOLICY_DECLARE_POLICY(HeadBudgetCache, DenseStorage, ExpectedAttentionScorer)
/// The registry, whose policies are instances of their own.
#define KVPOLICY_REGISTRY_INSTANCE(SPEC, E) SPEC PolicyRegistry<E> shipped_policies<E>();
KVPOLICY_DECLARE_INSTANCES(KVPOLICY_REGISTRY_INSTANCE)

}  // namespace kvpolicy
