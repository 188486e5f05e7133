// SPDX-License-Identifier: Apache-2.0
//
// Writes rows into a page in the format of its plane: dense numbers, or codes with their scales and
// zeros, or a verbatim copy of rows of the same format.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>

#include <kvpolicy/core/row.hpp>
#include <kvpolicy/core/scratch.hpp>
#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/storage/quantize.hpp>
#include <kvpolicy/storage/quantize_codebook.hpp>

namespace kvpolicy::detail {

/// Encodes the rows of one plane. Its scratch memory belongs to the thread, so that planes have
/// none: one encoder of a thread is used at a time.
class RowEncoder {
  struct Memory {
    Scratch<float> numbers;
    GridRow grids;
    CodebookRow codebook;
  };

 public:
  /// Numbers are rounded to `precision` before they are quantised.
  /// @throws std::bad_alloc for scratch memory, unless the thread has called `prepare` for this size
  RowEncoder(const RowFormat& format, Encoding precision, std::size_t head_dim, std::size_t page_rows)
      : format_{format},
        precision_{precision},
        head_dim_{head_dim},
        page_rows_{page_rows},
        layout_{format, head_dim, page_rows},
        memory_{&prepare(format, head_dim)},
        numbers_{memory_->numbers.take(head_dim * unit_of(format))} {}

  /// Obtains the thread's scratch memory for a format. @throws std::bad_alloc
  static Memory& prepare(const RowFormat& format, std::size_t head_dim) {
    thread_local Memory memory;
    static_cast<void>(memory.numbers.take(head_dim * unit_of(format)));
    if (is_quantized(format.encoding)) {
      memory.grids.resize(head_dim);
      memory.codebook.resize(head_dim);
    }
    return memory;
  }

  [[nodiscard]] const PageLayout& layout() const { return layout_; }
  /// Neighbouring rows that share scales and are quantised together.
  [[nodiscard]] std::size_t unit() const { return unit_of(format_); }
  /// Room for the numbers of row `i` of a unit.
  [[nodiscard]] std::span<float> row(std::size_t i) const {
    return numbers_.subspan(i * head_dim_, head_dim_);
  }
  void load(const Plane& source, std::size_t source_row, std::size_t i) const {
    load_row(source, source_row, row(i));
    if (source.format.encoding != precision_) round_dense(precision_, row(i));
    if (format_.hadamard) rotate_hadamard(row(i));
  }

  /// The unit that `row` holds becomes the rows of a page from `at` on.
  void write_unit(std::byte* page, std::size_t at) const {
    std::byte* codes = page + at * layout_.row_bytes;
    if (!is_quantized(format_.encoding)) return store_dense(format_.encoding, row(0), codes);
    if (format_.codebook != Codebook::even) {
      std::byte* own = page + layout_.scales_offset + at * layout_.param_bytes;
      return memory_->codebook.encode(row(0), format_, own, codes, codes + layout_.lower_offset);
    }
    const std::size_t first = at / unit() * layout_.params_per_row;
    float16* scales = reinterpret_cast<float16*>(page + layout_.scales_offset) + first;
    float16* zeros = reinterpret_cast<float16*>(page + layout_.zeros_offset) + first;
    if (format_.granularity == Granularity::per_channel) {
      memory_->grids.cover_columns(numbers_, format_.encoding, scales, zeros);
    } else {
      cover_row(scales, zeros);
    }
    if (layout_.is_in_halves()) {
      float16* upper_scales = reinterpret_cast<float16*>(page + layout_.upper_scales_offset()) + first;
      float16* upper_zeros = reinterpret_cast<float16*>(page + layout_.upper_zeros_offset()) + first;
      for (std::size_t i = 0; i < layout_.params_per_row; ++i) {
        const AffineGrid upper = AffineGrid{scales[i], zeros[i]}.upper_half();
        upper_scales[i] = upper.scale;
        upper_zeros[i] = upper.zero;
      }
    }
    for (std::size_t i = 0; i < unit(); ++i, codes += layout_.row_bytes) {
      memory_->grids.encode(row(i), format_.encoding, codes, codes + layout_.lower_offset);
    }
  }

  /// Copies rows of the same format, from plane row `from` on, to the rows of a page from `at` on:
  /// as many of `count` as neither page ends before. Returns their number.
  std::size_t copy(const Plane& source, std::size_t from, std::size_t count, std::byte* page,
                   std::size_t at) const {
    const auto place = source.address_of(from);
    const bool strided = source.step(layout_.row_bytes) != layout_.row_bytes;
    const std::size_t rows = strided ? 1 : std::min({count, place.contiguous_rows, page_rows_ - at});
    const PageLayout other{source.format, head_dim_, source.page_rows};
    const auto copy_arrays = [&](const PageLayout::Arrays& own, const PageLayout::Arrays& theirs,
                                 std::size_t bytes, std::size_t shared_by) {
      for (std::size_t i = 0; i < own.count; ++i) {
        std::memcpy(page + own.offsets[i] + at / shared_by * bytes,
                    place.page + theirs.offsets[i] + place.row / shared_by * bytes, rows / shared_by * bytes);
      }
    };
    copy_arrays(layout_.row_arrays(), other.row_arrays(), layout_.row_bytes, 1);
    copy_arrays(layout_.param_arrays(), other.param_arrays(), layout_.param_bytes, unit());
    return rows;
  }

 private:
  [[nodiscard]] static std::size_t unit_of(const RowFormat& format) {
    const bool per_channel = is_quantized(format.encoding) && format.granularity == Granularity::per_channel;
    return per_channel ? format.group : 1;
  }

  // One row, each group of channels with its own grid.
  void cover_row(float16* scales, float16* zeros) const {
    for (std::size_t g = 0; g < layout_.params_per_row; ++g) {
      const std::size_t channel = g * format_.group;
      const auto grid =
          memory_->grids.cover(row(0).subspan(channel, format_.group), channel, format_.encoding);
      scales[g] = grid.scale;
      zeros[g] = grid.zero;
    }
  }

  RowFormat format_;
  Encoding precision_;
  std::size_t head_dim_;
  std::size_t page_rows_;
  PageLayout layout_;
  Memory* memory_;
  std::span<float> numbers_;  // [unit, head_dim]
};

}  // namespace kvpolicy::detail
