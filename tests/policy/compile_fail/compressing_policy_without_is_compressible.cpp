// SPDX-License-Identifier: Apache-2.0
//
// A policy that compresses, but does not say whether rows would be dropped.
// expect in the first error: a policy that compresses, adds up attention or shares a budget needs bool
// is_compressible(std::size_t more) const
#include <span>

#include <kvpolicy/kvpolicy.hpp>

struct Own : kvpolicy::FullCache<kvpolicy::DenseStorage<float>> {
  using FullCache::FullCache;
  static std::size_t observed_queries(const Config&) { return 0; }
  std::size_t observed_queries() const { return 0; }
  static bool compresses_by_itself(const Config&) { return false; }
  bool wants_compress() const { return false; }
  void prepare_compress(std::span<const float>, std::size_t, std::size_t) {}
  void finish_compress() noexcept {}
  void abandon_compress() noexcept {}
};

const auto settings = kvpolicy::HeadSettings<float>::of<Own>();
