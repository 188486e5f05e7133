// SPDX-License-Identifier: Apache-2.0
//
// The verbs of kernels/simt_hopper.cuh. Products follow the PTX manual's layouts of registers and of shared memory,
// element by element. They are as lazy as they may be: accumulators are NaN from the start of a product until its
// group has been waited for. A fault names what a device would let pass in silence:
// - registers of a product that were written after the fence, or while it was under way;
// - shared memory that changed while a product read it, that a copy had not reached yet, or whose copies were not
//   fenced by the thread that made them (stores without a copy are not followed);
// - descriptors that do not fit the swizzle, warps of a warpgroup that start different products, a phase that was
//   missed.
#pragma once

#include <algorithm>
#include <cstring>

#include <kvpolicy/core/dtype.hpp>

#include "matrix.hpp"

#define KVPOLICY_HOPPER_KERNEL(threads) inline void

namespace kvpolicy::gpu {

inline constexpr bool has_warpgroups = true;

namespace simt {

inline WarpgroupBlock& warpgroups() { return self->block->warpgroups; }
inline std::size_t own_warpgroup() { return static_cast<std::size_t>(self->index) / 128; }

// ---- barriers --------------------------------------------------------------------------------
inline PhaseBarrier& phase_barrier(const SharedBarrier* barrier, const char* verb) {
  require_alignment(barrier, sizeof *barrier, "a barrier in shared memory: address not a multiple of 8");
  if (!self->block->shared.contains(barrier, sizeof *barrier)) {
    broken<OutOfBounds>("a barrier outside shared memory");
  }
  const auto found = warpgroups().barriers.find(shared_address(barrier));
  if (found == warpgroups().barriers.end()) broken<Fault>(std::string(verb) + " before mbarrier_init");
  return found->second;
}

inline void wake_all(std::vector<Thread*>& waiting) {
  for (Thread* thread : waiting) Grid::wake(*thread);
  waiting.clear();
  grid().draw_order(*self->block);
}

inline NamedBarrierState& come_to(int number, int threads) {
  if (number < 1 || number > 15) broken<Fault>("a named barrier must be numbered 1 to 15");
  if (threads % warp_lanes != 0) broken<Fault>("a named barrier counts whole warps");
  NamedBarrierState& barrier = warpgroups().named[static_cast<std::size_t>(number)];
  if (barrier.arrived == 0) barrier.expected = threads;
  if (barrier.expected != threads) {
    broken<Divergence>("others came to the named barrier with another number of threads");
  }
  ++barrier.arrived;
  return barrier;
}
inline bool complete(NamedBarrierState& barrier) {
  if (barrier.arrived < barrier.expected) return false;
  barrier.arrived = 0;
  wake_all(barrier.waiting);
  return true;
}

// ---- registers -------------------------------------------------------------------------------
inline int registers_of_launch() {
  const int threads = grid().launch.threads;
  return std::min(65536 / threads / 8 * 8, 255);
}

/// Every lane calls it; the first one to get here acts for the warp.
inline void change_registers(int count, bool raises) {
  meet(Collective::set_registers, [](Exchange&) {});
  Thread& me = *self;
  const int before = me.warpgroup.registers > 0 ? me.warpgroup.registers : registers_of_launch();
  if (count % 8 != 0 || count < 24 || count > 256 || (raises ? count < before : count > before)) {
    broken<Fault>("a register limit of " + std::to_string(count) + " after one of " + std::to_string(before));
  }
  if (me.lane == 0) {
    WarpgroupBlock& all = warpgroups();
    const int needed = (count - before) * warp_lanes;
    while (all.free_registers < needed) {
      all.wanting_registers.push_back(&me);
      grid().sleep();
    }
    all.free_registers -= needed;
    if (needed < 0) wake_all(all.wanting_registers);
  }
  me.warpgroup.registers = count;
  meet(Collective::set_registers, [](Exchange&) {});
}

// ---- registers of products -------------------------------------------------------------------
template <class T>
void fence_registers(T& registers) {
  FencedRegisters one{&registers, {}};
  const auto* first = reinterpret_cast<const std::byte*>(&registers);
  one.bytes.assign(first, first + sizeof registers);
  auto& fenced = self->warpgroup.fenced;
  std::erase_if(fenced, [&](const FencedRegisters& other) { return other.address == &registers; });
  fenced.push_back(std::move(one));
}

/// Refuses registers that no fence named since they were last written.
inline void require_fenced(const void* address, std::size_t bytes, const char* what) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  for (const FencedRegisters& one : self->warpgroup.fenced) {
    const auto first = reinterpret_cast<std::uintptr_t>(one.address);
    if (at < first || at + bytes > first + one.bytes.size()) continue;
    if (std::memcmp(one.bytes.data() + (at - first), address, bytes) == 0) return;
    broken<Fault>(std::string("wgmma: ") + what + " written after wgmma_fence");
  }
  broken<Fault>(std::string("wgmma: ") + what + " that wgmma_fence did not name");
}

// ---- operands in shared memory ---------------------------------------------------------------
/// A matrix of 16-bit numbers in rows of 64, eight of them in 1,024 bytes that are swizzled.
struct MatrixInMemory {
  std::uint32_t start;
  std::uint32_t columns_apart;
  std::uint32_t eight_rows_apart;

