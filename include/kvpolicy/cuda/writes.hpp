// SPDX-License-Identifier: Apache-2.0
//
// Collects small writes to device memory and puts them on a stream, many to a launch.
#pragma once

#include <cstddef>
#include <cstring>
#include <type_traits>

#include <kvpolicy/cuda/kernel_tables.hpp>
#include <kvpolicy/cuda/kernels/scatter.cuh>
#include <kvpolicy/cuda/runtime.hpp>

namespace kvpolicy::gpu {

/// Writes become visible to work put on the stream after `flush`, in any order among themselves: no
/// place may be written twice in between. Whoever throws them away without `flush` wrote nothing
/// but what did not fit a launch any more.
class DeviceWrites {
 public:
  explicit DeviceWrites(cudaStream_t stream) : stream_{stream} {}

  [[nodiscard]] cudaStream_t stream() const { return stream_; }

  /// `place` is device memory, aligned to 8 bytes.
  template <class T>
  void write(T* place, const T& value) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 8 == 0, "DeviceWrites: words of 8 bytes");
    auto* to = reinterpret_cast<unsigned long long*>(place);
    for (std::size_t i = 0; i < sizeof(T) / 8; ++i) {
      if (params_.count == ScatterParams::most) flush();
      params_.address[params_.count] = to + i;
      std::memcpy(&params_.word[params_.count], reinterpret_cast<const std::byte*>(&value) + 8 * i, 8);
      ++params_.count;
    }
  }

  /// @throws DeviceError
  void flush() {
    if (params_.count == 0) return;
    launch(detail::common_kernels<>().scatter, {}, stream_, params_);
    params_.count = 0;
  }

 private:
  cudaStream_t stream_;
  ScatterParams params_;
};

}  // namespace kvpolicy::gpu
