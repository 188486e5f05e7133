// SPDX-License-Identifier: Apache-2.0
//
// Ranks that are threads do what any communicator must; over MPI and NCCL the same trial runs.
#include <array>
#include <cstddef>
#include <exception>

#include <doctest/doctest.h>

#include "parallel/communicator_trial.hpp"
#include "parallel/thread_ranks.hpp"

namespace kvpolicy::reference::communicator_test {

TEST_CASE("sums, gatherings and messages between threads") {
  for (const std::size_t ranks : {1U, 2U, 3U, 5U}) {
    CAPTURE(ranks);
    for (const std::exception_ptr& one :
         test::run_ranks(ranks, [](Communicator& own) { try_communicator(own); })) {
      CHECK_NOTHROW(one ? std::rethrow_exception(one) : void());
    }
  }
}

TEST_CASE("messages that nobody can have sent, or of another size, are refused") {
  std::array<std::byte, 4> bytes{};
  for (const std::exception_ptr& one : test::run_ranks(2, [&](Communicator& ranks) {
         const std::array<Outgoing, 1> to_itself{{{ranks.rank(), bytes}}};
         CHECK_THROWS_AS(ranks.exchange(to_itself, {}), ConfigError);
         const std::array<Outgoing, 1> to_nobody{{{2, bytes}}};
         CHECK_THROWS_AS(ranks.exchange(to_nobody, {}), ConfigError);
         try_communicator(ranks);  // nothing was sent
       })) {
    CHECK(!one);
  }
}

}  // namespace kvpolicy::reference::communicator_test
