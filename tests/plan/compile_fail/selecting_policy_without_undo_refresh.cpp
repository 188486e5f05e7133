// SPDX-License-Identifier: Apache-2.0
//
// A policy that selects rows, but cannot undo a selection when its token is rolled back.
// expect: a policy that selects (it has selection_is_stale) needs void undo_refresh(
#include <kvpolicy/kvpolicy.hpp>

struct Own : kvpolicy::FullCache<kvpolicy::DenseStorage<float>> {
  using FullCache::FullCache;
  bool selection_is_stale() const { return false; }
  void prepare_refresh(std::span<const float>, kvpolicy::ChunkScorer&, std::size_t) {}
  void finish_refresh() noexcept {}
  void abandon_refresh() noexcept {}
  void forget_selection() noexcept {}
};

const auto settings = kvpolicy::HeadSettings<float>::of<Own>();
