// SPDX-License-Identifier: Apache-2.0
//
// A tile of neighbouring queries of one KV head: all its query heads of a token, then those of the next
// token. The queries of a tile share every key and value that is read.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include <kvpolicy/core/row.hpp>
#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/core/tensor_view.hpp>
#include <kvpolicy/cpu/highway.hpp>
#include <kvpolicy/cpu/tree_mask.hpp>

namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {

/// Channels of a row as kernels process it: rounded up to a multiple of 16, which all vectors divide, with
/// zeros after the row's own. Rows of that width are read where they are, others are copied first.
[[nodiscard]] constexpr std::size_t padded_channels(std::size_t channels) {
  return (channels + 15) / 16 * 16;
}

/// Padded channels of a head's two sides, which determine the layout of scratch memory.
struct HeadWidth {
  std::size_t keys;
  std::size_t values;
  [[nodiscard]] constexpr std::size_t widest() const { return std::max(keys, values); }
};

/// Query row m of the tile is query head `(first + m) % group` of the KV head's group at token
/// `(first + m) / group`.
struct QueryTile {
  ConstTensor queries;
  std::int64_t first_position = 0;  // of token 0
  std::size_t group = 1;
  std::size_t kv_head = 0;
  std::size_t first = 0;
  std::size_t rows = 0;
  float scale = 1.0F;
  float softcap = 0.0F;
  std::size_t value_dim = 0;  // 0 if no values are read
  // If the queries are nodes of a tree:
  const TreeMask* tree = nullptr;
  std::int64_t lowest = 0, highest = 0;  // range of the tile's positions

  /// Declares that the tile's queries are nodes of the tree of `mask`.
  void use_tree(const TreeMask& mask) {
    tree = &mask;
    lowest = highest = mask.position(token(0));
    for (std::size_t query = token(0); query <= token(rows - 1); ++query) {
      lowest = std::min(lowest, mask.position(query));
      highest = std::max(highest, mask.position(query));
    }
  }

  [[nodiscard]] std::size_t key_dim() const { return queries.head_dim; }
  [[nodiscard]] HeadWidth width() const { return {padded_channels(key_dim()), padded_channels(value_dim)}; }
  [[nodiscard]] std::size_t token(std::size_t m) const { return (first + m) / group; }
  [[nodiscard]] std::size_t head(std::size_t m) const { return kv_head * group + (first + m) % group; }
  [[nodiscard]] std::int64_t position(std::size_t m) const {
    return tree != nullptr ? tree->position(token(m)) : first_position + static_cast<std::int64_t>(token(m));
  }
  [[nodiscard]] std::int64_t earliest() const { return tree != nullptr ? lowest : position(0); }
  [[nodiscard]] std::int64_t latest() const { return tree != nullptr ? highest : position(rows - 1); }

  struct Range {
    std::size_t begin, end;
  };
  /// Calls visit(Range) for neighbouring queries that see a row, in order; a range may be empty.
  template <class Visit>
  void for_each_seeing(std::int64_t row_position, std::int64_t window, std::size_t node, Visit visit) const {
    if (tree == nullptr) return visit(seeing(row_position, window));
    for (std::size_t m = 0; m < rows;) {
      const std::size_t next = after_token(m);
      if (is_visible(row_position, position(m), window) && tree->sees(token(m), node)) {
        visit(Range{m, next});
      }
      m = next;
    }
  }
  /// Calls visit(Range) for neighbouring queries that do not see a row.
  template <class Visit>
  void for_each_not_seeing(std::int64_t row_position, std::int64_t window, std::size_t node,
                           Visit visit) const {
    std::size_t from = 0;
    for_each_seeing(row_position, window, node, [&](Range seeing) {
      if (from < seeing.begin) visit(Range{from, seeing.begin});
      from = seeing.end;
    });
    if (from < rows) visit(Range{from, rows});
  }
  [[nodiscard]] bool is_seen(std::int64_t row_position, std::int64_t window, std::size_t node) const {
    bool seen = node == no_node && all_see(row_position, row_position, window);
    if (seen) return true;
    for_each_seeing(row_position, window, node, [&](Range range) { seen = seen || range.begin < range.end; });
    return seen;
  }
  /// The queries that see a row of the text at `row_position`. They are neighbours, because positions
  /// ascend.
  [[nodiscard]] Range seeing(std::int64_t row_position, std::int64_t window) const {
    const auto tokens = latest() - earliest() + 1;
    const std::int64_t from = row_position - earliest();
    const std::int64_t to =
        window >= unlimited_window - std::max<std::int64_t>(from, 0) ? tokens : from + window;
    const auto row_of = [&](std::int64_t tile_token) {
      const auto at = static_cast<std::size_t>(std::clamp<std::int64_t>(tile_token, 0, tokens)) * group;
      return std::min(rows, at - std::min(at, first % group));
    };
    return {row_of(from), row_of(to)};
  }
  /// Whether every query of the tile sees every row of the text at the positions [oldest, newest].
  [[nodiscard]] bool all_see(std::int64_t oldest, std::int64_t newest, std::int64_t window) const {
    return newest <= earliest() && (window == unlimited_window || oldest > latest() - window);
  }

  /// The first query of the token after m's token.
  [[nodiscard]] std::size_t after_token(std::size_t m) const {
    return std::min(rows, m + group - (first + m) % group);
  }

  /// Whether a segment's rotation changes any query of the tile.
  [[nodiscard]] bool is_rotated_by(const QueryRotation& rotation) const {
    return rotation.inverse_frequencies != nullptr && latest() > rotation.latest_position;
  }

  /// Writes all queries as float, times `factor` and rotated as `rotation` says: [rows, width().keys].
  void load(const QueryRotation& rotation, float factor, float* out) const {
    const std::size_t head_dim = key_dim();
    const std::size_t padded = width().keys;
    for (std::size_t m = 0; m < rows; ++m) {
      const std::span<float> query{out + m * padded, head_dim};
      std::fill(out + m * padded + head_dim, out + (m + 1) * padded, 0.0F);
      load_dense(queries.encoding, queries.row(token(m), head(m)), query);
      for (float& number : query) number *= factor;
    }
    if (is_rotated_by(rotation)) rotate(rotation, out);
  }

 private:
  void rotate(const QueryRotation& rotation, float* out) const {
    const std::size_t head_dim = key_dim();
    const std::size_t padded = width().keys;
    // One angle serves the whole group, because sines are expensive.
    const std::size_t pairs = head_dim / 2;
    for (std::size_t m = 0; m < rows;) {
      const std::size_t next = after_token(m);
      const std::int64_t turn = rotation.latest_position - position(m);
      for (std::size_t pair = 0; pair < pairs && turn < 0; ++pair) {
        const double angle =
            static_cast<double>(turn) * static_cast<double>(rotation.inverse_frequencies[pair]);
        const auto cosine = static_cast<float>(std::cos(angle));
        const auto sine = static_cast<float>(std::sin(angle));
        for (std::size_t i = m; i < next; ++i) {
          float* query = out + i * padded + pair;
          const float low = query[0];
          const float high = query[pairs];
          query[0] = low * cosine - high * sine;
          query[pairs] = high * cosine + low * sine;
        }
      }
      m = next;
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
