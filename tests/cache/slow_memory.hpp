// SPDX-License-Identifier: Apache-2.0
//
// Two memories, of which one is slow, for Sequence and for tests of a cache's own.
#pragma once

#include <cstddef>
#include <vector>

#include "cache/sequence.hpp"
#include "support/memory.hpp"

namespace test {

/// Fast memory, with slow memory beside it.
struct TwoMemories : CountingResource {
  CountingResource slow;

  [[nodiscard]] std::size_t live_bytes() const {
    return CountingResource::live_bytes() + slow.live_bytes();
  }
  [[nodiscard]] std::size_t live_blocks() const {
    return CountingResource::live_blocks() + slow.live_blocks();
  }
  [[nodiscard]] std::size_t faults() const { return CountingResource::faults() + slow.faults(); }
};

/// A cache with slow memory: it does what the one without does.
template <kvpolicy::Element E>
struct SlowBackend : HostBackend<E> {
  using Base = HostBackend<E>;
  using Memory = TwoMemories;
};

}  // namespace test
