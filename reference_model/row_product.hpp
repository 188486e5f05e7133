// SPDX-License-Identifier: Apache-2.0
//
// Products of a few rows with weights in any format, as decoding needs them: each weight is read once, from
// memory, and multiplied in float. The libraries have no such product: oneDNN 2.6 repacks a bfloat16 weight
// before each product, which takes twice as long as reading it, and its float product needs a float weight.
#pragma once

#include <cstddef>

#include <reference_model/weight_matrix.hpp>

namespace kvpolicy::reference {

/// The most rows for which reading the weights takes longer than multiplying them.
inline constexpr std::size_t most_few_rows = 8;

/// Whether the build has this product. It needs Highway (kvpolicy::cpu).
[[nodiscard]] bool has_row_product() noexcept;

/// Computes y [rows, count] = x [rows, columns] Wᵀ + keep * y for the rows [first, first + count) of W, on the
/// calling thread. Rows of y are `stride` numbers apart. Each number is the same, bit for bit, for any
/// `rows`, `first` and `count`.
void multiply_rows(const float* x, std::size_t rows, const WeightMatrix& weight, std::size_t first,
                   std::size_t count, float keep, float* y, std::size_t stride);

}  // namespace kvpolicy::reference
