// SPDX-License-Identifier: Apache-2.0
//
// What a launch on the emulation throws when a kernel breaks a rule of the machine. On a device the
// same kernel would hang, trap or compute nonsense.
#pragma once

#include <stdexcept>
#include <string>

namespace kvpolicy::cuda::simt {

/// Any broken rule; the message says where: block, thread, what it did, and the seed of the order.
class Fault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Threads that should have met did not: part of a warp in a collective, a barrier that some
/// threads never reach, lanes of a warp in different collectives.
class Divergence : public Fault {
 public:
  using Fault::Fault;
};

/// An address that is not a multiple of what the instruction asks for.
class Misaligned : public Fault {
 public:
  using Fault::Fault;
};

/// An address outside the block's shared memory, or guard bytes around it that were overwritten.
class OutOfBounds : public Fault {
 public:
  using Fault::Fault;
};

}  // namespace kvpolicy::cuda::simt
