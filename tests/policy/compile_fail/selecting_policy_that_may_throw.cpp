// SPDX-License-Identifier: Apache-2.0
//
// A rollback must not fail.
// expect in the first error: a policy that selects needs void undo_refresh(std::size_t tokens) noexcept
#include <span>

#include <kvpolicy/kvpolicy.hpp>

struct Own : kvpolicy::FullCache<kvpolicy::DenseStorage<float>> {
  using FullCache::FullCache;
  bool selection_is_stale() const { return false; }
  void prepare_refresh(std::span<const float>, kvpolicy::ChunkScorer&, std::size_t) {}
  void finish_refresh() noexcept {}
  void abandon_refresh() noexcept {}
  void undo_refresh(std::size_t) {}
  void forget_selection() noexcept {}
};

const auto settings = kvpolicy::HeadSettings<float>::of<Own>();
