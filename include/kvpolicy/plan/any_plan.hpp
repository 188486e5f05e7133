// SPDX-License-Identifier: Apache-2.0
//
// A plan over every policy and storage that ships, for files and tools that learn at run time what
// a head gets; scorers other than SnapKV's over dense rows alone. Programs that know are better
// served by a HeadPlan of just their policies.
#pragma once

#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/policy/chunk_retrieval_cache.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/h2o_scorer.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/key_norm_scorer.hpp>
#include <kvpolicy/policy/quantized_residual_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>
#include <kvpolicy/policy/tova_scorer.hpp>

namespace kvpolicy {

/// Quantised rows whose keys share scales within a row.
template <Element E>
using PerTokenStorage = ResidualStorage<E, Granularity::per_token>;
/// Quantised rows whose keys share scales along the text (KIVI).
template <Element E>
using PerChannelStorage = ResidualStorage<E, Granularity::per_channel>;

/// A plan whose heads can have any policy that ships.
template <Element E = float>
using AnyPlan =
    HeadPlan<FullCache<DenseStorage<E>>, QuantizedResidualCache<E, Granularity::per_token>,
             QuantizedResidualCache<E, Granularity::per_channel>, SinkRecentCache<DenseStorage<E>>,
             SinkRecentCache<PerTokenStorage<E>>, HeadBudgetCache<DenseStorage<E>>,
             HeadBudgetCache<PerTokenStorage<E>>, HeadBudgetCache<DenseStorage<E>, TovaScorer>,
             HeadBudgetCache<DenseStorage<E>, H2oScorer>,
             HeadBudgetCache<DenseStorage<E>, KeyNormScorer>, ChunkRetrievalCache<DenseStorage<E>>,
             ChunkRetrievalCache<PerTokenStorage<E>>, ChunkRetrievalCache<PerChannelStorage<E>>,
             ChunkRetrievalCache<DenseStorage<E>, MinMaxKey>,
             ChunkRetrievalCache<PerTokenStorage<E>, MinMaxKey>,
             ChunkRetrievalCache<PerChannelStorage<E>, MinMaxKey>>;

}  // namespace kvpolicy
