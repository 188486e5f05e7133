// SPDX-License-Identifier: Apache-2.0
#include "nccl/fake/fake_nccl.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

namespace {

using test::fake_nccl::Fault;

enum class Kind { sum, gather, send, receive };

struct Operation {
  Kind kind = Kind::sum;
  const void* in = nullptr;
  void* out = nullptr;
  std::size_t bytes = 0;  // of `in` (of `out` where nothing is sent)
  int peer = -1;
  std::size_t order = 0;  // among those that its partner may be taken for
  bool done = false;
};

// Operations of one call, which are on the stream together.
struct Call {
  ncclComm* comm = nullptr;
  std::vector<Operation> operations;
  bool begun = false;
};

struct World {
  std::vector<ncclComm*> joined;
  bool complete = false;  // all ranks were there once
  std::size_t finalized = 0;
};

}  // namespace

struct ncclComm {
  std::shared_ptr<World> world;
  int rank = 0;
  std::map<std::pair<Kind, int>, std::size_t> begun;  // operations by kind and peer
  int polls = 0;                                      // until the latest call counts as enqueued
  std::function<void()> enqueue;
  std::vector<std::shared_ptr<Call>> open;  // on the stream, not done
  bool finalizing = false;
  ncclResult_t error = ncclSuccess;
};

struct CUstream_st {
  std::deque<std::function<bool()>> work;  // each returns whether it is done
  int rank = -1;                           // whose communicator used it
};

namespace {

std::mutex mutex;
int devices = 0;
unsigned char next_id = 0;
std::map<unsigned char, std::shared_ptr<World>> worlds;
std::map<std::size_t, Fault> faults;
std::map<const std::byte*, std::pair<std::size_t, bool>> buffers;  // by address: bytes, on the device
std::set<ncclComm*> comms;
std::set<CUstream_st*> streams;
std::size_t aborted = 0;
std::size_t mistakes = 0;
constexpr int slow = 3;  // polls until a call that does not block is done

thread_local int group_depth = 0;
thread_local std::vector<Operation> grouped;
thread_local ncclComm* group_comm = nullptr;
thread_local cudaStream_t group_stream = nullptr;

// All of this is called with the mutex.

bool lies_in(const void* pointer, std::size_t bytes, bool on_device) {
  const auto* at = static_cast<const std::byte*>(pointer);
  auto found = buffers.upper_bound(at);
  if (found == buffers.begin()) return false;
  --found;
  const auto [size, device] = found->second;
  return device == on_device && at >= found->first && bytes <= size &&
         static_cast<std::size_t>(at - found->first) <= size - bytes;
}

ncclResult_t mistake() {
  ++mistakes;
  return ncclInvalidUsage;
}

// What the other rank does with the message: the nth that is sent from one rank to another is the nth received there.
Operation* partner_of(const Call& call, const Operation& own) {
  const Kind wanted = own.kind == Kind::send ? Kind::receive : Kind::send;
  ncclComm* other = call.comm->world->joined[static_cast<std::size_t>(own.peer)];
  if (other == nullptr) return nullptr;
  for (const std::shared_ptr<Call>& theirs : other->open) {
    if (!theirs->begun) continue;
    for (Operation& one : theirs->operations) {
      if (one.kind == wanted && one.peer == call.comm->rank && one.order == own.order) return &one;
    }
  }
  return nullptr;
}

// Does what all ranks have come for. Returns whether the call is done.
bool progress(Call& call) {
  call.begun = true;
  const World& world = *call.comm->world;
  for (Operation& own : call.operations) {
    if (own.done) continue;
    if (own.kind == Kind::send || own.kind == Kind::receive) {
      Operation* other = partner_of(call, own);
      if (other == nullptr || other->bytes != own.bytes) continue;
      Operation& from = own.kind == Kind::send ? own : *other;
      Operation& to = own.kind == Kind::send ? *other : own;
      std::memcpy(to.out, from.in, from.bytes);
      from.done = to.done = true;
      continue;
    }
    std::vector<Operation*> all;
    for (ncclComm* member : world.joined) {
      if (member == nullptr) continue;
      for (const std::shared_ptr<Call>& theirs : member->open) {
        Operation& one = theirs->operations.front();
        if (theirs->begun && one.kind == own.kind && one.order == own.order && one.bytes == own.bytes)
          all.push_back(&one);
      }
    }
    if (all.size() != world.joined.size()) continue;
    std::vector<std::byte> result;
    if (own.kind == Kind::gather) {
      for (const Operation* one : all) {
        const auto* from = static_cast<const std::byte*>(one->in);
        result.insert(result.end(), from, from + one->bytes);
      }
    } else {
      std::vector<float> total(own.bytes / sizeof(float), 0.0F);
      for (const Operation* one : all) {
        const auto* from = static_cast<const float*>(one->in);
        for (std::size_t n = 0; n < total.size(); ++n) total[n] += from[n];
      }
      result.resize(own.bytes);
      std::memcpy(result.data(), total.data(), own.bytes);
    }
    for (Operation* one : all) {
      std::memcpy(one->out, result.data(), result.size());
      one->done = true;
    }
  }
  return std::ranges::all_of(call.operations, &Operation::done);
}

ncclResult_t fault_of(const ncclComm* comm) {
  const auto found = faults.find(static_cast<std::size_t>(comm->rank));
  if (found == faults.end()) return ncclSuccess;
  return std::exchange(found->second.call, ncclSuccess);
}

bool is_ready(const ncclComm* comm) {
  return comms.contains(const_cast<ncclComm*>(comm)) && comm->polls == 0 && !comm->enqueue &&
         !comm->finalizing;
}

// The call counts as enqueued after some polls of the communicator, and is on the stream only then.
ncclResult_t begin(ncclComm* comm, cudaStream_t stream, std::vector<Operation> operations) {
  if (!is_ready(comm) || !streams.contains(stream)) return mistake();
  auto call = std::make_shared<Call>();
  call->comm = comm;
  call->operations = std::move(operations);
  for (Operation& one : call->operations) one.order = comm->begun[{one.kind, one.peer}]++;
  comm->polls = slow;
  comm->enqueue = [comm, stream, call] {
    comm->open.push_back(call);
    stream->rank = comm->rank;
    stream->work.push_back([comm, call] {
      if (!comms.contains(comm)) return true;  // aborted
      auto& fault = faults[static_cast<std::size_t>(comm->rank)];
      if (fault.later != ncclSuccess) comm->error = std::exchange(fault.later, ncclSuccess);
      return comm->error == ncclSuccess && progress(*call);
    });
  };
  return ncclInProgress;
}

ncclResult_t add(ncclComm* comm, cudaStream_t stream, const Operation& operation) {
  if (const ncclResult_t result = fault_of(comm); result != ncclSuccess) return result;
  if (group_depth == 0) return begin(comm, stream, {operation});
  group_comm = comm;
  group_stream = stream;
  grouped.push_back(operation);
  return ncclSuccess;
}

std::size_t size_of(ncclDataType_t type) { return type == ncclFloat32 ? 4 : type == ncclUint8 ? 1 : 0; }

cudaError_t make(void** pointer, std::size_t bytes, bool on_device) {
  const std::lock_guard lock{mutex};
  *pointer = std::calloc(bytes, 1);
  buffers[static_cast<const std::byte*>(*pointer)] = {bytes, on_device};
  return cudaSuccess;
}
cudaError_t drop(void* pointer, bool on_device) {
  const std::lock_guard lock{mutex};
  if (pointer == nullptr) return cudaSuccess;
  const auto found = buffers.find(static_cast<const std::byte*>(pointer));
  if (found == buffers.end() || found->second.second != on_device) {
    ++mistakes;
    return cudaErrorInvalidValue;
  }
  buffers.erase(found);
  std::free(pointer);
  return cudaSuccess;
}

}  // namespace

