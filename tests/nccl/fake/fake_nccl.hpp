// SPDX-License-Identifier: Apache-2.0
//
// Stands in for NCCL and the CUDA runtime, of which it has what NcclCommunicator calls, under their own headers. Ranks
// are threads of one process. It is as strict as the real ones: memory of the device, memory that copies do not wait
// for and other memory are told apart; work on a stream is done later, in order, and a call of NCCL is part of it only
// once the communicator has said so; a call whose communicator is not ready is an error.
#pragma once

#include <cstddef>

#include <nccl.h>

namespace test::fake_nccl {

/// What one rank is to suffer. Reset by `reset`.
struct Fault {
  ncclResult_t call = ncclSuccess;   ///< what its next call of NCCL returns, if not success
  ncclResult_t later = ncclSuccess;  ///< what its communicator says while its next call is on the stream
  bool device = false;               ///< its stream fails
};

/// Forgets everything; `devices` are there from now on.
void reset(int devices);
void set(std::size_t rank, const Fault& fault);

/// What is alive, or was done since `reset`.
struct Counts {
  std::size_t communicators = 0, streams = 0, buffers = 0;  ///< alive
  std::size_t aborted = 0;                                  ///< communicators
  std::size_t mistakes = 0;                                 ///< calls that the real libraries do not allow
};
[[nodiscard]] Counts counts();

}  // namespace test::fake_nccl