  explicit MatrixInMemory(std::uint64_t descriptor)
      : start{field(descriptor)},
        columns_apart{field(descriptor >> 16)},
        eight_rows_apart{field(descriptor >> 32)} {
    if (descriptor >> 62 != 1) broken<Fault>("wgmma: a descriptor of another swizzle than 128 bytes");
    if (start / 128 % 8 != 0 || eight_rows_apart % 1024 != 0) {
      broken<Misaligned>("wgmma: eight rows do not begin at a multiple of 1024 bytes");
    }
  }
  static std::uint32_t field(std::uint64_t bits) { return static_cast<std::uint32_t>(bits & 0x3fffU) << 4; }

  /// Offset of number `along` of row `row`.
  [[nodiscard]] std::uint32_t offset(std::uint32_t row, std::uint32_t along) const {
    const std::uint32_t plain =
        start + row / 8 * eight_rows_apart + row % 8 * 128 + along / 64 * columns_apart + along % 64 * 2;
    return plain ^ (plain / 128 % 8 * 16);
  }
};

/// Notes that a product reads a chunk, and checks that it may.
inline void note_chunk(Product& product, std::uint32_t offset) {
  const std::uint32_t chunk = offset / 16 * 16;
  if (std::find(product.chunks.rbegin(), product.chunks.rend(), chunk) != product.chunks.rend()) return;
  const std::byte* const address = self->block->shared.begin() + chunk;
  require_shared(address, "wgmma: an operand outside shared memory");
  const ChunkMark mark = mark_of(address);
  if (mark.fences == ChunkMark::copying) {
    broken<Fault>("wgmma: a product reads what a copy has not brought yet");
  }
  if (mark.fences != 0 && mark.fences == self->block->threads[mark.thread]->warpgroup.fences) {
    broken<Fault>("wgmma: a product reads what was copied and not fenced by the thread that copied it");
  }
  product.chunks.push_back(chunk);
  const std::size_t size = product.bytes.size();
  product.bytes.resize(size + 16);
  std::memcpy(product.bytes.data() + size, address, 16);
}

template <Element E>
float number_at(Product& product, std::uint32_t offset) {
  note_chunk(product, offset);
  std::uint16_t bits;
  std::memcpy(&bits, self->block->shared.begin() + offset, sizeof bits);
  return number_of<E>(bits);
}

/// Reads the operands of a product, b transposed or not. Numbers of b are put where a lane finds its columns together.
template <Element E>
void read_operands(Product& product, bool transposed) {
  if (product.a_shared) {
    const MatrixInMemory a{product.a};
    product.a_numbers.resize(64 * 16);
    for (std::uint32_t row = 0; row < 64; ++row) {
      for (std::uint32_t k = 0; k < 16; ++k) {
        product.a_numbers[row * 16 + k] = number_at<E>(product, a.offset(row, k));
      }
    }
  }
  const MatrixInMemory b{product.b};
  if (transposed && b.columns_apart % 1024 != 0) {
    broken<Misaligned>("wgmma: columns do not begin at a multiple of 1024 bytes");
  }
  const auto columns = static_cast<std::uint32_t>(product.columns);
  product.b_numbers.resize(std::size_t{16} * columns);
  for (std::uint32_t k = 0; k < 16; ++k) {
    for (std::uint32_t n = 0; n < columns; ++n) {
      const std::uint32_t lane = n % 8 / 2;
      const std::uint32_t place = (k * 4 + lane) * (columns / 4) + n / 8 * 2 + n % 2;
      product.b_numbers[place] = number_at<E>(product, transposed ? b.offset(k, n) : b.offset(n, k));
    }
  }
}

/// Refuses shared memory that is no longer what a product read.
inline void require_unchanged(const Product& product) {
  for (std::size_t i = 0; i < product.chunks.size(); ++i) {
    const std::byte* const address = self->block->shared.begin() + product.chunks[i];
    if (std::memcmp(address, product.bytes.data() + i * 16, 16) != 0) {
      broken<Fault>("wgmma: shared memory changed while a product read it");
    }
  }
}

// ---- products --------------------------------------------------------------------------------
/// The warpgroup's product that this thread starts, which the first thread to start it reads.
template <Element E>
std::shared_ptr<Product> product_of(const Product& wanted, bool transposed) {
  WarpgroupBlock& all = warpgroups();
  const std::size_t group = own_warpgroup();
  auto& products = all.products[group];
  const std::uint64_t number = self->warpgroup.started++ - all.products_before[group];
  if (number == products.size()) {
    auto made = std::make_shared<Product>(wanted);
    read_operands<E>(*made, transposed);
    products.push_back(std::move(made));
  }
  std::shared_ptr<Product> product = products[number];
  if (product->a != wanted.a || product->b != wanted.b || product->a_shared != wanted.a_shared ||
      product->adds != wanted.adds || product->columns != wanted.columns ||
      product->first_column != wanted.first_column) {
    broken<Divergence>("wgmma: another warp of the warpgroup started another product");
  }
  return product;
}

inline Accumulation* accumulation_of(const float (*d)[4]) {
  for (Accumulation& one : self->warpgroup.accumulations) {
    if (one.d == d) return &one;
  }
  return nullptr;
}

template <Element E>
void start_product(float (*d)[4], const Product& wanted, const std::uint32_t (*a)[4], bool transposed) {
  Thread& me = *self;
  const auto& all = meet(Collective::wgmma, [&](Exchange& e) {
    if (a != nullptr) std::memcpy(e.slot[me.lane].bytes, *a, sizeof *a);
  });
  ProductPart part{.product = product_of<E>(wanted, transposed), .d = d, .group = me.warpgroup.group};
  if (a != nullptr) {
    require_fenced(*a, sizeof *a, "an operand");
    part.a = *a;
    std::memcpy(part.a_then.data(), *a, sizeof *a);
    for (std::size_t quad = 0; quad < 4; ++quad) {
      const auto words = left_by<std::array<std::uint32_t, 4>>(all, me.lane / 4 * 4 + static_cast<int>(quad));
      for (std::size_t i = 0; i < 4; ++i) {
        for (std::size_t high = 0; high < 2; ++high) {
          part.a_rows[i % 2 * 16 + i / 2 * 8 + quad * 2 + high] = number_of<E>(words[i] >> (16 * high));
        }
      }
    }
  }
  const std::size_t numbers = static_cast<std::size_t>(wanted.columns) / 2;
  Accumulation* accumulation = accumulation_of(d);
  if (accumulation == nullptr) {
    require_fenced(d, numbers * sizeof(float), "accumulators");
    const float* const first = *d;
    me.warpgroup.accumulations.push_back({d, wanted.columns, 0, {first, first + numbers}});
    accumulation = &me.warpgroup.accumulations.back();
    poison(d, numbers * sizeof(float));
  }
  if (accumulation->columns != wanted.columns) broken<Fault>("wgmma: accumulators of another product");
  ++accumulation->parts;
  me.warpgroup.under_way.push_back(std::move(part));
}

/// Adds a thread's part of a product.
KVPOLICY_SIMT_UNCHECKED inline void add_part(const ProductPart& part, float* numbers) {
  const Product& product = *part.product;
  const int columns = product.columns / 4;  // of this lane
  const int row = self->index % 128 / warp_lanes * 16 + self->lane / 4;
  const float* const low =
      product.a_shared ? &product.a_numbers[static_cast<std::size_t>(row) * 16] : &part.a_rows[0];
  const float* const high = product.a_shared ? low + 8 * 16 : low + 16;
  float sums[2][64] = {};
  if (product.adds) {
    for (int i = 0; i < columns; ++i) {
      sums[0][i] = numbers[i / 2 * 4 + i % 2];
      sums[1][i] = numbers[i / 2 * 4 + 2 + i % 2];
    }
  }
  for (int k = 0; k < 16; ++k) {
    const float* const b =
        &product
             .b_numbers[static_cast<std::size_t>(k * 4 + self->lane % 4) * static_cast<std::size_t>(columns)];
    for (int i = 0; i < columns; ++i) {
      sums[0][i] += low[k] * b[i];
      sums[1][i] += high[k] * b[i];
    }
  }
  for (int i = 0; i < columns; ++i) {
    numbers[i / 2 * 4 + i % 2] = sums[0][i];
    numbers[i / 2 * 4 + 2 + i % 2] = sums[1][i];
  }
}

inline bool all_poison(const float (*d)[4], std::size_t numbers) {
  const auto* words = reinterpret_cast<const std::uint32_t*>(*d);
  return std::all_of(words, words + numbers, [](std::uint32_t word) { return word == poison_word; });
}

/// Completes a thread's part of a product.
inline void complete_part(const ProductPart& part) {
  Thread& me = *self;
  if (me.lane == 0) require_unchanged(*part.product);
  if (part.a != nullptr && std::memcmp(part.a, part.a_then.data(), sizeof part.a_then) != 0) {
    broken<Fault>("wgmma: an operand's registers were written while a product read them");
  }
  Accumulation& accumulation = *accumulation_of(part.d);
  if (!all_poison(part.d, accumulation.numbers.size())) {
    broken<Fault>("wgmma: accumulators were written while a product was under way");
  }
  add_part(part, accumulation.numbers.data());
  if (--accumulation.parts == 0) {
    std::memcpy(part.d, accumulation.numbers.data(), accumulation.numbers.size() * sizeof(float));
    std::erase_if(me.warpgroup.accumulations, [&](const Accumulation& one) { return one.d == part.d; });
    std::erase_if(me.warpgroup.fenced, [&](const FencedRegisters& one) {
      const auto* first = static_cast<const std::byte*>(one.address);
      const auto* at = reinterpret_cast<const std::byte*>(part.d);
      return at >= first && at < first + one.bytes.size();
    });
  }
  --part.product->threads_left;
  WarpgroupBlock& all = warpgroups();
  auto& products = all.products[own_warpgroup()];
  while (!products.empty() && products.front()->threads_left == 0) {
    products.pop_front();
    ++all.products_before[own_warpgroup()];
  }
}

/// Refuses registers that products still use.
template <class T>
void require_done(const T& registers) {
  const auto* first = reinterpret_cast<const std::byte*>(&registers);
  const auto inside = [&](const void* address) {
    const auto* at = static_cast<const std::byte*>(address);
    return at >= first && at < first + sizeof registers;
  };
  for (const ProductPart& part : self->warpgroup.under_way) {
    if (inside(part.d) || (part.a != nullptr && inside(part.a))) {
      broken<Fault>("wgmma_wait: registers of a product that this does not wait for");
    }
  }
}

}  // namespace simt

