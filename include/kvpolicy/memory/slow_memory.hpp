// SPDX-License-Identifier: Apache-2.0
//
// Memory that takes long to reach and may fail to be reached: a file, say
// (offload/file_resource.hpp). As a page provider it is a tier of a pool: storages give it the pages
// that are full, once and as a whole, and an engine asks for what it is about to read
// (offload/fetching_engine.hpp). It is a memory resource as well, so that whoever takes one can be given it;
// what a tier is made of is a TierMemory, in which its own functions are not lost.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory_resource>
#include <optional>
#include <vector>

#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/core/type_tag.hpp>
#include <kvpolicy/memory/page_provider.hpp>

namespace kvpolicy {

/// A page provider whose memory comes from its own `do_allocate`. Blocks have addresses like any
/// other's: reading one that was not fetched is allowed and may wait, but a failure then is the
/// operating system's to report.
class SlowMemory : public std::pmr::memory_resource, public PageProvider {
 public:
  [[nodiscard]] std::byte* obtain(std::size_t bytes) override {
    return static_cast<std::byte*>(allocate(bytes, page_alignment));
  }
  void give_back(std::byte* start, std::size_t bytes) noexcept override {
    deallocate(start, bytes, page_alignment);
  }

  // What a slow tier must have: `holds` tells its addresses from others, so that an engine knows
  // what to fetch.
  [[nodiscard]] bool holds(const std::byte* address) const noexcept override = 0;
  void fetch(std::span<const Range> ranges) override = 0;
  void fetch_ahead(std::span<const Range> ranges) noexcept override = 0;
  void write(std::span<const Copy> copies) override = 0;
};

/// What a tier of memory is made of: a memory resource, or memory that is a page provider itself. Made of either, and
/// points to it.
class TierMemory {
 public:
  TierMemory(std::nullptr_t = nullptr) noexcept {}
  TierMemory(SlowMemory* memory) noexcept : resource_{memory}, provider_{memory} {}
  /// A resource that is a page provider as well stays one; but without RTTI only a `SlowMemory*` is seen to be.
  TierMemory(std::pmr::memory_resource* memory) noexcept : resource_{memory} {
#if KVPOLICY_RTTI
    provider_ = dynamic_cast<PageProvider*>(memory);
#endif
  }

  [[nodiscard]] std::pmr::memory_resource* resource() const noexcept { return resource_; }
  /// The same object; null if it is a resource alone.
  [[nodiscard]] PageProvider* provider() const noexcept { return provider_; }
  friend bool operator==(TierMemory a, TierMemory b) noexcept { return a.resource_ == b.resource_; }

 private:
  std::pmr::memory_resource* resource_ = nullptr;
  PageProvider* provider_ = nullptr;
};

/// A tier over a memory resource, or the provider that the memory is itself. The memory must outlive it.
class TierProvider {
 public:
  /// @throws ConfigError if `memory` is null
  explicit TierProvider(TierMemory memory) : provider_{memory.provider()} {
    if (provider_ == nullptr) own_.emplace(memory.resource());
  }

  [[nodiscard]] PageProvider* get() noexcept { return provider_ != nullptr ? provider_ : &*own_; }

 private:
  PageProvider* provider_;
  std::optional<ResourceProvider> own_;
};

/// Adds the parts of `memory` that `rows` rows of a plane lie in, from plane row `first` on.
inline void list_ranges(const PageProvider& memory, const Plane& plane, std::size_t head_dim,
                        std::size_t first, std::size_t rows, std::vector<PageProvider::Range>& out) {
  if (plane.pages == nullptr) return;
  const PageLayout layout{plane.format, head_dim, plane.page_rows};
  for (std::size_t done = 0; done < rows;) {
    const RowAddress place = plane.address_of(first + done);
    const std::size_t count = std::min(rows - done, place.contiguous_rows);
    done += count;
    if (!memory.holds(place.page)) continue;
    // Quantised rows need their scales and zeros, which lie after all of a page's codes.
    if (is_quantized(plane.format.encoding)) {
      out.emplace_back(place.page, layout.page_bytes);
    } else {
      out.emplace_back(place.page + place.row * layout.row_bytes, count * layout.row_bytes);
    }
  }
}

/// The same for the rows that count of a segment: keys of `head_dim` channels, and values of `value_dim`,
/// none for 0.
inline void list_ranges(const PageProvider& memory, const Segment& segment, std::size_t head_dim,
                        std::size_t value_dim, std::vector<PageProvider::Range>& out) {
  segment.for_each_run([&](const RowRun& run) {
    list_ranges(memory, segment.keys, head_dim, run.first, run.rows, out);
    if (value_dim > 0) list_ranges(memory, segment.values, value_dim, run.first, run.rows, out);
  });
}

}  // namespace kvpolicy
