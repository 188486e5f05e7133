// SPDX-License-Identifier: Apache-2.0
//
// Segments are what a policy shows and an engine reads: runs of cached rows of one KV head. Neither side
// knows the other, so a new policy needs no new kernel and a new kernel serves every policy.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <kvpolicy/core/codebook.hpp>
#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>

namespace kvpolicy {

/// The numbers of a quantised plane that share a scale and a zero.
enum class Granularity : std::uint8_t {
  per_token,   ///< `group` neighbouring channels of one row.
  per_channel  ///< `group` neighbouring rows of one channel (KIVI's keys).
};

/// The encoding of the rows of one side (keys or values) of a head. All but the first matter only for quantised
/// encodings; a row is dequantised as `scale * code + zero`, or as its codebook says, and then rotated back where rows
/// are rotated.
struct RowFormat {
  Encoding encoding = Encoding::float32;
  Granularity granularity = Granularity::per_token;
  std::size_t group = 0;               ///< numbers that share a scale and a zero; 0 for dense rows
  bool hadamard = false;               ///< rows were rotated before they were quantised (core/hadamard.hpp)
  Codebook codebook = Codebook::even;  ///< what codes stand for; all but `even` go with groups of channels
  float scale = 1.0F;                  ///< the head's, where the codebook has one (`has_head_scale`)

  friend constexpr bool operator==(const RowFormat&, const RowFormat&) = default;
};

/// The most channels of a stored row.
inline constexpr std::size_t max_head_dim = 4096;

/// The layout of a page. The codes of all rows come first, one row after another. Quantised formats then
/// have all scales, then all zeros, both in half: per token [page_rows, head_dim / group], per channel
/// [page_rows / group, head_dim]. Codebooks other than `even` have no zeros, and scales of `scale_bytes`, or none.
///
/// Codes that share a byte are not neighbours: byte j of a 4-bit row holds channel j in its low and channel
/// j + head_dim / 2 in its high nibble; byte j of a 2-bit row holds channels j + i * head_dim / 4 at bits
/// 2i. Unpacking a vector of bytes then yields neighbouring channels. A row of 3, 5 or 6 bits is a row of the
/// codes' upper 2, 4 or 4 bits, then one of their lower 1, 1 or 2 bits, each packed in this way (`code_parts`).
///
/// A page of codes in halves (uint4x2) begins as a page of 4-bit rows: the upper 4 bits of all rows, then scales and
/// zeros with which these stand for the row by themselves. The lower 4 bits of all rows follow, then the scales
/// and zeros of the whole codes. So upper halves are read as any 4-bit rows are, and nothing between them is read.
struct PageLayout {
  std::size_t row_bytes = 0;       ///< bytes from a row's codes to the next one's, or of a dense row
  std::size_t lower_offset = 0;    ///< bytes from a row's codes to the lower parts of them, if there are any
  std::size_t scales_offset = 0;   ///< bytes from the start of the page
  std::size_t zeros_offset = 0;    ///< bytes from the start of the page
  std::size_t params_per_row = 0;  ///< scales of a row; per channel: of a group of rows
  std::size_t param_bytes = 0;     ///< bytes of these scales
  std::size_t page_bytes = 0;      ///< size of the page

  constexpr PageLayout() = default;
  constexpr PageLayout(const RowFormat& format, std::size_t head_dim, std::size_t page_rows)
      : row_bytes{head_dim * bits_of(format.encoding) / 8} {
    scales_offset = zeros_offset = page_bytes = row_bytes * page_rows;
    if (!is_quantized(format.encoding)) return;
    const CodeParts parts = code_parts(format.encoding);
    if (parts.lower > 0) lower_offset = head_dim * parts.upper / 8;
    const bool per_token = format.granularity == Granularity::per_token;
    if (scale_bytes(format.codebook) > 0) params_per_row = per_token ? head_dim / format.group : head_dim;
    param_bytes = params_per_row * scale_bytes(format.codebook);
    const std::size_t array_bytes = param_bytes * (per_token ? page_rows : page_rows / format.group);
    if (kvpolicy::is_in_halves(format.encoding)) {
      row_bytes /= 2;
      lower_offset = row_bytes * page_rows + 2 * array_bytes;
      scales_offset = lower_offset + row_bytes * page_rows;
    }
    zeros_offset = page_bytes = scales_offset + array_bytes;
    if (has_zeros(format.codebook)) page_bytes += array_bytes;
  }

