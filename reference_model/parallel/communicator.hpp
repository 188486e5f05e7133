// SPDX-License-Identifier: Apache-2.0
//
// What ranks say to each other. The model over ranks needs three calls, which MPI and NCCL have under other names; how
// messages travel is theirs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy::reference {

/// A message that did not come, or a rank that is gone. What was computed so far is lost.
class CommunicationError : public Error {
 public:
  using Error::Error;
};

/// Bytes that go to another rank.
struct Outgoing {
  std::size_t rank = 0;
  std::span<const std::byte> bytes = {};
};
/// Where bytes of another rank go.
struct Incoming {
  std::size_t rank = 0;
  std::span<std::byte> bytes = {};
};

/// One rank's end. All ranks make the same calls in the same order; each returns when all have made it. One thread at a
/// time.
class Communicator {
 public:
  virtual ~Communicator() = default;

  [[nodiscard]] virtual std::size_t rank() const = 0;
  [[nodiscard]] virtual std::size_t size() const = 0;

  /// Adds up over ranks, in place: each gets the same bits. @throws CommunicationError
  virtual void sum(std::span<float> numbers) = 0;
  /// `all` [size, own.size()] gets what every rank passed as `own`, in their order. @throws CommunicationError
  virtual void gather(std::span<const float> own, std::span<float> all) = 0;
  /// Sends and receives messages between pairs of ranks, all at once. Those that a rank sends to another one meet those
  /// that the other receives from it, in their order, and must have the same sizes; any may be empty. Returns when this
  /// rank's have gone and come. @throws ConfigError for a message to or from no other rank; CommunicationError
  virtual void exchange(std::span<const Outgoing> sent, std::span<const Incoming> received) = 0;

 protected:
  /// @throws ConfigError
  void check_messages(std::span<const Outgoing> sent, std::span<const Incoming> received) const {
    const auto check = [&](std::size_t other) {
      require(other < size() && other != rank(), "a message between rank ", rank(), " and rank ", other,
              ", must be between two of ", size());
    };
    for (const Outgoing& message : sent) check(message.rank);
    for (const Incoming& message : received) check(message.rank);
  }
};

/// Checks that every rank has the same `digest`, of a plan, a file or a version, before any work depends on it.
/// @throws ConfigError, on every rank, that says which ranks have another digest than rank 0; CommunicationError
inline void require_same(Communicator& ranks, std::string_view what, std::uint64_t digest) {
  // Parts of 16 bits, which are exact as float.
  float own[4];
  for (int i = 0; i < 4; ++i) own[i] = static_cast<float>(digest >> (16 * i) & 0xffffU);
  std::vector<float> all(4 * ranks.size());
  ranks.gather(own, all);
  std::string others;
  for (std::size_t rank = 1; rank < ranks.size(); ++rank) {
    bool same = true;
    for (std::size_t i = 0; i < 4; ++i) same = same && all[4 * rank + i] == all[i];
    if (!same) others += (others.empty() ? "" : ", ") + std::to_string(rank);
  }
  require(others.empty(), "ranks do not have the same ", what, ": rank 0 has another than rank ", others,
          "; start all with the same files and options");
}

}  // namespace kvpolicy::reference
