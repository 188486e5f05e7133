// SPDX-License-Identifier: Apache-2.0
//
// One KV head as the kernels see it, its pages in memory from `new`: each page an allocation of its
// own, so that sanitizers see its ends, and NaN until somebody writes it. Reads and writes single
// numbers of it through the places that packing.cuh names.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/hadamard.hpp>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/kernels/packing.cuh>
#include <kvpolicy/storage/quantize.hpp>

#include "cuda/support/forbid.hpp"

namespace test {

enum class Side { keys, values };

template <kvpolicy::Element E>
class DeviceHead {
 public:
  /// `view` says everything but where the pages are; rings must be whole pages. There is room for
  /// `capacity` rows where they lie in a line. `selections` choices can be remembered.
  DeviceHead(const kvpolicy::gpu::HeadView& view, int head_dim, int page_rows, int capacity,
             int selections = 2)
      : view_{view}, head_dim_{head_dim}, page_rows_{page_rows} {
    view_.exact_origin = whole_pages(view.sinks);
    const int line = std::max(0, capacity - view.sinks);
    const std::size_t bytes = lay_out_rows();
    exact_.allocate(view_.exact_origin + whole_pages(view.exact_ring > 0 ? view.exact_ring : line), page_rows,
                    bytes, layout_of_rows_ == 3 ? 16 : 0);
    view_.exact_pages = exact_.table.data();
    if (view.is_packed()) {
      const kvpolicy::gpu::Sides widths{kvpolicy::gpu::code_width(view.key_encoding),
                                        kvpolicy::gpu::code_width(view.value_encoding)};
      layout_ = {widths, head_dim, page_rows, view.key_per_channel, view.key_group, view.value_group};
      packed_.allocate(whole_pages(view.packed_ring > 0 ? view.packed_ring : line), page_rows,
                       static_cast<std::size_t>(layout_.page_bytes));
      view_.packed_pages = packed_.table.data();
    }
    if (view.chunk_rows > 0) {
      const std::size_t vectors = view.min_max ? 2 : 1;
      summaries_.allocate(whole_pages(std::max(1, capacity / view.chunk_rows)), page_rows,
                          vectors * 2 * head_dim * page_rows);
      view_.summary_pages = summaries_.table.data();
      choices_.resize(static_cast<std::size_t>(selections) * (3 + view.budget_chunks), -1);
      *chosen_ = {.slots = selections,
                  .tokens = choices_.data(),
                  .ends = choices_.data() + selections,
                  .counts = choices_.data() + 2 * selections,
                  .chunks = choices_.data() + 3 * selections};
      view_.selections = chosen_.get();
    }
  }
  DeviceHead(const DeviceHead&) = delete;
  DeviceHead& operator=(const DeviceHead&) = delete;
  /// Nothing but rows may have been written.
  ~DeviceHead() {
    const auto row_bytes = static_cast<std::size_t>(head_dim_) * 2;
    for (std::byte* page : exact_.table) {
      allow(page, lay_out_rows());
      for (int row = 0; row < page_rows_; ++row) {
        std::memset(view_.exact_row(page, row, true), 0xff, row_bytes);
        std::memset(view_.exact_row(page, row, false), 0xff, row_bytes);
      }
      CHECK(std::all_of(page, page + lay_out_rows(), [](std::byte b) { return b == std::byte{0xff}; }));
    }
  }

  [[nodiscard]] const kvpolicy::gpu::HeadView& view() const { return view_; }
  [[nodiscard]] kvpolicy::gpu::HeadView& view() { return view_; }
  [[nodiscard]] kvpolicy::gpu::Selections& selections() { return *chosen_; }

  // ---- exact rows ----------------------------------------------------------------------------
  /// The 16-bit numbers of the exact slot of a row.
  [[nodiscard]] std::uint16_t* exact(Side side, int row) const {
    const int slot = view_.exact_slot(row);
    return numbers(view_.exact_row(exact_.table.at(static_cast<std::size_t>(slot / page_rows_)),
                                   slot % page_rows_, side == Side::keys));
  }