  /// Where some arrays of a page begin.
  struct Arrays {
    std::array<std::size_t, 4> offsets = {};
    std::size_t count = 0;
    [[nodiscard]] constexpr const std::size_t* begin() const { return offsets.data(); }
    [[nodiscard]] constexpr const std::size_t* end() const { return offsets.data() + count; }
  };
  /// The arrays with `row_bytes` for each row: codes, or their halves.
  [[nodiscard]] constexpr Arrays row_arrays() const {
    if (is_in_halves()) return {{0, lower_offset}, 2};
    return {{0}, 1};
  }
  /// The arrays of scales and zeros, with `param_bytes` for each row or group of rows; none of dense rows.
  [[nodiscard]] constexpr Arrays param_arrays() const {
    if (params_per_row == 0) return {};
    if (zeros_offset == page_bytes) return {{scales_offset}, 1};
    if (!is_in_halves()) return {{scales_offset, zeros_offset}, 2};
    return {{scales_offset, zeros_offset, upper_scales_offset(), upper_zeros_offset()}, 4};
  }

  /// Whether the page begins as one of its codes' upper halves.
  [[nodiscard]] constexpr bool is_in_halves() const { return lower_offset > row_bytes; }
  /// Where the scales of the upper halves are, and their zeros.
  [[nodiscard]] constexpr std::size_t upper_scales_offset() const {
    return lower_offset - 2 * (zeros_offset - scales_offset);
  }
  [[nodiscard]] constexpr std::size_t upper_zeros_offset() const {
    return lower_offset - (zeros_offset - scales_offset);
  }
};

/// The address of one row of a plane.
struct RowAddress {
  const std::byte* page;        ///< start of the page; with a row_stride the row itself
  std::size_t row;              ///< row inside the page; with a row_stride 0
  std::size_t contiguous_rows;  ///< rows that follow in this page, this one included
};

/// One side (keys or values) of a run of rows. A plane is either paged (`pages` is the page table) or, for
/// dense formats, rows that are `row_stride` bytes apart from `base`. Row 0 of the plane is row `first_row`
/// of the table, so a run may begin in the middle of a page or of a group. Rows of a page follow each other
/// as PageLayout says. Pages of an inference engine (memory/engine_pages.hpp) may instead have rows, of plain
/// numbers or of codes without scales of their own, that are `row_stride` bytes apart and begin `page_offset`
/// bytes after the start of the page.
struct Plane {
  RowFormat format = {};
  const std::byte* const* pages = nullptr;  ///< the page table; null: rows begin at `base`
  std::size_t page_rows = 0;                ///< rows of a page
  const std::byte* base = nullptr;          ///< row 0 of the table, if there are no pages
  std::size_t row_stride = 0;               ///< in bytes; 0 for pages that PageLayout describes
  std::size_t first_row = 0;                ///< row 0 of the plane, as a row of the table
  std::size_t page_offset = 0;              ///< in bytes; used only for pages with a row_stride

  [[nodiscard]] RowAddress address_of(std::size_t row) const {
    const std::size_t at = first_row + row;
    if (pages == nullptr) {
      return {base + at * row_stride, 0, std::numeric_limits<std::size_t>::max()};
    }
    const std::byte* page = pages[at / page_rows];
    const std::size_t index = at % page_rows;
    if (row_stride == 0) return {page, index, page_rows - index};
    return {page + page_offset + index * row_stride, 0, page_rows - index};
  }

