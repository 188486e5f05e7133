// SPDX-License-Identifier: Apache-2.0
//
// Ranks over NCCL, each with a GPU of its own. Numbers come from host memory and go back there, by way of a buffer on
// the device: the reference model computes on the host. How processes start is another's business; they need one number
// in common, the id, which rank 0 makes and others get over MPI or from a file:
//
//   MpiCommunicator processes;
//   NcclCommunicator ranks{share_nccl_id(processes), processes.rank(), processes.size()};
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include <reference_model/parallel/communicator.hpp>

namespace kvpolicy::reference {

/// What ranks of one communicator have in common.
using NcclId = std::array<std::byte, 128>;

struct NcclOptions {
  /// A call that has not come together after so long throws, from a millisecond to a day. The constructor also waits so
  /// long for the others.
  std::chrono::milliseconds timeout = std::chrono::minutes{1};
  std::optional<int> device = {};  ///< of this rank; none: its rank modulo the number of devices
  /// The time; tests have one of their own.
  std::function<std::chrono::steady_clock::time_point()> now = std::chrono::steady_clock::now;
};

/// Called by one thread at a time, which may be another each time. Sums have the same bits on every rank, as NCCL's do.
/// NCCL does not compare the sizes of messages: ranks that make other calls than each other may get wrong numbers
/// instead of an error.
class NcclCommunicator final : public Communicator {
 public:
  /// Joins the `size` ranks that have the same id. @throws CommunicationError, also for a rank that is not among them,
  /// a machine without devices, or an option out of range
  NcclCommunicator(const NcclId& id, std::size_t rank, std::size_t size, const NcclOptions& options = {});
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;
  /// Waits for the others to come here too, at most as long as for a call. After an error, its own or one that is in
  /// flight, it aborts instead: others find out when their time is over.
  ~NcclCommunicator() override;

  [[nodiscard]] std::size_t rank() const override { return rank_; }
  [[nodiscard]] std::size_t size() const override { return size_; }
  /// The three calls: an error of NCCL or of the device, or a rank that does not come in time, aborts this rank's
  /// communicator, and every later call throws.
  void sum(std::span<float> numbers) override;
  void gather(std::span<const float> own, std::span<float> all) override;
  void exchange(std::span<const Outgoing> sent, std::span<const Incoming> received) override;

 private:
  struct Handles;  // of NCCL and CUDA, whose headers only the source includes
  void begin(std::size_t bytes_in, std::size_t bytes_out);
  template <class Start>
  void complete(const char* what, std::size_t bytes_in, std::size_t bytes_out, Start start);

  std::unique_ptr<Handles> handles_;
  std::size_t rank_ = 0, size_ = 1;
  int exceptions_;  // in flight when it was made
};

/// A new id. @throws CommunicationError
[[nodiscard]] NcclId make_nccl_id();
/// The id that rank 0 makes, on every rank. @throws CommunicationError; RankError where rank 0 could make none
[[nodiscard]] NcclId share_nccl_id(Communicator& ranks);
/// The same for ranks that have nothing but a file in common: rank 0 writes it, others wait for it. It must not be
/// there before; remove it once the communicator is made. @throws StorageError if it is there, or cannot be written;
/// CommunicationError on a rank that has waited for `timeout`
[[nodiscard]] NcclId share_nccl_id(const std::string& path, std::size_t rank,
                                   std::chrono::milliseconds timeout = std::chrono::minutes{1});

}  // namespace kvpolicy::reference
