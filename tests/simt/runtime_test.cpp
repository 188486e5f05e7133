// SPDX-License-Identifier: Apache-2.0
//
// The stand-in for the CUDA runtime: memory, streams that work late, captures, calls that fail.
#include <doctest/doctest.h>

#include <cuda_runtime_api.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

#include "simt/run_kernel.hpp"

using namespace kvpolicy::gpu;

namespace {

// Restores the device's settings after a test.
struct Restore {
  Restore() = default;
  Restore(const Restore&) = delete;
  Restore& operator=(const Restore&) = delete;
  ~Restore() {
    simt::Device& device = simt::device();
    device.late = false;
    device.pace(0);
    device.devices = 1;
    device.total_bytes = std::size_t{8} << 30;
    simt::fail_after(0);
    cudaGetLastError();
    CHECK(simt::live_bytes() == 0);
    CHECK(device.allocations() == 0);
    CHECK(device.streams() == 0);
  }
};

struct Increment {
  float* numbers;
};
void increment_kernel(const Increment p) { p.numbers[thread_index()] += 1.0F; }

cudaError_t increment(float* numbers, cudaStream_t stream) {
  return simt::launch(increment_kernel, 1, 1, 32, 0, stream, {numbers});
}

TEST_CASE("memory is exact, poisoned and counted") {
  const Restore restore;
  float* memory = nullptr;
  REQUIRE(cudaMalloc(&memory, 40) == cudaSuccess);
  CHECK(simt::live_bytes() == 40);
  CHECK(std::isnan(memory[9]));
  CHECK(cudaMemset(memory, 0, 40) == cudaSuccess);
  CHECK(memory[9] == 0.0F);
  CHECK(cudaMemset(memory, 0, 41) == cudaErrorInvalidValue);
  CHECK(cudaFree(memory + 1) == cudaErrorInvalidValue);
  CHECK(cudaFreeHost(memory) == cudaErrorInvalidValue);
  CHECK(cudaFree(memory) == cudaSuccess);
  CHECK(cudaFree(memory) == cudaErrorInvalidValue);
  CHECK(cudaFree(nullptr) == cudaSuccess);
  CHECK(cudaGetLastError() == cudaErrorInvalidValue);
  CHECK(cudaGetLastError() == cudaSuccess);

  simt::device().total_bytes = 100;
  void* more = nullptr;
  CHECK(cudaMallocAsync(&more, 60, nullptr) == cudaSuccess);
  void* too_much = nullptr;
  CHECK(cudaMalloc(&too_much, 41) == cudaErrorMemoryAllocation);
  CHECK(too_much == nullptr);
  CHECK(cudaFreeAsync(more, nullptr) == cudaSuccess);
}

TEST_CASE("copies refuse addresses that do not fit their kind") {
  const Restore restore;
  std::array<float, 4> host = {1, 2, 3, 4};
  float* memory = nullptr;
  REQUIRE(cudaMalloc(&memory, sizeof host) == cudaSuccess);
  CHECK(cudaMemcpy(memory, host.data(), sizeof host, cudaMemcpyHostToDevice) == cudaSuccess);
  CHECK(cudaMemcpy(host.data(), memory, sizeof host, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  CHECK(cudaMemcpy(host.data(), memory + 1, sizeof host, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
  host.fill(0);
  CHECK(cudaMemcpy(host.data(), memory, sizeof host, cudaMemcpyDeviceToHost) == cudaSuccess);
  CHECK(host[3] == 4.0F);
  CHECK(cudaFree(memory) == cudaSuccess);
}

TEST_CASE("launches that a device refuses are refused") {
  const Restore restore;
  std::array<float, 32> numbers{};
  const auto attempt = [&](unsigned x, unsigned y, unsigned threads, std::size_t shared) {
    return simt::launch(increment_kernel, x, y, threads, shared, nullptr, {numbers.data()});
  };
  CHECK(attempt(0, 1, 32, 0) == cudaErrorInvalidConfiguration);
  CHECK(attempt(1, 65536, 32, 0) == cudaErrorInvalidConfiguration);
  CHECK(attempt(1, 1, 1056, 0) == cudaErrorInvalidConfiguration);
  CHECK(attempt(1, 1, 32, 166913) == cudaErrorInvalidValue);
  CHECK(cudaPeekAtLastError() == cudaErrorInvalidValue);
  CHECK(numbers[0] == 0.0F);
}

TEST_CASE("a kernel that is launched early has to wait, in every thread, and needs a device that can") {
  const Restore restore;
  std::array<float, 32> numbers{};
  void (*waits)(const Increment) = [](const Increment p) {
    wait_for_kernel_before();
    p.numbers[thread_index()] += 1.0F;
  };
  void (*waits_in_part)(const Increment) = [](const Increment) {
    if (thread_index() != 5) wait_for_kernel_before();
  };
  const auto attempt = [&](void (*kernel)(const Increment), bool early) {
    return simt::launch(kernel, 1, 1, 32, 0, nullptr, {numbers.data()}, early);
  };
  CHECK(attempt(waits, true) == cudaErrorNotSupported);
  CHECK(attempt(waits, false) == cudaSuccess);
  CHECK(attempt(waits_in_part, false) == cudaSuccess);
  simt::device().major = 9;
  CHECK(attempt(waits, true) == cudaSuccess);
  CHECK(numbers[31] == 2.0F);
  CHECK_THROWS_AS(static_cast<void>(attempt(waits_in_part, true)), simt::Fault);
  CHECK_THROWS_AS(static_cast<void>(attempt(increment_kernel, true)), simt::Fault);
  simt::device().major = 8;
}

struct Stream {
  cudaStream_t handle = nullptr;
  Stream() { REQUIRE(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking) == cudaSuccess); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { CHECK(cudaStreamDestroy(handle) == cudaSuccess); }
};

TEST_CASE("captured work runs only when the graph is launched, each time") {
  const Restore restore;
  const Stream stream;
  float* numbers = nullptr;
  REQUIRE(cudaMalloc(&numbers, 128) == cudaSuccess);
  std::array<float, 32> host{};

  REQUIRE(cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeGlobal) == cudaSuccess);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  CHECK(cudaStreamIsCapturing(stream.handle, &status) == cudaSuccess);
  CHECK(status == cudaStreamCaptureStatusActive);
  CHECK(increment(numbers, stream.handle) == cudaSuccess);
  CHECK(cudaMemcpyAsync(host.data(), numbers, 128, cudaMemcpyDeviceToHost, stream.handle) == cudaSuccess);
  cudaGraph_t graph = nullptr;
  REQUIRE(cudaStreamEndCapture(stream.handle, &graph) == cudaSuccess);
  CHECK(cudaStreamIsCapturing(stream.handle, &status) == cudaSuccess);
  CHECK(status == cudaStreamCaptureStatusNone);
  CHECK(std::isnan(numbers[0]));

  cudaGraphExec_t executable = nullptr;
  REQUIRE(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess);
  CHECK(cudaGraphDestroy(graph) == cudaSuccess);
  CHECK(cudaMemset(numbers, 0, 128) == cudaSuccess);
  for (int i = 1; i <= 3; ++i) {
    CHECK(cudaGraphLaunch(executable, stream.handle) == cudaSuccess);
    CHECK(host[31] == static_cast<float>(i));
  }
  CHECK(cudaGraphExecDestroy(executable) == cudaSuccess);
  CHECK(cudaFree(numbers) == cudaSuccess);
}

TEST_CASE("a second stream joins a capture by its event") {
  const Restore restore;
  const Stream stream;
  const Stream other;
  float* numbers = nullptr;
  REQUIRE(cudaMalloc(&numbers, 128) == cudaSuccess);
  REQUIRE(cudaMemset(numbers, 0, 128) == cudaSuccess);
  cudaEvent_t fork = nullptr;
  REQUIRE(cudaEventCreate(&fork) == cudaSuccess);
  REQUIRE(cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  CHECK(cudaEventRecord(fork, stream.handle) == cudaSuccess);
  CHECK(cudaStreamWaitEvent(other.handle, fork) == cudaSuccess);
  CHECK(increment(numbers, other.handle) == cudaSuccess);
  cudaGraph_t graph = nullptr;
  CHECK(cudaStreamEndCapture(other.handle, &graph) == cudaErrorStreamCaptureUnmatched);
  REQUIRE(cudaStreamEndCapture(stream.handle, &graph) == cudaSuccess);
  CHECK(numbers[0] == 0.0F);
  CHECK(increment(numbers, other.handle) == cudaSuccess);
  CHECK(numbers[0] == 1.0F);
  CHECK(cudaGraphDestroy(graph) == cudaSuccess);
  CHECK(cudaEventDestroy(fork) == cudaSuccess);
  CHECK(cudaFree(numbers) == cudaSuccess);
}

TEST_CASE("calls that a capture does not allow make it invalid") {
  const Restore restore;
  const Stream stream;
  std::array<float, 32> numbers{};
  const auto spoiled_by = [&](auto call) {
    REQUIRE(cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeGlobal) == cudaSuccess);
    CHECK(call() == cudaErrorStreamCaptureUnsupported);
    CHECK(increment(numbers.data(), stream.handle) == cudaErrorStreamCaptureInvalidated);
    cudaGraph_t graph = nullptr;
    CHECK(cudaStreamEndCapture(stream.handle, &graph) == cudaErrorStreamCaptureInvalidated);
    CHECK(graph == nullptr);
    CHECK(increment(numbers.data(), stream.handle) == cudaSuccess);
  };
  void* memory = nullptr;
  spoiled_by([&] { return cudaMalloc(&memory, 4); });
  spoiled_by([&] { return cudaMallocAsync(&memory, 4, stream.handle); });
  spoiled_by([&] { return cudaStreamSynchronize(stream.handle); });
  spoiled_by([&] { return cudaDeviceSynchronize(); });
  CHECK(memory == nullptr);
  CHECK(numbers[5] == 4.0F);
  CHECK(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal) == cudaErrorStreamCaptureUnsupported);
}

TEST_CASE("streams that work late reveal a result that is read too early") {
  const Restore restore;
  simt::device().late = true;
  const Stream stream;
  const Stream other;
  float* numbers = nullptr;
  float* pinned = nullptr;
  REQUIRE(cudaMalloc(&numbers, 128) == cudaSuccess);
  REQUIRE(cudaMallocHost(&pinned, 128) == cudaSuccess);

  // Pageable memory is read at once, pinned memory when the stream executes the copy.
  std::vector<float> host(32, 1.0F);
  CHECK(cudaMemcpyAsync(numbers, host.data(), 128, cudaMemcpyHostToDevice, stream.handle) == cudaSuccess);
  host.assign(32, 7.0F);
  CHECK(increment(numbers, stream.handle) == cudaSuccess);
  CHECK(cudaMemcpyAsync(pinned, numbers, 128, cudaMemcpyDeviceToHost, stream.handle) == cudaSuccess);
  CHECK(std::isnan(pinned[0]));
  CHECK(cudaStreamQuery(stream.handle) == cudaErrorNotReady);

  // Another stream that waits for an event makes this one work up to the event, and no further.
  cudaEvent_t event = nullptr;
  REQUIRE(cudaEventCreateWithFlags(&event, cudaEventDisableTiming) == cudaSuccess);
  CHECK(cudaEventRecord(event, stream.handle) == cudaSuccess);
  CHECK(increment(numbers, stream.handle) == cudaSuccess);
  CHECK(cudaStreamWaitEvent(other.handle, event) == cudaSuccess);
  CHECK(std::isnan(pinned[0]));
  CHECK(cudaStreamSynchronize(other.handle) == cudaSuccess);
  CHECK(pinned[0] == 2.0F);
  CHECK(numbers[0] == 2.0F);
  CHECK(cudaEventQuery(event) == cudaSuccess);
  CHECK(cudaStreamSynchronize(stream.handle) == cudaSuccess);
  CHECK(numbers[0] == 3.0F);
  CHECK(cudaStreamQuery(stream.handle) == cudaSuccess);

  CHECK(cudaEventDestroy(event) == cudaSuccess);
  CHECK(cudaFreeHost(pinned) == cudaSuccess);
  CHECK(cudaFree(numbers) == cudaSuccess);
}

// What two streams make of a number: one adds 1 to it, the other doubles it. In order it is 2 * (1 + 1).
float race(std::uint64_t seed, bool waits, bool blocking) {
  simt::device().late = true;
  simt::device().pace(seed);
  cudaStream_t second = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&second, blocking ? cudaStreamDefault : cudaStreamNonBlocking) ==
          cudaSuccess);
  const Stream other;
  cudaStream_t first = blocking ? nullptr : other.handle;
  float* numbers = nullptr;
  REQUIRE(cudaMalloc(&numbers, 128) == cudaSuccess);
  CHECK(cudaMemsetAsync(numbers, 0, 128, first) == cudaSuccess);
  CHECK(increment(numbers, first) == cudaSuccess);
  CHECK(increment(numbers, first) == cudaSuccess);
  cudaEvent_t event = nullptr;
  REQUIRE(cudaEventCreateWithFlags(&event, cudaEventDisableTiming) == cudaSuccess);
  CHECK(cudaEventRecord(event, first) == cudaSuccess);
  if (waits) CHECK(cudaStreamWaitEvent(second, event) == cudaSuccess);
  void (*twice)(const Increment) = [](const Increment p) { p.numbers[thread_index()] *= 2.0F; };
  CHECK(simt::launch(twice, 1, 1, 32, 0, second, {numbers}) == cudaSuccess);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  const float result = numbers[7];
  CHECK(cudaEventDestroy(event) == cudaSuccess);
  CHECK(cudaFree(numbers) == cudaSuccess);
  CHECK(cudaStreamDestroy(second) == cudaSuccess);
  return result;
}

TEST_CASE(
    "streams at a drawn pace: any order that events and the default stream allow, the same for a seed") {
  const Restore restore;
  std::set<float> unordered;
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    CAPTURE(seed);
    CHECK(race(seed, /*waits=*/true, /*blocking=*/false) == 4.0F);
    CHECK(race(seed, /*waits=*/false, /*blocking=*/true) == 4.0F);
    const float result = race(seed, /*waits=*/false, /*blocking=*/false);
    CHECK(result == race(seed, false, false));
    unordered.insert(result);
  }
  CHECK(unordered == std::set<float>{2.0F, 3.0F, 4.0F});
}

