// SPDX-License-Identifier: Apache-2.0
#include "serve/join_ranks.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>

#include <kvpolicy/core/error.hpp>

#ifdef KVPOLICY_SERVE_WITH_MPI
#include <reference_model/parallel/mpi_communicator.hpp>
#endif

namespace kvpolicy::serve {
namespace {

// What Open MPI, and MPICH and its relatives, tell a process of how many there are.
bool has_companions() {
  constexpr std::array sizes{"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"};
  return std::ranges::any_of(sizes, [](const char* name) {
    const char* size = std::getenv(name);
    return size != nullptr && std::string{size} != "1";
  });
}

}  // namespace

std::unique_ptr<reference::Communicator> join_ranks([[maybe_unused]] std::chrono::seconds timeout) {
  if (!has_companions()) return nullptr;
#ifdef KVPOLICY_SERVE_WITH_MPI
  return std::make_unique<reference::MpiCommunicator>(timeout);
#else
  fail<ConfigError>(
      "this server was built without MPI, and mpirun has started several; install MPI "
      "(Debian: libopenmpi-dev) and build it once more, or start one");
#endif
}

void end_all_ranks() {
#ifdef KVPOLICY_SERVE_WITH_MPI
  reference::MpiCommunicator::end_all();
#else
  std::abort();
#endif
}

}  // namespace kvpolicy::serve
