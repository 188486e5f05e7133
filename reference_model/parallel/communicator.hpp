// SPDX-License-Identifier: Apache-2.0
//
// What ranks say to each other. The model over ranks needs three calls, which MPI and NCCL have under other names; how
// messages travel is theirs. All else is made of the three.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
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

/// A call that failed on another rank, whose message says why: what fails on one fails on all.
class RankError : public Error {
 public:
  using Error::Error;
};

/// What rank `from` passes, on every rank; what the others pass is not looked at. The shortest texts take one message.
/// @throws CommunicationError
inline std::vector<std::byte> broadcast(Communicator& ranks, std::size_t from,
                                        std::span<const std::byte> own) {
  // Two bytes are a number that is exact as float, and stays so when zeros are added to it. The first message has the
  // length and the beginning.
  constexpr std::size_t head = 2;
  constexpr std::size_t first = 64 - head;
  const auto send = [&](std::size_t at, std::vector<float>& numbers, std::size_t skip) {
    for (std::size_t i = skip; i < numbers.size() && at < own.size(); ++i, at += 2) {
      const auto low = std::to_integer<unsigned>(own[at]);
      const auto high = at + 1 < own.size() ? std::to_integer<unsigned>(own[at + 1]) : 0U;
      numbers[i] = static_cast<float>(low | high << 8U);
    }
  };
  const bool is_mine = ranks.rank() == from;
  std::vector<float> begins(head + first, 0.0F);
  if (is_mine) {
    require<CommunicationError>(own.size() <= 0xffffffffU, "broadcast: a message of ", own.size(),
                                " bytes, at most 2^32 - 1 are possible");
    begins[0] = static_cast<float>(own.size() & 0xffffU);
    begins[1] = static_cast<float>(own.size() >> 16U);
    send(0, begins, head);
  }
  ranks.sum(begins);
  const std::size_t bytes = static_cast<std::size_t>(begins[0]) | static_cast<std::size_t>(begins[1]) << 16U;
  std::vector<float> numbers{begins.begin() + head, begins.end()};
  if (bytes > 2 * first) {
    std::vector<float> rest((bytes + 1) / 2 - first, 0.0F);
    if (is_mine) send(2 * first, rest, 0);
    ranks.sum(rest);
    numbers.insert(numbers.end(), rest.begin(), rest.end());
  }
  std::vector<std::byte> all(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    all[i] = static_cast<std::byte>(static_cast<unsigned>(numbers[i / 2]) >> 8 * (i % 2) & 0xffU);
  }
  return all;
}

/// For each of some questions, whether it is true on any rank. @throws CommunicationError
inline void any_of_ranks(Communicator& ranks, std::vector<bool>& own) {
  std::vector<float> numbers(own.begin(), own.end());
  ranks.sum(numbers);
  for (std::size_t i = 0; i < own.size(); ++i) own[i] = numbers[i] > 0;
}

/// The counts that each rank passes, rank by rank. @throws CommunicationError
[[nodiscard]] inline std::vector<std::size_t> gather_counts(Communicator& ranks,
                                                            std::span<const std::size_t> own) {
  constexpr std::size_t parts = sizeof(std::size_t) / 2;  // of 16 bits, which are exact as float
  std::vector<float> numbers;
  for (const std::size_t count : own) {
    for (std::size_t i = 0; i < parts; ++i)
      numbers.push_back(static_cast<float>(count >> (16 * i) & 0xffffU));
  }
  std::vector<float> all(numbers.size() * ranks.size());
  ranks.gather(numbers, all);
  std::vector<std::size_t> counts(own.size() * ranks.size(), 0);
  for (std::size_t i = 0; i < all.size(); ++i)
    counts[i / parts] |= static_cast<std::size_t>(all[i]) << 16 * (i % parts);
  return counts;
}

/// What fails on one rank fails on all: `own` is what this rank's part threw, or null.
/// @throws what this rank's part threw; RankError, with the text of the first rank's error, where another's did;
/// CommunicationError
inline void fail_together(Communicator& ranks, const std::exception_ptr& own) {
  const float mine = own == nullptr ? 0.0F : 1.0F;
  std::vector<float> failed(ranks.size());
  ranks.gather({&mine, 1}, failed);
  const auto first = std::ranges::find_if(failed, [](float one) { return one > 0; });
  if (first == failed.end()) return;
  const auto rank = static_cast<std::size_t>(first - failed.begin());
  std::string why;
  if (rank == ranks.rank()) {
    try {
      std::rethrow_exception(own);
    } catch (const std::exception& error) {
      why = error.what();
    } catch (...) {
      why = "an unknown error";
    }
  }
  const std::vector<std::byte> text = broadcast(ranks, rank, std::as_bytes(std::span{why}));
  if (own != nullptr) std::rethrow_exception(own);
  fail<RankError>("rank ", rank, ": ",
                  std::string_view{reinterpret_cast<const char*>(text.data()), text.size()});
}

/// Does this rank's part, and fails with the others. @throws as fail_together
template <class Work>
void together(Communicator& ranks, Work work) {
  std::exception_ptr failed;
  try {
    work();
  } catch (...) {
    failed = std::current_exception();
  }
  fail_together(ranks, failed);
}

/// Checks that every rank has the same `digest`, of a plan, a file or a version, before any work depends on it.
/// @throws ConfigError, on every rank, that says which ranks have another digest than rank 0; CommunicationError
inline void require_same(Communicator& ranks, std::string_view what, std::uint64_t digest,
                         std::string_view advice = "start all with the same files and options") {
  static_assert(sizeof(std::size_t) == sizeof(std::uint64_t));
  const std::vector<std::size_t> all = gather_counts(ranks, std::array{static_cast<std::size_t>(digest)});
  std::string others;
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] != all[0]) others += (others.empty() ? "" : ", ") + std::to_string(rank);
  }
  require(others.empty(), "ranks do not have the same ", what, ": rank 0 has another than rank ", others,
          "; ", advice);
}

}  // namespace kvpolicy::reference
