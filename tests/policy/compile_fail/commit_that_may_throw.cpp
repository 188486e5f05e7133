// SPDX-License-Identifier: Apache-2.0
//
// A policy whose commit may throw: it is called when the call's attention is done, and nothing can be undone then.
// expect: policy.commit(rows)
#include <kvpolicy/kvpolicy.hpp>

struct Own : kvpolicy::FullCache<kvpolicy::DenseStorage<float>> {
  using FullCache::FullCache;
  void commit(const kvpolicy::Segment& rows) { FullCache::commit(rows); }
};

const auto settings = kvpolicy::HeadSettings<float>::of<Own>();
