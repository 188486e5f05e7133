// SPDX-License-Identifier: Apache-2.0
//
// A policy that chooses rows, but cannot take a choice back when the text is cut.
// expect: kvpolicy: a policy that selects (it has selection_is_stale) needs void undo_refresh(std::size_t tokens) noexcept
#include <cstddef>

#include <kvpolicy/policy/chunk_retrieval_cache.hpp>
#include <kvpolicy/policy/head_settings.hpp>

using Chunks = kvpolicy::ChunkRetrievalCache<kvpolicy::DenseStorage<float>>;

struct Own : Chunks {
  using Chunks::Chunks;
  void undo_refresh(std::size_t) noexcept = delete;
};

const auto settings = kvpolicy::HeadSettings<float>::of<Own>();
