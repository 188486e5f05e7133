// SPDX-License-Identifier: Apache-2.0
//
// How a layer's rows are divided among the blocks of a decode launch. All heads of all sequences,
// whatever their policy, length and format, form one line, in which every unit of work weighs what
// it moves; each block takes an equal piece of the line. A head may so be cut, and a block may
// serve several heads (after Stream-K, arXiv:2301.03598, and LeanAttention, arXiv:2405.10480).
//
// Everything follows from lengths that live on the device, so the grid is fixed while the text
// grows. Pure functions; blocks and tests compute the same.
#pragma once

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/packing.cuh>

namespace kvpolicy::cuda {

/// Rows that a warp takes at a time. Exact units begin at the segment's first row; packed ones at
/// multiples of their size in slots, so they lie in one page, and edges are masked.
KVPOLICY_HOST_DEVICE constexpr int rows_of_unit(Encoding encoding) {
  return encoding == Encoding::uint8                                  ? 32
         : encoding == Encoding::uint4 || encoding == Encoding::uint2 ? 64
                                                                      : tile_rows;
}
/// What a unit moves, in units of 16 rows of 8-bit numbers.
KVPOLICY_HOST_DEVICE constexpr int weight_of_unit(Encoding encoding) {
  return encoding == Encoding::uint2 ? 1 : 2;
}
/// What beginning a head costs a block (queries, the first loads, the merge), in the same measure.
inline constexpr int weight_of_head = 16;
/// A warp is not started for less than this.
inline constexpr int least_weight_of_warp = 4;

/// The units of a segment.
struct Units {
  int rows = 0;     ///< of a unit
  int weight = 0;   ///< of a unit
  int skipped = 0;  ///< rows of unit 0 before the segment's first row
  int count = 0;
};
KVPOLICY_HOST_DEVICE Units units_of(const HeadView& head, const Segment& segment) {
  const bool packed = segment.source == Segment::Source::packed;
  const Encoding encoding = packed ? head.encoding : Encoding::float16;
  Units units{.rows = rows_of_unit(encoding), .weight = weight_of_unit(encoding)};
  if (packed && segment.chunks == nullptr) {
    units.skipped = (segment.first - head.sinks) % units.rows;
  }
  units.count = quotient_up(units.skipped + segment.rows, units.rows);
  return units;
}

/// What `list_segments` fills to learn a head's weight.
struct HeadWeight {
  const HeadView* head = nullptr;
  int first_position = 0;
  int weight = 0;  ///< 0: there is nothing to read

  KVPOLICY_HOST_DEVICE void add(const Segment& segment) {
    if (segment.rows <= 0) return;
    const Units units = units_of(*head, segment);
    weight += (weight == 0 ? weight_of_head : 0) + units.count * units.weight;
  }
};
KVPOLICY_HOST_DEVICE int weight_of(const HeadView& head, const LayerState& state,
                                   const Request& request) {
  HeadWeight list{.head = &head};
  list_segments(head, state, request, list);
  return list.weight;
}

/// A line of `total` weights in `blocks` pieces.
struct Partition {
  long long total = 0;
  int blocks = 1;

  /// For a launch of `grid` blocks of `warps` warps; short lines leave blocks idle.
  KVPOLICY_HOST_DEVICE Partition(long long length, int grid, int warps) : total{length} {
    const long long worth = length / (warps * least_weight_of_warp);
    blocks = worth < 1 ? 1 : worth < grid ? static_cast<int>(worth) : grid;
  }
  KVPOLICY_HOST_DEVICE long long begin(int block) const { return block * total / blocks; }
  /// The block in whose piece `place` lies.
  KVPOLICY_HOST_DEVICE int block_of(long long place) const {
    return static_cast<int>(((place + 1) * blocks - 1) / total);
  }
};

/// Units begin .. end - 1 of a segment.
struct UnitRange {
  int begin;
  int end;
};
/// The units that start in [from, to) where unit 0 stands at `place`.
KVPOLICY_HOST_DEVICE UnitRange units_within(const Units& units, long long place, long long from,
                                            long long to) {
  const auto first_at = [&](long long bound) {
    const long long distance = bound - place;
    if (distance <= 0) return 0;
    const long long unit = (distance + units.weight - 1) / units.weight;
    return unit < units.count ? static_cast<int>(unit) : units.count;
  };
  return {first_at(from), first_at(to)};
}

}  // namespace kvpolicy::cuda
