// SPDX-License-Identifier: Apache-2.0
//
// The communicator over a stand-in for NCCL and the CUDA runtime (fake_nccl.hpp): numbers, ranks that do not come,
// errors at once, later and of the device, and what is left afterwards.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <latch>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/plan/shards.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>
#include <reference_model/parallel/nccl_communicator.hpp>
#include <reference_model/parallel/parallel_llama.hpp>
#include <reference_model/parallel/prefill_over_ranks.hpp>
#include <reference_model/parallel/rank_cache.hpp>

#include "model/golden.hpp"
#include "nccl/fake/fake_nccl.hpp"
#include "parallel/communicator_trial.hpp"
#include "parallel/thread_ranks.hpp"
#include "support/compare.hpp"

namespace kvpolicy::reference::nccl_communicator_test {

using std::chrono::milliseconds;
using test::contains;
namespace fake = test::fake_nccl;

// Long enough for any thread to come.
constexpr milliseconds long_time = std::chrono::minutes{2};

// A time that stands still until it is let run; then each look at it takes a millisecond.
class TestClock {
 public:
  std::chrono::steady_clock::time_point operator()() {
    return std::chrono::steady_clock::time_point{milliseconds{runs_ ? ++looks_ : 0}};
  }
  void run() { runs_ = true; }
  // Ranks give up when it has run for so long.
  [[nodiscard]] NcclOptions options() {
    return {.timeout = milliseconds{300}, .now = [this] { return (*this)(); }};
  }

