// SPDX-License-Identifier: Apache-2.0
//
// Fast memory and slow memory, for Sequence and for tests with caches of their own.
#pragma once

#include <cstddef>
#include <vector>

#include "cache/sequence.hpp"
#include "support/memory.hpp"

namespace test {

/// Fast memory with a slow memory beside it.
struct TwoMemories : CountingResource {
  CountingResource slow;

  [[nodiscard]] std::size_t live_bytes() const { return CountingResource::live_bytes() + slow.live_bytes(); }
  [[nodiscard]] std::size_t live_blocks() const {
    return CountingResource::live_blocks() + slow.live_blocks();
  }
  [[nodiscard]] std::size_t faults() const { return CountingResource::faults() + slow.faults(); }
};

/// A cache with slow memory, which must behave like one without.
template <kvpolicy::Element E>
struct SlowBackend : HostBackend<E> {
  using Base = HostBackend<E>;
  using Memory = TwoMemories;
};

}  // namespace test
