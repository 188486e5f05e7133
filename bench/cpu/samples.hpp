// SPDX-License-Identifier: Apache-2.0
//
// Takes the samples of one case: as many as fit into a number of seconds, but always enough for
// meaningful percentiles.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <utility>
#include <vector>

namespace kvpolicy::bench {

using Clock = std::chrono::steady_clock;

[[nodiscard]] inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// The seconds that `work()` takes.
template <class Work>
[[nodiscard]] double seconds_of(Work work) {
  const auto start = Clock::now();
  work();
  return seconds_since(start);
}

class Samples {
 public:
  void add(double seconds) {
    seconds_.insert(std::ranges::upper_bound(seconds_, seconds), seconds);
    sum_ += seconds;
  }
  [[nodiscard]] std::size_t count() const { return seconds_.size(); }
  [[nodiscard]] double sum() const { return sum_; }
  /// The sample below which a `share` of all samples lie. There must be at least one sample.
  [[nodiscard]] double at(double share) const {
    const double rank = share * static_cast<double>(seconds_.size() - 1);
    return seconds_[static_cast<std::size_t>(rank + 0.5)];
  }
  [[nodiscard]] double best() const { return at(0); }
  [[nodiscard]] double median() const { return at(0.5); }

 private:
  std::vector<double> seconds_;  // ascending
  double sum_ = 0.0;
};

/// How long a case is sampled.
struct Patience {
  double seconds = 1.0;    ///< for samples, roughly
  std::size_t least = 30;  ///< samples at least, however long they take
  std::size_t most = 400;
};

/// Calls `sample()` until there are enough samples. It returns seconds, or nothing if it is to be
/// timed.
template <class Sample>
void repeat(const Patience& patience, Sample sample) {
  const auto start = Clock::now();
  for (std::size_t i = 0; i < patience.most; ++i) {
    if (i >= patience.least && seconds_since(start) >= patience.seconds) break;
    sample();
  }
}

/// Measures something else several times between a case's samples. On a shared machine the
/// available speed changes within seconds, and a case must be judged by the speed while it ran.
template <class Look>
class BetweenSamples {
 public:
  static constexpr double looks = 5;

  BetweenSamples(const Patience& patience, Look look)
      : look_{std::move(look)}, pause_{patience.seconds / looks} {}

  /// Call it before each sample; `taken` has the samples so far.
  void step(const Samples& taken) {
    if (taken.sum() < next_) return;
    next_ = std::max(next_ + pause_, taken.sum());
    seen_.add(look_());
  }
  [[nodiscard]] double median() const { return seen_.median(); }

 private:
  Look look_;
  double pause_;
  double next_ = 0.0;
  Samples seen_;
};

}  // namespace kvpolicy::bench
