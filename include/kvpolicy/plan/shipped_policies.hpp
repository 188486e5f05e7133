// SPDX-License-Identifier: Apache-2.0
//
// Every policy over every storage that ships. This is the one header that instantiates all of them:
// a program that names the policies it uses does without.
#pragma once

#include <kvpolicy/plan/policy_registry.hpp>
#include <kvpolicy/policy/chunk_retrieval_cache.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/h2o_scorer.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/key_norm_scorer.hpp>
#include <kvpolicy/policy/quantized_residual_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>
#include <kvpolicy/policy/tova_scorer.hpp>

namespace kvpolicy {

/// The shipped policies; scorers other than SnapKV's over dense rows alone.
template <Element E = float>
[[nodiscard]] PolicyRegistry<E> shipped_policies() {
  using Dense = DenseStorage<E>;
  using PerToken = PerTokenStorage<E>;
  using PerChannel = PerChannelStorage<E>;
  PolicyRegistry<E> policies;
  policies.template add<FullCache<Dense>>();
  policies.template add<FullCache<PerToken>>();
  policies.template add<FullCache<PerChannel>>();
  policies.template add<SinkRecentCache<Dense>>();
  policies.template add<SinkRecentCache<PerToken>>();
  policies.template add<HeadBudgetCache<Dense>>();
  policies.template add<HeadBudgetCache<PerToken>>();
  policies.template add<HeadBudgetCache<Dense, TovaScorer>>();
  policies.template add<HeadBudgetCache<Dense, H2oScorer>>();
  policies.template add<HeadBudgetCache<Dense, KeyNormScorer>>();
  policies.template add<ChunkRetrievalCache<Dense>>();
  policies.template add<ChunkRetrievalCache<PerToken>>();
  policies.template add<ChunkRetrievalCache<PerChannel>>();
  policies.template add<ChunkRetrievalCache<Dense, MinMaxKey>>();
  policies.template add<ChunkRetrievalCache<PerToken, MinMaxKey>>();
  policies.template add<ChunkRetrievalCache<PerChannel, MinMaxKey>>();
  return policies;
}

}  // namespace kvpolicy
