// SPDX-License-Identifier: Apache-2.0
//
// A linear layer in float: y = x Wᵀ + b. The products are computed by oneDNN or BLAS, whichever the
// build found. No other part of the model calls these libraries or knows how they use threads.
#pragma once

#include <cstddef>
#include <functional>
#include <string_view>
#include <vector>

namespace kvpolicy::reference {

struct Linear {
  std::size_t inputs = 0;
  std::size_t outputs = 0;
  std::vector<float> weight;  // [outputs, inputs], as checkpoints store it
  std::vector<float> bias;    // [outputs], or empty

  /// Computes y [rows, outputs] = x [rows, inputs] Wᵀ + b. x and y must not overlap.
  void apply(const float* x, std::size_t rows, float* y) const;

  /// Computes y += x Wᵀ + b, for a residual connection without a buffer of its own.
  void add_to(const float* x, std::size_t rows, float* y) const;

  /// The backward pass: dx [rows, inputs] = dy [rows, outputs] W, where dx and dy are the
  /// derivatives of a loss with respect to x and y. They must not overlap.
  void back(const float* dy, std::size_t rows, float* dx) const;

  /// Computes dx += dy W, for an x that several layers read.
  void add_back(const float* dy, std::size_t rows, float* dx) const;
};

/// A row-major matrix in memory that the caller owns.
struct MatrixView {
  const float* data = nullptr;
  std::size_t rows = 0;     ///< as stored
  std::size_t columns = 0;  ///< as stored
  std::size_t stride = 0;   ///< numbers from one row to the next
  bool transposed = false;  ///< use its transpose
};

/// Computes out [m, n] = scale * a [m, k] b [k, n] + keep * out on the calling thread; rows of out
/// are `stride` numbers apart. `out` must not overlap a or b. @throws ShapeError if the inner sizes
/// differ
void multiply(const MatrixView& a, const MatrixView& b, float scale, float keep, float* out,
              std::size_t stride);

/// Calls work(first, count) for blocks of rows that cover [0, rows), on several threads if there
/// are many rows. A block may do anything to its own rows, products included. The division into
/// blocks does not depend on the number of threads.
/// @throws the first exception that `work` throws
void for_each_row_block(std::size_t rows,
                        const std::function<void(std::size_t first, std::size_t count)>& work);

/// The library that computes the products: "oneDNN" or "BLAS".
[[nodiscard]] std::string_view matmul_backend() noexcept;

}  // namespace kvpolicy::reference
