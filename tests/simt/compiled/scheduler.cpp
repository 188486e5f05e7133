// SPDX-License-Identifier: Apache-2.0
//
// The order of threads, compiled once. It runs at each step of each thread and is not what tests look for mistakes in, so
// the sanitizers' build leaves out the checks of its own reads and writes.
#include <algorithm>
#include <bit>
#include <cstdlib>
#include <numeric>

#include <kvpolicy/cuda/kernels/simt.cuh>

namespace kvpolicy::gpu::simt {

Grid& grid() {
  static thread_local Grid instance;
  return instance;
}

Grid& idle_grid() {
  Grid* found = &grid();
  while (found->running) {
    if (found->other == nullptr) found->other = std::make_unique<Grid>();
    found = found->other.get();
  }
  return *found;
}

void seed(std::uint64_t value) {
  grid().seed = value;
  grid().launches = 0;
}

Grid::Grid() {
  if (const char* text = std::getenv("KVPOLICY_SIMT_SEED")) {
    seed = std::strtoull(text, nullptr, 10);
  }
}

// ---- blocks ----------------------------------------------------------------------------------
void Grid::run(const Launch& what) {
  launch = what;
  seed = grid().seed;
  launches = ++grid().launches;
  random.seed(seed * 1000003U + launches);
  fault = nullptr;
  running = true;
  waiting.clear();
  blocks.resize(static_cast<std::size_t>(what.grid_x) * static_cast<std::size_t>(what.grid_y));
  std::iota(blocks.begin(), blocks.end(), 0);
  random.shuffle(blocks);
  resident_count = 1 + random.below(most_resident);
  for (int i = 0; i < resident_count; ++i) {
    Block& block = resident[static_cast<std::size_t>(i)];
    block.grid = this;
    block.running = false;
    if (!blocks.empty()) begin_block(block);
  }
  turn_to_some_block();
  run_threads();
  running = false;
  if (fault != nullptr) {
    // The blocks that were running are abandoned, with their stacks.
    for (Block& block : resident) {
      for (const auto& thread : block.threads) thread->fiber.start(&thread_entry, thread.get());
    }
    std::rethrow_exception(std::exchange(fault, nullptr));
  }
}

void Grid::run_threads() {
  for (self = draw(); self != nullptr; self = draw()) {
    Fiber::switch_to(host, self->fiber);
    if (fault != nullptr || launch.before == nullptr) break;
    end_kernel_before();
    if (fault != nullptr) break;
  }
  self = nullptr;
}
bool Grid::is_over() const {
  return blocks.empty() && std::none_of(resident.begin(), resident.begin() + resident_count,
                                        [](const Block& block) { return block.running; });
}

// On the host's stack, when all threads wait for this or for others that do, or are done.
void Grid::end_kernel_before() {
  self = nullptr;
  try {
    (*launch.before)();
  } catch (...) {
    fault = std::current_exception();
  }
  launch.before = nullptr;
  if (fault == nullptr && waiting.empty() && !is_over()) {
    fault = std::make_exception_ptr(Divergence(who_waits()));
  }
  for (const Thread* thread : waiting) thread->warp->ready |= 1U << thread->lane;
  waiting.clear();
}

void Grid::begin_block(Block& block) {
  const int number = blocks.back();
  blocks.pop_back();
  block.x = number % launch.grid_x;
  block.y = number / launch.grid_x;
  block.live = launch.threads;
  block.waiting = 0;
  block.running = true;
  block.shared.resize(launch.shared_bytes);
  block.shared.fill_with_nan();
  const auto threads = static_cast<std::size_t>(launch.threads);
  const std::size_t warps = (threads + warp_lanes - 1) / warp_lanes;
  while (block.warps.size() < warps) block.warps.push_back(std::make_unique<Warp>());
  while (block.threads.size() < threads) {
    auto thread = std::make_unique<Thread>();
    thread->block = &block;
    thread->index = static_cast<int>(block.threads.size());
    thread->lane = thread->index % warp_lanes;
    thread->warp = block.warps[static_cast<std::size_t>(thread->index / warp_lanes)].get();
    thread->fiber.start(&thread_entry, thread.get());
    block.threads.push_back(std::move(thread));
  }
  for (std::size_t i = 0; i < threads; ++i) {
    block.threads[i]->copies.clear();
    block.threads[i]->copy_group = 0;
    block.threads[i]->warpgroup.reset();
  }
  block.warpgroups.reset(threads, launch.shared_bytes);
  for (std::size_t w = 0; w < warps; ++w) {
    const std::size_t lanes = std::min<std::size_t>(threads - w * warp_lanes, warp_lanes);
    Warp& warp = *block.warps[w];
    warp.members = lanes == warp_lanes ? ~0U : (1U << lanes) - 1U;
    warp.ready = warp.members;
    warp.arrived = warp.at_barrier = warp.asleep = warp.exited = 0;
    for (Exchange& exchange : warp.exchange) poison(&exchange, sizeof exchange);
  }
  block.order.resize(warps);
  std::iota(block.order.begin(), block.order.end(), 0);
  draw_order(block);
  draw_last_warp(block);
}

void Grid::end_block(Block& block) {
  block.running = false;
  if (!block.shared.guards_are_whole()) {
    throw OutOfBounds("block (" + std::to_string(block.x) + ", " + std::to_string(block.y) +
                      ") wrote beside its shared memory of " + std::to_string(block.shared.bytes()) +
                      " bytes");
  }
  for (const NamedBarrierState& barrier : block.warpgroups.named) {
    if (barrier.arrived != 0) throw Divergence("the last to come to a named barrier never came");
  }
  for (const auto& products : block.warpgroups.products) {
    if (!products.empty()) throw Divergence("a product that some warps of a warpgroup never started");
  }
  if (!blocks.empty()) begin_block(block);
}

// ---- choosing the next thread ------------------------------------------------------------------
// A block runs for one step or for hundreds, so that some blocks stand still while another runs to its end.
void Grid::turn_to_some_block() {
  current = random.below(resident_count);
  stretch = 1 << random.below(11);
}

void Grid::draw_order(Block& block) {
  random.shuffle(block.order);
  block.one_ahead = random.below(4) != 0;
}

void Grid::draw_last_warp(Block& block) {
  const bool one_waits = random.below(8) == 0;
  block.last_warp = one_waits ? random.below(static_cast<int>(block.order.size())) : -1;
}

Thread* Grid::draw_from(Block& block, bool last_warps) {
  const auto warps = block.order.size();
  const std::size_t start =
      block.one_ahead ? 0 : static_cast<std::size_t>(random.below(static_cast<int>(warps)));
  for (std::size_t i = 0; i < warps; ++i) {
    const std::size_t at = start + i < warps ? start + i : start + i - warps;
    const int w = block.order[at];
    Warp& warp = *block.warps[static_cast<std::size_t>(w)];
    if (warp.ready == 0 || (w == block.last_warp) != last_warps) continue;
    const int turn = static_cast<int>(random.next() % warp_lanes);
    const int lane = (std::countr_zero(std::rotr(warp.ready, turn)) + turn) % warp_lanes;
    warp.ready &= ~(1U << lane);
    return block.threads[static_cast<std::size_t>(w * warp_lanes + lane)].get();
  }
  return nullptr;
}

Thread* Grid::draw() {
  if (--stretch <= 0) turn_to_some_block();
  for (const bool last_warps : {false, true}) {
    for (int i = 0; i < resident_count; ++i) {
      Block& block = resident[static_cast<std::size_t>(current)];
      if (block.running) {
        if (Thread* thread = draw_from(block, last_warps)) {
          if (last_warps) block.last_warp = -1;  // nothing else could go on
          return thread;
        }
      }
      current = (current + 1) % resident_count;
    }
  }
  return nullptr;
}

void Grid::switch_away() {
  Thread* const me = self;
  Thread* const next = draw();
  if (next == me) return;
  if (next == nullptr) {
    if (launch.before != nullptr) return Fiber::switch_to(me->fiber, host);
    if (!is_over()) fault = std::make_exception_ptr(Divergence(who_waits()));
    Fiber::switch_to(me->fiber, host);
    return;
  }
  self = next;
  Fiber::switch_to(me->fiber, next->fiber);
}

void Grid::step_aside() {
  self->warp->ready |= 1U << self->lane;
  if (random.next() % 2 == 0) {
    draw_order(*self->block);
    turn_to_some_block();
  }
  // Whoever has just arrived somewhere may stand still, while those that it has woken go as far as they can.
  if (self->block->last_warp < 0 && random.below(8) == 0) self->block->last_warp = self->index / warp_lanes;
  switch_away();
}

void Grid::thread_entry(void* argument) {
  auto* const me = static_cast<Thread*>(argument);
  Grid& grid = *me->block->grid;
  for (;;) {
    try {
      me->has_waited = false;
      grid.launch.call(grid.launch.kernel, grid.launch.params);
      if (grid.launch.early && !me->has_waited) {
        throw Fault{"a thread of a kernel that is launched early did not wait for the kernel before"};
      }
      if (!me->warpgroup.under_way.empty()) {
        throw Fault{"a thread returned while products of its were under way"};
      }
      grid.thread_ended();
    } catch (...) {
      grid.fault = std::current_exception();
    }
    if (grid.fault != nullptr) {
      Fiber::switch_to(me->fiber, grid.host);
    } else {
      grid.switch_away();
    }
  }
}

void Grid::thread_ended() {
  Block& block = *self->block;
  self->warp->exited |= 1U << self->lane;
  --block.live;
  if (block.live == 0) {
    end_block(block);
  } else if (block.waiting == block.live) {
    release_barrier(block);
  }
}

// ---- barriers and collectives ------------------------------------------------------------------
void Grid::arrive_at_barrier() {
  Block& block = *self->block;
  self->warp->at_barrier |= 1U << self->lane;
  if (++block.waiting == block.live) release_barrier(block);
  switch_away();
}

void Grid::sleep() {
  self->warp->asleep |= 1U << self->lane;
  switch_away();
}

void Grid::wake(Thread& thread) {
  thread.warp->asleep &= ~(1U << thread.lane);
  thread.warp->ready |= 1U << thread.lane;
}

void Grid::wait_for_kernel_before() {
  self->has_waited = true;
  if (launch.before == nullptr) return;
  waiting.push_back(self);
  switch_away();
}

void Grid::release_barrier(Block& block) {
  block.waiting = 0;
  for (std::size_t w = 0; w < block.order.size(); ++w) {
    Warp& warp = *block.warps[w];
    warp.ready |= warp.at_barrier;
    warp.at_barrier = 0;
  }
  draw_order(block);
  draw_last_warp(block);
}

std::string Grid::place_of(const Thread& thread) const {
  return "thread " + std::to_string(thread.index) + " of block (" + std::to_string(thread.block->x) + ", " +
         std::to_string(thread.block->y) + "), seed " + std::to_string(seed) + ", launch " +
         std::to_string(launches);
}

std::string Grid::who_waits() const {
  std::string text = "threads wait for others that never come (seed " + std::to_string(seed) + ", launch " +
                     std::to_string(launches) + ")";
  for (int i = 0; i < resident_count; ++i) {
    const Block& block = resident[static_cast<std::size_t>(i)];
    if (!block.running) continue;
    for (std::size_t w = 0; w < block.order.size(); ++w) {
      const Warp& warp = *block.warps[w];
      text += "\n  block (" + std::to_string(block.x) + ", " + std::to_string(block.y) + ") warp " +
              std::to_string(w) + ": " + std::to_string(std::popcount(warp.at_barrier)) +
              " lanes at the barrier, " + std::to_string(std::popcount(warp.arrived)) + " in " +
              name_of(warp.kind) + ", " + std::to_string(std::popcount(warp.exited)) + " have returned";
      if (warp.asleep != 0) text += ", " + std::to_string(std::popcount(warp.asleep)) + " at another barrier";
    }
  }
  return text;
}

}  // namespace kvpolicy::gpu::simt
