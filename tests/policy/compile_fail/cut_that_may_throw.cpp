// SPDX-License-Identifier: Apache-2.0
//
// A prefix cache goes back in a fork that it has made, which must not fail.
// expect in the first error: a policy's bool cut(std::size_t row) must be noexcept
#include <kvpolicy/kvpolicy.hpp>

struct Own : kvpolicy::FullCache<kvpolicy::DenseStorage<float>> {
  using FullCache::FullCache;
  bool cut(std::size_t) { return false; }
};

const auto settings = kvpolicy::HeadSettings<float>::of<Own>();
