// SPDX-License-Identifier: Apache-2.0
//
// Every shipped policy in a list of types, for tests that iterate over all of them.
#pragma once

#include <type_traits>

#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>

namespace test {

template <kvpolicy::Element E>
using ShippedPlan = kvpolicy::HeadPlan<
    kvpolicy::FullCache<kvpolicy::DenseStorage<E>>,
    kvpolicy::QuantizedResidualCache<E, kvpolicy::Granularity::per_token>,
    kvpolicy::QuantizedResidualCache<E, kvpolicy::Granularity::per_channel>,
    kvpolicy::SinkRecentCache<kvpolicy::DenseStorage<E>>,
    kvpolicy::SinkRecentCache<kvpolicy::PerTokenStorage<E>>,
    kvpolicy::HeadBudgetCache<kvpolicy::DenseStorage<E>>,
    kvpolicy::HeadBudgetCache<kvpolicy::PerTokenStorage<E>>,
    kvpolicy::HeadBudgetCache<kvpolicy::DenseStorage<E>, kvpolicy::TovaScorer>,
    kvpolicy::HeadBudgetCache<kvpolicy::DenseStorage<E>, kvpolicy::H2oScorer>,
    kvpolicy::HeadBudgetCache<kvpolicy::DenseStorage<E>, kvpolicy::KeyNormScorer>,
    kvpolicy::HeadBudgetCache<kvpolicy::DenseStorage<E>, kvpolicy::KeyDiffScorer>,
    kvpolicy::HeadBudgetCache<kvpolicy::DenseStorage<E>, kvpolicy::KvZipScorer>,
    kvpolicy::HeadBudgetCache<kvpolicy::DenseStorage<E>, kvpolicy::ExpectedAttentionScorer>,
    kvpolicy::ChunkRetrievalCache<kvpolicy::DenseStorage<E>>,
    kvpolicy::ChunkRetrievalCache<kvpolicy::PerTokenStorage<E>>,
    kvpolicy::ChunkRetrievalCache<kvpolicy::PerChannelStorage<E>>,
    kvpolicy::ChunkRetrievalCache<kvpolicy::DenseStorage<E>, kvpolicy::MinMaxKey>,
    kvpolicy::ChunkRetrievalCache<kvpolicy::PerTokenStorage<E>, kvpolicy::MinMaxKey>,
    kvpolicy::ChunkRetrievalCache<kvpolicy::PerChannelStorage<E>, kvpolicy::MinMaxKey>>;

/// Calls visit.template operator()<P>() for each policy P.
template <kvpolicy::Element E, class Visit>
constexpr void for_each_shipped(Visit visit) {
  [&]<class... P>(std::type_identity<kvpolicy::HeadPlan<P...>>) {
    (visit.template operator()<P>(), ...);
  }(std::type_identity<ShippedPlan<E>>{});
}

}  // namespace test