namespace test::fake_nccl {

void reset(int count) {
  const std::lock_guard lock{mutex};
  devices = count;
  worlds.clear();
  faults.clear();
  for (const auto& [pointer, unused] : buffers) std::free(const_cast<std::byte*>(pointer));
  buffers.clear();
  for (ncclComm* comm : comms) delete comm;
  comms.clear();
  for (CUstream_st* stream : streams) delete stream;
  streams.clear();
  aborted = mistakes = 0;
}
void set(std::size_t rank, const Fault& fault) {
  const std::lock_guard lock{mutex};
  faults[rank] = fault;
}
Counts counts() {
  const std::lock_guard lock{mutex};
  return {comms.size(), streams.size(), buffers.size(), aborted, mistakes};
}

}  // namespace test::fake_nccl

// ---- the CUDA runtime ------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) {
  *count = devices;
  return devices > 0 ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t cudaSetDevice(int device) { return device < devices ? cudaSuccess : cudaErrorInvalidDevice; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorNoDevice ? "no CUDA-capable device is detected" : "a fault of the test";
}
cudaError_t cudaMalloc(void** pointer, size_t bytes) { return make(pointer, bytes, true); }
cudaError_t cudaFree(void* pointer) { return drop(pointer, true); }
cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return make(pointer, bytes, false); }
cudaError_t cudaFreeHost(void* pointer) { return drop(pointer, false); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  const std::lock_guard lock{mutex};
  *stream = new CUstream_st;
  streams.insert(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const std::lock_guard lock{mutex};
  if (streams.erase(stream) == 0) ++mistakes;
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  const std::lock_guard lock{mutex};
  const bool down = kind == cudaMemcpyHostToDevice;
  if (!streams.contains(stream) || (!down && kind != cudaMemcpyDeviceToHost) || !lies_in(to, bytes, down) ||
      !lies_in(from, bytes, !down)) {
    ++mistakes;
    return cudaErrorInvalidValue;
  }
  stream->work.push_back([=] {
    std::memcpy(to, from, bytes);
    return true;
  });
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const std::lock_guard lock{mutex};
  if (stream->rank >= 0 && faults[static_cast<std::size_t>(stream->rank)].device)
    return cudaErrorIllegalAddress;
  // One piece of work a look, so that nobody counts on more.
  if (!stream->work.empty() && stream->work.front()()) stream->work.pop_front();
  return stream->work.empty() ? cudaSuccess : cudaErrorNotReady;
}

// ---- NCCL ------------------------------------------------------------------------------------

const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclRemoteError    ? "remote process exited or there was a network error"
         : result == ncclInvalidUsage ? "invalid usage"
                                      : "a fault of the test";
}
const char* ncclGetLastError(ncclComm_t) { return "said by the fake"; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  const std::lock_guard lock{mutex};
  std::memset(id, 0, sizeof(*id));
  std::memset(id->internal + 1, 0x5a, sizeof(id->internal) - 1);
  id->internal[0] = static_cast<char>(++next_id);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  const std::lock_guard lock{mutex};
  const ncclConfig_t initial = NCCL_CONFIG_INITIALIZER;
  if (config->magic != initial.magic || config->size != initial.size || config->blocking != 0 ||
      devices == 0) {
    return mistake();
  }
  auto& world = worlds[static_cast<unsigned char>(id.internal[0])];
  if (!world) world = std::make_shared<World>();
  world->joined.resize(static_cast<std::size_t>(size), nullptr);
  if (world->joined[static_cast<std::size_t>(rank)] != nullptr) return mistake();
  auto* comm = new ncclComm;
  comm->world = world;
  comm->rank = rank;
  comm->polls = slow;
  world->joined[static_cast<std::size_t>(rank)] = comm;
  world->complete =
      std::ranges::none_of(world->joined, [](const ncclComm* member) { return member == nullptr; });
  comms.insert(comm);
  *made = comm;
  return ncclInProgress;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  const std::lock_guard lock{mutex};
  if (!comms.contains(comm)) return mistake();
  *state = comm->error;
  if (comm->error != ncclSuccess) return ncclSuccess;
  const World& world = *comm->world;
  if (comm->finalizing ? world.finalized < world.joined.size() : !world.complete) {
    *state = ncclInProgress;
  } else if (comm->polls > 0 && --comm->polls > 0) {
    *state = ncclInProgress;
  } else if (comm->enqueue) {
    std::exchange(comm->enqueue, nullptr)();
  }
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  const std::lock_guard lock{mutex};
  if (!is_ready(comm)) return mistake();
  comm->finalizing = true;
  ++comm->world->finalized;
  comm->polls = slow;
  return ncclInProgress;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  const std::lock_guard lock{mutex};
  if (!comms.contains(comm) || !comm->finalizing || comm->polls > 0) return mistake();
  comm->world->joined[static_cast<std::size_t>(comm->rank)] = nullptr;
  comms.erase(comm);
  delete comm;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  const std::lock_guard lock{mutex};
  if (!comms.contains(comm)) return mistake();
  comm->world->joined[static_cast<std::size_t>(comm->rank)] = nullptr;
  ++aborted;
  comms.erase(comm);
  delete comm;
  return ncclSuccess;
}
ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  const std::lock_guard lock{mutex};
  if (--group_depth > 0) return ncclSuccess;
  std::vector<Operation> all = std::exchange(grouped, {});
  if (all.empty()) return ncclSuccess;
  return begin(group_comm, group_stream, std::move(all));
}
ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type,
                           ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
  const std::lock_guard lock{mutex};
  const std::size_t bytes = count * size_of(type);
  if (type != ncclFloat32 || operation != ncclSum || !lies_in(in, bytes, true) ||
      !lies_in(out, bytes, true)) {
    return mistake();
  }
  return add(comm, stream, {.kind = Kind::sum, .in = in, .out = out, .bytes = bytes});
}
ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  const std::lock_guard lock{mutex};
  const std::size_t bytes = count * size_of(type);
  if (bytes == 0 || !is_ready(comm) || !lies_in(in, bytes, true) ||
      !lies_in(out, bytes * comm->world->joined.size(), true)) {
    return mistake();
  }
  return add(comm, stream, {.kind = Kind::gather, .in = in, .out = out, .bytes = bytes});
}
ncclResult_t ncclSend(const void* in, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  const std::lock_guard lock{mutex};
  const std::size_t bytes = count * size_of(type);
  if (bytes == 0 || !lies_in(in, bytes, true)) return mistake();
  return add(comm, stream, {.kind = Kind::send, .in = in, .bytes = bytes, .peer = peer});
}
ncclResult_t ncclRecv(void* out, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  const std::lock_guard lock{mutex};
  const std::size_t bytes = count * size_of(type);
  if (bytes == 0 || !lies_in(out, bytes, true)) return mistake();
  return add(comm, stream, {.kind = Kind::receive, .out = out, .bytes = bytes, .peer = peer});
}
