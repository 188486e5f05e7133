// SPDX-License-Identifier: Apache-2.0
//
// Drives a scheduler: submits requests when their time comes, steps, and notes when every token was written.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>

#include "bench/cpu/samples.hpp"
#include "serve/scheduler.hpp"
#include "subject.hpp"

namespace kvpolicy::bench {

/// The time that a run goes by: the machine's.
class RealTime {
 public:
  [[nodiscard]] double now() const { return seconds_since(start_); }
  void stepped() {}
  void wait_until(double time) {
    const double left = time - now();
    if (left > 0) std::this_thread::sleep_for(std::chrono::duration<double>(left));
  }

 private:
  Clock::time_point start_ = Clock::now();
};

/// A time in which every step takes equally long, and nothing is waited for.
class SimulatedTime {
 public:
  explicit SimulatedTime(double step_seconds) : step_seconds_{step_seconds} {}
  [[nodiscard]] double now() const { return time_; }
  void stepped() { time_ += step_seconds_; }
  void wait_until(double time) { time_ = std::max(time_, time); }

 private:
  double step_seconds_;
  double time_ = 0;
};

/// Numbers of which percentiles are asked at the end.
class Spread {
 public:
  void add(double value) { values_.push_back(value); }
  [[nodiscard]] std::size_t count() const { return values_.size(); }
  /// The value below which a `share` of all lie; 0 if there is none.
  [[nodiscard]] double at(double share) const {
    if (values_.empty()) return 0;
    std::vector<double> copy = values_;
    const auto rank = static_cast<std::ptrdiff_t>(share * static_cast<double>(copy.size() - 1) + 0.5);
    std::ranges::nth_element(copy, copy.begin() + rank);
    return copy[static_cast<std::size_t>(rank)];
  }

 private:
  std::vector<double> values_;
};

/// One request on its way.
struct Text {
  const DrawnRequest* request = nullptr;
  double came = 0;
  std::vector<double> token_times = {};
  std::vector<int> tokens = {};
  std::optional<serve::Outcome> outcome = {};
};

/// What a run has cost.
struct Measured {
  double seconds = 0;  ///< from the first arrival to the last end
  std::size_t requests = 0, refused = 0, failed = 0;
  std::string error;  ///< of one that failed
  std::size_t prompt_tokens = 0, cached_tokens = 0, new_tokens = 0;
  std::size_t most_running = 0;
  double mean_running = 0;  ///< over time
  std::size_t most_waiting = 0;
  std::size_t moved_out = 0;
  std::size_t budget = 0, peak_bytes = 0;
  std::size_t asked = 0, right = 0;
  Spread first_token, between;

  [[nodiscard]] double tokens_per_second() const { return static_cast<double>(new_tokens) / seconds; }
  [[nodiscard]] double requests_per_second() const { return static_cast<double>(requests) / seconds; }
  [[nodiscard]] double found_share() const {
    return prompt_tokens == 0 ? 0 : static_cast<double>(cached_tokens) / static_cast<double>(prompt_tokens);
  }
};

template <class Time = RealTime>
class Drive {
 public:
  /// Called after each step.
  using Watch = std::function<void(const Drive&)>;

  Drive(serve::ServedModel& model, serve::SchedulerOptions options, Time time = {})
      : time_{std::move(time)}, scheduler_{model, with_clock(std::move(options))} {}
  Drive(const Drive&) = delete;
  Drive& operator=(const Drive&) = delete;

  [[nodiscard]] serve::Scheduler& scheduler() { return scheduler_; }
  [[nodiscard]] const serve::Scheduler& scheduler() const { return scheduler_; }
  [[nodiscard]] double now() const { return time_.now(); }
  /// The latest requests, in the order in which they came.
  [[nodiscard]] const std::deque<Text>& texts() const { return texts_; }
  /// How many have not ended.
  [[nodiscard]] std::size_t open() const { return open_; }