 private:
  std::atomic<bool> runs_ = false;
  std::atomic<std::int64_t> looks_ = 0;
};

// Calls work(rank) on a thread for each rank, and returns the messages of what they threw.
std::vector<std::string> run(std::size_t size, const std::function<void(std::size_t)>& work) {
  std::vector<std::string> messages(size);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        work(rank);
      } catch (const CommunicationError& error) {
        messages[rank] = error.what();
      } catch (const std::exception& error) {
        messages[rank] = std::string{"another error: "} + error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return messages;
}

void check_clean() {
  const fake::Counts left = fake::counts();
  CHECK(left.communicators == 0);
  CHECK(left.streams == 0);
  CHECK(left.buffers == 0);
  CHECK(left.aborted == 0);
  CHECK(left.mistakes == 0);
}

TEST_CASE("sums, gatherings and messages over NCCL") {
  for (const std::size_t size : {1U, 2U, 3U, 5U}) {
    CAPTURE(size);
    fake::reset(2);
    const NcclId id = make_nccl_id();
    for (const std::string& message : run(size, [&](std::size_t rank) {
           NcclCommunicator ranks{id, rank, size, {.timeout = long_time}};
           CHECK(ranks.rank() == rank);
           CHECK(ranks.size() == size);
           try_communicator(ranks);
         })) {
      CHECK(message.empty());
    }
    check_clean();
  }
}

TEST_CASE("messages to some ranks alone, and rooms of the wrong size") {
  fake::reset(4);
  const NcclId id = make_nccl_id();
  for (const std::string& message : run(3, [&](std::size_t rank) {
         NcclCommunicator ranks{id, rank, 3, {.timeout = long_time}};
         // Rank 2 has no part in the first exchange, and all have one in the sum.
         std::vector<std::byte> bytes(100, static_cast<std::byte>(rank));
         if (rank == 0) ranks.exchange(std::vector<Outgoing>{{1, bytes}}, {});
         if (rank == 1) ranks.exchange({}, std::vector<Incoming>{{0, bytes}});
         if (rank == 2) ranks.exchange({}, {});
         CHECK(bytes[99] == static_cast<std::byte>(rank == 1 ? 0 : rank));
         std::vector<float> all(5);
         CHECK_THROWS_AS(ranks.gather(std::vector<float>(2), all), CommunicationError);
         CHECK_THROWS_AS(ranks.exchange(std::vector<Outgoing>{{rank, bytes}}, {}), ConfigError);
         CHECK_THROWS_AS(ranks.exchange({}, std::vector<Incoming>{{3, bytes}}), ConfigError);
         try_communicator(ranks);  // nothing was sent
       })) {
    CHECK(message.empty());
  }
  check_clean();
}

TEST_CASE("a golden checkpoint over NCCL, a prompt and then token by token") {
  const Llama model = Llama::load(golden_folder("mha_d64"), {.weights = WeightFormat::float32});
  const Golden golden = load_golden("mha_d64");
  const std::span<const int> tokens{golden.tokens};
  const HeadPlan<float> plan{model.config().shape()};
  const Shards shards = balance(plan, 1000, {.ranks = 3});
  fake::reset(3);
  const NcclId id = make_nccl_id();
  for (const std::string& message : run(3, [&](std::size_t rank) {
         NcclCommunicator ranks{id, rank, 3, {.timeout = long_time}};
         RankCache<float> cache{plan, shards, ranks};
         std::vector<float> logits = prefill_over_ranks(model, cache, tokens.first(100), LogitsOf::all);
         ParallelLlama own{model, shards, ranks};
         const std::vector<float> more = own.forward(tokens.subspan(100), cache, LogitsOf::all);
         logits.insert(logits.end(), more.begin(), more.end());
         CHECK(largest_error(logits, golden.logits) <= 1.5F * logit_tolerance);
       })) {
    CHECK(message.empty());
  }
  check_clean();
}

TEST_CASE("ranks that do not come: nobody waits for longer than was asked") {
  fake::reset(2);
  const NcclId id = make_nccl_id();
  TestClock nobody_comes;
  nobody_comes.run();
  auto messages = run(3, [&](std::size_t rank) {
    if (rank == 1) return;
    NcclCommunicator ranks{id, rank, 3, nobody_comes.options()};
  });
  CHECK(contains(messages[0], "rank 0 of 3: the others did not join in 300 ms"));
  CHECK(contains(messages[2], "rank 2 of 3: the others did not join in 300 ms"));
  CHECK(fake::counts().aborted == 2);
  CHECK(fake::counts().streams == 0);

  // One that ends in the middle, with an error in flight.
  fake::reset(2);
  const NcclId other = make_nccl_id();
  TestClock one_ends;
  messages = run(3, [&](std::size_t rank) {
    NcclCommunicator ranks{other, rank, 3, one_ends.options()};
    std::vector<float> numbers(10, 1.0F);
    ranks.sum(numbers);
    CHECK(numbers[9] == 3.0F);
    if (rank == 1) {
      one_ends.run();
      throw CommunicationError{"this rank had enough"};
    }
    try {
      ranks.sum(numbers);
    } catch (const CommunicationError&) {
      CHECK_THROWS_WITH_AS(ranks.sum(numbers), doctest::Contains("an earlier call did not come together"),
                           CommunicationError);
      CHECK_THROWS_AS(ranks.exchange({}, {}), CommunicationError);
      throw;
    }
  });
  CHECK(messages[1] == "this rank had enough");
  CHECK(contains(messages[0], "a sum of 80 bytes did not come together in 300 ms"));
  CHECK(contains(messages[2], "rank 2 of 3: a sum"));
  CHECK(fake::counts().aborted == 3);
  CHECK(fake::counts().communicators == 0);
  CHECK(fake::counts().mistakes == 0);

  // Ranks that make other calls than each other.
  fake::reset(2);
  const NcclId third = make_nccl_id();
  TestClock joined;
  messages = run(2, [&](std::size_t rank) {
    NcclCommunicator ranks{third, rank, 2, joined.options()};
    joined.run();
    std::vector<float> numbers(10, 1.0F);
    std::vector<float> all(20);
    if (rank == 0) ranks.sum(numbers);
    if (rank == 1) ranks.gather(numbers, all);
  });
  CHECK(contains(messages[0], "a sum of 80 bytes did not come together"));
  CHECK(contains(messages[1], "a gathering of 120 bytes did not come together"));
  CHECK(fake::counts().aborted == 2);
}

TEST_CASE("errors at once, later and of the device") {
  struct Case {
    fake::Fault fault;
    const char* expected;
  };
  for (const Case& one :
       {Case{{.call = ncclInternalError}, "NCCL: a sum: a fault of the test (said by the fake)"},
        Case{{.later = ncclRemoteError}, "NCCL: a sum: remote process exited"},
        Case{{.device = true}, "NCCL: a sum: a fault of the test"}}) {
    CAPTURE(one.expected);
    fake::reset(2);
    const NcclId id = make_nccl_id();
    TestClock clock;
    const auto messages = run(2, [&](std::size_t rank) {
      NcclCommunicator ranks{id, rank, 2, clock.options()};
      try_numbers(ranks, 100);
      if (rank == 1) fake::set(rank, one.fault);
      std::vector<float> numbers(10, 1.0F);
      try {
        ranks.sum(numbers);
      } catch (...) {
        clock.run();
        throw;
      }
    });
    CHECK(contains(messages[1], one.expected));
    CHECK(contains(messages[0], "did not come together in 300 ms"));
    CHECK(fake::counts().aborted == 2);
    CHECK(fake::counts().mistakes == 0);
  }
  // In the middle of a group, which is ended all the same: the thread's next communicator works.
  fake::reset(2);
  const NcclId id = make_nccl_id();
  const NcclId next = make_nccl_id();
  TestClock clock;
  for (const std::string& message : run(2, [&](std::size_t rank) {
         try {
           NcclCommunicator ranks{id, rank, 2, clock.options()};
           if (rank == 1) fake::set(rank, {.call = ncclSystemError});
           try_exchange(ranks, 100);
           FAIL("no error");
         } catch (const CommunicationError& error) {
           clock.run();
           CHECK(contains(error.what(), rank == 1
                                            ? "NCCL: an exchange: a fault of the test"
                                            : "an exchange of 144 bytes did not come together in 300 ms"));
         }
         NcclCommunicator again{next, rank, 2, {.timeout = long_time}};
         try_communicator(again);
       })) {
    CHECK(message.empty());
  }
  CHECK(fake::counts().aborted == 2);
  CHECK(fake::counts().mistakes == 0);
}

TEST_CASE("what cannot be joined is refused") {
  fake::reset(2);
  const NcclId id = make_nccl_id();
  const auto refused = [&](std::size_t rank, std::size_t size, const NcclOptions& options) {
    return test::thrown<CommunicationError>([&] { NcclCommunicator ranks{id, rank, size, options}; });
  };
  CHECK(contains(refused(2, 2, {}), "rank 2 of 2 ranks, must be one of them"));
  CHECK(contains(refused(0, 0, {}), "rank 0 of 0 ranks"));
  CHECK(
      contains(refused(0, 1, {.timeout = milliseconds{0}}), "the timeout is 0 ms, must be from 1 to a day"));
  CHECK(contains(refused(0, 1, {.timeout = std::chrono::hours{25}}), "must be from 1 to a day"));
  CHECK(contains(refused(0, 1, {.device = 2}), "there is no device 2, there are 2"));
  CHECK(contains(refused(0, 1, {.device = -1}), "there is no device -1"));
  fake::reset(0);
  CHECK(contains(refused(0, 1, {}), "no CUDA device: no CUDA-capable device is detected"));
  check_clean();
}

TEST_CASE("ids are handed over by another communicator, or in a file") {
  fake::reset(1);
  std::vector<NcclId> found(3);
  for (const std::exception_ptr& one :
       test::run_ranks(3, [&](Communicator& ranks) { found[ranks.rank()] = share_nccl_id(ranks); })) {
    CHECK(!one);
  }
  CHECK(found[0] != NcclId{});
  CHECK(found[1] == found[0]);
  CHECK(found[2] == found[0]);

  const auto folder =
      std::filesystem::temp_directory_path() / ("kvpolicy_nccl_" + std::to_string(std::random_device{}()));
  std::filesystem::create_directory(folder);
  const std::string path = (folder / "id").string();
  std::latch others{2};
  for (const std::string& message : run(3, [&](std::size_t rank) {
         // They look for a file that is not there yet.
         if (rank == 0) {
           others.wait();
         } else {
           others.count_down();
         }
         found[rank] = share_nccl_id(path, rank, long_time);
       })) {
    CHECK(message.empty());
  }
  CHECK(found[1] == found[0]);
  CHECK(found[2] == found[0]);
  // An id of an earlier run would never bring the ranks together.
  CHECK(contains(test::thrown<StorageError>([&] { static_cast<void>(share_nccl_id(path, 0)); }),
                 "is there already, perhaps of an earlier run"));
  const std::string nowhere = (folder / "nowhere").string();
  CHECK(contains(test::thrown<CommunicationError>(
                     [&] { static_cast<void>(share_nccl_id(nowhere, 1, milliseconds{30})); }),
                 "rank 1 found no id in"));
  // Half a file is none.
  std::ofstream{nowhere} << "short";
  CHECK(contains(test::thrown<CommunicationError>(
                     [&] { static_cast<void>(share_nccl_id(nowhere, 1, milliseconds{30})); }),
                 "found no id"));
  std::filesystem::remove_all(folder);
}

}  // namespace kvpolicy::reference::nccl_communicator_test
