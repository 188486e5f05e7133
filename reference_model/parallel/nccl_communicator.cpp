// SPDX-License-Identifier: Apache-2.0
#include <reference_model/parallel/nccl_communicator.hpp>

#include <algorithm>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <thread>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <kvpolicy/state/new_file.hpp>
#include <reference_model/parallel/waiting.hpp>

namespace kvpolicy::reference {
namespace {

static_assert(sizeof(NcclId) == sizeof(ncclUniqueId));

// Pieces of a buffer begin at multiples of this, which NCCL copies fastest.
constexpr std::size_t alignment = 16;
constexpr std::size_t aligned(std::size_t bytes) { return (bytes + alignment - 1) / alignment * alignment; }

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // the next call must not find it
  fail<CommunicationError>("NCCL: ", what, ": ", cudaGetErrorString(status));
}

void check_timeout(std::chrono::milliseconds timeout) {
  require<CommunicationError>(timeout.count() >= 1 && timeout <= std::chrono::hours{24},
                              "NCCL: the timeout is ", timeout.count(), " ms, must be from 1 to a day");
}

}  // namespace

struct NcclCommunicator::Handles {
  std::chrono::milliseconds timeout{};
  Clock now;
  int device = 0;
  cudaStream_t stream = nullptr;
  ncclComm_t comm = nullptr;  // null once it was aborted
  bool failed = false;
  // What goes to the device and comes back, in memory of the host that copies do not wait for, and on the device.
  std::byte* host = nullptr;
  std::byte* on_device = nullptr;
  std::size_t bytes = 0;  // of either

  void check_nccl(ncclResult_t result, const char* what) const {
    if (result == ncclSuccess || result == ncclInProgress) return;
    fail<CommunicationError>("NCCL: ", what, ": ", ncclGetErrorString(result), " (", ncclGetLastError(comm),
                             ")");
  }
  // The calls of a communicator that does not block return before they are done: waits until they are.
  // Returns whether that was in time.
  [[nodiscard]] bool wait_for_calls(const char* what, Waiting& waiting) const {
    for (;;) {
      ncclResult_t state = ncclSuccess;
      check_nccl(ncclCommGetAsyncError(comm, &state), what);
      check_nccl(state, what);
      if (state != ncclInProgress) return true;
      if (!waiting.again()) return false;
    }
  }
  // Waits until the device has done its work, with an eye on the other ranks.
  [[nodiscard]] bool wait_for_device(const char* what, Waiting& waiting) const {
    for (;;) {
      const cudaError_t status = cudaStreamQuery(stream);
      if (status == cudaSuccess) return true;
      if (status != cudaErrorNotReady) check(status, what);
      ncclResult_t state = ncclSuccess;
      check_nccl(ncclCommGetAsyncError(comm, &state), what);
      check_nccl(state, what);
      if (!waiting.again()) return false;
    }
  }
  void grow(std::size_t wanted) {
    if (wanted <= bytes) return;
    release();
    const std::size_t size = std::max(wanted, std::size_t{1} << 16);
    void* memory = nullptr;
    check(cudaMallocHost(&memory, size), "memory for messages on the host");
    host = static_cast<std::byte*>(memory);
    check(cudaMalloc(&memory, size), "memory for messages on the device");
    on_device = static_cast<std::byte*>(memory);
    bytes = size;
  }
  void release() {
    static_cast<void>(cudaFree(on_device));
    static_cast<void>(cudaFreeHost(host));
    on_device = nullptr;
    host = nullptr;
    bytes = 0;
  }
  void abort() {
    failed = true;
    if (comm != nullptr) static_cast<void>(ncclCommAbort(comm));
    comm = nullptr;
  }
};

