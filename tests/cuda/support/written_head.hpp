// SPDX-License-Identifier: Apache-2.0
//
// A head that kernels write to, beside the text that was written: checks that every exact row,
// code, scale, zero and summary is bit for bit what plain loops over the text make of it, and that
// what was never written still is not.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/storage/quantize.hpp>

#include "cuda/support/device_head.hpp"
#include "cuda/support/row_oracle.hpp"

namespace test {

/// One head's text, and what its memory must hold.
template <kvpolicy::Element E>
struct WrittenHead {
  WrittenHead(const kvpolicy::gpu::HeadView& policy, int dim, int page_rows, int room)
      : memory{policy, dim, page_rows, room}, head_dim{dim}, capacity{room} {}

  [[nodiscard]] const kvpolicy::gpu::HeadView& view() const { return memory.view(); }
  [[nodiscard]] int rows() const { return static_cast<int>(text[0].size()) / head_dim; }
  [[nodiscard]] std::uint16_t bits(Side side, int row, int channel) const {
    return text[side == Side::keys ? 0 : 1][static_cast<std::size_t>(row * head_dim + channel)];
  }
  [[nodiscard]] float number(Side side, int row, int channel) const {
    E value;
    value.bits = bits(side, row, channel);
    return static_cast<float>(value);
  }

  /// All rows of one side as they are quantised.
  [[nodiscard]] std::vector<float> as_quantized(Side side) const {
    std::vector<float> all;
    for (int row = 0; row < rows(); ++row) {
      std::vector<float> numbers;
      for (int c = 0; c < head_dim; ++c) numbers.push_back(number(side, row, c));
      if (memory.rotates(side)) kvpolicy::rotate_hadamard(numbers);
      all.insert(all.end(), numbers.begin(), numbers.end());
    }
    return all;
  }

  [[nodiscard]] int packed_end(int committed) const {
    int end = view().sinks;
    if (!view().is_packed()) return end;
    while (end + 64 + view().residual <= committed - view().evicted) end += 64;
    return end;
  }

  void check(const kvpolicy::gpu::LayerState& state) {
    written = std::max(written, rows());
    const int packed = packed_end(state.committed);
    int wrong = 0;
    for (const Side side : {Side::keys, Side::values}) {
      for (int row = 0; row < rows(); ++row) {
        const bool sink = row < view().sinks;
        if (!sink && (row < packed || (view().exact_ring > 0 && row + view().exact_ring < written))) {
          continue;
        }
        const std::uint16_t* there = memory.exact(side, row);
        for (int c = 0; c < head_dim; ++c) wrong += there[c] != bits(side, row, c);
      }
      CHECK(wrong == 0);
      check_packed(side, packed);
    }
    if (view().exact_ring == 0 && written < capacity) {
      for (int c = 0; c < head_dim; ++c) wrong += memory.exact(Side::keys, written)[c] != 0xffff;
      CHECK(wrong == 0);
    }
    if (view().chunk_rows > 0) check_chunks(state);
  }

  void check_packed(Side side, int packed) {
    const bool by_rows = side == Side::keys && view().key_per_channel;
    const int group = side == Side::keys ? view().key_group : view().value_group;
    const std::vector<float> all = as_quantized(side);
    const auto number = [&](int row, int channel) {
      return all[static_cast<std::size_t>(row * head_dim + channel)];
    };
    int first = view().sinks;
    if (view().packed_ring > 0) first = std::max(first, packed - view().packed_ring);
    int wrong_grids = 0, wrong_codes = 0;
    // The first number of each group: at row, channel; the others down or along.
    for (int row = first; row < packed; row += by_rows ? group : 1) {
      for (int channel = 0; channel < head_dim; channel += by_rows ? 1 : group) {
        std::vector<float> numbers;
        for (int i = 0; i < group; ++i) {
          numbers.push_back(by_rows ? number(row + i, channel) : number(row, channel + i));
        }
        const QuantizedGroup expected{numbers,
                                      side == Side::keys ? view().key_encoding : view().value_encoding};
        for (int i = 0; i < group; ++i) {
          const int r = by_rows ? row + i : row;
          const int c = by_rows ? channel : channel + i;
          const kvpolicy::AffineGrid there = memory.grid(side, r, c);
          wrong_grids += there.scale != expected.grid.scale || there.zero != expected.grid.zero;
          if (memory.is_in_halves(side)) {
            const kvpolicy::AffineGrid upper = memory.grid_of_upper_half(side, r, c);
            const kvpolicy::AffineGrid own = expected.grid.upper_half();
            wrong_grids += upper.scale != own.scale || upper.zero != own.zero;
          }
          wrong_codes += memory.code(side, r, c) != expected.codes[static_cast<std::size_t>(i)];
        }
      }
    }
    CHECK(wrong_grids == 0);
    CHECK(wrong_codes == 0);
  }

  void check_chunks(const kvpolicy::gpu::LayerState& state) {
    const int chunk_rows = view().chunk_rows;
    int wrong = 0;
    for (int chunk = first_chunk; (chunk + 1) * chunk_rows <= state.committed - view().evicted; ++chunk) {
      for (int c = 0; c < head_dim; ++c) {
        float sum = 0;
        float min = std::numeric_limits<float>::infinity(), max = -min;
        for (int i = 0; i < chunk_rows; ++i) {
          const float x = number(Side::keys, chunk * chunk_rows + i, c);
          sum += x;
          min = std::min(min, x);
          max = std::max(max, x);
        }
        if (view().min_max) {
          wrong += memory.summary(chunk, 0)[c] != E{min}.bits;
          wrong += memory.summary(chunk, 1)[c] != E{max}.bits;
        } else {
          wrong += memory.summary(chunk, 0)[c] != E{sum / static_cast<float>(chunk_rows)}.bits;
        }
      }
    }
    CHECK(wrong == 0);
  }

  DeviceHead<E> memory;
  int head_dim;
  int capacity;
  int written = 0;      ///< rows that were ever written
  int first_chunk = 0;  ///< the first that a kernel closed
  std::vector<std::uint16_t> text[2];
};

}  // namespace test
