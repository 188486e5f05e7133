// SPDX-License-Identifier: Apache-2.0
//
// Memory with a limit, for all caches of a server together: what it has given is known at any time, and it gives
// no more than it may.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory_resource>
#include <new>
#include <span>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/try.hpp>
#include <kvpolicy/memory/slow_memory.hpp>

namespace kvpolicy {

/// Passes on what other memory gives, up to a limit; beyond it `allocate` throws std::bad_alloc. Over slow memory it is
/// slow memory. All functions may be called from several threads at once if the other memory's may.
class LimitedMemory final : public SlowMemory {
 public:
  /// @throws ConfigError if `upstream` is null
  explicit LimitedMemory(std::size_t limit, TierMemory upstream = std::pmr::get_default_resource())
      : limit_{limit}, upstream_{upstream} {
    require(upstream != nullptr, "LimitedMemory: upstream is null, must be a memory resource");
  }

  [[nodiscard]] std::size_t limit() const noexcept { return limit_; }
  /// Bytes that were given and did not come back.
  [[nodiscard]] std::size_t live_bytes() const noexcept { return live_.load(std::memory_order_relaxed); }
  /// The most of that at any time.
  [[nodiscard]] std::size_t peak_bytes() const noexcept { return peak_.load(std::memory_order_relaxed); }
  /// Bytes that it may still give.
  [[nodiscard]] std::size_t free_bytes() const noexcept { return limit_ - live_bytes(); }

  // ---- SlowMemory

  [[nodiscard]] bool holds(const std::byte* address) const noexcept override {
    return upstream_.provider() != nullptr && upstream_.provider()->holds(address);
  }
  void fetch(std::span<const Range> ranges) override {
    if (PageProvider* pages = upstream_.provider()) pages->fetch(ranges);
  }
  void fetch_ahead(std::span<const Range> ranges) noexcept override {
    if (PageProvider* pages = upstream_.provider()) pages->fetch_ahead(ranges);
  }
  void write(std::span<const Copy> copies) override {
    PageProvider* pages = upstream_.provider();
    pages != nullptr ? pages->write(copies) : PageProvider::write(copies);
  }

 private:
  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    std::size_t live = live_.load(std::memory_order_relaxed);
    do {
      if (bytes > limit_ - live) throw_error(std::bad_alloc{});
    } while (!live_.compare_exchange_weak(live, live + bytes, std::memory_order_relaxed));
    KVPOLICY_TRY {
      void* start = upstream_.resource()->allocate(bytes, alignment);
      std::size_t peak = peak_.load(std::memory_order_relaxed);
      while (peak < live + bytes &&
             !peak_.compare_exchange_weak(peak, live + bytes, std::memory_order_relaxed)) {
      }
      return start;
    }
    KVPOLICY_CATCH_ALL {
      live_.fetch_sub(bytes, std::memory_order_relaxed);
      KVPOLICY_RETHROW;
    }
  }
  void do_deallocate(void* start, std::size_t bytes, std::size_t alignment) override {
    upstream_.resource()->deallocate(start, bytes, alignment);
    live_.fetch_sub(bytes, std::memory_order_relaxed);
  }
  [[nodiscard]] bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
    return this == &other;
  }

  std::size_t limit_;
  TierMemory upstream_;
  std::atomic<std::size_t> live_{0};
  std::atomic<std::size_t> peak_{0};
};

}  // namespace kvpolicy
