// SPDX-License-Identifier: Apache-2.0
//
// Cuts segments into row tiles of up to 64 rows, each row given by a pointer: the code that uses them knows
// no pages, runs and strides. The rows of a tile need not be neighbours, so many short runs fill tiles as
// well as one long run.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/cpu/highway.hpp>
#include <kvpolicy/cpu/query_tile-inl.hpp>

namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {

inline constexpr std::size_t max_tile_rows = 64;

/// The addresses of the rows of one side of a row tile. Scales and zeros are set only for quantised
/// formats, `code_scales` in their place for codebooks other than `even`.
struct RowTileSide {
  RowFormat format = {};
  std::size_t lower_offset = 0;  // bytes from a row's codes to their lower parts (PageLayout)
  std::array<const std::byte*, max_tile_rows> codes;
  std::array<const float16*, max_tile_rows> scales;
  std::array<const float16*, max_tile_rows> zeros;
  std::array<const std::byte*, max_tile_rows> code_scales;
};

/// Rows of one segment, in its order. At least one query of the tile sees each of them, as far as the
/// positions of its run tell.
struct RowTile {
  const Segment* segment = nullptr;
  std::size_t rows = 0;
  bool cut = false;  // some query does not see some row
  RowTileSide keys;
  RowTileSide values;
  std::array<std::int64_t, max_tile_rows> positions;
  std::array<std::size_t, max_tile_rows> nodes;     // if the segment's rows are nodes of a tree
  std::array<std::size_t, max_tile_rows> ordinals;  // index among all rows that the segments show

  [[nodiscard]] std::size_t node(std::size_t row) const {
    return segment->node == no_node ? no_node : nodes[row];
  }
  /// Call visit(Range) for neighbouring queries of the tile that see a row, or that do not.
  template <class Visit>
  void for_each_seeing(const QueryTile& tile, std::size_t row, Visit visit) const {
    tile.for_each_seeing(positions[row], segment->window, node(row), visit);
  }
  template <class Visit>
  void for_each_not_seeing(const QueryTile& tile, std::size_t row, Visit visit) const {
    tile.for_each_not_seeing(positions[row], segment->window, node(row), visit);
  }
};

/// The cost of one row: its bytes, and a small amount for the arithmetic, which is equal for all formats.
/// It serves to divide work and is not a time.
[[nodiscard]] inline std::size_t row_cost(const Segment& segment, const QueryTile& tile) {
  const std::size_t bits = tile.key_dim() * bits_of(segment.keys.format.encoding) +
                           tile.value_dim * bits_of(segment.values.format.encoding);
  return bits / 8 + tile.key_dim() + tile.value_dim;
}

/// The part of a run that some query of the tile may see.
[[nodiscard]] inline RowRun seen_part(const Segment& segment, const RowRun& run, const QueryTile& tile) {
  if (segment.positions != nullptr) return run;  // positions are in any order, so each row is checked later
  const auto first = static_cast<std::int64_t>(run.first);
  const auto last = static_cast<std::int64_t>(run.first + run.rows);
  const std::int64_t oldest = segment.window >= unlimited_window - segment.position - tile.earliest()
                                  ? first
                                  : tile.earliest() - segment.window + 1 - segment.position;
  const std::int64_t from = std::clamp(oldest, first, last);
  const std::int64_t to = std::clamp(tile.latest() + 1 - segment.position, from, last);
  return {static_cast<std::size_t>(from), static_cast<std::size_t>(to - from)};
}

/// The cost of all rows that some query of the tile may see.
[[nodiscard]] inline std::size_t seen_cost(std::span<const Segment> segments, const QueryTile& tile) {
  std::size_t total = 0;
  for (const Segment& segment : segments) {
    const std::size_t cost = row_cost(segment, tile);
    segment.for_each_run([&](const RowRun& run) { total += cost * seen_part(segment, run, tile).rows; });
  }
  return total;
}

/// The most rows of a row tile, for dense and for quantised keys.
struct RowTileLimit {
  std::size_t dense;
  std::size_t quantized;

  [[nodiscard]] std::size_t of(const Segment& segment) const {
    return is_quantized(segment.keys.format.encoding) ? quantized : dense;
  }
};

/// Reads the rows that a tile sees and whose cumulated cost begins in [from, to). Any cut of the cost is a
/// cut of the rows.
class RowTileReader {
 public:
  RowTileReader(std::span<const Segment> segments, const QueryTile& tile, std::size_t from, std::size_t to)
      : segments_{segments}, tile_{tile}, from_{from}, to_{to} {
    if (!segments_.empty()) enter_segment();
  }

  /// Fills `row_tile` with the next rows, at most as many as `limit` allows; with none if no rows are left.
  void read(RowTile& row_tile, const RowTileLimit& limit) {
    row_tile.rows = 0;
    row_tile.cut = false;
    while (row_tile.rows == 0 || row_tile.rows < limit.of(*row_tile.segment)) {
      if (row_ < end_) {
        take(row_tile, limit.of(segments_[segment_]));
      } else if (!enter_run()) {
        if (row_tile.rows > 0 || segment_ == segments_.size()) break;
        if (++segment_ < segments_.size()) enter_segment();
      }
    }
    if (row_tile.rows == 0) return;
    row_tile.cut =
        row_tile.segment->node != no_node || !tile_.all_see(oldest_, newest_, row_tile.segment->window);
  }

 private:
  void enter_segment() {
    const Segment& segment = segments_[segment_];
    run_ = 0;
    cost_ = row_cost(segment, tile_);
    key_layout_ = PageLayout{segment.keys.format, tile_.key_dim(), segment.keys.page_rows};
    value_layout_ = PageLayout{segment.values.format, tile_.value_dim, segment.values.page_rows};
  }

  // Enters the next run of this segment, cut to the rows that the tile sees and to the range of cost.
  bool enter_run() {
    if (segment_ == segments_.size()) return false;
    const Segment& segment = segments_[segment_];
    if (run_ == std::max<std::size_t>(segment.runs.size(), 1)) return false;
    const RowRun run = segment.runs.empty() ? RowRun{0, segment.rows} : segment.runs[run_];
    ++run_;
    const RowRun seen = seen_part(segment, run, tile_);
    const auto rows_before = [&](std::size_t bound) {
      return std::min(seen.rows, (bound - std::min(bound, passed_) + cost_ - 1) / cost_);
    };
    row_ = seen.first + rows_before(from_);
    end_ = seen.first + rows_before(to_);
    ordinal_ = shown_ + (row_ - run.first);
    passed_ += seen.rows * cost_;
    shown_ += run.rows;
    return true;
  }

  // Takes as many rows as are contiguous in both planes.
  void take(RowTile& row_tile, std::size_t limit) {
    const Segment& segment = segments_[segment_];
    if (row_tile.rows == 0) {
      row_tile.segment = &segment;
      row_tile.keys.format = segment.keys.format;
      row_tile.values.format = segment.values.format;
      row_tile.keys.lower_offset = key_layout_.lower_offset;
      row_tile.values.lower_offset = value_layout_.lower_offset;
      oldest_ = std::numeric_limits<std::int64_t>::max();
      newest_ = std::numeric_limits<std::int64_t>::min();
    }
    const auto keys = segment.keys.address_of(row_);
    const auto values = segment.values.address_of(row_);
    const std::size_t count =
        std::min({limit - row_tile.rows, end_ - row_, keys.contiguous_rows, values.contiguous_rows});
    const std::size_t first = row_tile.rows;
    std::int64_t oldest = segment.position_of(row_);
    std::int64_t newest = oldest + static_cast<std::int64_t>(count) - 1;
    bool in_one_go = segment.node == no_node;
    if (segment.positions != nullptr) {
      newest = oldest;
      for (std::size_t i = 0; i < count; ++i) {
        const std::int64_t position = segment.positions[row_ + i];
        row_tile.positions[first + i] = position;
        oldest = std::min(oldest, position);
        newest = std::max(newest, position);
      }
      in_one_go = in_one_go && tile_.all_see(oldest, newest, segment.window);
    }
    if (in_one_go) {
      place_rows(segment.keys, keys, count, key_layout_, row_tile.keys, first);
      place_rows(segment.values, values, count, value_layout_, row_tile.values, first);
      for (std::size_t i = 0; i < count; ++i) {
        if (segment.positions == nullptr) {
          row_tile.positions[first + i] = oldest + static_cast<std::int64_t>(i);
        }
        row_tile.ordinals[first + i] = ordinal_ + i;
      }
      oldest_ = std::min(oldest_, oldest);
      newest_ = std::max(newest_, newest);
      row_tile.rows += count;
    } else {
      for (std::size_t i = 0; i < count; ++i) {
        const std::int64_t position = segment.position_of(row_ + i);
        if (!tile_.is_seen(position, segment.window, segment.node_of(row_ + i))) continue;
        place_rows(segment.keys, segment.keys.address_of(row_ + i), 1, key_layout_, row_tile.keys,
                   row_tile.rows);
        place_rows(segment.values, segment.values.address_of(row_ + i), 1, value_layout_, row_tile.values,
                   row_tile.rows);
        row_tile.positions[row_tile.rows] = position;
        row_tile.nodes[row_tile.rows] = segment.node_of(row_ + i);
        row_tile.ordinals[row_tile.rows] = ordinal_ + i;
        oldest_ = std::min(oldest_, position);
        newest_ = std::max(newest_, position);
        ++row_tile.rows;
      }
    }
    row_ += count;
    ordinal_ += count;
  }

  // Sets the addresses of `count` contiguous rows, from row `first` of the row tile on.
  static void place_rows(const Plane& plane, const RowAddress& address, std::size_t count,
                         const PageLayout& layout, RowTileSide& side, std::size_t first) {
    const std::size_t step = plane.step(layout.row_bytes);
    const std::byte* codes = address.page + address.row * step;
    for (std::size_t i = 0; i < count; ++i) side.codes[first + i] = codes + i * step;
    if (!is_quantized(plane.format.encoding)) return;
    if (plane.format.codebook != Codebook::even) {
      const std::byte* own = address.page + layout.scales_offset + address.row * layout.param_bytes;
      for (std::size_t i = 0; i < count; ++i) side.code_scales[first + i] = own + i * layout.param_bytes;
      return;
    }
    const auto* scales = reinterpret_cast<const float16*>(address.page + layout.scales_offset);
    const auto* zeros = reinterpret_cast<const float16*>(address.page + layout.zeros_offset);
    if (plane.format.granularity == Granularity::per_token) {
      for (std::size_t i = 0; i < count; ++i) {
        const std::size_t at = (address.row + i) * layout.params_per_row;
        side.scales[first + i] = scales + at;
        side.zeros[first + i] = zeros + at;
      }
      return;
    }
    const std::size_t group = plane.format.group;
    std::size_t left = group - address.row % group;
    const float16* group_scales = scales + address.row / group * layout.params_per_row;
    for (std::size_t i = 0; i < count; left = group, group_scales += layout.params_per_row) {
      const std::size_t end = std::min(count, i + left);
      std::fill_n(side.scales.data() + first + i, end - i, group_scales);
      std::fill_n(side.zeros.data() + first + i, end - i, group_scales + (zeros - scales));
      i = end;
    }
  }

  std::span<const Segment> segments_;
  const QueryTile& tile_;
  std::size_t from_, to_;
  std::size_t segment_ = 0;
  std::size_t run_ = 0;
  std::size_t row_ = 0, end_ = 0;  // remaining rows of the run
  std::size_t ordinal_ = 0;        // ordinal of row_
  std::size_t shown_ = 0;          // rows of all entered runs
  std::size_t passed_ = 0;         // cost of all rows seen in them
  std::size_t cost_ = 0;
  std::int64_t oldest_ = 0, newest_ = 0;
  PageLayout key_layout_;
  PageLayout value_layout_;
};

}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
