// SPDX-License-Identifier: Apache-2.0
//
// Reads memory, so that the second-level cache holds nothing that it would have to write back while something is timed.
#pragma once

#include <cstddef>
#include <cstdint>

#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::bench {

struct ReadParams {
  const gpu::Words4* from = nullptr;
  long long count = 0;          ///< of words of 16 bytes
  std::uint32_t never = 0;      ///< what no word holds, so that
  std::uint32_t* to = nullptr;  ///< this is not written, and reads are not left out
};

inline constexpr int read_threads = 256;

/// Any grid.
template <int Threads = read_threads>
KVPOLICY_KERNEL(Threads, 4)
read_kernel(const KVPOLICY_GRID_CONSTANT ReadParams p) {
  std::uint32_t seen = 0;
  for (long long i = gpu::block_x() * Threads + gpu::thread_index(); i < p.count;
       i += gpu::grid_x() * Threads) {
    seen |= gpu::load_shared_by_blocks(p.from + i).word[0] == p.never ? 1U : 0U;
  }
  if (seen != 0) *p.to = seen;
}

}  // namespace kvpolicy::bench
