// SPDX-License-Identifier: Apache-2.0
//
// Attention is added up for a compression.
// expect in the first error: a policy that compresses, adds up attention or shares a budget needs static std::size_t
// observed_queries(const Config&)
#include <span>

#include <kvpolicy/kvpolicy.hpp>

struct Own : kvpolicy::FullCache<kvpolicy::DenseStorage<float>> {
  using FullCache::FullCache;
  void accumulate(std::span<const float>, std::size_t) noexcept {}
  std::span<const double> accumulated() const { return {}; }
  void inherit(std::span<const double>) {}
};

const auto settings = kvpolicy::HeadSettings<float>::of<Own>();
