// SPDX-License-Identifier: Apache-2.0
//
// Part of the stand-in for the CUDA runtime: errors, the device, memory and copies.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "device.hpp"

// ---- errors ----------------------------------------------------------------------------------
inline cudaError_t cudaPeekAtLastError() { return kvpolicy::gpu::simt::device().last_error(); }
inline cudaError_t cudaGetLastError() {
  const cudaError_t error = cudaPeekAtLastError();
  kvpolicy::gpu::simt::device().clear_error();
  return error;
}

namespace kvpolicy::gpu::simt {

/// A call of the runtime: fails if a test asks for it, otherwise runs its body.
template <class Body>
cudaError_t call(Body body) {
  if (const cudaError_t error = device().enter()) return error;
  return device().answer(body(device()));
}
/// The same for calls that are not allowed during a capture.
template <class Body>
cudaError_t call_outside_capture(Body body) {
  return call([&](Device& d) { return d.spoils_capture() ? cudaErrorStreamCaptureUnsupported : body(d); });
}

}  // namespace kvpolicy::gpu::simt

// ---- the device ------------------------------------------------------------------------------
inline cudaError_t cudaGetDeviceCount(int* count) {
  return kvpolicy::gpu::simt::call([=](auto& d) {
    *count = d.devices;
    return d.devices > 0 ? cudaSuccess : cudaErrorNoDevice;
  });
}
inline cudaError_t cudaGetDevice(int* number) {
  return kvpolicy::gpu::simt::call([=](auto& d) {
    *number = 0;
    return d.devices > 0 ? cudaSuccess : cudaErrorNoDevice;
  });
}
inline cudaError_t cudaSetDevice(int number) {
  return kvpolicy::gpu::simt::call(
      [=](auto& d) { return number >= 0 && number < d.devices ? cudaSuccess : cudaErrorInvalidDevice; });
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int number) {
  return kvpolicy::gpu::simt::call([=](auto& d) {
    if (number < 0 || number >= d.devices) return cudaErrorInvalidDevice;
    switch (attribute) {
      case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
      case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
      case cudaDevAttrWarpSize: *value = 32; break;
      case cudaDevAttrMultiProcessorCount: *value = d.multiprocessors; break;
      case cudaDevAttrL2CacheSize: *value = 40 << 20; break;
      case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
      case cudaDevAttrComputeCapabilityMajor: *value = d.major; break;
      case cudaDevAttrComputeCapabilityMinor: *value = d.minor; break;
      case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = d.max_shared_bytes + 1024; break;
      case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = d.max_shared_bytes; break;
      default: return cudaErrorInvalidValue;
    }
    return cudaSuccess;
  });
}
inline cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  return kvpolicy::gpu::simt::call([=](auto& d) {
    if (function == nullptr) return cudaErrorInvalidDeviceFunction;
    const bool fits = attribute != cudaFuncAttributeMaxDynamicSharedMemorySize ||
                      (value >= 0 && value <= d.max_shared_bytes);
    return fits ? cudaSuccess : cudaErrorInvalidValue;
  });
}
template <class Function>
cudaError_t cudaFuncSetAttribute(Function* function, cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(function), attribute, value);
}
inline cudaError_t cudaDeviceSynchronize() {
  return kvpolicy::gpu::simt::call_outside_capture([](auto& d) {
    d.note_wait();
    d.finish_all();
    return cudaSuccess;
  });
}
inline cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes) {
  return kvpolicy::gpu::simt::call([=](auto& d) {
    *total_bytes = d.total_bytes;
    *free_bytes = d.total_bytes - std::min(d.total_bytes, d.live_bytes());
    return cudaSuccess;
  });
}