inline void mbarrier_init(SharedBarrier* barrier, int arrivals) {
  simt::require_alignment(barrier, sizeof *barrier, "mbarrier_init: address not a multiple of 8");
  if (!simt::self->block->shared.contains(barrier, sizeof *barrier)) {
    simt::broken<simt::OutOfBounds>("mbarrier_init: outside shared memory");
  }
  const bool made =
      simt::warpgroups()
          .barriers.try_emplace(shared_address(barrier), simt::PhaseBarrier{arrivals, arrivals, 0, {}})
          .second;
  if (!made) simt::broken<simt::Fault>("mbarrier_init: a barrier is there already");
}
inline void mbarrier_arrive(SharedBarrier* barrier) {
  simt::PhaseBarrier& state = simt::phase_barrier(barrier, "mbarrier_arrive");
  if (--state.pending == 0) {
    state.pending = state.expected;
    ++state.phase;
    simt::wake_all(state.waiting);
  }
  simt::grid().step_aside();
}
inline void mbarrier_wait(SharedBarrier* barrier, int parity) {
  simt::PhaseBarrier& state = simt::phase_barrier(barrier, "mbarrier_wait");
  if (static_cast<int>(state.phase % 2) != parity) return;
  const std::uint64_t phase = state.phase;
  state.waiting.push_back(simt::self);
  simt::grid().sleep();
  if (state.phase != phase + 1) {
    simt::broken<simt::Fault>("mbarrier_wait: the next phase was complete before this thread saw this one");
  }
}