NcclCommunicator::NcclCommunicator(const NcclId& id, std::size_t rank, std::size_t size,
                                   const NcclOptions& options)
    : handles_{std::make_unique<Handles>()},
      rank_{rank},
      size_{size},
      exceptions_{std::uncaught_exceptions()} {
  check_timeout(options.timeout);
  require<CommunicationError>(size >= 1 && size <= 1'000'000 && rank < size, "NCCL: rank ", rank, " of ",
                              size, " ranks, must be one of them");
  int devices = 0;
  const cudaError_t found = cudaGetDeviceCount(&devices);
  if (found != cudaSuccess) static_cast<void>(cudaGetLastError());
  require<CommunicationError>(found == cudaSuccess && devices > 0, "NCCL: no CUDA device: ",
                              found == cudaSuccess ? "none is installed" : cudaGetErrorString(found),
                              "; ranks without one speak over MPI");
  Handles& h = *handles_;
  h.timeout = options.timeout;
  h.now = options.now;
  h.device = options.device.value_or(static_cast<int>(rank % static_cast<std::size_t>(devices)));
  require<CommunicationError>(h.device >= 0 && h.device < devices, "NCCL: there is no device ", h.device,
                              ", there are ", devices);
  check(cudaSetDevice(h.device), "the device");
  check(cudaStreamCreateWithFlags(&h.stream, cudaStreamNonBlocking), "a stream");
  ncclUniqueId shared;
  std::memcpy(&shared, id.data(), id.size());
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  try {
    h.check_nccl(
        ncclCommInitRankConfig(&h.comm, static_cast<int>(size), shared, static_cast<int>(rank), &config),
        "joining");
    Waiting waiting{h.timeout, h.now};
    require<CommunicationError>(h.wait_for_calls("joining", waiting), "rank ", rank_, " of ", size_,
                                ": the others did not join in ", h.timeout.count(),
                                " ms: one is missing, or has another id");
  } catch (...) {
    h.abort();
    static_cast<void>(cudaStreamDestroy(h.stream));
    throw;
  }
}

NcclCommunicator::~NcclCommunicator() {
  Handles& h = *handles_;
  static_cast<void>(cudaSetDevice(h.device));
  try {
    if (!h.failed && std::uncaught_exceptions() <= exceptions_) {
      Waiting waiting{h.timeout, h.now};
      h.check_nccl(ncclCommFinalize(h.comm), "the end");
      if (h.wait_for_calls("the end", waiting)) {
        static_cast<void>(ncclCommDestroy(h.comm));
        h.release();
        static_cast<void>(cudaStreamDestroy(h.stream));
        return;
      }
    }
  } catch (...) {
    // Another rank is gone, and there is nothing left to lose.
  }
  // The buffers and the stream stay: to free them would wait for what an aborted call left on the device.
  h.abort();
}

// `start(place)` enqueues the call, whose numbers lie in the buffer on the device: `bytes_in` are brought there before,
// and `bytes_out` after them, at a multiple of `alignment`, back.
template <class Start>
void NcclCommunicator::complete(const char* what, std::size_t bytes_in, std::size_t bytes_out, Start start) {
  Handles& h = *handles_;
  h.failed = true;  // until the call has come together
  try {
    Waiting waiting{h.timeout, h.now};
    const std::size_t out = aligned(bytes_in);
    if (bytes_in > 0)
      check(cudaMemcpyAsync(h.on_device, h.host, bytes_in, cudaMemcpyHostToDevice, h.stream), what);
    start(h.on_device, h.on_device + out);
    bool in_time = h.wait_for_calls(what, waiting);
    if (in_time) {
      if (bytes_out > 0) {
        check(cudaMemcpyAsync(h.host + out, h.on_device + out, bytes_out, cudaMemcpyDeviceToHost, h.stream),
              what);
      }
      in_time = h.wait_for_device(what, waiting);
    }
    require<CommunicationError>(in_time, "rank ", rank_, " of ", size_, ": ", what, " of ",
                                bytes_in + bytes_out, " bytes did not come together in ", h.timeout.count(),
                                " ms: another rank is gone, or makes other calls");
  } catch (...) {
    h.abort();
    throw;
  }
  h.failed = false;
}

void NcclCommunicator::begin(std::size_t bytes_in, std::size_t bytes_out) {
  Handles& h = *handles_;
  require<CommunicationError>(!h.failed, "rank ", rank_, " of ", size_,
                              ": an earlier call did not come together, so no other can");
  try {
    check(cudaSetDevice(h.device), "the device");
    h.grow(aligned(bytes_in) + bytes_out);
  } catch (...) {  // the others make this call, so no later one of this rank would be theirs
    h.abort();
    throw;
  }
}

void NcclCommunicator::sum(std::span<float> numbers) {
  const std::size_t bytes = numbers.size_bytes();
  begin(bytes, bytes);
  if (bytes == 0) return;
  Handles& h = *handles_;
  std::memcpy(h.host, numbers.data(), bytes);
  complete("a sum", bytes, bytes, [&](std::byte* in, std::byte* out) {
    h.check_nccl(ncclAllReduce(in, out, numbers.size(), ncclFloat32, ncclSum, h.comm, h.stream), "a sum");
  });
  std::memcpy(numbers.data(), h.host + aligned(bytes), bytes);
}