// ---- memory ----------------------------------------------------------------------------------
inline cudaError_t cudaMalloc(void** address, std::size_t bytes) {
  return kvpolicy::gpu::simt::call_outside_capture(
      [=](auto& d) { return d.allocate(address, bytes, kvpolicy::gpu::simt::MemoryKind::device); });
}
template <class T>
cudaError_t cudaMalloc(T** address, std::size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(address), bytes);
}
/// During a capture a device would record this as a node of the graph. Our code never allocates then, so it
/// is refused here.
inline cudaError_t cudaMallocAsync(void** address, std::size_t bytes, cudaStream_t) {
  return cudaMalloc(address, bytes);
}
template <class T>
cudaError_t cudaMallocAsync(T** address, std::size_t bytes, cudaStream_t stream) {
  return cudaMallocAsync(reinterpret_cast<void**>(address), bytes, stream);
}
inline cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* wanted) {
  return kvpolicy::gpu::simt::call_outside_capture([=](auto& d) {
    const bool fits = wanted->allocType == cudaMemAllocationTypePinned &&
                      wanted->location.type == cudaMemLocationTypeDevice && wanted->location.id < d.devices;
    if (!fits) return cudaErrorInvalidValue;
    *pool = d.create_pool();
    return cudaSuccess;
  });
}
inline cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr, void* value) {
  return kvpolicy::gpu::simt::call([=](auto&) {
    pool->threshold = *static_cast<const std::uint64_t*>(value);
    return cudaSuccess;
  });
}
inline cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, std::size_t kept) {
  return kvpolicy::gpu::simt::call_outside_capture([=](auto&) {
    pool->give_back(kept);
    return cudaSuccess;
  });
}
inline cudaError_t cudaMallocFromPoolAsync(void** address, std::size_t bytes, cudaMemPool_t pool,
                                           cudaStream_t) {
  return kvpolicy::gpu::simt::call_outside_capture(
      [=](auto& d) { return d.allocate_from(*pool, address, bytes); });
}
inline cudaError_t cudaFree(void* address) {
  auto& d = kvpolicy::gpu::simt::device();
  d.note_wait();
  if (d.spoils_capture()) return d.answer(cudaErrorStreamCaptureUnsupported);
  d.finish_all();
  return d.release(address, kvpolicy::gpu::simt::MemoryKind::device);
}
inline cudaError_t cudaFreeAsync(void* address, cudaStream_t stream) {
  auto& d = kvpolicy::gpu::simt::device();
  if (address == nullptr) return cudaSuccess;
  if (d.spoils_capture()) return d.answer(cudaErrorStreamCaptureUnsupported);
  if (!d.holds(address, 1, kvpolicy::gpu::simt::MemoryKind::device)) {
    return d.answer(cudaErrorInvalidValue);
  }
  return d.submit(stream, [&d, address] { d.release(address, kvpolicy::gpu::simt::MemoryKind::device); });
}
inline cudaError_t cudaMallocHost(void** address, std::size_t bytes) {
  return kvpolicy::gpu::simt::call_outside_capture(
      [=](auto& d) { return d.allocate(address, bytes, kvpolicy::gpu::simt::MemoryKind::pinned); });
}
template <class T>
cudaError_t cudaMallocHost(T** address, std::size_t bytes) {
  return cudaMallocHost(reinterpret_cast<void**>(address), bytes);
}
template <class T>
cudaError_t cudaHostAlloc(T** address, std::size_t bytes, unsigned) {
  return cudaMallocHost(reinterpret_cast<void**>(address), bytes);
}
/// Does not wait. Nothing guarantees that a device waits, so this reveals work that still needs the memory.
inline cudaError_t cudaFreeHost(void* address) {
  auto& d = kvpolicy::gpu::simt::device();
  d.note_wait();
  if (d.spoils_capture()) return d.answer(cudaErrorStreamCaptureUnsupported);
  return d.release(address, kvpolicy::gpu::simt::MemoryKind::pinned);
}
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  return kvpolicy::gpu::simt::call([=](auto& d) {
    using kvpolicy::gpu::simt::MemoryKind;
    *attributes = {cudaMemoryTypeUnregistered, -2, nullptr, const_cast<void*>(address)};
    if (d.holds(address, 1, MemoryKind::device)) {
      *attributes = {cudaMemoryTypeDevice, 0, const_cast<void*>(address), nullptr};
    } else if (d.holds(address, 1, MemoryKind::pinned)) {
      *attributes = {cudaMemoryTypeHost, 0, const_cast<void*>(address), const_cast<void*>(address)};
    }
    return cudaSuccess;
  });
}

