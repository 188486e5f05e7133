// SPDX-License-Identifier: Apache-2.0
//
// The attention that was added up for each row of a head that ranks its rows by it, on the device: 8
// bytes a row, which kernels/column_sums.cuh writes and kernels/compact.cuh moves.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>

#include <kvpolicy/cuda/memory.hpp>
#include <kvpolicy/cuda/runtime.hpp>

namespace kvpolicy::gpu {

/// Rows that no query has seen yet have the sum 0, or a negative one if the head waits for scoring passes
/// (`waits_for_scoring`), which tells them from rows to which no query paid anything.
class RowSums {
 public:
  explicit RowSums(bool waits_for_scoring = false) : waits_for_scoring_{waits_for_scoring} {}

  [[nodiscard]] double* data() const { return reinterpret_cast<double*>(sums_.get()); }
  [[nodiscard]] std::size_t rows() const { return rows_; }
  [[nodiscard]] std::size_t bytes() const { return rows_ * sizeof(double); }

  /// Memory that was obtained and is not in use yet.
  struct Growth {
    DeviceBuffer sums;
    std::size_t rows = 0;
  };
  /// Memory for `rows` rows, if there is not enough; at least half as many again as there were, because
  /// the sums are copied. @throws std::bad_alloc
  [[nodiscard]] Growth prepare(std::size_t rows, MemoryResource* memory, cudaStream_t stream) const {
    if (rows <= rows_) return {};
    rows = std::max(rows, rows_ + rows_ / 2);
    return {allocate(memory, rows * sizeof(double), stream), rows};
  }
  /// What was in use before comes back in `growth`. @throws DeviceError
  void grow(Growth& growth, cudaStream_t stream) {
    if (growth.rows == 0) return;
    if (rows_ > 0) copy(growth.sums.get(), stream);
    check(cudaMemsetAsync(growth.sums.get() + bytes(), waits_for_scoring_ ? unscored_byte : 0,
                          growth.rows * sizeof(double) - bytes(), stream),
          "cudaMemsetAsync");
    std::swap(sums_, growth.sums);
    std::swap(rows_, growth.rows);
  }
  /// @throws std::bad_alloc, DeviceError
  [[nodiscard]] RowSums fork(MemoryResource* memory, cudaStream_t stream) const {
    RowSums other{waits_for_scoring_};
    if (rows_ == 0) return other;
    other.sums_ = allocate(memory, bytes(), stream);
    other.rows_ = rows_;
    copy(other.sums_.get(), stream);
    return other;
  }
  /// Takes over what another head has of its first `count` rows. @throws DeviceError
  void take(const RowSums& other, std::size_t count, cudaStream_t stream) const {
    if (count == 0) return;
    check(cudaMemcpyAsync(sums_.get(), other.sums_.get(), count * sizeof(double), cudaMemcpyDeviceToDevice,
                          stream),
          "cudaMemcpyAsync");
  }
  /// Where the memory goes back.
  void give_back_on(const LastUse& use) noexcept { sums_.give_back_on(use); }

 private:
  void copy(std::byte* to, cudaStream_t stream) const {
    check(cudaMemcpyAsync(to, sums_.get(), bytes(), cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
  }

  static constexpr int unscored_byte = 0xbf;  // a double of such bytes is negative

  DeviceBuffer sums_;
  std::size_t rows_ = 0;
  bool waits_for_scoring_;
};

}  // namespace kvpolicy::gpu
