// SPDX-License-Identifier: Apache-2.0
//
// Pages of quantised rows on their way between host and device. Both sides store the same codes, scales
// and zeros: the host row after row, keys and values in pages of their own (core/segment.hpp), the device
// both in one page and in fragment order (kernels/packing.cuh). Nothing is rounded on the way.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include <kvpolicy/core/head_rule.hpp>
#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/cuda/kernels/packing.cuh>
#include <kvpolicy/cuda/served_rule.hpp>

namespace kvpolicy::gpu {

/// Translates pages of one head's rule. Not for the hot path.
class PackedPages {
 public:
  PackedPages(const HeadRule& rule, std::size_t head_dim, std::size_t page_rows)
      : widths_{packed_widths(rule)},
        head_dim_{static_cast<int>(head_dim)},
        page_rows_{static_cast<int>(page_rows)},
        per_channel_{rule.key_per_channel},
        key_group_{static_cast<int>(rule.key_group)},
        value_group_{static_cast<int>(rule.value_group)},
        key_format_{rule.key_encoding,
                    rule.key_per_channel ? Granularity::per_channel : Granularity::per_token, rule.key_group,
                    rule.key_hadamard},
        value_format_{rule.value_encoding, Granularity::per_token, rule.value_group, rule.value_hadamard},
        layout_{widths_, head_dim_, page_rows_, per_channel_, key_group_, value_group_} {
    for (const bool key : {true, false}) {
      for (int part = 0; part < tile_parts(widths_.of(key)); ++part) {
        auto& bit = bits_in_tile_[key ? 0 : 1][part];
        for (int row = 0; row < tile_rows; ++row) {
          for (int channel = 0; channel < head_dim_; ++channel) {
            const TileOffset at =
                key ? offset_of_key(row, channel, head_dim_) : offset_of_value(row, channel, head_dim_);
            bit.push_back(bit_of_code(at, tile_part(widths_.of(key), part), head_dim_));
          }
        }
      }
    }
  }

  [[nodiscard]] const RowFormat& format(bool key) const { return key ? key_format_ : value_format_; }
  [[nodiscard]] std::size_t page_bytes() const { return static_cast<std::size_t>(layout_.page_bytes); }
  /// The bytes of a host page, which holds keys or values.
  [[nodiscard]] std::size_t host_page_bytes(bool key) const { return host_layout(key).page_bytes; }

  /// One side of a device page becomes a page of the host.
  void to_host(const std::byte* device, bool key, std::byte* host) const {
    const PageLayout to = host_layout(key);
    for (const std::size_t codes_of : to.row_arrays()) {
      std::fill_n(host + codes_of, static_cast<std::size_t>(page_rows_) * to.row_bytes, std::byte{0});
    }
    const std::byte* codes = device + codes_offset(key);
    for (int row = 0; row < page_rows_; ++row) {
      std::byte* out = host + static_cast<std::size_t>(row) * to.row_bytes;
      for (int channel = 0; channel < head_dim_; ++channel) {
        unsigned code = 0;
        for_each_part_on_device(key, row, channel, [&](const Part& part) {
          code |= (static_cast<unsigned>(codes[part.byte]) >> part.bit & part.mask) << part.shift;
        });
        for_each_part_on_host(key, channel, to, [&](const Part& part) {
          out[part.byte] |= static_cast<std::byte>((code >> part.shift & part.mask) << part.bit);
        });
      }
    }
    for_each_param(key, [&](std::size_t on_device, std::size_t on_host) {
      std::memcpy(host + to.scales_offset + on_host, device + scales_offset(key) + on_device,
                  sizeof(float16));
      std::memcpy(host + to.zeros_offset + on_host, device + zeros_offset(key) + on_device, sizeof(float16));
      if (!to.is_in_halves()) return;
      const std::byte* upper = device + layout_.upper_grids.of(key) + on_device;
      std::memcpy(host + to.upper_scales_offset() + on_host, upper + scales_offset(key), sizeof(float16));
      std::memcpy(host + to.upper_zeros_offset() + on_host, upper + zeros_offset(key), sizeof(float16));
    });
  }