void NcclCommunicator::gather(std::span<const float> own, std::span<float> all) {
  require<CommunicationError>(all.size() == own.size() * size_, "NCCL: room for ", all.size(), " numbers, ",
                              size_, " ranks send ", own.size(), " each");
  const std::size_t bytes = own.size_bytes();
  begin(bytes, all.size_bytes());
  if (bytes == 0) return;
  Handles& h = *handles_;
  std::memcpy(h.host, own.data(), bytes);
  complete("a gathering", bytes, all.size_bytes(), [&](std::byte* in, std::byte* out) {
    h.check_nccl(ncclAllGather(in, out, own.size(), ncclFloat32, h.comm, h.stream), "a gathering");
  });
  std::memcpy(all.data(), h.host + aligned(bytes), all.size_bytes());
}

void NcclCommunicator::exchange(std::span<const Outgoing> sent, std::span<const Incoming> received) {
  check_messages(sent, received);
  std::size_t bytes_in = 0;
  std::size_t bytes_out = 0;
  for (const Outgoing& message : sent) bytes_in += aligned(message.bytes.size());
  for (const Incoming& message : received) bytes_out += aligned(message.bytes.size());
  begin(bytes_in, bytes_out);
  if (bytes_in + bytes_out == 0) return;  // empty messages are not sent
  Handles& h = *handles_;
  std::byte* place = h.host;
  for (const Outgoing& message : sent) {
    std::ranges::copy(message.bytes, place);
    place += aligned(message.bytes.size());
  }
  complete("an exchange", bytes_in, bytes_out, [&](std::byte* in, std::byte* out) {
    h.check_nccl(ncclGroupStart(), "an exchange");
    // A group that was begun must be ended, whatever is wrong with its calls.
    ncclResult_t first_error = ncclSuccess;
    const auto note = [&](ncclResult_t result) {
      if (result != ncclInProgress && first_error == ncclSuccess) first_error = result;
    };
    for (const Outgoing& message : sent) {
      if (message.bytes.empty()) continue;
      note(ncclSend(in, message.bytes.size(), ncclUint8, static_cast<int>(message.rank), h.comm, h.stream));
      in += aligned(message.bytes.size());
    }
    for (const Incoming& message : received) {
      if (message.bytes.empty()) continue;
      note(ncclRecv(out, message.bytes.size(), ncclUint8, static_cast<int>(message.rank), h.comm, h.stream));
      out += aligned(message.bytes.size());
    }
    note(ncclGroupEnd());
    h.check_nccl(first_error, "an exchange");
  });
  place = h.host + aligned(bytes_in);
  for (const Incoming& message : received) {
    std::copy_n(place, message.bytes.size(), message.bytes.begin());
    place += aligned(message.bytes.size());
  }
}

NcclId make_nccl_id() {
  ncclUniqueId made;
  const ncclResult_t result = ncclGetUniqueId(&made);
  require<CommunicationError>(result == ncclSuccess, "NCCL: an id: ", ncclGetErrorString(result), " (",
                              ncclGetLastError(nullptr), ")");
  NcclId id;
  std::memcpy(id.data(), &made, id.size());
  return id;
}

NcclId share_nccl_id(Communicator& ranks) {
  NcclId id{};
  together(ranks, [&] {
    if (ranks.rank() == 0) id = make_nccl_id();
  });
  std::ranges::copy(broadcast(ranks, 0, id), id.begin());
  return id;
}

NcclId share_nccl_id(const std::string& path, std::size_t rank, std::chrono::milliseconds timeout) {
  check_timeout(timeout);
  if (rank == 0) {
    require<StorageError>(!std::filesystem::exists(path), path,
                          ": is there already, perhaps of an earlier run; remove it, or take another name");
    const NcclId id = make_nccl_id();
    NewFile file{path, NewFileAccess::owner};
    file.write(id);
    file.replace();
    return id;
  }
  NcclId id{};
  for (Waiting waiting{timeout};;) {
    // Files appear as a whole.
    std::ifstream file{path, std::ios::binary};
    if (file.read(reinterpret_cast<char*>(id.data()), static_cast<std::streamsize>(id.size()))) return id;
    require<CommunicationError>(waiting.again(), "NCCL: rank ", rank, " found no id in ", path, " in ",
                                timeout.count(), " ms");
    std::this_thread::sleep_for(std::chrono::milliseconds{1});
  }
}

}  // namespace kvpolicy::reference
