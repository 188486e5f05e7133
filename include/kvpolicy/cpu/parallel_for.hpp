// SPDX-License-Identifier: Apache-2.0
//
// Where the CPU engine's threads come from: the caller. An engine never starts a thread of its
// own; it hands a loop to a ParallelFor, by default OpenMP's threads where the translation unit is
// compiled with OpenMP, else the calling thread alone.
#pragma once

#include <concepts>
#include <cstddef>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace kvpolicy::cpu {

/// `parallel_for(count, body)` calls `body(i)` once for each i in [0, count), in any order, from
/// any threads, and returns when all calls have; `body` does not throw and may be copied or turned
/// into a std::function<void(std::size_t)>. `threads()` says how many calls can run at once: the
/// engine asks for that many, each of which takes work until none is left.
template <class P>
concept ParallelFor = requires(const P& pool, void (*body)(std::size_t)) {
  { pool.threads() } -> std::convertible_to<std::size_t>;
  pool(std::size_t{1}, body);
} && std::copyable<P>;  // asked last: whether a type is copyable may depend on what converts to a pool

/// The calling thread.
struct SerialFor {
  [[nodiscard]] std::size_t threads() const { return 1; }

  template <class Body>
  void operator()(std::size_t count, const Body& body) const {
    for (std::size_t i = 0; i < count; ++i) body(i);
  }
};

#ifdef _OPENMP
/// OpenMP's threads: `count` of them, or as many as OpenMP gives a region (0).
struct OpenMpFor {
  std::size_t count = 0;

  [[nodiscard]] std::size_t threads() const {
    return count > 0 ? count : static_cast<std::size_t>(omp_get_max_threads());
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
/// OpenMP's threads where there is OpenMP, else the calling one.
using DefaultParallelFor = OpenMpFor;
static_assert(ParallelFor<OpenMpFor>);
#else
using DefaultParallelFor = SerialFor;
#endif
static_assert(ParallelFor<SerialFor>);

}  // namespace kvpolicy::cpu
