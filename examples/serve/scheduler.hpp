// SPDX-License-Identifier: Apache-2.0
//
// Continuous batching under a memory budget. Every step is one call of the model for all sequences that run: a
// token of each that writes, and parts of the prompts of those that read.
//
// Memory. A request comes in when the bytes that all running sequences and it will take at most (HeadPlan::peak_memory
// for prompt and answer, less what it shares) fit into the budget, so a request that was admitted never fails for
// memory. Prefixes of texts live in what is left, and go when a sequence needs their room.
//
// Order. Requests come in as they arrived. One that does not fit lets later ones pass for a while; after that
// the sequence that has written most since it came in is moved out for it, and waits in turn. One whose beginning
// another sequence is reading waits until that has come to its last common mark, and goes on from there.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include <reference_model/sampler.hpp>

#include "serve/rows.hpp"
#include "serve/served_model.hpp"

namespace kvpolicy::serve {

struct SchedulerOptions : RowsOptions {
  std::size_t step_tokens = 256;  ///< most tokens of prompts in a step, and of a piece of one
  std::size_t max_running = 64;
  std::size_t max_waiting = 256;
  double patience = 2.0;   ///< seconds for which later requests may pass one that does not fit
  std::size_t slice = 64;  ///< tokens that a sequence writes before it may be moved out
  std::size_t mark_every =
      512;  ///< tokens between marks of a prompt, besides those that a request names; 0: none
  /// Seconds since any time; tests and benchmarks have their own.
  std::function<double()> now;
  /// Is told in a line what becomes of a request, once a snapshot has it; by the thread that steps.
  std::function<void(const std::string&)> log;

  /// @throws ConfigError
  void validate() const;
};

/// Why a text ended.
enum class FinishReason : std::uint8_t { stop, length, cancelled, failed };
[[nodiscard]] const char* name_of(FinishReason reason);

struct Outcome {
  FinishReason reason = FinishReason::stop;
  std::size_t prompt_tokens = 0;
  std::size_t cached_tokens = 0;  ///< of them, those found as a prefix
  std::size_t new_tokens = 0;
  std::size_t kv_bytes = 0;  ///< of the cache at its end
  std::string error;         ///< if it failed
};

/// The callbacks are made by the thread that steps, and must not wait.
struct Request {
  std::vector<int> prompt;
  std::vector<std::size_t> marks;  ///< where prefixes end that others may share, ascending
  std::size_t max_new = 16;
  reference::SamplerConfig sampler;
  std::string plan_name;
  std::shared_ptr<const Plan> plan;
  std::function<bool(int token)> on_token;  ///< false: the text ends here
  std::function<void(const Outcome&)> on_end;
};

/// The queue is full: the client may try again later.
class QueueFull : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class Phase : std::uint8_t { waiting, reading, writing, moved_out };
[[nodiscard]] const char* name_of(Phase phase);

/// The server takes no more requests.
class Stopping : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// One request, for who watches.
struct RequestView {
  std::uint64_t id = 0;
  std::string plan;
  Phase phase = Phase::waiting;
  std::size_t prompt_tokens = 0, cached_tokens = 0, read_tokens = 0, new_tokens = 0, max_new = 0;
  std::size_t bytes = 0, shared_bytes = 0;
  double seconds = 0;  ///< since it came
};

/// Sums over all requests so far.
struct Counters {
  std::size_t requests = 0, refused = 0;
  std::size_t ended[4] = {};  ///< by FinishReason
  std::size_t prompt_tokens = 0, cached_tokens = 0, new_tokens = 0;
  std::size_t steps = 0, moved_out = 0, moved_in = 0;
  double first_token_seconds = 0;
  std::size_t first_tokens = 0;
  double between_seconds = 0;
  std::size_t betweens = 0;
};

struct Snapshot {
  std::vector<RequestView> requests;
  std::vector<PrefixInfo> prefixes;
  PrefixStatistics prefix_statistics;
  Counters counters;
  std::size_t budget = 0;
  std::size_t live_bytes = 0;      ///< in fast memory
  std::size_t promised_bytes = 0;  ///< that running sequences may take yet
  std::size_t prefix_only_bytes = 0;
  std::size_t swapped_bytes = 0;
};

/// `submit`, `cancel` and `snapshot` may be called by any thread, the others by one.
class Scheduler {
 public:
  /// Over rows of this process. The model must outlive it.
  /// @throws ConfigError
  Scheduler(ServedModel& model, const SchedulerOptions& options);
  /// Over `rows`, which were made with the same options; both must outlive it.
  /// @throws ConfigError
  Scheduler(ServedModel& model, Rows& rows, const SchedulerOptions& options);
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  /// Queues a request and returns its number. `on_end` is called exactly once for each.
  /// @throws CapacityError for a request that can never fit, ConfigError for a wrong one, QueueFull, Stopping
  std::uint64_t submit(Request request);
  /// The client has gone: the request ends with the next step.
  void cancel(std::uint64_t id);
  [[nodiscard]] Snapshot snapshot() const;

