// SPDX-License-Identifier: Apache-2.0
//
// Runs the tests on the device that is there, or says that there is none. The tests build heads and
// tensors out of ordinary containers; here `new` gives memory that host and device share, so that
// kernels can follow every pointer that the emulation's could.
//
// It is cut from one allocation, of managed memory or, where the host may not touch that while the device works, of pinned
// memory: the tests' plain loops ask for millions of small vectors, and while a stream is captured the driver must not
// be asked for memory at all.
//
// Not compiled by nvcc, which would make these operators the device's as well.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <new>
#include <string_view>

#include <cuda_runtime_api.h>

namespace {

/// Blocks of 2^k bytes; what was given back waits in a list for the next of its size. Ordinary
/// memory until `share`: what is built before main, and all there is without a device.
class SharedMemory {
 public:
  [[nodiscard]] cudaError_t share(bool managed) {
    void* start = nullptr;
    const std::size_t bytes = managed ? most_bytes : most_bytes / 4;  // pinned memory is taken whole at once
    const cudaError_t error =
        managed ? cudaMallocManaged(&start, bytes) : cudaHostAlloc(&start, bytes, cudaHostAllocMapped);
    if (error != cudaSuccess) return error;
    next_ = static_cast<std::byte*>(start);
    end_ = next_ + bytes;
    return cudaSuccess;
  }

  /// Null if there is none left.
  void* allocate(std::size_t bytes, std::size_t alignment) noexcept {
    if (bytes > most_bytes) return nullptr;
    const std::size_t room = bytes + alignment + sizeof(Header);
    const auto size_class = static_cast<std::uint32_t>(std::bit_width(room - 1));
    const std::scoped_lock lock{mutex_};
    const bool shared = end_ != nullptr;
    std::byte* start = shared ? block(size_class) : static_cast<std::byte*>(std::malloc(room));
    if (start == nullptr) return nullptr;
    const auto first = reinterpret_cast<std::uintptr_t>(start + sizeof(Header));
    const std::size_t gap = (alignment - first % alignment) % alignment;
    std::byte* place = start + sizeof(Header) + gap;
    new (place - sizeof(Header)) Header{start, size_class, shared};
    return place;
  }

  void give_back(void* place) noexcept {
    if (place == nullptr) return;
    const Header header = *(static_cast<Header*>(place) - 1);
    if (!header.shared) return std::free(header.start);
    const std::scoped_lock lock{mutex_};
    free_[header.size_class] = new (header.start) Free{free_[header.size_class]};
  }

 private:
  static constexpr std::size_t most_bytes = std::size_t{8} << 30;  // of managed memory, touched as it is used

  /// Before each block's memory, wherever alignment has moved that.
  struct alignas(__STDCPP_DEFAULT_NEW_ALIGNMENT__) Header {
    std::byte* start;
    std::uint32_t size_class;
    bool shared;
  };
  struct Free {
    Free* next;
  };

  std::byte* block(std::uint32_t size_class) noexcept {
    if (Free* found = free_[size_class]) {
      free_[size_class] = found->next;
      return reinterpret_cast<std::byte*>(found);
    }
    const std::size_t bytes = std::size_t{1} << size_class;
    if (static_cast<std::size_t>(end_ - next_) < bytes) return nullptr;
    std::byte* start = next_;
    next_ += bytes;
    return start;
  }

  std::mutex mutex_;
  std::byte* next_ = nullptr;
  std::byte* end_ = nullptr;
  std::array<Free*, 64> free_{};
};

constinit SharedMemory memory;  // asked before any constructor runs

void* allocate(std::size_t bytes, std::size_t alignment) {
  if (void* place = memory.allocate(bytes, alignment)) return place;
  throw std::bad_alloc{};
}
constexpr std::size_t usual = __STDCPP_DEFAULT_NEW_ALIGNMENT__;

}  // namespace

// The others of <new> call these.
void* operator new(std::size_t bytes) { return allocate(bytes, usual); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, std::max(usual, static_cast<std::size_t>(alignment)));
}
void operator delete(void* place) noexcept { memory.give_back(place); }
void operator delete(void* place, std::size_t) noexcept { memory.give_back(place); }
void operator delete(void* place, std::align_val_t) noexcept { memory.give_back(place); }
void operator delete(void* place, std::size_t, std::align_val_t) noexcept { memory.give_back(place); }

int main(int argc, char** argv) {
  // What tests there are needs no device.
  const auto lists = [](std::string_view option) { return option.starts_with("--list-"); };
  if (std::any_of(argv + 1, argv + argc, lists)) return doctest::Context{argc, argv}.run();
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess || count == 0) {
    std::printf("skipped: no CUDA device (%s)\n", cudaGetErrorString(error));
    return 0;
  }
  cudaDeviceProp device{};
  cudaError_t error = cudaGetDeviceProperties(&device, 0);
  if (error == cudaSuccess) {
    std::printf("on %s, compute capability %d.%d\n", device.name, device.major, device.minor);
    if (device.major < 8) {
      std::printf("skipped: the kernels need 8.0\n");
      return 0;
    }
    error = memory.share(device.concurrentManagedAccess != 0);
  }
  if (error != cudaSuccess) {
    std::printf("failed: %s\n", cudaGetErrorString(error));
    return 1;
  }
  const int failed = doctest::Context{argc, argv}.run();
  std::cout.flush();
  std::fflush(nullptr);
  // Not by way of statics' destructors: some hold shared memory, which goes with the driver.
  std::_Exit(failed);
}
