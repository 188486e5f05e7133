// SPDX-License-Identifier: Apache-2.0
//
// The scales and zeros of a row tile's quantised rows as float, with rows side by side: one vector then has the
// scales of neighbouring rows for one group of channels.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include <kvpolicy/cpu/row_tile-inl.hpp>
#include <kvpolicy/cpu/vector-inl.hpp>

namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {
KVPOLICY_CPU_BEGIN_TARGET

/// Rounds a number of floats up to whole cache lines. Scratch memory is cut so, because a vector that crosses a line
/// is two accesses.
[[nodiscard]] constexpr std::size_t whole_lines(std::size_t count) { return (count + 15) / 16 * 16; }

/// The scales of a row tile, and the numbers that stand in the middle of the codes: scale * middle + zero. Codes
/// count from there, so that a rounded factor errs by half the range of the codes at most.
class RowTileParams {
 public:
  /// With smaller groups, scales are more work than codes.
  static constexpr std::size_t smallest_group = 16;

  [[nodiscard]] static std::size_t scratch_floats(std::size_t head_dim) {
    return 2 * max_tile_rows * most_groups(head_dim) + lanes * most_groups(head_dim);
  }
  RowTileParams(std::size_t head_dim, float* scratch)
      : scales_{scratch},
        middles_{scales_ + max_tile_rows * most_groups(head_dim)},
        rows_{middles_ + max_tile_rows * most_groups(head_dim)} {}

  /// Loads those of rows with `groups` groups each, of which none is smaller than smallest_group unless there is
  /// only one. Zeros follow up to a whole vector of rows. Returns whether all are finite.
  bool load(const RowTileSide& side, std::size_t rows, std::size_t groups, float middle) {
    auto nothing = zero_vector();  // or NaN
    const Distances apart = distances(groups * sizeof(float16));
    for (std::size_t row = 0; row < rows; row += lanes) {
      const std::size_t count = std::min(rows - row, lanes);
      spread(side.scales.data() + row, count, groups, apart, scales_ + row);
      spread(side.zeros.data() + row, count, groups, apart, middles_ + row);
      for (std::size_t g = 0; g < groups; ++g) {
        const auto scale = hn::LoadU(floats, scales(g) + row);
        const auto at_middle =
            hn::MulAdd(scale, hn::Set(floats, middle), hn::LoadU(floats, middles(g) + row));
        hn::StoreU(at_middle, floats, middles_ + g * max_tile_rows + row);
        // Not finite if either of the two is.
        nothing = hn::Add(nothing, hn::Sub(at_middle, at_middle));
      }
    }
    return hn::AllTrue(floats, hn::Eq(nothing, zero_vector()));
  }

  /// Those of group g, for each row.
  [[nodiscard]] HWY_INLINE const float* scales(std::size_t g) const { return scales_ + g * max_tile_rows; }
  [[nodiscard]] HWY_INLINE const float* middles(std::size_t g) const { return middles_ + g * max_tile_rows; }

 private:
  // Addresses of neighbouring rows' numbers, less that of the first row.
  static constexpr hn::ScalableTag<std::int64_t> longs{};
  static constexpr std::size_t longs_at_once = hn::MaxLanes(longs);
  struct Distances {
    hn::Vec<hn::ScalableTag<std::int64_t>> of_rows[lanes / longs_at_once];
  };
  [[nodiscard]] static HWY_INLINE Distances distances(std::size_t bytes) {
    HWY_ALIGN std::int64_t numbers[lanes];
    for (std::size_t i = 0; i < lanes; ++i) numbers[i] = static_cast<std::int64_t>(i * bytes);
    Distances result;
    for (std::size_t i = 0; i < lanes / longs_at_once; ++i) {
      result.of_rows[i] = hn::Load(longs, numbers + i * longs_at_once);
    }
    return result;
  }

  [[nodiscard]] static std::size_t most_groups(std::size_t head_dim) {
    return (head_dim + smallest_group - 1) / smallest_group;
  }

  // Writes the numbers of `count` rows, `groups` for each, as out[group * max_tile_rows + row].
  HWY_INLINE void spread(const float16* const* numbers, std::size_t count, std::size_t groups,
                         const Distances& apart, float* out) const {
    if (count == lanes && are_neighbours(numbers, apart)) {
      if (groups == 1) return hn::StoreU(load_half(numbers[0]), floats, out);
      for (std::size_t at = 0; at < groups; ++at) {
        hn::StoreU(load_half(numbers[0] + at * lanes), floats, rows_ + at * lanes);
      }
    } else {
      for (std::size_t at = 0; at < groups * lanes; at += lanes) {
        std::array<float16, lanes> halves{};
        for (std::size_t i = at; i < at + lanes && i / groups < count; ++i) {
          halves[i - at] = numbers[i / groups][i % groups];
        }
        hn::StoreU(load_half(halves.data()), floats, rows_ + at);
      }
    }
    FloatVector a, b, c, d;
    switch (groups) {
      case 2:
        hn::LoadInterleaved2(floats, rows_, a, b);
        hn::StoreU(a, floats, out);
        hn::StoreU(b, floats, out + max_tile_rows);
        return;
      case 4:
        hn::LoadInterleaved4(floats, rows_, a, b, c, d);
        hn::StoreU(a, floats, out);
        hn::StoreU(b, floats, out + max_tile_rows);
        hn::StoreU(c, floats, out + 2 * max_tile_rows);
        hn::StoreU(d, floats, out + 3 * max_tile_rows);
        return;
      default:
        for (std::size_t g = 0; g < groups; ++g) {
          for (std::size_t row = 0; row < lanes; ++row) {
            out[g * max_tile_rows + row] = rows_[row * groups + g];
          }
        }
    }
  }

  // Whether the numbers of `lanes` rows are contiguous in memory, as in most row tiles.
  [[nodiscard]] static HWY_INLINE bool are_neighbours(const float16* const* numbers, const Distances& apart) {
    static_assert(sizeof(float16) == 2 && sizeof(numbers) == sizeof(std::int64_t));
    const auto first = hn::Set(longs, reinterpret_cast<std::int64_t>(numbers[0]));
    auto different = hn::Zero(longs);
    KVPOLICY_CPU_UNROLL
    for (std::size_t i = 0; i < lanes / longs_at_once; ++i) {
      const auto found = hn::LoadU(longs, reinterpret_cast<const std::int64_t*>(numbers + i * longs_at_once));
      different = hn::Or(different, hn::Xor(found, hn::Add(first, apart.of_rows[i])));
    }
    return hn::AllTrue(longs, hn::Eq(different, hn::Zero(longs)));
  }

  float* scales_;   // [groups, max_tile_rows]
  float* middles_;  // [groups, max_tile_rows]
  float* rows_;     // [lanes, groups]
};

KVPOLICY_CPU_END_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