namespace kvpolicy::gpu::simt {

/// Whether the addresses of a copy are what its kind says. Taking a host address for a device address is the
/// most common mistake that the emulation's host memory would hide.
inline bool sides_are_right(const Device& d, const void* to, const void* from, std::size_t bytes,
                            cudaMemcpyKind kind) {
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if (kind == cudaMemcpyDefault) return true;
  return d.holds(to, bytes, MemoryKind::device) == to_device &&
         d.holds(from, bytes, MemoryKind::device) == from_device;
}

}  // namespace kvpolicy::gpu::simt

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream = nullptr) {
  return kvpolicy::gpu::simt::call([=](auto& d) {
    if (bytes == 0) return cudaSuccess;
    if (!kvpolicy::gpu::simt::sides_are_right(d, to, from, bytes, kind)) {
      return cudaErrorInvalidValue;
    }
    CUstream_st* const where = d.stream_of(stream);
    const bool captured = d.knows(where) && where->capture != nullptr;
    if (!captured && !d.owns(from, bytes)) {
      // From pageable memory the driver takes the bytes before the call returns.
      d.note_wait();
      const auto* first = static_cast<const std::byte*>(from);
      return d.submit(stream, [to, taken = std::vector<std::byte>(first, first + bytes)] {
        std::memcpy(to, taken.data(), taken.size());
      });
    }
    const cudaError_t error = d.submit(stream, [=] { std::memmove(to, from, bytes); });
    // To pageable memory the call returns when the bytes have arrived.
    if (error == cudaSuccess && !captured && !d.owns(to, bytes)) {
      d.note_wait();
      d.finish(*where);
    }
    return error;
  });
}
/// As one copy of each row.
inline cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                                     std::size_t width, std::size_t height, cudaMemcpyKind kind,
                                     cudaStream_t stream = nullptr) {
  if (to_pitch < width || from_pitch < width) return cudaErrorInvalidValue;
  for (std::size_t row = 0; row < height; ++row) {
    const cudaError_t error =
        cudaMemcpyAsync(static_cast<std::byte*>(to) + row * to_pitch,
                        static_cast<const std::byte*>(from) + row * from_pitch, width, kind, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  return kvpolicy::gpu::simt::call_outside_capture([=](auto& d) {
    if (!kvpolicy::gpu::simt::sides_are_right(d, to, from, bytes, kind)) {
      return cudaErrorInvalidValue;
    }
    d.note_wait();
    d.finish_blocking();
    if (bytes > 0) std::memmove(to, from, bytes);
    return cudaSuccess;
  });
}
inline cudaError_t cudaMemsetAsync(void* address, int value, std::size_t bytes,
                                   cudaStream_t stream = nullptr) {
  return kvpolicy::gpu::simt::call([=](auto& d) {
    if (bytes == 0) return cudaSuccess;
    if (!d.owns(address, bytes)) return cudaErrorInvalidValue;
    return d.submit(stream, [=] { std::memset(address, value, bytes); });
  });
}
inline cudaError_t cudaMemset(void* address, int value, std::size_t bytes) {
  return kvpolicy::gpu::simt::call_outside_capture([=](auto& d) {
    if (!d.owns(address, bytes)) return cudaErrorInvalidValue;
    d.finish_blocking();
    if (bytes > 0) std::memset(address, value, bytes);
    return cudaSuccess;
  });
}
