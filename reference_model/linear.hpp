// SPDX-License-Identifier: Apache-2.0
//
// A linear layer in float: y = x Wᵀ + b. The products are oneDNN's or BLAS's, whichever the build
// found; nothing else of the model calls them, or knows how they use threads.
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

  /// y [rows, outputs] = x [rows, inputs] Wᵀ + b. x and y must not overlap.
  void apply(const float* x, std::size_t rows, float* y) const;

  /// y += x Wᵀ + b: a residual connection without a buffer of its own.
  void add_to(const float* x, std::size_t rows, float* y) const;

  /// The way back: dx [rows, inputs] = dy [rows, outputs] W, where dy is how a loss changes with y
  /// and dx how it changes with x. They must not overlap.
  void back(const float* dy, std::size_t rows, float* dx) const;

  /// dx += dy W: for an x that several layers read.
  void add_back(const float* dy, std::size_t rows, float* dx) const;
};

/// A matrix in someone's memory, row after row.
struct MatrixView {
  const float* data = nullptr;
  std::size_t rows = 0;     ///< as they lie
  std::size_t columns = 0;  ///< as they lie
  std::size_t stride = 0;   ///< from row to row
  bool transposed = false;  ///< to be read the other way round
};

/// out [m, n] = scale * a [m, k] b [k, n] + keep * out, whose rows are `stride` apart. On the calling
/// thread alone. `out` must not overlap a or b. @throws ShapeError if the inner sizes differ.
void multiply(const MatrixView& a, const MatrixView& b, float scale, float keep, float* out,
              std::size_t stride);

/// Calls work(first, count) for blocks of rows that cover [0, rows), on several threads if `rows`
/// are many. A block may do anything to its own rows, products included. How rows fall into blocks
/// does not depend on the number of threads.
/// @throws what `work` throws, the first of it.
void for_each_row_block(std::size_t rows,
                        const std::function<void(std::size_t first, std::size_t count)>& work);

/// The library behind the products: "oneDNN" or "BLAS".
[[nodiscard]] std::string_view matmul_backend() noexcept;

}  // namespace kvpolicy::reference
