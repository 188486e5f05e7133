// SPDX-License-Identifier: Apache-2.0
//
// Loads and asynchronous copies of kernels/simt.cuh. A copy arrives only when its thread waits for it; until
// then the destination holds NaN.
#pragma once

#include <algorithm>
#include <cstring>
#include <set>

#include "collectives.hpp"

namespace kvpolicy::gpu {
namespace simt {

/// Lines of 128 bytes that kernels asked the second-level cache for, and those that were loaded; for one test at a
/// time.
struct Lines {
  std::set<std::uintptr_t> requested;
  std::set<std::uintptr_t> loaded;

  static std::uintptr_t of(const void* address) { return reinterpret_cast<std::uintptr_t>(address) / 128; }
};
inline thread_local Lines* lines = nullptr;  // null: not watched

template <class Words>
inline Words load_words(const Words* address) {
  if (lines != nullptr) lines->loaded.insert(Lines::of(address));
  require_alignment(address, sizeof(Words), "load_once: address not a multiple of the access");
  return *address;
}

/// The mark of the chunk of 16 bytes at an address in shared memory.
inline ChunkMark& mark_of(const void* address) {
  const auto offset = static_cast<const std::byte*>(address) - self->block->shared.begin();
  return self->block->warpgroups.marks[static_cast<std::size_t>(offset) / 16];
}

inline void require_shared(const void* address, const char* what) {
  if (!self->block->shared.contains(address, 16)) broken<OutOfBounds>(what);
}

}  // namespace simt

/// The block's dynamic shared memory, aligned to 1,024 bytes; its size is a launch argument.
inline std::byte* shared_memory() { return simt::self->block->shared.begin(); }

inline std::uint32_t shared_address(const void* address) {
  return static_cast<std::uint32_t>(static_cast<const std::byte*>(address) - shared_memory());
}

inline Words4 load_once(const Words4* address) { return simt::load_words(address); }
inline Words2 load_once(const Words2* address) { return simt::load_words(address); }
inline Words1 load_once(const Words1* address) { return simt::load_words(address); }
inline std::uint32_t load_once(const std::uint16_t* address) { return simt::load_words(address); }

/// Under AddressSanitizer some byte of the line must be there.
inline void request_line(const void* address) {
#if KVPOLICY_SIMT_ASAN
  const auto* const line = reinterpret_cast<const std::byte*>(simt::Lines::of(address) * 128);
  bool there = false;
  for (int i = 0; i < 128; i += 8) there = there || __asan_address_is_poisoned(line + i) == 0;
  if (!there) simt::broken<simt::OutOfBounds>("request_line: nothing is there");
#endif
  if (simt::lines != nullptr) simt::lines->requested.insert(simt::Lines::of(address));
}

inline void cp_async_16(void* shared, const void* global, bool valid) {
  const char* const name = "cp_async_16: address not a multiple of 16";
  simt::require_alignment(static_cast<const std::byte*>(shared), 16, name);
  simt::require_alignment(static_cast<const std::byte*>(global), 16, name);
  simt::require_shared(shared, "cp_async_16: destination outside shared memory");
  simt::poison(shared, 16);
  if (valid) {
    if (simt::lines != nullptr) simt::lines->loaded.insert(simt::Lines::of(global));
    // Reads the source now, so that a bad address is reported at the copy and not at the wait.
    const auto* bytes = static_cast<const volatile std::byte*>(global);
    static_cast<void>(bytes[0]);
    static_cast<void>(bytes[15]);
  }
  simt::Thread& me = *simt::self;
  simt::mark_of(shared) = {simt::ChunkMark::copying, static_cast<std::uint32_t>(me.index)};
  me.copies.push_back({shared, valid ? global : nullptr, me.copy_group});
}
inline void cp_async_commit() { ++simt::self->copy_group; }

template <int Pending>
inline void cp_async_wait() {
  simt::Thread& me = *simt::self;
  auto copy = me.copies.begin();
  for (; copy != me.copies.end() && copy->group + Pending < me.copy_group; ++copy) {
    if (copy->from != nullptr) {
      std::memcpy(copy->to, copy->from, 16);
    } else {
      std::memset(copy->to, 0, 16);
    }
    simt::mark_of(copy->to) = {me.warpgroup.fences, static_cast<std::uint32_t>(me.index)};
  }
  me.copies.erase(me.copies.begin(), copy);
}

}  // namespace kvpolicy::gpu
