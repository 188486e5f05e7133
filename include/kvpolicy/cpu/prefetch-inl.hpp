// SPDX-License-Identifier: Apache-2.0
//
// Rows brought into cache, a few at a time, while others are worked on.
#pragma once

#include <algorithm>
#include <cstddef>

#include <kvpolicy/cpu/highway.hpp>
#include <kvpolicy/cpu/row_block-inl.hpp>

namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {

/// Not to the first level, which Highway's own Prefetch aims at: requests beyond the few that level
/// keeps in flight stall the loads behind them. Measured on Zen 4: 1.5 times the speed.
HWY_INLINE void fetch_to_second_level(const std::byte* line) {
#if HWY_COMPILER_MSVC
  hwy::Prefetch(line);
#else
  __builtin_prefetch(line, 0, 2);
#endif
}

/// The codes of one side of a block.
struct Prefetch {
  const std::byte* const* rows = nullptr;
  std::size_t count = 0;
  std::size_t bytes = 0;
  std::size_t first_byte = 0;

  HWY_INLINE void row(std::size_t i) const {
    if (i >= count) return;
    for (std::size_t at = first_byte; at < bytes; at += 64) fetch_to_second_level(rows[i] + at);
  }
  /// The lines of each row that pass `index` of `passes` over the rows at hand is to fetch. All in
  /// the first pass would let memory idle in the others: 0.8 times the speed.
  [[nodiscard]] Prefetch share(std::size_t index, std::size_t passes) const {
    const auto begin = [&](std::size_t pass) { return bytes * pass / passes / 64 * 64; };
    return {rows, count, index + 1 < passes ? begin(index + 1) : bytes, begin(index)};
  }
};

[[nodiscard]] inline Prefetch prefetch_of(const BlockSide& side, std::size_t rows,
                                          std::size_t head_dim) {
  return {side.codes.data(), rows, head_dim * bits_of(side.format.encoding) / 8};
}

/// The same in equal shares, for work of a known number of steps.
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

/// The scales and zeros of a side's first and last rows: they lie behind the codes of a page, where
/// no walk along its rows foresees them. (Always inline: GCC drops calls of functions that do nothing
/// but fetch.)
HWY_INLINE void fetch_params(const BlockSide& side, std::size_t rows, std::size_t head_dim) {
  if (rows == 0 || !is_quantized(side.format.encoding)) return;
  const bool per_token = side.format.granularity == Granularity::per_token;
  const std::size_t bytes = (per_token ? head_dim / side.format.group : head_dim) * sizeof(half);
  for (const auto* params : {&side.scales, &side.zeros}) {
    const auto* first = reinterpret_cast<const std::byte*>((*params)[0]);
    const auto* last = reinterpret_cast<const std::byte*>((*params)[rows - 1]);
    for (std::size_t at = 0; at < bytes; at += 64) {
      fetch_to_second_level(first + at);
      if (last != first) fetch_to_second_level(last + at);
    }
    fetch_to_second_level(last + bytes - 1);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
