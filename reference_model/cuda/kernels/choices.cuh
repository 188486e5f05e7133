// SPDX-License-Identifier: Apache-2.0
//
// Where the kernels that choose a token put it, so that a captured step can feed the next one.
#pragma once

#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu::llama {

inline constexpr int no_token = -1;

struct Choices {
  int* token = nullptr;   ///< the latest choice
  int* chosen = nullptr;  ///< [capacity]: all choices so far
  int* count = nullptr;   ///< number of choices so far
  int capacity = 0;

  /// Called by one thread.
  KVPOLICY_DEVICE void record(int choice) const {
    *token = choice;
    if (*count < capacity) chosen[*count] = choice;
    ++*count;
  }
};

}  // namespace kvpolicy::gpu::llama
