// SPDX-License-Identifier: Apache-2.0
//
// A member of a role counts by its name, also where nobody could call it.
// expect in the first error: a policy that selects needs bool selection_is_stale() const
#include <vector>

#include <kvpolicy/kvpolicy.hpp>

struct Own : kvpolicy::FullCache<kvpolicy::DenseStorage<float>> {
  using FullCache::FullCache;
  void prepare_refresh(std::vector<float>&) {}
};

const auto settings = kvpolicy::HeadSettings<float>::of<Own>();
