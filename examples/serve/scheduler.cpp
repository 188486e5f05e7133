// SPDX-License-Identifier: Apache-2.0
//
// Requests come, are stepped until they end, and are shown to who watches. scheduler_admission.cpp says who comes in,
// scheduler_step.cpp what a step is.
#include "serve/scheduler.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

#include "serve/local_rows.hpp"
#include "serve/sequence.hpp"

namespace kvpolicy::serve {

void SchedulerOptions::validate() const {
  RowsOptions::validate();
  require(step_tokens > 0, "server: step_tokens is 0, must be at least 1");
  require(max_running > 0, "server: max_running is 0, must be at least 1");
}

const char* name_of(FinishReason reason) {
  switch (reason) {
    case FinishReason::stop: return "stop";
    case FinishReason::length: return "length";
    case FinishReason::cancelled: return "cancelled";
    case FinishReason::failed: break;
  }
  return "failed";
}
const char* name_of(Phase phase) {
  switch (phase) {
    case Phase::waiting: return "waiting";
    case Phase::reading: return "reading";
    case Phase::writing: return "writing";
    case Phase::moved_out: break;
  }
  return "moved out";
}

Scheduler::Scheduler(ServedModel& model, const SchedulerOptions& options)
    : Scheduler{model, std::make_unique<LocalRows>(model, options), nullptr, options} {}
Scheduler::Scheduler(ServedModel& model, Rows& rows, const SchedulerOptions& options)
    : Scheduler{model, nullptr, &rows, options} {}
Scheduler::Scheduler(ServedModel& model, std::unique_ptr<Rows> own, Rows* rows,
                     const SchedulerOptions& options)
    : model_{model},
      options_{options},
      own_rows_{std::move(own)},
      rows_{own_rows_ == nullptr ? *rows : *own_rows_} {
  options_.validate();
  if (!options_.now) {
    options_.now = [start = std::chrono::steady_clock::now()] {
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
  }
  publish(true);
}

Scheduler::~Scheduler() {
  stop();
  end_all();
}

std::size_t Scheduler::peak_bytes(const Plan& plan, std::size_t prompt, std::size_t max_new) const {
  return rows_.peak_bytes(plan, prompt, max_new);
}

std::uint64_t Scheduler::submit(Request request) {
  {
    const std::lock_guard lock{mutex_};
    if (stopped_) throw Stopping("the server is stopping");
  }
  require(request.plan != nullptr && request.plan->shape() == model_.shape(),
          "server: the plan is not for this model");
  require<ShapeError>(!request.prompt.empty(), "the prompt has no token, must have at least 1");
  require(request.max_new > 0, "max_tokens is 0, must be at least 1");
  const std::size_t tokens = request.prompt.size() + request.max_new;
  const std::size_t context = model_.context();
  require<CapacityError>(context == 0 || (request.prompt.size() < context && tokens <= context + 1),
                         "the prompt's ", request.prompt.size(), " tokens and ", request.max_new,
                         " new ones are more than the ", context,
                         " tokens that the model was trained for; shorten the prompt, or ask for fewer");
  const std::size_t peak = peak_bytes(*request.plan, request.prompt.size(), request.max_new);
  require<CapacityError>(peak <= options_.memory, "the prompt's ", request.prompt.size(), " tokens and ",
                         request.max_new, " new ones take up to ", peak, " bytes under the plan ",
                         request.plan_name, ", the server has ", options_.memory,
                         "; shorten them, or choose another kv_plan");
  require(std::ranges::is_sorted(request.marks), "server: marks must ascend");
  const tools::PlanNeeds needs = tools::needs_of(*request.plan);
  reference::Sampler sampler{request.sampler};
  const double time = now();

  const std::lock_guard lock{mutex_};
  if (stopped_) throw Stopping("the server is stopping");
  if (queued_ >= options_.max_waiting + options_.max_running) {
    ++refused_;
    throw QueueFull(message(queued_, " requests run or wait, no more are taken; try again later"));
  }
  const std::uint64_t id = next_id_++;
  inbox_.push_back(
      std::make_unique<Sequence>(Sequence{id, std::move(request), needs, std::move(sampler), time, time}));
  ++queued_;
  arrived_.notify_one();
  return id;
}

void Scheduler::cancel(std::uint64_t id) {
  const std::lock_guard lock{mutex_};
  cancelled_.insert(id);
  arrived_.notify_one();
}

Snapshot Scheduler::snapshot() const {
  const std::lock_guard lock{mutex_};
  Snapshot copy = latest_;
  copy.counters.refused = refused_;
  return copy;
}

std::size_t Scheduler::run() {
  for (;;) {
    if (step()) continue;
    std::unique_lock lock{mutex_};
    if (stopped_) break;
    if (inbox_.empty() && cancelled_.empty()) {
      arrived_.wait_for(lock, std::chrono::milliseconds{waiting_.empty() ? 1000 : 20});
    }
  }
  const std::size_t ended = end_all();
  tell_news();
  return ended;
}

std::size_t Scheduler::end_all() {
  take_inbox();
  const std::size_t count = running_.size() + waiting_.size();
  for (auto& sequence : running_) end(*sequence, FinishReason::cancelled);
  for (auto& sequence : waiting_) end(*sequence, FinishReason::cancelled);
  running_.clear();
  waiting_.clear();
  return count;
}

void Scheduler::tell_news() {
  for (const std::string& line : std::exchange(news_, {})) options_.log(line);
}

void Scheduler::stop() {
  const std::lock_guard lock{mutex_};
  stopped_ = true;
  arrived_.notify_all();
}

bool Scheduler::step() {
  {
    const std::lock_guard lock{mutex_};
    if (stopped_) return false;
  }
  rows_.tick();
  take_inbox();
  admit();
  rows_.make_room();
  const bool works = !running_.empty();
  if (works) read_and_write();
  std::erase_if(running_, [](const auto& sequence) { return sequence->is_over; });
  publish(!works || !news_.empty());
  tell_news();
  return works;
}

// New requests join the queue, and those whose clients have gone leave.
void Scheduler::take_inbox() {
  std::vector<std::unique_ptr<Sequence>> arrivals;
  std::unordered_set<std::uint64_t> gone;
  {
    const std::lock_guard lock{mutex_};
    arrivals = std::exchange(inbox_, {});
    gone = std::exchange(cancelled_, {});
  }
  counters_.requests += arrivals.size();
  for (auto& one : arrivals) {
    const Request& request = one->request;
    note("request ", one->id, " came: ", request.prompt.size(), " tokens, at most ", request.max_new,
         " new ones, plan ", request.plan_name);
    waiting_.push_back(std::move(one));
  }
  if (gone.empty()) return;
  for (auto& one : running_) {
    if (gone.contains(one->id)) end(*one, FinishReason::cancelled);
  }
  for (auto& one : waiting_) {
    if (gone.contains(one->id)) end(*one, FinishReason::cancelled);
  }
  std::erase_if(running_, [](const auto& one) { return one->is_over; });
  std::erase_if(waiting_, [](const auto& one) { return one->is_over; });
}

void Scheduler::end(Sequence& sequence, FinishReason reason, const std::string& error) {
  if (sequence.is_over) return;
  sequence.is_over = true;
  const Outcome outcome{reason,
                        sequence.request.prompt.size(),
                        sequence.cached,
                        sequence.written.size(),
                        rows_.end(sequence.id),
                        error};
  ++counters_.ended[static_cast<std::size_t>(reason)];
  note("request ", sequence.id, " ended: ", name_of(reason), " after ", outcome.new_tokens, " tokens",
       error.empty() ? "" : ": ", error);
  ++changes_;
  if (sequence.request.on_end) sequence.request.on_end(outcome);
}

void Scheduler::publish(bool at_once) {
  const double time = now();
  if (!at_once && time - published_ < 0.1) {
    const std::lock_guard lock{mutex_};
    queued_ = running_.size() + waiting_.size() + inbox_.size();
    return;
  }
  published_ = time;
  Snapshot now_is;
  const auto add = [&](const Sequence& one, Phase phase) {
    RequestView view{one.id, one.request.plan_name, phase};
    view.prompt_tokens = one.request.prompt.size();
    view.cached_tokens = one.cached;
    view.new_tokens = one.written.size();
    view.max_new = one.request.max_new;
    view.seconds = time - one.came;
    if (phase != Phase::waiting) {
      view.read_tokens = rows_.tokens(one.id);
      view.bytes = rows_.bytes(one.id);
      view.shared_bytes = rows_.shared_bytes(one.id);
    }
    now_is.requests.push_back(std::move(view));
  };
  for (const auto& one : running_) add(*one, one->reads() ? Phase::reading : Phase::writing);
  for (const auto& one : waiting_) add(*one, one->is_out ? Phase::moved_out : Phase::waiting);
  now_is.prefixes = prefixes().list();
  now_is.prefix_statistics = prefixes().statistics();
  now_is.counters = counters_;
  now_is.budget = options_.memory;
  const Room room = rows_.room();
  now_is.live_bytes = room.live;
  now_is.promised_bytes = room.promised;
  now_is.prefix_only_bytes = room.prefix_only;
  now_is.swapped_bytes = room.swapped;
  const std::lock_guard lock{mutex_};
  queued_ = running_.size() + waiting_.size() + inbox_.size();
  latest_ = std::move(now_is);
}

}  // namespace kvpolicy::serve
