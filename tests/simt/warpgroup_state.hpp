// SPDX-License-Identifier: Apache-2.0
//
// What the emulation remembers of kernels that use kernels/simt_hopper.cuh: barriers in shared memory, barriers of some
// warps, products that are under way, and which bytes of shared memory a product may read. hopper.hpp has the verbs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

namespace kvpolicy::gpu::simt {

struct Thread;

/// A barrier in shared memory; the map's key is its offset.
struct PhaseBarrier {
  int expected = 0;
  int pending = 0;
  std::uint64_t phase = 0;  // number of complete phases
  std::vector<Thread*> waiting;
};

/// A barrier of some warps.
struct NamedBarrierState {
  int arrived = 0;
  int expected = 0;
  std::vector<Thread*> waiting;
};

/// A product that the warps of a warpgroup start, each when it gets there: the first one reads the operands.
struct Product {
  std::uint64_t a = 0;  // descriptors
  std::uint64_t b = 0;
  bool a_shared = false;
  bool adds = true;
  int columns = 0;
  int first_column = 0;
  int threads_left = 128;                  // that have not waited for it
  std::vector<float> a_numbers = {};       // [64, 16], if shared
  std::vector<float> b_numbers = {};       // [16, columns / 8 * 8], in the order of lanes
  std::vector<std::uint32_t> chunks = {};  // offsets of the chunks of 16 bytes that it reads
  std::vector<std::byte> bytes = {};       // what they held
};

/// One thread's part of a product.
struct ProductPart {
  std::shared_ptr<Product> product;
  float (*d)[4] = nullptr;
  const std::uint32_t* a = nullptr;  // registers, or null
  std::array<std::uint32_t, 4> a_then{};
  std::array<float, 32> a_rows{};  // rows lane / 4 and lane / 4 + 8
  unsigned group = 0;
};

/// Accumulators that a product will write.
struct Accumulation {
  float (*d)[4] = nullptr;
  int columns = 0;
  int parts = 0;               // products under way
  std::vector<float> numbers;  // as d
};

/// Registers as they were at a thread's latest fences.
struct FencedRegisters {
  const void* address = nullptr;
  std::vector<std::byte> bytes;
};

struct WarpgroupThread {
  unsigned group = 0;         // number of the open group
  std::uint64_t started = 0;  // products
  std::vector<ProductPart> under_way;
  std::vector<Accumulation> accumulations;
  std::vector<FencedRegisters> fenced;
  std::uint32_t fences = 1;  // fence_shared_for_products so far, and 1
  int registers = 0;         // limit; 0: that of the launch

  void reset() { *this = WarpgroupThread{}; }
};

/// Whether a copy has written a chunk of 16 bytes of shared memory, by which thread, and how often that thread had
/// fenced.
struct ChunkMark {
  static constexpr std::uint32_t copying = ~0U;
  std::uint32_t fences = 0;  // 0: no copy has
  std::uint32_t thread = 0;
};

struct WarpgroupBlock {
  std::map<std::uint32_t, PhaseBarrier> barriers;
  std::array<NamedBarrierState, 16> named;
  std::vector<std::deque<std::shared_ptr<Product>>>
      products;  // of each warpgroup: those that some thread still has to wait for
  std::vector<std::uint64_t> products_before;  // of each warpgroup
  std::vector<ChunkMark> marks;
  int free_registers = 0;  // given back
  std::vector<Thread*> wanting_registers;

  void reset(std::size_t threads, std::size_t shared_bytes) {
    barriers.clear();
    for (NamedBarrierState& barrier : named) barrier = {};
    products.assign((threads + 127) / 128, {});
    products_before.assign((threads + 127) / 128, 0);
    marks.assign((shared_bytes + 15) / 16, {});
    free_registers = 0;
    wanting_registers.clear();
  }
};

}  // namespace kvpolicy::gpu::simt
