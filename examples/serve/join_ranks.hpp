// SPDX-License-Identifier: Apache-2.0
//
// Whether this process is one of several that mpirun has started.
#pragma once

#include <chrono>
#include <memory>

#include <reference_model/parallel/communicator.hpp>

namespace kvpolicy::serve {

/// Joins the others; null if this process is alone. A call in which a rank is missing for `timeout` fails.
/// @throws CommunicationError; ConfigError if there are others and this program was built without MPI
[[nodiscard]] std::unique_ptr<reference::Communicator> join_ranks(std::chrono::seconds timeout);

/// Ends all of them, with exit status 1: after an error that this one has told.
[[noreturn]] void end_all_ranks();

}  // namespace kvpolicy::serve
