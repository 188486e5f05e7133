// SPDX-License-Identifier: Apache-2.0
//
// The threads of the CPU engine belong to the caller. An engine never starts a thread of its own; it passes
// a loop to a ParallelFor. The default uses OpenMP's threads if the translation unit is compiled with
// OpenMP, otherwise the calling thread alone.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <limits>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace kvpolicy::cpu {

/// `parallel_for(count, body)` calls `body(i)` once for each i in [0, count), in any order, from any
/// threads, and returns after all calls have returned. `body` does not throw; it may be copied or converted
/// to a std::function<void(std::size_t)>. `threads()` says how many calls can run at once. The engine
/// requests that many calls, each of which takes work until none is left.
template <class P>
concept ParallelFor = requires(const P& pool, void (*body)(std::size_t)) {
  { pool.threads() } -> std::convertible_to<std::size_t>;
  pool(std::size_t{1}, body);
  requires std::copyable<P>;  // last, because copyability may depend on conversions to a pool
};

/// Runs everything on the calling thread.
struct SerialFor {
  [[nodiscard]] std::size_t threads() const { return 1; }

  template <class Body>
  void operator()(std::size_t count, const Body& body) const {
    for (std::size_t i = 0; i < count; ++i) body(i);
  }
};

#ifdef _OPENMP
/// Uses OpenMP's threads: `count` of them, or as many as OpenMP gives a region (0), which is one where the
/// caller is in a region already and OpenMP does not nest them (its default).
struct OpenMpFor {
  std::size_t count = 0;

  [[nodiscard]] std::size_t threads() const {
    // More than OpenMP's own type counts would be none.
    constexpr std::size_t most = std::numeric_limits<int>::max();
    if (count > 0) return std::min(count, most);
    if (omp_get_active_level() >= omp_get_max_active_levels()) return 1;
    return static_cast<std::size_t>(omp_get_max_threads());
  }

  template <class Body>
  void operator()(std::size_t calls, const Body& body) const {
    if (calls == 1) return body(0);
    const auto last = static_cast<std::ptrdiff_t>(calls);
    const auto team = static_cast<int>(threads());
#pragma omp parallel for schedule(static, 1) num_threads(team)
    for (std::ptrdiff_t i = 0; i < last; ++i) body(static_cast<std::size_t>(i));
  }
};
/// OpenMP's threads if there is OpenMP, otherwise the calling thread.
using DefaultParallelFor = OpenMpFor;
static_assert(ParallelFor<OpenMpFor>);
#else
using DefaultParallelFor = SerialFor;
#endif
static_assert(ParallelFor<SerialFor>);

}  // namespace kvpolicy::cpu
