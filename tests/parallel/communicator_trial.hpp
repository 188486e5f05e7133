// SPDX-License-Identifier: Apache-2.0
//
// What any communicator must do, called by every rank at once, whatever the transport.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <reference_model/parallel/communicator.hpp>

namespace kvpolicy::reference {

// A byte that tells sender, receiver, message and place.
inline std::byte byte_of(std::size_t from, std::size_t to, std::size_t message, std::size_t at) {
  return static_cast<std::byte>((from * 131 + to * 31 + message * 7 + at * at) % 251);
}

/// Every rank sends three messages to every other one, of sizes that differ and of none.
/// @throws CommunicationError where one is not what was sent
inline void try_exchange(Communicator& ranks, std::size_t longest) {
  const std::size_t own = ranks.rank();
  const auto size_of = [&](std::size_t from, std::size_t to, std::size_t message) {
    return message == 1 ? 0 : (longest * (message + 1) + 17 * from + to) % (longest + 1);
  };
  std::vector<std::vector<std::byte>> memory;
  std::vector<Outgoing> sent;
  std::vector<Incoming> received;
  for (std::size_t message = 0; message < 3; ++message) {
    for (std::size_t other = 0; other < ranks.size(); ++other) {
      if (other == own) continue;
      std::vector<std::byte>& out = memory.emplace_back(size_of(own, other, message));
      for (std::size_t at = 0; at < out.size(); ++at) out[at] = byte_of(own, other, message, at);
      sent.push_back({other, out});
      received.push_back({other, memory.emplace_back(size_of(other, own, message))});
    }
  }
  ranks.exchange(sent, received);
  std::vector<std::size_t> seen(ranks.size(), 0);
  for (const Incoming& one : received) {
    const std::size_t message = seen[one.rank]++;
    for (std::size_t at = 0; at < one.bytes.size(); ++at) {
      require<CommunicationError>(one.bytes[at] == byte_of(one.rank, own, message, at), "rank ", own,
                                  ": message ", message, " of rank ", one.rank, " differs at byte ", at);
    }
  }
}

/// Sums and gatherings of `count` numbers, whole ones, whose sums are exact.
/// @throws CommunicationError where one is not what it should be
inline void try_numbers(Communicator& ranks, std::size_t count) {
  const auto number = [](std::size_t rank, std::size_t at) {
    return static_cast<float>((rank + 1) * (at % 1009)) - 5.0F;
  };
  std::vector<float> own(count);
  for (std::size_t at = 0; at < count; ++at) own[at] = number(ranks.rank(), at);
  std::vector<float> all(count * ranks.size(), std::numeric_limits<float>::quiet_NaN());
  ranks.gather(own, all);
  std::vector<float> expected(count, 0.0F);
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    for (std::size_t at = 0; at < count; ++at) {
      require<CommunicationError>(all[rank * count + at] == number(rank, at), "gathered number ", at,
                                  " of rank ", rank, " is ", all[rank * count + at]);
      expected[at] += number(rank, at);
    }
  }
  ranks.sum(own);
  for (std::size_t at = 0; at < count; ++at) {
    require<CommunicationError>(own[at] == expected[at], "sum ", at, " is ", own[at], ", not ", expected[at]);
  }
}

/// What is made of them: texts from any rank, questions, counts, digests, and errors of one rank.
/// @throws CommunicationError where one is not what it should be
inline void try_agreements(Communicator& ranks) {
  const auto expect = [&](bool holds, const char* what) {
    require<CommunicationError>(holds, "rank ", ranks.rank(), ": ", what);
  };
  for (std::size_t from = 0; from < ranks.size(); ++from) {
    for (const std::size_t size : {0U, 1U, 123U, 124U, 125U, 4099U}) {
      std::vector<std::byte> text(size);
      for (std::size_t at = 0; at < size; ++at) text[at] = byte_of(from, 0, size, at);
      const std::vector<std::byte> own(ranks.rank() == from ? text : std::vector<std::byte>{});
      expect(broadcast(ranks, from, own) == text, "a broadcast brought another text");
    }
    std::vector<bool> answers{ranks.rank() == from, false, true};
    any_of_ranks(ranks, answers);
    expect(answers == std::vector<bool>{true, false, true}, "ranks answer otherwise than one of them did");
  }
  const auto count = [](std::size_t rank) { return (std::size_t{1} << 47) + rank * 65'537; };
  const std::vector<std::size_t> counts =
      gather_counts(ranks, std::vector{count(ranks.rank()), ranks.rank()});
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    expect(counts[2 * rank] == count(rank) && counts[2 * rank + 1] == rank, "a count differs");
  require_same(ranks, "numbers", 0x0123'4567'89ab'cdef);
  const std::size_t last = ranks.size() - 1;
  std::string seen;
  try {
    together(ranks, [&] {
      if (ranks.rank() == last) fail<ShapeError>("the last rank has no room");
    });
  } catch (const ShapeError& error) {
    seen = error.what();
    expect(ranks.rank() == last, "an error of another rank has its type");
  } catch (const RankError& error) {
    seen = error.what();
    expect(ranks.rank() != last, "a rank's own error has lost its type");
  }
  expect(seen.ends_with("the last rank has no room"), "an error did not come with its text");
}

/// All of it, at sizes that hurt.
inline void try_communicator(Communicator& ranks) {
  for (const std::size_t size : {std::size_t{1}, std::size_t{13}, std::size_t{4099}, std::size_t{1} << 20}) {
    try_exchange(ranks, size);
    try_numbers(ranks, size);
  }
  try_numbers(ranks, 0);
  ranks.exchange({}, {});
  try_agreements(ranks);
}

}  // namespace kvpolicy::reference
