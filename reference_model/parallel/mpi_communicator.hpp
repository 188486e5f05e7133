// SPDX-License-Identifier: Apache-2.0
//
// Ranks over MPI. Start a program with `mpirun -n 4 program`; without mpirun it is the only rank.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include <reference_model/parallel/communicator.hpp>

namespace kvpolicy::reference {

/// Called by one thread at a time, which may be another each time.
class MpiCommunicator final : public Communicator {
 public:
  /// Joins all processes of the MPI world; starts MPI if nobody has. A call that has not come together after `timeout`
  /// throws, and says which ranks are gone, or that all wait in different calls; so does every later call.
  /// @throws CommunicationError, also for a timeout that is not from a millisecond to a day
  explicit MpiCommunicator(std::chrono::milliseconds timeout = std::chrono::minutes{1});
  MpiCommunicator(const MpiCommunicator&) = delete;
  MpiCommunicator& operator=(const MpiCommunicator&) = delete;
  /// Ends MPI if this started it. After an error, its own or one that is in flight, it leaves MPI as it is, for others
  /// may wait for this rank: a process that then ends, best by `end_all`, ends them.
  ~MpiCommunicator() override;

  [[nodiscard]] std::size_t rank() const override { return rank_; }
  [[nodiscard]] std::size_t size() const override { return size_; }
  void sum(std::span<float> numbers) override;
  void gather(std::span<const float> own, std::span<float> all) override;
  void exchange(std::span<const Outgoing> sent, std::span<const Incoming> received) override;

  /// Ends all processes, with exit status 1: for a program that has caught an error and said what it was.
  [[noreturn]] static void end_all();

 private:
  struct Handles;  // of MPI, whose header only the source includes
  template <class Start>
  void complete(const char* what, std::size_t count, const char* unit, Start start);
  void answer();
  [[nodiscard]] std::string call_the_roll();

  std::unique_ptr<Handles> handles_;
  std::chrono::milliseconds timeout_;
  std::size_t rank_ = 0, size_ = 1;
  int exceptions_;  // in flight when it was made
};

}  // namespace kvpolicy::reference
