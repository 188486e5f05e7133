// SPDX-License-Identifier: Apache-2.0
//
// How a layer's rows are divided among the blocks of a decode launch. The work units of all heads
// of all sequences, whatever their policy, length and format, form one line. A unit's weight is its
// cost, and each block takes an equal slice of the total. So a head may be split over blocks, and a
// block may serve several heads (after Stream-K, arXiv:2301.03598, and LeanAttention,
// arXiv:2405.10480).
//
// The division follows from lengths in device memory, so the grid stays fixed while the text grows.
// All functions are pure, so that blocks and tests compute the same.
#pragma once

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/packing.cuh>

namespace kvpolicy::gpu {

/// Stands for the widths of codes that the decode kernel learns from the head.
inline constexpr int any_width = 0;
/// Whether the decode kernel has code for keys and values of these widths alone. It makes bytes of all other codes.
KVPOLICY_HOST_DEVICE constexpr bool has_own_shape(Sides widths) {
  const auto power_of_two = [](int n) { return n == 2 || n == 4 || n == 8; };
  return power_of_two(widths.keys) && power_of_two(widths.values) && widths.keys >= widths.values;
}

KVPOLICY_HOST_DEVICE constexpr int log2_rows_of_unit(Sides widths) {
  if (widths.keys == 16) return 4;
  return has_own_shape(widths) && widths.keys < 8 ? 6 : 5;
}
/// Rows of a work unit, which a warp takes at a time. Exact units begin at the segment's first row.
/// Packed units begin at slots that are multiples of their size, so each is inside one page; rows
/// at the edges are masked.
KVPOLICY_HOST_DEVICE constexpr int rows_of_unit(Sides widths) { return 1 << log2_rows_of_unit(widths); }
static_assert(rows_of_unit({16, 16}) == tile_rows);
/// The cost of a unit, measured by the bytes that it reads: 1 is 4 rows of 8-bit numbers.
KVPOLICY_HOST_DEVICE constexpr int cost_of_unit(Sides widths) {
  return rows_of_unit(widths) * (bits_read(widths.keys) + bits_read(widths.values)) / 64;
}
/// The cost of starting a head (queries, first loads, merge), in the same measure.
inline constexpr int cost_of_head = 64;
/// The least work for which a warp is started.
inline constexpr int least_cost_of_warp = 16;

/// The work units of a segment.
struct Units {
  int rows = 0;     ///< rows of a unit
  int weight = 0;   ///< weight of a unit
  int skipped = 0;  ///< rows of unit 0 before the segment's first row
  int count = 0;
};
/// `upper_half` is as Request has it.
KVPOLICY_HOST_DEVICE Units units_of(const HeadView& head, const DeviceSegment& segment,
                                    bool upper_half = false) {
  const bool packed = segment.source == DeviceSegment::Source::packed;
  const Sides widths = packed ? head.widths(upper_half) : Sides{16, 16};
  const int log2_rows = log2_rows_of_unit(widths);
  Units units{.rows = 1 << log2_rows, .weight = cost_of_unit(widths)};
  if (packed && segment.chunks == nullptr) {
    units.skipped = (segment.first - head.sinks) & (units.rows - 1);
  }
  units.count = (units.skipped + segment.rows + units.rows - 1) >> log2_rows;
  return units;
}

/// A list for `list_segments` that only sums a head's weight.
struct HeadCost {
  const HeadView* head = nullptr;
  bool upper_half = false;  ///< as Request has it
  int first_position = 0;
  int weight = 0;  ///< 0: there is nothing to read

  KVPOLICY_HOST_DEVICE void add(const DeviceSegment& segment) {
    if (segment.rows <= 0) return;
    const Units units = units_of(*head, segment, upper_half);
    weight += (weight == 0 ? cost_of_head : 0) + units.count * units.weight;
  }
};
KVPOLICY_HOST_DEVICE int cost_of(const HeadView& head, const LayerState& state, const Request& request) {
  HeadCost list{.head = &head, .upper_half = request.upper_half};
  list_segments(head, state, request, list);
  return list.weight;
}

/// Divides a line of weight `total` into `blocks` slices.
struct Partition {
  long long total = 0;
  int blocks = 1;

  /// For a launch of `grid` blocks of `warps` warps; a short line leaves some blocks idle.
  KVPOLICY_HOST_DEVICE Partition(long long length, int grid, int warps) : total{length} {
    const long long worth = length / (warps * least_cost_of_warp);
    blocks = worth < 1 ? 1 : worth < grid ? static_cast<int>(worth) : grid;
  }
  KVPOLICY_HOST_DEVICE long long begin(int block) const { return block * total / blocks; }
  /// The block whose slice contains `place`.
  KVPOLICY_HOST_DEVICE int block_of(long long place) const {
    return static_cast<int>(((place + 1) * blocks - 1) / total);
  }
};

/// Units begin .. end - 1 of a segment.
struct UnitRange {
  int begin;
  int end;
};
/// The units that start in [from, to), if unit 0 starts at `place`. The weight of all units fits an int, as a head's
/// does, so 32 bits are divided here, which takes a device a fraction of the time.
KVPOLICY_HOST_DEVICE UnitRange units_within(const Units& units, long long place, long long from,
                                            long long to) {
  const auto first_at = [&](long long bound) {
    const long long distance = bound - place;
    if (distance <= 0) return 0;
    if (distance > (units.count - 1) * units.weight) return units.count;
    return quotient_up(static_cast<int>(distance), units.weight);
  };
  return {first_at(from), first_at(to)};
}

}  // namespace kvpolicy::gpu
