// SPDX-License-Identifier: Apache-2.0
//
// Matrix products of oneDNN or BLAS, whichever the build found. No other part of the model calls these
// libraries or knows how they use threads.
#pragma once

#include <cstddef>
#include <string_view>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cpu/aligned_buffer.hpp>

namespace kvpolicy::reference {

/// Whether several threads may multiply at once, each its own product. A BLAS with threads of its own has
/// one lock for them, for which callers would only queue.
#if defined(KVPOLICY_WITH_ONEDNN) && defined(_OPENMP)
inline constexpr bool one_thread_per_product = true;
#else
inline constexpr bool one_thread_per_product = false;
#endif

/// The library that computes the products: "oneDNN" or "BLAS".
[[nodiscard]] std::string_view matmul_backend() noexcept;

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

/// Whether this machine multiplies bfloat16 so much faster than float that numbers split into two bfloat16
/// terms pay (AMX). The first call asks the system for AMX. Thread-safe.
[[nodiscard]] bool multiplies_bfloat16();

/// A copy of a weight in the order in which this machine multiplies bfloat16 fastest. Only if
/// multiplies_bfloat16().
class PackedWeight {
 public:
  /// Rows of x that a weight is packed for: a multiply of so many is fastest.
  static constexpr std::size_t most_rows = 128;

  /// Packs weight [outputs, inputs], contiguous, into memory that the object keeps for the next weight.
  void pack(const bfloat16* weight, std::size_t outputs, std::size_t inputs);

  /// Computes y [rows, outputs] = x [rows, inputs] weightᵀ, + y if `add`, on the calling thread, with sums in
  /// float and subnormal numbers as zeros. x and y are contiguous. Efficient if `rows` is at most most_rows and
  /// takes few different values. Several threads may call it at once.
  void multiply(const bfloat16* x, std::size_t rows, bool add, float* y) const;

 private:
  cpu::AlignedBuffer<std::byte> memory_;  // oneDNN reads unaligned weights several times as slowly
  std::size_t outputs_ = 0;
  std::size_t inputs_ = 0;
};

}  // namespace kvpolicy::reference
