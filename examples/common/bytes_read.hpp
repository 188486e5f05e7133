// SPDX-License-Identifier: Apache-2.0
//
// Counts the bytes of cached rows that one pass of a model reads, over all heads of a cache.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/segment.hpp>

namespace kvpolicy::tools {

[[nodiscard]] inline std::size_t bytes_of_rows(const Plane& plane, std::size_t rows, std::size_t head_dim) {
  const std::size_t codes = rows * head_dim * bits_of(plane.format.encoding) / 8;
  if (!is_quantized(plane.format.encoding)) return codes;
  // Each group has a scale, and a zero or none; a group is some channels of a row or some rows of a channel.
  return codes + param_bytes_of_group(plane.format.codebook) * (rows * head_dim / plane.format.group);
}

/// The same of a segment's keys and values.
[[nodiscard]] inline std::size_t bytes_of_rows(const Segment& segment, std::size_t rows,
                                               std::size_t head_dim) {
  return bytes_of_rows(segment.keys, rows, head_dim) + bytes_of_rows(segment.values, rows, head_dim);
}

/// Bytes of the rows that `read` shows of one head. Summaries that are read to select rows are not
/// counted.
template <class Cache>
[[nodiscard]] std::size_t bytes_shown(const Cache& cache, std::size_t layer, std::size_t head, Read read) {
  const std::size_t head_dim = cache.plan().shape().head_dim;
  std::size_t total = 0;
  const SegmentList shown = cache.segments(layer, head, read);
  for (const Segment& segment : shown) {
    segment.for_each_run([&](const RowRun& run) { total += bytes_of_rows(segment, run.rows, head_dim); });
  }
  return total;
}

/// The same, summed over all heads.
template <class Cache>
[[nodiscard]] std::size_t bytes_shown(const Cache& cache, Read read) {
  const ModelShape& shape = cache.plan().shape();
  std::size_t total = 0;
  for (std::size_t head = 0; head < shape.kv_head_count(); ++head) {
    total += bytes_shown(cache, head / shape.kv_heads, head % shape.kv_heads, read);
  }
  return total;
}

/// Bytes of a bounded read that read so many rows of each KV head in full, layers added up: the upper half of every key
/// that has one, and the whole of those rows, upper halves of keys once more.
template <class Cache>
[[nodiscard]] std::size_t bytes_of_bounded(const Cache& cache, std::span<const std::size_t> rows_read) {
  const ModelShape& shape = cache.plan().shape();
  std::size_t total = 0;
  std::size_t exact_rows = 0;
  std::size_t halved_rows = 0;
  std::size_t halved_bytes = 0;
  for (std::size_t head = 0; head < shape.kv_head_count(); ++head) {
    for (const Segment& segment : cache.segments(head / shape.kv_heads, head % shape.kv_heads, Read::all)) {
      const std::size_t whole = bytes_of_rows(segment, segment.rows, shape.head_dim);
      if (is_in_halves(segment.keys.format.encoding)) {
        total += bytes_of_rows(segment.keys.upper_half(), segment.rows, shape.head_dim);
        halved_rows += segment.rows;
        halved_bytes += whole;
      } else {
        total += whole;
        exact_rows += segment.rows;
      }
    }
  }
  std::size_t read = 0;
  for (const std::size_t rows : rows_read) read += rows;
  if (halved_rows == 0) return total;
  return total + (read - std::min(read, exact_rows)) * halved_bytes / halved_rows;
}

}  // namespace kvpolicy::tools
