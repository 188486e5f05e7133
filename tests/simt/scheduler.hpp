// SPDX-License-Identifier: Apache-2.0
//
// Runs a grid: threads are fibers that run in an order drawn from a seed.
//
// A thread runs until it waits for others (barrier, warp collective) or ends; then the next thread is drawn.
// In some stretches between barriers one warp runs ahead of all others as far as it can, in others each step
// is drawn among all threads. Now and then one warp stands still while all others go as far as they can.
// Lanes of a warp run in any order, and up to three blocks of the grid run at once. So every order that a
// missing barrier allows occurs under some seed. A deadlock cannot happen: if no thread can continue, the
// launch throws Divergence.
//
// A kernel that is launched early begins before the one before it does anything at all (Launch::before), and
// goes on when none of its threads can but by waiting for that one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "block.hpp"
#include "fault.hpp"

namespace kvpolicy::gpu::simt {

/// The emulation of one kernel at a time; fibers and memory are kept from launch to launch.
struct Grid {
  static constexpr int most_resident = 3;

  Launch launch;
  bool running = false;
  std::uint64_t seed = 1;
  std::uint64_t launches = 0;  // since the seed was set
  Random random;
  std::vector<int> blocks;  // numbers of the blocks that have not begun, the next one last
  std::array<Block, most_resident> resident;
  int resident_count = 0;
  int current = 0;               // resident block that runs now
  int stretch = 0;               // steps before another block may run
  std::vector<Thread*> waiting;  // for the kernel before
  Fiber host;
  std::exception_ptr fault;
  std::unique_ptr<Grid> other;  // for the kernel before, while this one waits

  Grid();

  void run(const Launch& what);

  /// Stops the running thread and continues one that is drawn. Returns when this thread is drawn again.
  void switch_away();
  /// Lets another thread run although the running one could continue.
  void step_aside();
  void arrive_at_barrier();
  /// Stops the running thread until another one wakes it.
  void sleep();
  static void wake(Thread& thread);
  /// Another order of the block's warps.
  void draw_order(Block& block);
  /// At times one warp stands still for as long as another thread can go on.
  void draw_last_warp(Block& block);
  void wait_for_kernel_before();
  [[nodiscard]] std::string place_of(const Thread& thread) const;

 private:
  void run_threads();
  [[nodiscard]] bool is_over() const;
  void end_kernel_before();
  void begin_block(Block& block);
  void end_block(Block& block);
  void release_barrier(Block& block);
  void turn_to_some_block();
  void thread_ended();
  Thread* draw();
  Thread* draw_from(Block& block, bool last_warps);
  [[nodiscard]] std::string who_waits() const;
  static void thread_entry(void* argument);
};

/// That of this OS thread, which counts the launches of all.
Grid& grid();
/// One that runs no kernel: the same, or another one while a kernel waits for the one before it.
Grid& idle_grid();
/// Sets the seed of the following orders (default: KVPOLICY_SIMT_SEED or 1).
void seed(std::uint64_t value);

/// Throws E with the error and the thread.
template <class E>
[[noreturn]] void broken(const std::string& what) {
  throw E(what + ": " + self->block->grid->place_of(*self));
}

/// Lets all lanes of the warp meet. `leave(exchange)` stores this lane's operands; the returned object holds
/// those of all lanes until this lane's next collective.
template <class Leave>
inline const Exchange& meet(Collective kind, Leave leave) {
  Thread& me = *self;
  Warp& warp = *me.warp;
  if (warp.members != ~0U) broken<Divergence>("a warp collective in a warp that is not full");
  if (warp.arrived == 0) {
    warp.kind = kind;
  } else if (warp.kind != kind) {
    broken<Divergence>(std::string("this lane is in ") + name_of(kind) + " where others are in " +
                       name_of(warp.kind));
  }
  Exchange& exchange = warp.exchange[warp.generation % 2];
  leave(exchange);
  warp.arrived |= 1U << me.lane;
  if (warp.arrived == ~0U) {
    warp.arrived = 0;
    ++warp.generation;
    warp.ready = ~0U;
  }
  me.block->grid->switch_away();
  return exchange;
}

}  // namespace kvpolicy::gpu::simt
