// SPDX-License-Identifier: Apache-2.0
//
// One member of a role is enough for a policy to need all of them.
// expect in the first error: a policy that compresses, adds up attention or shares a budget needs static std::size_t
// observed_queries(const Config&)
#include <kvpolicy/kvpolicy.hpp>

struct Own : kvpolicy::FullCache<kvpolicy::DenseStorage<float>> {
  using FullCache::FullCache;
  void finish_compress() noexcept {}
};

const auto settings = kvpolicy::HeadSettings<float>::of<Own>();