  // ---- quantised rows ------------------------------------------------------------------------
  [[nodiscard]] std::uint32_t code(Side side, int row, int channel) const {
    std::uint32_t code = 0;
    for_each_part(side, row, channel, [&](std::byte* word, int bit, const kvpolicy::gpu::TilePart& part) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, word, sizeof bits);
      code |= (bits >> bit & ((1U << part.bits) - 1U)) << part.shift;
    });
    return code;
  }
  void set_code(Side side, int row, int channel, std::uint32_t code) {
    for_each_part(side, row, channel, [&](std::byte* word, int bit, const kvpolicy::gpu::TilePart& part) {
      const std::uint32_t mask = (1U << part.bits) - 1U;
      std::uint32_t bits = 0;
      std::memcpy(&bits, word, sizeof bits);
      bits = (bits & ~(mask << bit)) | (code >> part.shift & mask) << bit;
      std::memcpy(word, &bits, sizeof bits);
    });
  }
  [[nodiscard]] kvpolicy::AffineGrid grid(Side side, int row, int channel) const {
    kvpolicy::AffineGrid grid;
    const auto [scale, zero] = grid_position(side, row, channel);
    std::memcpy(&grid.scale.bits, scale, 2);
    std::memcpy(&grid.zero.bits, zero, 2);
    return grid;
  }
  void set_grid(Side side, int row, int channel, const kvpolicy::AffineGrid& grid) {
    const auto [scale, zero] = grid_position(side, row, channel);
    std::memcpy(scale, &grid.scale.bits, 2);
    std::memcpy(zero, &grid.zero.bits, 2);
    if (!is_in_halves(side)) return;
    const kvpolicy::AffineGrid upper = grid.upper_half();
    std::memcpy(scale + upper_grid(side), &upper.scale.bits, 2);
    std::memcpy(zero + upper_grid(side), &upper.zero.bits, 2);
  }
  [[nodiscard]] bool is_in_halves(Side side) const { return kvpolicy::is_in_halves(encoding(side)); }
  /// The grid of the upper half of a code in halves.
  [[nodiscard]] kvpolicy::AffineGrid grid_of_upper_half(Side side, int row, int channel) const {
    kvpolicy::AffineGrid grid;
    const auto [scale, zero] = grid_position(side, row, channel);
    std::memcpy(&grid.scale.bits, scale + upper_grid(side), 2);
    std::memcpy(&grid.zero.bits, zero + upper_grid(side), 2);
    return grid;
  }

  // ---- whole texts ---------------------------------------------------------------------------
  /// Writes all rows as a cache has them in this state; keys and values are [rows, head_dim] for
  /// rows 0 .. tokens - evicted, rounded to E here. Of a ring, the latest rows remain.
  void store(std::span<const float> keys, std::span<const float> values,
             const kvpolicy::gpu::LayerState& state) {
    const int rows = state.tokens - view_.evicted;
    const int packed_end = view_.packed_end(state.committed);
    for (int row = 0; row < rows; ++row) {
      if (row >= view_.sinks && row < packed_end) continue;
      for (int c = 0; c < head_dim_; ++c) {
        exact(Side::keys, row)[c] = E{keys[index(row, c)]}.bits;
        exact(Side::values, row)[c] = E{values[index(row, c)]}.bits;
      }
    }
    for (const Side side : {Side::keys, Side::values}) {
      const auto numbers = as_quantized(side, side == Side::keys ? keys : values, packed_end);
      std::vector<kvpolicy::AffineGrid> grids(
          static_cast<std::size_t>(head_dim_));  // of the group at each channel
      for (int row = view_.sinks; row < packed_end; ++row) {
        for (int c = 0; c < head_dim_; ++c) quantize(side, numbers, row, c, grids);
      }
    }
  }

  [[nodiscard]] bool rotates(Side side) const {
    return side == Side::keys ? view_.key_hadamard : view_.value_hadamard;
  }
  /// A row as attention must see it, where it reads upper halves only or not.
  [[nodiscard]] std::vector<float> row(Side side, int row, const kvpolicy::gpu::LayerState& state,
                                       bool upper_half = false) const {
    std::vector<float> numbers(static_cast<std::size_t>(head_dim_));
    upper_half = upper_half && is_in_halves(side);
    const bool packed = row >= view_.sinks && row < view_.packed_end(state.committed);
    for (int channel = 0; channel < head_dim_; ++channel) {
      if (packed) {
        const kvpolicy::AffineGrid at =
            upper_half ? grid_of_upper_half(side, row, channel) : grid(side, row, channel);
        const std::uint32_t whole = code(side, row, channel);
        numbers[static_cast<std::size_t>(channel)] =
            static_cast<float>(at.scale) * static_cast<float>(upper_half ? whole >> 4 : whole) +
            static_cast<float>(at.zero);
      } else {
        E value;
        value.bits = exact(side, row)[channel];
        numbers[static_cast<std::size_t>(channel)] = static_cast<float>(value);
      }
    }
    if (packed && rotates(side)) kvpolicy::rotate_hadamard(numbers);
    return numbers;
  }

  // ---- summaries -----------------------------------------------------------------------------
  /// The 16-bit numbers of a chunk's summary vector.
  [[nodiscard]] std::uint16_t* summary(int chunk, int vector) const {
    return numbers(summaries_.table.at(static_cast<std::size_t>(chunk / page_rows_))) +
           (vector * page_rows_ + chunk % page_rows_) * head_dim_;
  }

 private:
  /// Memory begins at lines, as a device's does.
  struct Delete {
    void operator()(std::byte* page) const { ::operator delete[](page, std::align_val_t{128}); }
  };
  struct Pages {
    std::vector<std::unique_ptr<std::byte[], Delete>> owned;
    std::vector<std::byte*> table;

    /// Pages begin `offset` bytes behind a line's begin.
    void allocate(int rows, int page_rows, std::size_t page_bytes, std::size_t offset = 0) {
      const std::size_t bytes = offset + page_bytes;
      for (int row = 0; row < rows; row += page_rows) {
        owned.emplace_back(static_cast<std::byte*>(::operator new[](bytes, std::align_val_t{128})));
        std::memset(owned.back().get(), 0xff, bytes);  // NaN in half, bfloat16 and float
        table.push_back(owned.back().get() + offset);
      }
    }
  };

  // Rows lie as in pages of a cache's own, or apart, as in a tensor that an engine shares among heads, where a page may
  // begin anywhere in a line. Which of these differs from head to head. Returns the bytes of a page.
  [[nodiscard]] std::size_t lay_out_rows() {
    if (layout_of_rows_ == 0) {
      static int heads = 0;
      layout_of_rows_ = 1 + heads++ % 3;
    }
    view_.set_contiguous_rows(head_dim_, page_rows_);
    if (layout_of_rows_ == 2) view_.exact_row_stride *= 3;
    view_.exact_values_offset *= layout_of_rows_ == 2 ? 3 : 1;
    if (layout_of_rows_ == 3) view_.exact_values_offset += 48;
    return static_cast<std::size_t>(view_.exact_values_offset) +
           static_cast<std::size_t>(view_.exact_row_stride) * page_rows_;
  }
  [[nodiscard]] int whole_pages(int rows) const { return (rows + page_rows_ - 1) / page_rows_ * page_rows_; }
  [[nodiscard]] std::size_t index(int row, int channel) const {
    return static_cast<std::size_t>(row) * static_cast<std::size_t>(head_dim_) +
           static_cast<std::size_t>(channel);
  }
  static std::uint16_t* numbers(std::byte* page) { return reinterpret_cast<std::uint16_t*>(page); }
  [[nodiscard]] kvpolicy::Encoding encoding(Side side) const {
    return side == Side::keys ? view_.key_encoding : view_.value_encoding;
  }
  [[nodiscard]] int width(Side side) const { return kvpolicy::gpu::code_width(encoding(side)); }
  // bytes from a grid's numbers to those of its upper half
  [[nodiscard]] int upper_grid(Side side) const { return layout_.upper_grids.of(side == Side::keys); }

  // visit(word, bit in it, part) of each part of a code
  template <class Visit>
  void for_each_part(Side side, int row, int channel, Visit visit) const {
    const int slot = view_.packed_slot(row);
    const int tile_row = slot % kvpolicy::gpu::tile_rows;
    const kvpolicy::gpu::TileOffset at = side == Side::keys
                                             ? kvpolicy::gpu::offset_of_key(tile_row, channel, head_dim_)
                                             : kvpolicy::gpu::offset_of_value(tile_row, channel, head_dim_);
    std::byte* tile =
        packed_.table.at(static_cast<std::size_t>(slot / page_rows_)) +
        (side == Side::values ? layout_.values_offset : 0) +
        slot % page_rows_ / kvpolicy::gpu::tile_rows * layout_.tile_bytes.of(side == Side::keys);
    for (int i = 0; i < kvpolicy::gpu::tile_parts(width(side)); ++i) {
      const auto part = kvpolicy::gpu::tile_part(width(side), i);
      const int bit = kvpolicy::gpu::bit_of_code(at, part, head_dim_);
      visit(tile + bit / 32 * 4, bit % 32, part);
    }
  }

  struct GridPosition {
    std::byte* scale;
    std::byte* zero;
  };
  [[nodiscard]] GridPosition grid_position(Side side, int row, int channel) const {
    const int slot = view_.packed_slot(row);
    std::byte* page = packed_.table.at(static_cast<std::size_t>(slot / page_rows_));
    if (side == Side::keys) {
      const int i = kvpolicy::gpu::key_param(slot % page_rows_, channel, head_dim_, page_rows_,
                                             view_.key_per_channel, view_.key_group);
      return {page + layout_.key_scales_offset + 2 * i, page + layout_.key_zeros_offset + 2 * i};
    }
    const int i = kvpolicy::gpu::value_param(slot % page_rows_, channel, page_rows_, view_.value_group);
    return {page + layout_.value_scales_offset + 2 * i, page + layout_.value_zeros_offset + 2 * i};
  }

  // All rows, rounded to E; those that are quantised are rotated if the head says so.
  [[nodiscard]] std::vector<float> as_quantized(Side side, std::span<const float> rows,
                                                int packed_end) const {
    std::vector<float> numbers(rows.size());
    std::ranges::transform(rows, numbers.begin(), [](float x) { return static_cast<float>(E{x}); });
    for (int row = view_.sinks; rotates(side) && row < packed_end; ++row) {
      kvpolicy::rotate_hadamard(
          std::span{numbers}.subspan(index(row, 0), static_cast<std::size_t>(head_dim_)));
    }
    return numbers;
  }

  // One number; the first one of a group finds its grid.
  void quantize(Side side, std::span<const float> rows, int row, int channel,
                std::vector<kvpolicy::AffineGrid>& grids) {
    const bool by_rows = side == Side::keys && view_.key_per_channel;
    const int group = side == Side::keys ? view_.key_group : view_.value_group;
    const int place = by_rows ? (row - view_.sinks) % group : channel % group;
    const int first = (by_rows ? row : channel) - place;
    auto& grid = grids[static_cast<std::size_t>(by_rows ? channel : first)];
    if (place == 0) {
      float min = 0, max = 0;
      for (int i = 0; i < group; ++i) {
        const float x = by_rows ? rows[index(first + i, channel)] : rows[index(row, first + i)];
        min = i == 0 ? x : std::min(min, x);
        max = i == 0 ? x : std::max(max, x);
      }
      // Adding 0 leaves no -0: which zero of several is the smallest is nobody's business.
      grid = kvpolicy::AffineGrid::covering(min + 0.0F, max + 0.0F, encoding(side));
    }
    set_grid(side, row, channel, grid);
    set_code(side, row, channel, grid.encode(rows[index(row, channel)], encoding(side)));
  }

  kvpolicy::gpu::HeadView view_;
  int head_dim_;
  int page_rows_;
  kvpolicy::gpu::PackedLayout layout_;
  Pages exact_, packed_, summaries_;
  int layout_of_rows_ = 0;
  std::vector<int> choices_;
  std::unique_ptr<kvpolicy::gpu::Selections> chosen_ = std::make_unique<kvpolicy::gpu::Selections>();
};

}  // namespace test
