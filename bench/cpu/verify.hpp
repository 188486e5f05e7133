// SPDX-License-Identifier: Apache-2.0
//
// The reference that the bench checks results with before it times them: attention in double
// precision, in plain loops over the rows as a cache shows them. It shares no code with the engine
// that it judges. It also counts the rows, on which every GB/s is based.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <kvpolicy/core/row.hpp>
#include <kvpolicy/core/segment.hpp>

#include "reads.hpp"

namespace kvpolicy::bench {

/// The largest accepted ||out - reference|| / ||reference||, over the output of one query head.
/// Engines may multiply rows of 16 bits by probabilities of 16 bits, an error of 0.0017 each; with
/// quantised rows the queries may also be rounded to 8 bits.
inline constexpr double most_error_exact = 6e-3;
inline constexpr double most_error_packed = 1e-2;

/// Which rows a query at `position` sees: none after it, and with a window only the sinks and the
/// latest `recent`, its own included (0: all). This does not use the segments' own rule, because
/// that is judged too.
struct Sight {
  std::int64_t position = 0;
  Window window;

  [[nodiscard]] bool sees(std::int64_t row) const {
    const auto sinks = static_cast<std::int64_t>(window.sinks);
    const auto recent = static_cast<std::int64_t>(window.recent);
    return row <= position && (recent == 0 || row < sinks || row > position - recent);
  }
};

/// The expected output of one query head, and the number of rows that it reads.
struct Reference {
  std::vector<double> out;  // [head_dim]
  SideRows keys;
  SideRows values;
};

/// Attention of `queries` [count, head_dim], all at one position, over the segments of their head.
[[nodiscard]] inline std::vector<Reference> attention(std::span<const float> queries, std::size_t head_dim,
                                                      std::span<const Segment> segments, const Sight& sight) {
  const std::size_t count = queries.size() / head_dim;
  const double scale = 1.0 / std::sqrt(static_cast<double>(head_dim));
  std::vector<Reference> found(count, Reference{std::vector<double>(head_dim), {}, {}});
  std::vector<float> row(head_dim);
  SideRows keys;
  SideRows values;
  const auto count_row = [](const Plane& plane, SideRows& side) {
    ++(is_quantized(plane.format.encoding) ? side.packed : side.exact);
  };
  const auto for_each_row = [&](auto visit) {
    for (const Segment& segment : segments) {
      segment.for_each_run([&](const RowRun& run) {
        for (std::size_t i = run.first; i < run.first + run.rows; ++i) {
          if (sight.sees(segment.position_of(i))) visit(segment, i);
        }
      });
    }
  };
  std::vector<double> logits;  // [rows, count]
  std::vector<double> highest(count, -std::numeric_limits<double>::infinity());
  for_each_row([&](const Segment& segment, std::size_t i) {
    count_row(segment.keys, keys);
    count_row(segment.values, values);
    load_row(segment.keys, i, row);
    for (std::size_t q = 0; q < count; ++q) {
      double dot = 0.0;
      for (std::size_t c = 0; c < head_dim; ++c) {
        dot += static_cast<double>(queries[q * head_dim + c]) * static_cast<double>(row[c]);
      }
      logits.push_back(dot * scale);
      highest[q] = std::max(highest[q], dot * scale);
    }
  });
  std::vector<double> sums(count);
  std::size_t next = 0;
  for_each_row([&](const Segment& segment, std::size_t i) {
    load_row(segment.values, i, row);
    for (std::size_t q = 0; q < count; ++q) {
      const double weight = std::exp(logits[next++] - highest[q]);
      sums[q] += weight;
      for (std::size_t c = 0; c < head_dim; ++c) {
        found[q].out[c] += weight * static_cast<double>(row[c]);
      }
    }
  });
  for (std::size_t q = 0; q < count; ++q) {
    for (double& number : found[q].out) number /= sums[q];
    found[q].keys = keys;
    found[q].values = values;
  }
  return found;
}

/// ||out - reference|| / ||reference||; NaN if `out` has a NaN, or if the reference has no row.
[[nodiscard]] inline double relative_error(std::span<const float> out, std::span<const double> reference) {
  double difference = 0.0;
  double norm = 0.0;
  for (std::size_t c = 0; c < reference.size(); ++c) {
    const double off = static_cast<double>(out[c]) - reference[c];
    difference += off * off;
    norm += reference[c] * reference[c];
  }
  return std::sqrt(difference / norm);
}

}  // namespace kvpolicy::bench
