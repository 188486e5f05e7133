// SPDX-License-Identifier: Apache-2.0
//
// What a storage that quantises asks of its rows and settings before anything changes.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/hadamard.hpp>
#include <kvpolicy/core/quantizable.hpp>
#include <kvpolicy/core/row.hpp>
#include <kvpolicy/core/segment.hpp>

namespace kvpolicy::detail {

inline constexpr double least_head_scale = 0x1p-60;
inline constexpr double most_head_scale = 0x1p60;

/// Whether a codebook's scale of a head (`key_scale`, `value_scale`) can be used. @throws ConfigError
inline void check_head_scale(std::string_view storage, const char* side, double scale) {
  require(scale >= least_head_scale && scale <= most_head_scale, storage, ": ", side, "_scale is ", scale,
          ", must be from 2^-60 to 2^60");
}
/// The scale as formats have it: planes are made before the settings are checked.
[[nodiscard]] inline float head_scale(double scale) {
  return scale >= least_head_scale && scale <= most_head_scale ? static_cast<float>(scale) : 1.0F;
}

/// Looks at keys, then values: `formats` and `channels` are those of both. Rows are rounded to `precision` before they
/// are quantised.
/// @throws ShapeError for a number, as it is kept, that is not finite or whose scale or zero could be beyond half
/// (core/quantizable.hpp)
inline void check_quantizable(std::string_view storage, const Segment& rows,
                              const std::array<RowFormat, 2>& formats, Encoding precision,
                              const std::array<std::size_t, 2>& channels) {
  std::array<float, max_head_dim> memory;
  const std::array<const Plane*, 2> sides{&rows.keys, &rows.values};
  for (std::size_t side = 0; side < 2; ++side) {
    const std::span<float> row = std::span{memory}.first(channels[side]);
    for (std::size_t i = 0; i < rows.rows; ++i) {
      load_row(*sides[side], i, row);
      if (sides[side]->format.encoding != precision) round_dense(precision, row);
      if (formats[side].hadamard) rotate_hadamard(row);
      const auto fits = [](float number) { return is_quantizable(std::bit_cast<std::uint32_t>(number)); };
      unsigned refused = 0;  // counted, for then the loop has no exit and becomes vectors
      for (const float number : row) refused += fits(number) ? 0U : 1U;
      if (refused == 0) continue;
      const auto first = std::ranges::find_if_not(row, fits);
      const auto channel = static_cast<std::size_t>(first - row.begin());
      std::vector<float> given(row.size());
      load_row(*sides[side], i, given);
      fail<ShapeError>(storage, ": ", side == 0 ? "key" : "value", " at position ", rows.position_of(i),
                       ", channel ", channel, " is ", given[channel], ", kept as ", *first, " in ",
                       name_of(precision), "; to be quantised it must be finite and at most ",
                       largest_quantizable);
    }
  }
}

}  // namespace kvpolicy::detail
