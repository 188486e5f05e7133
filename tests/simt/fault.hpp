// SPDX-License-Identifier: Apache-2.0
//
// What a launch on the emulation throws if a kernel breaks a rule of the machine. On a device the same kernel
// would hang, trap or compute wrong results.
#pragma once

#include <stdexcept>
#include <string>

namespace kvpolicy::gpu::simt {

/// Any broken rule. The message gives the block, the thread, what it did, and the seed of the order.
class Fault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Threads that should have met did not: only part of a warp joined a collective, some threads never reached
/// a barrier, or lanes of a warp were in different collectives.
class Divergence : public Fault {
 public:
  using Fault::Fault;
};

/// An address without the alignment that the instruction needs.
class Misaligned : public Fault {
 public:
  using Fault::Fault;
};

/// An address outside the block's shared memory, or an overwritten guard zone around it.
class OutOfBounds : public Fault {
 public:
  using Fault::Fault;
};

}  // namespace kvpolicy::gpu::simt
