// SPDX-License-Identifier: Apache-2.0
//
// Counts what a call has to read and compute; every GB/s and TFLOP/s that the benches print is
// based on it. For a text of N rows, the query's own included, a KV head of head_dim d reads these
// 16-bit rows (4 d bytes for key and value):
//
//   all rows          N
//   sinks + recent    min(N, sinks + recent)
//   chosen chunks     budget + rows since the last closed chunk, and, where the call chooses a new
//                     selection, the summary of each closed chunk: one vector (mean) or two (min, max)
//   a budget          min(P, budget + rows always kept) + N - P, if it was compressed at P rows
//
// Quantised rows (d bits / 8 + 4 d / group bytes of a key, and the same of a value: codes, scales and
// zeros) are the whole blocks of 64 before the residual. Queries and outputs are not counted.
#pragma once

#include <algorithm>
#include <cstddef>

#include <kvpolicy/cuda/kernels/packing.cuh>
#include <kvpolicy/cuda/served_rule.hpp>

namespace kvpolicy::bench {

struct HeadReads {
  std::size_t exact_rows = 0;
  std::size_t packed_rows = 0;
  std::size_t summary_vectors = 0;

  [[nodiscard]] double bytes(const HeadRule& head, std::size_t head_dim) const {
    const auto d = static_cast<double>(head_dim);
    double packed_row = 0.0;
    if (packed_rows > 0) {
      const double codes =
          d * static_cast<double>(bits_of(head.key_encoding) + bits_of(head.value_encoding)) / 8;
      // Scale and zero take 2 bytes each. A group of `key_group` rows of each channel gives as many
      // of them.
      const double key_groups = d / static_cast<double>(head.key_group);
      const double value_groups = d / static_cast<double>(head.value_group);
      packed_row = codes + 4 * (key_groups + value_groups);
    }
    return static_cast<double>(exact_rows) * 4 * d + static_cast<double>(packed_rows) * packed_row +
           static_cast<double>(summary_vectors) * 2 * d;
  }
};

/// Counts for a head whose text has `tokens` rows, all committed except the query's own.
/// `refreshes`: the call chooses new chunks; `selected`: it reads selected chunks.
[[nodiscard]] inline HeadReads decode_reads(const HeadRule& head, std::size_t tokens, bool selected,
                                            bool refreshes) {
  if (head.recent > 0) return {.exact_rows = std::min(tokens, head.sinks + head.recent)};
  const std::size_t committed = tokens - 1;
  if (head.chunk > 0 && selected) {
    const std::size_t chunks = committed / head.chunk;
    const std::size_t chosen = std::min(chunks * head.chunk, head.chosen_rows);
    const bool ranks = refreshes && chunks * head.chunk > head.chosen_rows;
    return {.exact_rows = chosen + tokens - chunks * head.chunk,
            .summary_vectors = ranks ? chunks * (gpu::has_min_max_summary(head) ? 2U : 1U) : 0U};
  }
  if (head.is_quantized()) {
    const std::size_t beyond = committed - std::min(committed, head.residual);
    const std::size_t packed = beyond / gpu::quantized_together * gpu::quantized_together;
    return {.exact_rows = tokens - packed, .packed_rows = packed};
  }
  return {.exact_rows = tokens};
}

/// Counts for a head with a budget, compressed when its text had `compressed_at` rows.
[[nodiscard]] inline HeadReads compressed_reads(const HeadRule& head, std::size_t tokens,
                                                std::size_t compressed_at) {
  return {.exact_rows = std::min(compressed_at, head.budget + head.kept_rows) + tokens - compressed_at};
}

/// Pairs of a query and a visible row in one head, for a chunk of `queries` after `cached` rows.
[[nodiscard]] inline double visible_pairs(const HeadRule& head, std::size_t cached, std::size_t queries) {
  const auto triangle = [](double n) { return n * (n + 1) / 2; };
  const auto first = static_cast<double>(cached);
  const auto last = static_cast<double>(cached + queries);
  if (head.recent == 0) return triangle(last) - triangle(first);
  const auto reach = static_cast<double>(head.sinks + head.recent);
  // A query sees min(position + 1, sinks + recent) rows.
  const double growing = triangle(std::min(last, reach)) - triangle(std::min(first, reach));
  return growing + reach * (last - std::max(first, std::min(last, reach)));
}

/// The same pairs counted in whole tiles, which a tile kernel must compute: `query_rows` rows
/// (pairs of a token and a query head of a group) by `key_rows` keys, with key tiles aligned to
/// position 0.
[[nodiscard]] inline double live_tile_pairs(const HeadRule& head, std::size_t cached, std::size_t queries,
                                            std::size_t group, std::size_t query_rows, std::size_t key_rows) {
  std::size_t tiles = 0;
  const std::size_t rows = queries * group;
  for (std::size_t row = 0; row < rows; row += query_rows) {
    const std::size_t first = cached + row / group;
    const std::size_t last = cached + (std::min(row + query_rows, rows) - 1) / group;
    std::size_t from = 0;
    if (head.recent > 0) {
      from = first + 1 - std::min(first + 1, head.recent);
      from = std::max(from, std::min(head.sinks, last + 1));
      const std::size_t sinks = std::min(head.sinks, last + 1);
      tiles += (sinks + key_rows - 1) / key_rows;
    }
    if (from <= last) tiles += last / key_rows - from / key_rows + 1;
  }
  return static_cast<double>(tiles) * static_cast<double>(query_rows * key_rows);
}

/// Floating-point operations of a pair: two products of head_dim, with a multiplication and an
/// addition each.
[[nodiscard]] inline double flops_of_pair(std::size_t head_dim) {
  return 4.0 * static_cast<double>(head_dim);
}

}  // namespace kvpolicy::bench
