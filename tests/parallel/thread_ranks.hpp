// SPDX-License-Identifier: Apache-2.0
//
// Ranks that are threads of one process, for tests without MPI: under sanitizers, and of a rank that fails.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <reference_model/parallel/communicator.hpp>

namespace test {

/// What the ranks of a group have in common: a place where all meet.
class Meeting {
 public:
  explicit Meeting(std::size_t size) : size_{size}, given_(size), sent_(size) {}

  [[nodiscard]] std::size_t size() const { return size_; }

  /// Waits until all ranks are here, each with some numbers; then calls use(numbers of all ranks), and waits until all
  /// have used them.
  template <class Use>
  void meet(std::size_t rank, std::span<const float> own, Use use) {
    given_[rank] = own;
    wait();
    use(std::as_const(given_));
    wait();
  }
  /// The same for messages, of which each rank takes its own.
  void exchange(std::size_t rank, std::span<const kvpolicy::reference::Outgoing> sent,
                std::span<const kvpolicy::reference::Incoming> received) {
    using kvpolicy::reference::CommunicationError;
    sent_[rank] = sent;
    wait();
    std::vector<std::size_t> taken(size_, 0);
    for (const kvpolicy::reference::Incoming& to : received) {
      std::vector<std::span<const std::byte>> for_me;
      for (const kvpolicy::reference::Outgoing& from : sent_[to.rank]) {
        if (from.rank == rank) for_me.push_back(from.bytes);
      }
      const std::size_t next = taken[to.rank]++;
      kvpolicy::require<CommunicationError>(next < for_me.size() && for_me[next].size() == to.bytes.size(),
                                            "no such message was sent");
      std::ranges::copy(for_me[next], to.bytes.begin());
    }
    wait();
  }
  /// Says that a rank will come no more.
  void leave() {
    const std::lock_guard lock{mutex_};
    left_ = true;
    all_here_.notify_all();
  }

 private:
  void wait() {
    std::unique_lock lock{mutex_};
    const std::size_t round = round_;
    if (++here_ == size_) {
      here_ = 0;
      ++round_;
      all_here_.notify_all();
      return;
    }
    all_here_.wait(lock, [&] { return round_ != round || left_; });
    kvpolicy::require<kvpolicy::reference::CommunicationError>(round_ != round, "a rank is gone");
  }

  std::size_t size_;
  std::vector<std::span<const float>> given_;
  std::vector<std::span<const kvpolicy::reference::Outgoing>> sent_;
  std::mutex mutex_;
  std::condition_variable all_here_;
  std::size_t here_ = 0, round_ = 0;
  bool left_ = false;
};

class ThreadRank final : public kvpolicy::reference::Communicator {
 public:
  ThreadRank(Meeting& meeting, std::size_t rank) : meeting_{&meeting}, rank_{rank} {}

  [[nodiscard]] std::size_t rank() const override { return rank_; }
  [[nodiscard]] std::size_t size() const override { return meeting_->size(); }
  void sum(std::span<float> numbers) override {
    std::vector<float> total(numbers.size(), 0.0F);
    meeting_->meet(rank_, numbers, [&](const auto& all) {
      for (const std::span<const float> one : all) {
        kvpolicy::require<kvpolicy::reference::CommunicationError>(one.size() == total.size(),
                                                                   "a sum of different sizes");
        for (std::size_t i = 0; i < total.size(); ++i) total[i] += one[i];
      }
    });
    std::ranges::copy(total, numbers.begin());
  }
  void gather(std::span<const float> own, std::span<float> all) override {
    meeting_->meet(rank_, own, [&](const auto& given) {
      auto to = all.begin();
      for (const std::span<const float> one : given) {
        kvpolicy::require<kvpolicy::reference::CommunicationError>(one.size() == own.size(),
                                                                   "a gathering of different sizes");
        to = std::ranges::copy(one, to).out;
      }
    });
  }
  void exchange(std::span<const kvpolicy::reference::Outgoing> sent,
                std::span<const kvpolicy::reference::Incoming> received) override {
    check_messages(sent, received);
    meeting_->exchange(rank_, sent, received);
  }

 private:
  Meeting* meeting_;
  std::size_t rank_;
};

/// Calls work(rank) on a thread for each rank and returns what each threw, if anything.
inline std::vector<std::exception_ptr> run_ranks(
    std::size_t size, const std::function<void(kvpolicy::reference::Communicator&)>& work) {
  Meeting meeting{size};
  std::vector<std::exception_ptr> thrown(size);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      ThreadRank own{meeting, rank};
      try {
        work(own);
      } catch (...) {
        thrown[rank] = std::current_exception();
        meeting.leave();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return thrown;
}

}  // namespace test
