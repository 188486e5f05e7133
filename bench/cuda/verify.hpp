// SPDX-License-Identifier: Apache-2.0
//
// The reference that a bench checks results with before it times them: attention of one query in
// double precision, in plain loops over rows that were copied to the host. It shares no code with
// the kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <cuda_runtime_api.h>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/inspect.hpp>
#include <kvpolicy/cuda/runtime.hpp>

namespace kvpolicy::bench {

/// The largest accepted ||out - reference|| / ||reference||, over the output of one query head.
/// Rounding a row of results to bfloat16 gives an error of about 0.0017, and probabilities are
/// multiplied with values in bfloat16, which gives another such error. With quantised rows queries
/// and values are also rounded to half.
inline constexpr double most_error_exact = 6e-3;
inline constexpr double most_error_packed = 1e-2;

/// Copies 16-bit numbers to the host. Waits for the stream.
[[nodiscard]] inline std::vector<bfloat16> download(const bfloat16* from, std::size_t count,
                                                    cudaStream_t stream) {
  std::vector<bfloat16> numbers(count);
  gpu::check(cudaMemcpyAsync(numbers.data(), from, count * sizeof(bfloat16), cudaMemcpyDeviceToHost, stream),
             "cudaMemcpyAsync");
  gpu::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  return numbers;
}

/// Adds the rows of a call, [tokens, heads, head_dim], after those that a cache holds of one head.
inline void add_rows(gpu::CachedRows& rows, std::span<const bfloat16> keys, std::span<const bfloat16> values,
                     std::size_t heads, std::size_t head, std::size_t head_dim, std::size_t tokens,
                     std::size_t first_position) {
  for (std::size_t token = 0; token < tokens; ++token) {
    rows.positions.push_back(static_cast<std::int64_t>(first_position + token));
    rows.quantized.push_back(false);
    const std::size_t at = (token * heads + head) * head_dim;
    for (std::size_t c = 0; c < head_dim; ++c) {
      rows.keys.push_back(static_cast<float>(keys[at + c]));
      rows.values.push_back(static_cast<float>(values[at + c]));
    }
  }
}

/// Which of the rows a query at `position` sees: none after it, and with a window only the sinks
/// and the latest `recent`, its own included (0: all).
struct Sight {
  std::int64_t position = 0;
  std::int64_t sinks = 0;
  std::int64_t recent = 0;

  [[nodiscard]] bool sees(std::int64_t row) const {
    return row <= position && (recent == 0 || row < sinks || row > position - recent);
  }
};

/// Attention of the query [head_dim] over the rows that it sees.
[[nodiscard]] inline std::vector<double> attention(std::span<const bfloat16> query,
                                                   const gpu::CachedRows& rows, const Sight& sight) {
  const std::size_t dim = query.size();
  const double scale = 1.0 / std::sqrt(static_cast<double>(dim));
  std::vector<double> q(dim);
  for (std::size_t c = 0; c < dim; ++c) q[c] = scale * static_cast<double>(static_cast<float>(query[c]));
  const std::size_t count = rows.positions.size();
  std::vector<double> logits(count, -std::numeric_limits<double>::infinity());
  double max = -std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < count; ++i) {
    if (!sight.sees(rows.positions[i])) continue;
    double dot = 0.0;
    for (std::size_t c = 0; c < dim; ++c) dot += q[c] * static_cast<double>(rows.keys[i * dim + c]);
    logits[i] = dot;
    max = std::max(max, dot);
  }
  std::vector<double> out(dim);
  double sum = 0.0;
  for (std::size_t i = 0; i < count; ++i) {
    if (!sight.sees(rows.positions[i])) continue;
    const double weight = std::exp(logits[i] - max);
    sum += weight;
    for (std::size_t c = 0; c < dim; ++c) {
      out[c] += weight * static_cast<double>(rows.values[i * dim + c]);
    }
  }
  for (double& number : out) number /= sum;
  return out;
}

/// ||out - reference|| / ||reference||; NaN if `out` has a NaN.
[[nodiscard]] inline double relative_error(std::span<const bfloat16> out, std::span<const double> reference) {
  double difference = 0.0;
  double norm = 0.0;
  for (std::size_t c = 0; c < reference.size(); ++c) {
    const double off = static_cast<double>(static_cast<float>(out[c])) - reference[c];
    difference += off * off;
    norm += reference[c] * reference[c];
  }
  return std::sqrt(difference / norm);
}

}  // namespace kvpolicy::bench