  /// The distance in bytes from one row of a page to the next; `row_bytes` is the size of a row.
  [[nodiscard]] std::size_t step(std::size_t row_bytes) const {
    return pages != nullptr && row_stride == 0 ? row_bytes : row_stride;
  }

  /// The plane of which only the upper half of each code is read, where codes are in halves.
  [[nodiscard]] Plane upper_half() const {
    Plane upper = *this;
    if (is_in_halves(format.encoding)) upper.format.encoding = upper_half_encoding;
    return upper;
  }

  /// The plane that begins `rows` rows later.
  [[nodiscard]] Plane from(std::size_t rows) const {
    Plane later = *this;
    later.first_row += rows;
    return later;
  }
};

/// `rows` neighbouring rows of a segment's planes, from plane row `first`.
struct RowRun {
  std::size_t first = 0;
  std::size_t rows = 0;
};

/// Stands for the number of a node: the row belongs to the text.
inline constexpr std::size_t no_node = std::numeric_limits<std::size_t>::max();

/// A window that hides no row.
inline constexpr std::int64_t unlimited_window = std::numeric_limits<std::int64_t>::max();

/// The rotation of a query back before it meets a segment, so that the segment's rows look closer than they
/// are: a query at position t is read as one at position min(t, latest_position).
struct QueryRotation {
  const float* inverse_frequencies = nullptr;  ///< [head_dim / 2]; null: the query is not rotated
  std::int64_t latest_position = unlimited_window;
};

/// Cached rows of one KV head. The row at position p is visible to the query at position t if `p <= t` and
/// `p > t - window`. A row that is a node of a tree of draft tokens is visible only to the queries of that
/// node and of its descendants (core/token_tree.hpp). Pointers stay valid until the owner next changes.
struct Segment {
  Plane keys = {};
  Plane values = {};
  std::size_t rows = 0;                     ///< rows of both planes
  std::int64_t position = 0;                ///< text position of plane row 0
  const std::int64_t* positions = nullptr;  ///< [plane rows], if positions are not consecutive
  std::size_t node = no_node;               ///< node of plane row 0; the next rows are the next nodes
  std::span<const RowRun> runs = {};        ///< its plane rows, ascending; empty: [0, rows)
  std::int64_t window = unlimited_window;   ///< latest tokens that a query sees, its own included
  QueryRotation rotation = {};              ///< applied to a query before it meets the rows

  [[nodiscard]] std::int64_t position_of(std::size_t row) const {
    return positions != nullptr ? positions[row] : position + static_cast<std::int64_t>(row);
  }

  /// Number of a row's node; `no_node` for rows of the text.
  [[nodiscard]] std::size_t node_of(std::size_t row) const { return node == no_node ? no_node : node + row; }

  /// The part [first, first + count); only for segments without `runs`.
  [[nodiscard]] Segment part(std::size_t first, std::size_t count) const {
    KVPOLICY_ASSERT(runs.empty() && first + count <= rows);
    Segment piece = *this;
    piece.keys = keys.from(first);
    piece.values = values.from(first);
    piece.rows = count;
    piece.position = position + static_cast<std::int64_t>(first);
    piece.positions = positions == nullptr ? nullptr : positions + first;
    piece.node = node_of(first);
    return piece;
  }

  /// Calls `visit(RowRun)` for each run of neighbouring rows, in order.
  template <class Visit>
  void for_each_run(Visit visit) const {
    if (runs.empty()) {
      if (rows > 0) visit(RowRun{0, rows});
      return;
    }
    for (const RowRun& run : runs) visit(run);
  }
};

/// The segments that one KV head shows, in any order.
using SegmentList = std::vector<Segment>;

/// Whether the query at text position `query` sees the row at position `row`.
[[nodiscard]] constexpr bool is_visible(std::int64_t row, std::int64_t query, std::int64_t window) {
  return row <= query && (window == unlimited_window || row > query - window);
}

}  // namespace kvpolicy