inline void named_barrier_sync(int barrier, int threads) {
  simt::NamedBarrierState& state = simt::come_to(barrier, threads);
  state.waiting.push_back(simt::self);
  simt::self->warp->asleep |= 1U << simt::self->lane;
  simt::complete(state);
  simt::grid().switch_away();
}
inline void named_barrier_arrive(int barrier, int threads) {
  simt::complete(simt::come_to(barrier, threads));
  simt::grid().step_aside();
}

inline void fence_shared_for_products() { ++simt::self->warpgroup.fences; }

template <int Count>
inline void lower_register_limit() {
  simt::change_registers(Count, false);
}
template <int Count>
inline void raise_register_limit() {
  simt::change_registers(Count, true);
}

template <class... Registers>
inline void wgmma_fence(Registers&... registers) {
  simt::meet(simt::Collective::wgmma_fence, [](simt::Exchange&) {});
  (simt::fence_registers(registers), ...);
}
inline void wgmma_commit() {
  simt::meet(simt::Collective::wgmma_commit, [](simt::Exchange&) {});
  ++simt::self->warpgroup.group;
}
template <int Pending, class... Registers>
inline void wgmma_wait(Registers&... registers) {
  simt::meet(simt::Collective::wgmma_wait, [](simt::Exchange&) {});
  simt::WarpgroupThread& me = simt::self->warpgroup;
  auto part = me.under_way.begin();
  for (; part != me.under_way.end() && part->group + Pending < me.group; ++part) simt::complete_part(*part);
  me.under_way.erase(me.under_way.begin(), part);
  (simt::require_done(registers), ...);
}

template <Element E, int Columns, bool Add, int All>
inline void wgmma(float (&d)[All][4], std::uint64_t a, std::uint64_t b) {
  static_assert(All == Columns / 8);
  simt::start_product<E>(d, {.a = a, .b = b, .a_shared = true, .adds = Add, .columns = Columns}, nullptr,
                         false);
}
template <Element E, int Columns, int First, int All>
inline void wgmma_transposed(float (&all)[All][4], const std::uint32_t (&a)[4], std::uint64_t b) {
  static_assert(First + Columns / 8 <= All);
  simt::start_product<E>(all + First, {.b = b, .columns = Columns, .first_column = First}, &a, true);
}

}  // namespace kvpolicy::gpu
