// SPDX-License-Identifier: Apache-2.0
//
// Barriers, shuffles, votes and atomics of kernels/simt.cuh.
#pragma once

#include <cstring>
#include <type_traits>

#include "scheduler.hpp"

namespace kvpolicy::gpu {
namespace simt {

template <class T>
inline const Exchange& meet_with(Collective kind, const T& value) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(Exchange::Slot));
  const int lane = self->lane;
  return meet(kind, [&](Exchange& e) { std::memcpy(e.slot[lane].bytes, &value, sizeof value); });
}
template <class T>
inline T left_by(const Exchange& exchange, int lane) {
  T value;
  std::memcpy(&value, exchange.slot[lane].bytes, sizeof value);
  return value;
}
template <class T>
inline constexpr bool can_shuffle = std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8);

template <class T>
inline void require_alignment(const T* address, std::size_t bytes, const char* what) {
  if (reinterpret_cast<std::uintptr_t>(address) % bytes != 0) broken<Misaligned>(what);
}

}  // namespace simt

inline void sync_block() { simt::self->block->grid->arrive_at_barrier(); }
inline void sync_warp() {
  simt::meet(simt::Collective::sync_warp, [](simt::Exchange&) {});
}

template <class T>
inline T shuffle(T value, int source_lane) {
  static_assert(simt::can_shuffle<T>);
  const auto& all = simt::meet_with(simt::Collective::shuffle, value);
  return simt::left_by<T>(all, source_lane & (warp_lanes - 1));
}
template <int Width, class T>
inline T shuffle_within(T value, int source_lane) {
  const int first = simt::self->lane / Width * Width;
  return shuffle(value, first + source_lane % Width);
}
template <class T>
inline T shuffle_xor(T value, int mask) {
  static_assert(simt::can_shuffle<T>);
  const auto& all = simt::meet_with(simt::Collective::shuffle_xor, value);
  const int source = simt::self->lane ^ mask;
  return source < warp_lanes && source >= 0 ? simt::left_by<T>(all, source) : value;
}
template <class T>
inline T shuffle_up(T value, int delta) {
  static_assert(simt::can_shuffle<T>);
  const auto& all = simt::meet_with(simt::Collective::shuffle_up, value);
  const int source = simt::self->lane - delta;
  return source >= 0 ? simt::left_by<T>(all, source) : value;
}
inline std::uint32_t ballot(bool vote) {
  const auto& all = simt::meet_with(simt::Collective::ballot, vote);
  std::uint32_t votes = 0;
  for (int lane = 0; lane < warp_lanes; ++lane) {
    votes |= static_cast<std::uint32_t>(simt::left_by<bool>(all, lane)) << lane;
  }
  return votes;
}
inline bool any(bool vote) {
  const auto& all = simt::meet_with(simt::Collective::any, vote);
  bool found = false;
  for (int lane = 0; lane < warp_lanes; ++lane) found = found || simt::left_by<bool>(all, lane);
  return found;
}

/// Other threads may run before an atomic and after an arrival, because results must not depend on who adds
/// first.
inline std::uint32_t atomic_add(std::uint32_t* address, std::uint32_t value) {
  simt::require_alignment(address, sizeof *address, "atomic_add: address not a multiple of 4");
  simt::self->block->grid->step_aside();
  const std::uint32_t old = *address;
  *address = old + value;
  return old;
}
inline std::uint32_t arrive(std::uint32_t* counter) {
  const std::uint32_t before = atomic_add(counter, 1);
  simt::self->block->grid->step_aside();
  return before;
}
inline float load_shared_by_blocks(const float* address) {
  simt::require_alignment(address, sizeof *address, "load_shared_by_blocks: address not a multiple of 4");
  return *address;
}
inline Words2 load_shared_by_blocks(const Words2* address) {
  simt::require_alignment(address, sizeof *address, "load_shared_by_blocks: address not a multiple of 8");
  return *address;
}
inline Words4 load_shared_by_blocks(const Words4* address) {
  simt::require_alignment(address, sizeof *address, "load_shared_by_blocks: address not a multiple of 16");
  return *address;
}

}  // namespace kvpolicy::gpu
