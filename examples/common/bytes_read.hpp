// SPDX-License-Identifier: Apache-2.0
//
// Counts the bytes of cached rows that one pass of a model reads, over all heads of a cache.
#pragma once

#include <cstddef>

#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/segment.hpp>

namespace kvpolicy::tools {

[[nodiscard]] inline std::size_t bytes_of_rows(const Plane& plane, std::size_t rows, std::size_t head_dim) {
  const std::size_t codes = rows * head_dim * bits_of(plane.format.encoding) / 8;
  if (!is_quantized(plane.format.encoding)) return codes;
  // Each group has a scale and a zero; a group is some channels of a row or some rows of a channel.
  return codes + 2 * sizeof(half) * (rows * head_dim / plane.format.group);
}

/// Bytes of the rows that `read` shows of one head. Summaries that are read to select rows are not
/// counted.
template <class Cache>
[[nodiscard]] std::size_t bytes_shown(const Cache& cache, std::size_t layer, std::size_t head, Read read) {
  const std::size_t head_dim = cache.plan().shape().head_dim;
  std::size_t total = 0;
  const SegmentList shown = cache.segments(layer, head, read);
  for (const Segment& segment : shown) {
    segment.for_each_run([&](const RowRun& run) {
      total +=
          bytes_of_rows(segment.keys, run.rows, head_dim) + bytes_of_rows(segment.values, run.rows, head_dim);
    });
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

}  // namespace kvpolicy::tools
