// SPDX-License-Identifier: Apache-2.0
//
// The state of a grid that runs: blocks, warps, threads and what each of them waits for. scheduler.hpp
// decides the order in which they run.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "fiber.hpp"
#include "shared_memory.hpp"
#include "warpgroup_state.hpp"

namespace kvpolicy::gpu::simt {

struct Block;
struct Grid;

/// The operations that lanes of a warp perform together.
enum class Collective : std::uint8_t {
  sync_warp,
  shuffle,
  shuffle_xor,
  shuffle_up,
  ballot,
  any,
  load_matrix,
  load_matrix_transposed,
  transpose_matrix,
  multiply_add,
  wgmma,
  wgmma_fence,
  wgmma_commit,
  wgmma_wait,
  set_registers
};
inline const char* name_of(Collective kind) {
  constexpr std::array<const char*, 15> names = {"sync_warp",
                                                 "shuffle",
                                                 "shuffle_xor",
                                                 "shuffle_up",
                                                 "ballot",
                                                 "any",
                                                 "load_matrix_x4",
                                                 "load_matrix_x4_transposed",
                                                 "transpose_matrix",
                                                 "multiply_add",
                                                 "wgmma",
                                                 "wgmma_fence",
                                                 "wgmma_commit",
                                                 "wgmma_wait",
                                                 "lower/raise_register_limit"};
  return names[static_cast<std::size_t>(kind)];
}

/// Memory in which the lanes of a warp store operands for each other. There are two, used alternately: a
/// lane that is ahead writes to the other one while slower lanes still read.
struct Exchange {
  struct alignas(16) Slot {
    std::byte bytes[16];
  };
  Slot slot[warp_lanes];
  float a[16][16];  // for multiply_add
  float b[16][8];
};

struct Warp {
  std::uint32_t members = 0;  // masks of lanes
  std::uint32_t ready = 0;
  std::uint32_t arrived = 0;
  std::uint32_t at_barrier = 0;
  std::uint32_t asleep = 0;  // at another kind of barrier, or until there are registers
  std::uint32_t exited = 0;
  unsigned generation = 0;                  // number of finished collectives
  Collective kind = Collective::sync_warp;  // what the lanes that have arrived perform
  Exchange exchange[2];
};

/// A copy that has not arrived yet: cp_async_16.
struct AsyncCopy {
  void* to;
  const void* from;  // null: zeros
  unsigned group;
};

struct Thread {
  Fiber fiber;
  Block* block = nullptr;
  Warp* warp = nullptr;
  int index = 0;
  int lane = 0;
  bool has_waited = false;  // for the kernel before
  unsigned copy_group = 0;  // number of the open group
  std::vector<AsyncCopy> copies;
  WarpgroupThread warpgroup;
};

/// The fiber that runs among all fibers of this OS thread.
inline constinit thread_local Thread* self = nullptr;

/// A block that runs; the object is used again for the next block.
struct Block {
  Grid* grid = nullptr;
  int x = 0;
  int y = 0;
  int live = 0;     // threads that have not ended
  int waiting = 0;  // of these, at the barrier
  bool running = false;
  int last_warp = -1;      // runs only if no other thread of the grid can
  bool one_ahead = false;  // the first runnable warp of `order` always runs next
  std::vector<int> order;  // warps in their current order
  SharedMemory shared;
  WarpgroupBlock warpgroups;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<std::unique_ptr<Thread>> threads;
};

/// A launch: every thread calls fn(params).
struct Launch {
  void (*call)(const void* kernel, const void* params) = nullptr;
  const void* kernel = nullptr;
  const void* params = nullptr;
  int grid_x = 1;
  int grid_y = 1;
  int threads = warp_lanes;
  std::size_t shared_bytes = 0;
  bool early = false;  // while the kernel before it ends
  /// What the kernel before it has left to do when it begins; null: nothing.
  const std::function<void()>* before = nullptr;
};

/// xorshift64*: small, fast and the same on every machine.
class Random {
 public:
  void seed(std::uint64_t value) {
    state_ = value * 0x9e3779b97f4a7c15ULL + 0x2545f4914f6cdd1dULL;
    if (state_ == 0) state_ = 1;
    for (int i = 0; i < 8; ++i) next();
  }
  std::uint32_t next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return static_cast<std::uint32_t>((state_ * 0x2545f4914f6cdd1dULL) >> 32);
  }
  int below(int n) { return static_cast<int>((std::uint64_t{next()} * static_cast<std::uint64_t>(n)) >> 32); }
  void shuffle(std::vector<int>& items) {
    for (int i = static_cast<int>(items.size()) - 1; i > 0; --i) {
      std::swap(items[static_cast<std::size_t>(i)], items[static_cast<std::size_t>(below(i + 1))]);
    }
  }

 private:
  std::uint64_t state_ = 1;
};

}  // namespace kvpolicy::gpu::simt
