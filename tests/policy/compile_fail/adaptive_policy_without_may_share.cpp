// SPDX-License-Identifier: Apache-2.0
//
// A policy whose heads share budgets, but which does not say with which heads.
// expect in the first error: a policy that shares a layer's budget needs static bool may_share(const Config&, const
// Config&)
#include <span>
#include <vector>

#include <kvpolicy/kvpolicy.hpp>

struct Own : kvpolicy::FullCache<kvpolicy::DenseStorage<float>> {
  using FullCache::FullCache;
  static std::size_t observed_queries(const Config&) { return 0; }
  std::size_t observed_queries() const { return 0; }
  static bool compresses_by_itself(const Config&) { return false; }
  bool wants_compress() const { return false; }
  bool is_compressible(std::size_t) const { return false; }
  void prepare_compress(std::span<const float>, std::size_t, std::size_t) {}
  void finish_compress() noexcept {}
  void abandon_compress() noexcept {}
  bool is_adaptive_in_layer() const { return false; }
  static bool is_adaptive_in_layer(const Config&) { return false; }
  kvpolicy::SharingHead compete(std::span<const float>, std::size_t, std::size_t) const { return {}; }
  void prepare_survivors(std::vector<std::size_t>) {}
};

const auto settings = kvpolicy::HeadSettings<float>::of<Own>();
