// SPDX-License-Identifier: Apache-2.0
//
// A policy that hands on sums of attention, but cannot be given any.
// expect in the first error: a policy that adds up attention needs void accumulate(std::span<const float> sums,
// std::size_t group) noexcept
#include <span>

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
  std::span<const double> accumulated() const { return {}; }
  void inherit(std::span<const double>) {}
};

const auto settings = kvpolicy::HeadSettings<float>::of<Own>();