  /// Runs all requests to their ends; request i comes at `arrivals[i]`, seconds from now, or at once if there are none.
  /// @throws StorageError if requests wait that nothing will let in
  Measured run(std::span<const DrawnRequest> requests, const std::shared_ptr<const serve::Plan>& plan,
               const std::string& plan_name, std::span<const double> arrivals = {}, const Watch& watch = {}) {
    texts_.clear();
    Measured measured;
    const double start = time_.now();
    const std::size_t moved_before = scheduler_.snapshot().counters.moved_out;
    double running_seconds = 0;
    double latest = start;
    std::size_t next = 0;
    std::size_t idle = 0;
    while (next < requests.size() || open_ > 0) {
      for (; next < requests.size(); ++next) {
        const double comes = start + (arrivals.empty() ? 0 : arrivals[next]);
        if (comes > time_.now()) break;
        submit(requests[next], plan, plan_name, comes, measured);
      }
      ended_in_step_ = 0;
      const bool works = scheduler_.step();
      if (works) time_.stepped();
      const std::size_t running = scheduler_.running() + ended_in_step_;
      measured.most_running = std::max(measured.most_running, running);
      measured.most_waiting = std::max(measured.most_waiting, open_ - std::min(open_, scheduler_.running()));
      running_seconds += static_cast<double>(running) * (time_.now() - latest);
      latest = time_.now();
      if (watch) watch(*this);
      if (works) {
        idle = 0;
      } else if (open_ > 0) {
        require<StorageError>(++idle < 1000, open_, " requests wait, none runs, and none comes in");
        time_.wait_until(time_.now() + 0.01);
      } else if (next < requests.size()) {
        time_.wait_until(start + arrivals[next]);
        latest = time_.now();
      }
    }
    measured.seconds = std::max(time_.now() - start, 1e-9);
    measured.mean_running = running_seconds / measured.seconds;
    measured.budget = scheduler_.options().memory;
    measured.peak_bytes = scheduler_.memory().peak_bytes();
    // The scheduler publishes now and then: a step of nothing makes it tell all.
    static_cast<void>(scheduler_.step());
    measured.moved_out = scheduler_.snapshot().counters.moved_out - moved_before;
    for (const Text& text : texts_) add(text, measured);
    return measured;
  }

 private:
  serve::SchedulerOptions with_clock(serve::SchedulerOptions options) {
    options.now = [this] { return time_.now(); };
    return options;
  }

  void submit(const DrawnRequest& drawn, const std::shared_ptr<const serve::Plan>& plan,
              const std::string& plan_name, double came, Measured& measured) {
    Text& text = texts_.emplace_back(Text{.request = &drawn, .came = came});
    serve::Request request;
    request.prompt = drawn.prompt;
    if (drawn.system > 0 && drawn.system < drawn.prompt.size()) request.marks = {drawn.system};
    request.max_new = drawn.max_new;
    request.plan = plan;
    request.plan_name = plan_name;
    request.on_token = [this, &text](int token) {
      text.tokens.push_back(token);
      text.token_times.push_back(time_.now());
      return true;
    };
    request.on_end = [this, &text](const serve::Outcome& outcome) {
      text.outcome = outcome;
      --open_;
      ++ended_in_step_;
    };
    try {
      scheduler_.submit(std::move(request));
      ++open_;
    } catch (const CapacityError&) {  // alone it takes more than the budget
      ++measured.refused;
    } catch (const serve::QueueFull&) {
      ++measured.refused;
    }
  }

  static void add(const Text& text, Measured& measured) {
    if (!text.outcome) return;
    if (text.outcome->reason == serve::FinishReason::failed) {
      ++measured.failed;
      measured.error = text.outcome->error;
      return;
    }
    ++measured.requests;
    measured.prompt_tokens += text.outcome->prompt_tokens;
    measured.cached_tokens += text.outcome->cached_tokens;
    measured.new_tokens += text.outcome->new_tokens;
    for (std::size_t i = 0; i < text.token_times.size(); ++i) {
      if (i == 0) {
        measured.first_token.add(text.token_times[0] - text.came);
      } else {
        measured.between.add(text.token_times[i] - text.token_times[i - 1]);
      }
    }
    if (!text.request->is_right) return;
    ++measured.asked;
    measured.right += text.request->is_right(text.tokens) ? 1U : 0U;
  }

  Time time_;
  std::deque<Text> texts_;
  std::size_t open_ = 0;
  std::size_t ended_in_step_ = 0;
  serve::Scheduler scheduler_;
};

}  // namespace kvpolicy::bench
