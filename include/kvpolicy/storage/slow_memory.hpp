// SPDX-License-Identifier: Apache-2.0
//
// Row memory that takes long to reach and may fail to be: a file, say (offload/file_resource.hpp).
// Storages give it the pages that are full, once and for all, and an engine asks for what it is
// about to read (offload/fetching_engine.hpp). Any other memory resource can serve as slow memory as well;
// what derives from this one is asked before it is touched.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory_resource>
#include <span>
#include <vector>

#include <kvpolicy/core/segment.hpp>

namespace kvpolicy {

/// Memory for full pages that is slow to read, and fetched before it is read.
/// Blocks are addresses like any other's: reading one that was not fetched is allowed and may wait,
/// but a failure then is the operating system's to report.
class SlowMemory : public std::pmr::memory_resource {
 public:
  using Range = std::span<const std::byte>;
  /// `bytes` bytes of fast memory, and the place in a block that they go to.
  struct Copy {
    std::byte* to;
    const std::byte* from;
    std::size_t bytes;
  };

  /// Whether `place` lies in a block of this memory.
  [[nodiscard]] virtual bool holds(const std::byte* place) const noexcept = 0;

  /// Waits until all these ranges of blocks are at hand. Others may leave fast memory for it.
  /// @throws StorageError if one cannot be read, std::bad_alloc
  virtual void fetch(std::span<const Range> ranges) = 0;
  /// Begins to bring them, where there is room beside what was fetched last; does not wait.
  virtual void fetch_ahead(std::span<const Range> ranges) noexcept = 0;

  /// Fills blocks. Once it returns, the rows are where they stay: the sources may go.
  /// @throws StorageError, std::bad_alloc; the contents of the targets are unspecified then.
  virtual void write(std::span<const Copy> copies) = 0;
};

/// Adds the parts of `memory` that `rows` rows of a plane lie in, from plane row `first` on.
inline void list_ranges(const SlowMemory& memory, const Plane& plane, std::size_t head_dim,
                        std::size_t first, std::size_t rows, std::vector<SlowMemory::Range>& out) {
  if (plane.pages == nullptr) return;
  const PageLayout layout{plane.format, head_dim, plane.page_rows};
  for (std::size_t done = 0; done < rows;) {
    const Plane::Place place = plane.place(first + done);
    const std::size_t count = std::min(rows - done, place.contiguous_rows);
    done += count;
    if (!memory.holds(place.page)) continue;
    // Quantised rows need their scales and zeros, which lie behind all of a page's codes.
    if (is_quantized(plane.format.encoding)) {
      out.emplace_back(place.page, layout.page_bytes);
    } else {
      out.emplace_back(place.page + place.row * layout.row_bytes, count * layout.row_bytes);
    }
  }
}

/// `SlowMemory::write` of any resource.
inline void write_blocks(std::pmr::memory_resource* memory, std::span<const SlowMemory::Copy> copies) {
  if (copies.empty()) return;
  if (auto* slow = dynamic_cast<SlowMemory*>(memory)) return slow->write(copies);
  for (const SlowMemory::Copy& copy : copies) std::memcpy(copy.to, copy.from, copy.bytes);
}

}  // namespace kvpolicy