  /// The row `row` of a device page becomes what row `from` of a plane is, which has this side's format.
  void row_to_device(const Plane& plane, std::size_t from, bool key, int row, std::byte* device) const {
    const auto at = plane.address_of(from);
    const PageLayout layout{plane.format, static_cast<std::size_t>(head_dim_), plane.page_rows};
    std::byte* codes = device + codes_offset(key);
    const std::byte* in = at.page + at.row * layout.row_bytes;
    for (int channel = 0; channel < head_dim_; ++channel) {
      unsigned code = 0;
      for_each_part_on_host(key, channel, layout, [&](const Part& part) {
        code |= (static_cast<unsigned>(in[part.byte]) >> part.bit & part.mask) << part.shift;
      });
      for_each_part_on_device(key, row, channel, [&](const Part& part) {
        std::byte& out = codes[part.byte];
        out = (out & ~static_cast<std::byte>(part.mask << part.bit)) |
              static_cast<std::byte>((code >> part.shift & part.mask) << part.bit);
      });
    }
    const bool along = key && per_channel_;
    const std::size_t first = (along ? at.row / plane.format.group : at.row) * layout.params_per_row;
    for (std::size_t i = 0; i < layout.params_per_row; ++i) {
      const auto channel = static_cast<int>(along ? i : i * plane.format.group);
      const auto to = static_cast<std::size_t>(
          key ? key_param(row, channel, head_dim_, page_rows_, per_channel_, key_group_)
              : value_param(row, channel, page_rows_, value_group_));
      std::memcpy(device + scales_offset(key) + to * sizeof(float16),
                  at.page + layout.scales_offset + (first + i) * sizeof(float16), sizeof(float16));
      std::memcpy(device + zeros_offset(key) + to * sizeof(float16),
                  at.page + layout.zeros_offset + (first + i) * sizeof(float16), sizeof(float16));
      if (!layout.is_in_halves()) continue;
      std::byte* upper = device + layout_.upper_grids.of(key) + to * sizeof(float16);
      const std::size_t from_host = (first + i) * sizeof(float16);
      std::memcpy(upper + scales_offset(key), at.page + layout.upper_scales_offset() + from_host,
                  sizeof(float16));
      std::memcpy(upper + zeros_offset(key), at.page + layout.upper_zeros_offset() + from_host,
                  sizeof(float16));
    }
  }

 private:
  // Some bits of a code: those from `shift` on that `mask` has lie in a byte from bit `bit` on.
  struct Part {
    std::size_t byte;
    int bit;
    int shift;
    unsigned mask;
  };

  [[nodiscard]] PageLayout host_layout(bool key) const {
    return {format(key), static_cast<std::size_t>(head_dim_), static_cast<std::size_t>(page_rows_)};
  }
  [[nodiscard]] int codes_offset(bool key) const { return key ? 0 : layout_.values_offset; }
  [[nodiscard]] int scales_offset(bool key) const {
    return key ? layout_.key_scales_offset : layout_.value_scales_offset;
  }
  [[nodiscard]] int zeros_offset(bool key) const {
    return key ? layout_.key_zeros_offset : layout_.value_zeros_offset;
  }

  // The parts of a code in a page of the device; bytes count from the side's first code.
  template <class Visit>
  void for_each_part_on_device(bool key, int row, int channel, Visit visit) const {
    const auto tile = static_cast<std::size_t>(row / tile_rows * layout_.tile_bytes.of(key));
    for (int p = 0; p < tile_parts(widths_.of(key)); ++p) {
      const TilePart part = tile_part(widths_.of(key), p);
      const int bit =
          bits_in_tile_[key ? 0 : 1][p][static_cast<std::size_t>(row % tile_rows * head_dim_ + channel)];
      visit(Part{tile + static_cast<std::size_t>(bit / 8), bit % 8, part.shift, (1U << part.bits) - 1U});
    }
  }
  // The parts of a code in a row of the host (PageLayout); bytes count from the row's first.
  template <class Visit>
  void for_each_part_on_host(bool key, int channel, const PageLayout& layout, Visit visit) const {
    const CodeParts parts = code_parts(format(key).encoding);
    const auto upper = static_cast<int>(parts.upper), lower = static_cast<int>(parts.lower);
    const auto visit_part = [&](std::size_t first_byte, int bits, int shift) {
      const int bytes = head_dim_ * bits / 8;
      visit(Part{first_byte + static_cast<std::size_t>(channel % bytes), channel / bytes * bits, shift,
                 (1U << bits) - 1U});
    };
    visit_part(0, upper, lower);
    if (lower > 0) visit_part(layout.lower_offset, lower, 0);
  }
  // visit(byte among the device page's scales, byte among the host's), of every scale of a page
  template <class Visit>
  void for_each_param(bool key, Visit visit) const {
    const bool along = key && per_channel_;
    const int group = key ? key_group_ : value_group_;
    const int rows = along ? page_rows_ / group : page_rows_;
    const int columns = along ? head_dim_ : head_dim_ / group;
    for (int row = 0; row < rows; ++row) {
      for (int column = 0; column < columns; ++column) {
        const int on_host = row * columns + column;
        const int on_device = along ? on_host : column * page_rows_ + row;
        visit(static_cast<std::size_t>(on_device) * sizeof(float16),
              static_cast<std::size_t>(on_host) * sizeof(float16));
      }
    }
  }

  Sides widths_;
  int head_dim_;
  int page_rows_;
  bool per_channel_;
  int key_group_;
  int value_group_;
  RowFormat key_format_;
  RowFormat value_format_;
  PackedLayout layout_;
  std::vector<int> bits_in_tile_[2][2];  // of keys and values, of each part: [tile_rows, head_dim]
};

}  // namespace kvpolicy::gpu
