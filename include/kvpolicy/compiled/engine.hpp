// SPDX-License-Identifier: Apache-2.0
//
// The CPU engine, compiled once into a library (target kvpolicy::compiled) for several instruction sets. An
// engine takes the best one that the processor has when it is made. This header includes none of the
// engine's code and needs neither Highway nor a compiler flag: a file with it compiles as fast as one with
// ScalarEngine, and one program runs well on every machine. Results are those of cpu::Engine compiled for
// the same instruction set.
#pragma once

#include <concepts>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/cpu/parallel_for.hpp>

namespace kvpolicy::compiled {

/// A type-erased cpu::ParallelFor. A call allocates nothing by itself. Thread-safe if the pool is.
class AnyParallelFor {
 public:
  /// Calls one index of a loop's body. It has two words, so std::function<void(std::size_t)> holds it
  /// without allocating.
  struct Body {
    const void* object;
    void (*call)(const void*, std::size_t);

    void operator()(std::size_t index) const { call(object, index); }
  };

  // The order of the conditions matters: whether an AnyParallelFor can be copied must not depend on itself.
  template <class Pool>
    requires(!std::same_as<Pool, AnyParallelFor> && cpu::ParallelFor<Pool>)
  AnyParallelFor(Pool pool)
      : threads_{[pool] { return static_cast<std::size_t>(pool.threads()); }},
        run_{[pool](std::size_t count, const Body& body) { pool(count, body); }} {}

  [[nodiscard]] std::size_t threads() const { return threads_(); }

  template <class Loop>
  void operator()(std::size_t count, const Loop& loop) const {
    run_(count, Body{&loop, [](const void* object, std::size_t index) {
                       (*static_cast<const Loop*>(object))(index);
                     }});
  }

 private:
  std::function<std::size_t()> threads_;
  std::function<void(std::size_t, const Body&)> run_;
};

namespace detail {
class AnyEngine;
}

/// The names of the instruction sets that both this processor and this library have, best first. They are
/// among "AVX512-VNNI", "AVX2", "SSE4" and "baseline"; the last is always there.
[[nodiscard]] std::vector<std::string_view> instruction_sets();

/// An AttentionEngine. Keys and values may have any multiple of 8 channels, and a GQA group any size. Calls
/// on one engine must not overlap, because they share scratch memory. A copy has its own scratch memory and
/// a copy of the pool. An engine that was moved from may only be assigned to or destroyed.
class Engine {
 public:
  /// Runs on the calling thread, with the best instruction set.
  Engine();
  /// Runs on the threads of `pool`.
  explicit Engine(AnyParallelFor pool);
  /// Uses one of `instruction_sets()`.
  /// @throws ConfigError for any other name
  Engine(AnyParallelFor pool, std::string_view instruction_set);
  Engine(const Engine& other);
  Engine(Engine&& other) noexcept;
  Engine& operator=(const Engine& other);
  Engine& operator=(Engine&& other) noexcept;
  ~Engine();

  /// @throws ShapeError for a head_dim or value_dim that 8 does not divide, std::bad_alloc
  void attend(const LayerAttention& work);
  /// The same for any number of calls, whose outputs must not overlap.
  /// @throws as `attend`, before anything is written
  void attend_all(std::span<const LayerAttention> works);
  /// @throws ShapeError for a head_dim or value_dim that 8 does not divide, std::bad_alloc
  void observe(const LayerObservation& work);
  /// @throws ShapeError for a query length that 8 does not divide, std::bad_alloc
  void score(const Plane& rows, std::span<const float> query, std::span<float> out);
  /// @throws ShapeError for a head_dim that 8 does not divide, std::bad_alloc
  void bound(const LayerBounds& work);

  /// The instruction set of this engine.
  [[nodiscard]] std::string_view instruction_set() const noexcept;

 private:
  std::unique_ptr<detail::AnyEngine> engine_;
};

static_assert(BatchedEngine<Engine> && BoundingEngine<Engine>);

}  // namespace kvpolicy::compiled