TEST_CASE("the n-th call fails, once, and does nothing") {
  const Restore restore;
  for (std::uint64_t n = 1; n <= 4; ++n) {
    CAPTURE(n);
    float* numbers = nullptr;
    REQUIRE(cudaMalloc(&numbers, 128) == cudaSuccess);
    simt::fail_after(n, cudaErrorLaunchFailure);
    std::array<cudaError_t, 4> results = {cudaMemset(numbers, 0, 128), increment(numbers, nullptr),
                                          increment(numbers, nullptr), cudaStreamSynchronize(nullptr)};
    for (std::uint64_t i = 0; i < 4; ++i) {
      CHECK(results[i] == (i + 1 == n ? cudaErrorLaunchFailure : cudaSuccess));
    }
    CHECK(cudaGetLastError() == cudaErrorLaunchFailure);
    const float expected = n == 2 || n == 3 ? 1.0F : 2.0F;
    if (n == 1) {
      CHECK(std::isnan(numbers[0]));
    } else {
      CHECK(numbers[0] == expected);
    }
    CHECK(cudaFree(numbers) == cudaSuccess);
  }
}

TEST_CASE("without a device and with one") {
  const Restore restore;
  int value = 0;
  CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess);
  CHECK(value == 8);
  CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0) == cudaSuccess);
  CHECK(value == 4);
  simt::device().devices = 0;
  CHECK(cudaGetDeviceCount(&value) == cudaErrorNoDevice);
  CHECK(value == 0);
}

TEST_CASE("a kernel that breaks a rule throws from the call that runs it") {
  const Restore restore;
  simt::device().late = true;
  const Stream stream;
  void (*function)(const Increment) = [](const Increment) {
    if (lane_index() == 0) sync_warp();
  };
  CHECK(simt::launch(function, 1, 1, 32, 0, stream.handle, {nullptr}) == cudaSuccess);
  CHECK_THROWS_AS(cudaStreamSynchronize(stream.handle), simt::Divergence);
  CHECK(cudaStreamSynchronize(stream.handle) == cudaSuccess);
}

}  // namespace