  /// One step of all sequences that can run. False if there is nothing to do.
  bool step();
  /// Steps until `stop`, and sleeps while there is nothing to do; then ends every request as cancelled, and returns how many there
  /// were. @throws CommunicationError if other processes are gone
  std::size_t run();
  /// Ends `run`.
  void stop();

  /// Bytes that a text of this prompt and answer takes at most.
  [[nodiscard]] std::size_t peak_bytes(const Plan& plan, std::size_t prompt, std::size_t max_new) const;
  [[nodiscard]] const SchedulerOptions& options() const { return options_; }
  /// Sequences that hold a cache in fast memory now.
  [[nodiscard]] std::size_t running() const { return running_.size(); }
  /// For who saves and loads them while nothing is stepped.
  [[nodiscard]] Prefixes& prefixes() { return rows_.prefixes(); }
  [[nodiscard]] const LimitedMemory& memory() const { return rows_.memory(); }

 private:
  struct Sequence;

  Scheduler(ServedModel& model, std::unique_ptr<Rows> own, Rows* rows, const SchedulerOptions& options);

  [[nodiscard]] double now() const { return options_.now(); }
  void take_inbox();
  void end(Sequence& sequence, FinishReason reason, const std::string& error = {});
  std::size_t end_all();
  void tell_news();
  void admit();
  [[nodiscard]] bool is_being_read(const Sequence& sequence) const;
  [[nodiscard]] bool try_admit(Sequence& sequence);
  [[nodiscard]] bool bring_back(Sequence& sequence);
  [[nodiscard]] bool move_one_out();
  void keep_prefix(const Sequence& sequence);
  void read_and_write();
  void take_result(Sequence& sequence, std::size_t tokens, const reference::BatchedRead& read);
  void write(Sequence& sequence, int token);
  void publish(bool at_once);
  // A line for the log, of what the next snapshot shows.
  template <class... Parts>
  void note(const Parts&... parts) {
    if (options_.log) news_.push_back(message(parts...));
  }

  ServedModel& model_;
  SchedulerOptions options_;
  std::unique_ptr<Rows> own_rows_;
  Rows& rows_;
  std::deque<std::unique_ptr<Sequence>> waiting_;  // in the order in which they may come in
  std::vector<std::unique_ptr<Sequence>> running_;
  Counters counters_;
  std::size_t next_reader_ = 0;
  bool first_waits_ = true;
  std::size_t changes_ = 0;  // rises when somebody may fit who did not
  double published_ = -1;
  std::vector<std::string> news_;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable arrived_;
  std::vector<std::unique_ptr<Sequence>> inbox_;
  std::unordered_set<std::uint64_t> cancelled_;
  std::uint64_t next_id_ = 1;
  std::size_t queued_ = 0;
  std::size_t refused_ = 0;
  bool stopped_ = false;
  Snapshot latest_;
};

}  // namespace kvpolicy::serve
