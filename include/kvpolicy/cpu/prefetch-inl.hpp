// SPDX-License-Identifier: Apache-2.0
//
// Prefetches rows into the cache, a few at a time, while other rows are processed.
#pragma once

#include <algorithm>
#include <cstddef>

#include <kvpolicy/cpu/highway.hpp>
#include <kvpolicy/cpu/row_tile-inl.hpp>
#include <kvpolicy/cpu/vector-inl.hpp>

namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {

/// Fetches a cache line into the second-level cache. Highway's own Prefetch fetches to the first level:
/// more requests than the few that level keeps in flight stall the loads after them. Measured on Zen 4: 1.5
/// times the speed.
HWY_INLINE void fetch_to_second_level(const std::byte* line) {
#if HWY_COMPILER_MSVC
  hwy::Prefetch(line);
#else
  __builtin_prefetch(line, 0, 2);
#endif
}

KVPOLICY_CPU_BEGIN_TARGET

/// The codes of one side of a row tile, to be prefetched.
struct Prefetch {
  const std::byte* const* rows = nullptr;
  std::size_t count = 0;
  std::size_t bytes = 0;
  std::size_t first_byte = 0;

  /// The start of the row that is fetched as number i. Rows of the two halves alternate, because memory
  /// delivers two streams faster than one (measured on Emerald Rapids: 6 %).
  [[nodiscard]] HWY_INLINE const std::byte* start_of(std::size_t i) const {
    return rows[i % 2 == 0 ? i / 2 : (count + i) / 2];
  }
  HWY_INLINE void row(std::size_t i) const {
    if (i >= count) return;
    const std::byte* start = start_of(i);
    for (std::size_t at = first_byte; at < bytes; at += 64) fetch_to_second_level(start + at);
  }
  /// The part of each row that pass number `index` of `passes` over the current rows has to fetch. If the
  /// first pass fetched everything, memory would be idle in the others: 0.8 times the speed.
  [[nodiscard]] Prefetch share(std::size_t index, std::size_t passes) const {
    const auto begin = [&](std::size_t pass) { return bytes * pass / passes / 64 * 64; };
    return {rows, count, index + 1 < passes ? begin(index + 1) : bytes, begin(index)};
  }
};

/// Bytes of a row that are fetched from its codes on. Lower halves lie elsewhere, one after another, and are left to
/// the processor.
[[nodiscard]] constexpr std::size_t fetched_bytes(Encoding encoding, std::size_t head_dim) {
  return head_dim * bits_of(encoding) / (is_in_halves(encoding) ? 16 : 8);
}

[[nodiscard]] inline Prefetch prefetch_of(const RowTileSide& side, std::size_t rows, std::size_t head_dim) {
  return {side.codes.data(), rows, fetched_bytes(side.format.encoding, head_dim)};
}

/// Fetches four rows, a few cache lines at each step of work: many at once would stall the loads after
/// them.
class FourRowPrefetch {
 public:
  /// Begins with row number i in fetching order. `steps` is the number of steps until all is fetched.
  HWY_INLINE FourRowPrefetch(const Prefetch& rows, std::size_t i, std::size_t steps)
      : at_{rows.first_byte},
        end_{i + 4 <= rows.count ? rows.bytes : 0},
        stride_{((rows.bytes - rows.first_byte + 63) / 64 + steps - 1) / steps * 64} {
    if (end_ > 0) {
      unroll<4>([&](auto j) KVPOLICY_CPU_INLINE_LAMBDA { starts_[j] = rows.start_of(i + j); });
    } else {
      for (std::size_t last = i; last < rows.count; ++last) rows.row(last);
    }
  }
  HWY_INLINE void step() {
    for (const std::size_t end = std::min(at_ + stride_, end_); at_ < end; at_ += 64) {
      unroll<4>([&](auto j) KVPOLICY_CPU_INLINE_LAMBDA { fetch_to_second_level(starts_[j] + at_); });
    }
  }

 private:
  const std::byte* starts_[4] = {};
  std::size_t at_, end_, stride_;
};

/// Fetches rows in equal parts, for work of a known number of steps.
class PrefetchWalk {
 public:
  PrefetchWalk(const Prefetch& rows, std::size_t steps)
      : rows_{rows}, share_{(rows.count + steps - 1) / std::max<std::size_t>(steps, 1)} {}

  HWY_INLINE void step() {
    const std::size_t end = std::min(next_ + share_, rows_.count);
    for (; next_ < end; ++next_) rows_.row(next_);
  }

 private:
  Prefetch rows_;
  std::size_t share_;
  std::size_t next_ = 0;
};

/// Fetches the scales and zeros of a side's rows: all of them if they follow each other, which is up to a page,
/// otherwise those of the first and the last row. They come after the codes of a page, where the prefetch of rows
/// does not reach. (Always inline: GCC drops calls of functions that only prefetch.)
HWY_INLINE void fetch_params(const RowTileSide& side, std::size_t rows, std::size_t head_dim) {
  if (rows == 0 || !is_quantized(side.format.encoding)) return;
  const bool per_token = side.format.granularity == Granularity::per_token;
  const std::size_t params = per_token ? head_dim / side.format.group : head_dim;
  const std::size_t bytes = params * scale_bytes(side.format.codebook);
  const auto fetch = [&](const void* first_row, const void* last_row) KVPOLICY_CPU_INLINE_LAMBDA {
    const auto* first = static_cast<const std::byte*>(first_row);
    const auto* last = static_cast<const std::byte*>(last_row);
    if (per_token && last == first + (rows - 1) * bytes) {
      for (const std::byte* line = first; line < last; line += 64) fetch_to_second_level(line);
    } else {
      for (std::size_t at = 0; at < bytes; at += 64) {
        fetch_to_second_level(first + at);
        if (last != first) fetch_to_second_level(last + at);
      }
    }
    fetch_to_second_level(last + bytes - 1);
  };
  if (side.format.codebook == Codebook::even) {
    fetch(side.scales[0], side.scales[rows - 1]);
    fetch(side.zeros[0], side.zeros[rows - 1]);
  } else if (bytes > 0) {
    fetch(side.code_scales[0], side.code_scales[rows - 1]);
  }
}

KVPOLICY_CPU_END_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
