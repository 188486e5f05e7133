// SPDX-License-Identifier: Apache-2.0
#include "serve/scheduler.hpp"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <new>
#include <span>
#include <utility>

#include <kvpolicy/cache/admission.hpp>

namespace kvpolicy::serve {

void SchedulerOptions::validate() const {
  require(memory > 0, "server: memory is 0 bytes, must be at least 1");
  require(step_tokens > 0, "server: step_tokens is 0, must be at least 1");
  require(max_running > 0, "server: max_running is 0, must be at least 1");
  require(swap_to != nullptr, "server: swap_to is null, must be a memory resource");
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

struct Scheduler::Sequence {
  std::uint64_t id;
  Request request;
  TextPromise promise;
  tools::PlanNeeds needs;
  reference::Sampler sampler;
  double came;                      // when the request arrived
  double waits_since;               // when it last joined the queue
  std::optional<Cache> cache = {};  // while it runs
  std::optional<Waiting> out = {};  // after it was moved out
  std::size_t bytes_back = 0;       // that it takes at most when it comes back
  std::vector<int> written = {};    // of which the cache has not read the last one
  std::size_t cached = 0;
  std::size_t slice = 0;                          // tokens written since it came in
  std::size_t tried_at_change = ~std::size_t{0};  // when it did not fit, Scheduler::changes_ was this
  double last_token = 0;
  bool is_over = false;

  [[nodiscard]] bool reads() const { return written.empty(); }
  // What the cache is to read next, of a prompt up to the next mark.
  [[nodiscard]] std::size_t part_end(std::size_t most, std::size_t every) const {
    const std::size_t from = cache->tokens();
    std::size_t end = std::min(request.prompt.size(), from + most);
    const auto mark = std::ranges::upper_bound(request.marks, from);
    if (mark != request.marks.end()) end = std::min(end, *mark);
    if (every > 0) end = std::min(end, from / every * every + every);
    return end;
  }
  [[nodiscard]] bool is_mark(std::size_t tokens, std::size_t every) const {
    if (tokens == 0 || tokens >= request.prompt.size()) return false;
    return std::ranges::binary_search(request.marks, tokens) || (every > 0 && tokens % every == 0);
  }
  // The last mark of the prompt that is not beyond `tokens`; 0 if there is none.
  [[nodiscard]] std::size_t last_mark(std::size_t tokens, std::size_t every) const {
    tokens = std::min(tokens, request.prompt.size() - 1);
    const auto after = std::ranges::upper_bound(request.marks, tokens);
    const std::size_t named = after == request.marks.begin() ? 0 : *std::prev(after);
    return std::max(named, every > 0 ? tokens / every * every : 0);
  }
};

Scheduler::Scheduler(ServedModel& model, const SchedulerOptions& options)
    : model_{model},
      options_{options},
      memory_{options.memory},
      swap_memory_{options.swap_memory, options.swap_to},
      // Each page by itself: the budget is counted in bytes that are in use, and none lie idle.
      pool_{&memory_, {.max_slab_bytes = 0}},
      swap_pool_{&swap_memory_, {.max_slab_bytes = 0}},
      cache_options_{.page_rows = options.page_rows, .memory = &memory_, .pool = &pool_},
      prefixes_{cache_options_} {
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
  take_inbox();
  for (auto& sequence : running_) end(*sequence, FinishReason::cancelled);
  for (auto& sequence : waiting_) end(*sequence, FinishReason::cancelled);
}

std::uint64_t Scheduler::submit(Request request) {
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
  const TextPromise promise = promise_of(*request.plan, tokens, cache_options_, request.prompt.size());
  require<CapacityError>(promise.peak <= options_.memory, "the prompt's ", request.prompt.size(),
                         " tokens and ", request.max_new, " new ones take up to ", promise.peak,
                         " bytes under the plan ", request.plan_name, ", the server has ", options_.memory,
                         "; shorten them, or choose another kv_plan");
  require(std::ranges::is_sorted(request.marks), "server: marks must ascend");
  const tools::PlanNeeds needs = tools::needs_of(*request.plan);
  reference::Sampler sampler{request.sampler};
  const double time = now();

  const std::lock_guard lock{mutex_};
  if (stopped_) throw QueueFull("the server is shutting down");
  if (queued_ >= options_.max_waiting) {
    ++refused_;
    throw QueueFull(message(queued_, " requests are waiting, no more are taken; try again later"));
  }
  const std::uint64_t id = next_id_++;
  inbox_.push_back(std::make_unique<Sequence>(
      Sequence{id, std::move(request), promise, needs, std::move(sampler), time, time}));
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

void Scheduler::run() {
  for (;;) {
    if (step()) continue;
    std::unique_lock lock{mutex_};
    if (stopped_) return;
    if (inbox_.empty() && cancelled_.empty()) {
      arrived_.wait_for(lock, std::chrono::milliseconds{waiting_.empty() ? 1000 : 20});
    }
  }
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
  take_inbox();
  admit();
  make_room();
  const bool works = !running_.empty();
  if (works) read_and_write();
  std::erase_if(running_, [](const auto& sequence) { return sequence->is_over; });
  publish(!works);
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
  for (auto& one : arrivals) waiting_.push_back(std::move(one));
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
                        sequence.cache ? sequence.cache->bytes() : 0,
                        error};
  sequence.cache.reset();
  sequence.out.reset();
  ++counters_.ended[static_cast<std::size_t>(reason)];
  ++changes_;
  if (sequence.request.on_end) sequence.request.on_end(outcome);
}

// ---- who comes in

std::size_t Scheduler::growth() const {
  std::size_t total = 0;
  for (const auto& one : running_) {
    if (one->cache) total += growth_of(*one->cache, one->promise);
  }
  return total;
}

// Whether `more` bytes fit besides what the running sequences hold and may take; prefixes go for them.
bool Scheduler::fits(std::size_t more) const {
  const std::size_t needed =
      memory_.live_bytes() - std::min(memory_.live_bytes(), prefixes_.evictable_bytes()) + growth() + more;
  return needed <= options_.memory;
}

// Lets prefixes go until all that the running sequences may take, and `more`, is free.
void Scheduler::make_room(std::size_t more) {
  for (;;) {
    const std::size_t needed = memory_.live_bytes() + growth() + more;
    if (needed <= options_.memory || prefixes_.evict(needed - options_.memory) == 0) return;
  }
}

// Whether a running sequence reads just now what this one begins with: soon it is there as a prefix. That sequence has a
// part in every few steps and is not moved out before it writes, so nobody waits for ever.
bool Scheduler::is_being_read(const Sequence& sequence) const {
  const std::span<const int> prompt = sequence.request.prompt;
  return std::ranges::any_of(running_, [&](const auto& one) {
    if (!one->reads()) return false;
    const std::size_t read = one->cache->tokens();
    if (one->last_mark(prompt.size() - 1, options_.mark_every) <= read) return false;
    const auto& own = sequence.request.plan;
    if (one->request.plan != own && *one->request.plan != *own) return false;
    const std::span<const int> other = one->request.prompt;
    const auto common = std::ranges::mismatch(prompt.first(prompt.size() - 1), other).in1 - prompt.begin();
    return one->last_mark(static_cast<std::size_t>(common), options_.mark_every) > read;
  });
}

bool Scheduler::try_admit(Sequence& sequence) {
  const std::span<const int> prompt = sequence.request.prompt;
  const auto begin = [&] {
    auto found = prefixes_.find(*sequence.request.plan, prompt.first(prompt.size() - 1));
    sequence.cached = found ? found->tokens : 0;
    if (found) {
      sequence.cache.emplace(std::move(found->cache));
    } else {
      sequence.cache.emplace(*sequence.request.plan, cache_options_);
    }
  };
  try {
    begin();
  } catch (const std::bad_alloc&) {
    make_room(sequence.promise.peak);
    try {
      begin();
    } catch (const std::bad_alloc&) {
      return false;
    }
  }
  if (fits(growth_of(*sequence.cache, sequence.promise))) return true;
  sequence.cache.reset();
  return false;
}

bool Scheduler::bring_back(Sequence& sequence) {
  if (!fits(sequence.bytes_back)) return false;
  make_room(sequence.bytes_back);
  try {
    sequence.cache.emplace(sequence.out->swap_in());
  } catch (const std::bad_alloc&) {
    return false;
  }
  sequence.out.reset();
  ++counters_.moved_in;
  return true;
}

// The sequence that has written most since it came in waits for another one.
bool Scheduler::move_one_out() {
  if (options_.swap_memory == 0) return false;
  const auto victim =
      std::ranges::max_element(running_, {}, [&](const auto& one) { return one->reads() ? 0 : one->slice; });
  if (victim == running_.end() || (*victim)->reads() || (*victim)->slice < options_.slice) return false;
  Sequence& sequence = **victim;
  sequence.bytes_back = sequence.cache->bytes() + growth_of(*sequence.cache, sequence.promise);
  try {
    sequence.out.emplace(std::move(*sequence.cache), swap_pool_);
  } catch (const std::bad_alloc&) {
    return false;
  }
  sequence.cache.reset();
  sequence.slice = 0;
  sequence.waits_since = now();
  ++counters_.moved_out;
  ++changes_;
  waiting_.push_back(std::move(*victim));
  running_.erase(victim);
  return true;
}

void Scheduler::admit() {
  bool passed = false;  // somebody who came first did not fit
  for (auto next = waiting_.begin(); next != waiting_.end() && running_.size() < options_.max_running;) {
    Sequence& sequence = **next;
    if (!sequence.out && is_being_read(sequence)) {
      ++next;
      continue;
    }
    const auto try_it = [&](Sequence& one) {
      if (one.tried_at_change == changes_) return false;
      const bool fit = one.out ? bring_back(one) : try_admit(one);
      if (!fit) one.tried_at_change = changes_;
      return fit;
    };
    bool comes_in = try_it(sequence);
    const bool is_first = !passed;
    const bool is_impatient = now() - sequence.waits_since > options_.patience;
    if (!comes_in && is_first && is_impatient) {
      const auto place = next - waiting_.begin();
      while (!comes_in && move_one_out()) {
        comes_in = try_it(**(waiting_.begin() + place));
      }
      next = waiting_.begin() + place;
    }
    if (comes_in) {
      (*next)->slice = 0;
      running_.push_back(std::move(*next));
      next = waiting_.erase(next);
      make_room();
      continue;
    }
    // Nobody passes one who has waited for long.
    if (is_impatient) return;
    passed = true;
    ++next;
  }
}

// ---- a step

void Scheduler::read_and_write() {
  std::vector<StepCall> calls;
  std::vector<std::pair<Sequence*, std::size_t>> called;  // and how many tokens it reads
  const auto add = [&](Sequence& sequence, std::span<const int> tokens, bool wants_logits) {
    calls.push_back(
        {&*sequence.cache, tokens, wants_logits, sequence.needs.selected_reads && !sequence.reads()});
    called.emplace_back(&sequence, tokens.size());
  };
  for (auto& one : running_) {
    if (!one->reads()) add(*one, std::span<const int>{one->written}.last(1), true);
  }
  // Half of a step's tokens are for the prompt that came first, so that it is soon answered. In the other half
  // prompts take turns, so that a long one does not keep short ones waiting.
  std::size_t left = options_.step_tokens;
  const auto add_part = [&](Sequence& one, std::size_t most) {
    const std::size_t from = one.cache->tokens();
    const std::size_t end = one.part_end(most, options_.mark_every);
    add(one, std::span<const int>{one.request.prompt}.subspan(from, end - from),
        end == one.request.prompt.size());
    left -= end - from;
  };
  std::vector<Sequence*> readers;
  for (const auto& one : running_) {
    if (one->reads()) readers.push_back(one.get());
  }
  std::ranges::sort(readers, {}, &Sequence::id);
  if (readers.size() == 1) add_part(*readers.front(), left);
  if (readers.size() > 1) {
    add_part(*readers.front(), (left + 1) / 2);
    const std::size_t others = readers.size() - 1;
    for (std::size_t i = 0; i < others && left > 0; ++i)
      add_part(*readers[1 + next_reader_++ % others], left);
  }
  if (calls.empty()) return;
  ++counters_.steps;
  std::vector<reference::BatchedRead> results;
  try {
    results = model_.read(calls);
  } catch (const std::exception& error) {
    for (auto& [sequence, tokens] : called) end(*sequence, FinishReason::failed, error.what());
    return;
  }
  for (std::size_t i = 0; i < called.size(); ++i) {
    Sequence& sequence = *called[i].first;
    try {
      if (results[i].error != nullptr) std::rethrow_exception(results[i].error);
      take_result(sequence, called[i].second, results[i]);
    } catch (const std::bad_alloc&) {
      end(sequence, FinishReason::failed, "the server ran out of memory");
    } catch (const std::exception& error) {
      end(sequence, FinishReason::failed, error.what());
    }
  }
}

void Scheduler::take_result(Sequence& sequence, std::size_t tokens, const reference::BatchedRead& read) {
  if (sequence.reads()) {
    const std::size_t now_read = sequence.cache->tokens();
    counters_.prompt_tokens += tokens;
    if (sequence.is_mark(now_read, options_.mark_every)) keep_prefix(sequence, now_read);
    if (now_read < sequence.request.prompt.size()) return;
    counters_.cached_tokens += sequence.cached;
    if (sequence.needs.compress) {
      const std::size_t layers = model_.shape().layers;
      for (std::size_t layer = 0; layer < layers; ++layer) sequence.cache->compress(layer);
      ++changes_;
    }
  }
  write(sequence, sequence.sampler.next(read.logits));
}

void Scheduler::write(Sequence& sequence, int token) {
  const double time = now();
  if (sequence.reads()) {
    counters_.first_token_seconds += time - sequence.came;
    ++counters_.first_tokens;
  } else {
    counters_.between_seconds += time - sequence.last_token;
    ++counters_.betweens;
  }
  sequence.last_token = time;
  const bool is_end = model_.is_end(token);
  bool goes_on = !is_end;
  if (!is_end) {
    sequence.written.push_back(token);
    ++sequence.slice;
    ++counters_.new_tokens;
    goes_on = sequence.request.on_token(token);
  }
  if (goes_on && sequence.written.size() < sequence.request.max_new) return;
  if (!sequence.needs.compress) keep_prefix(sequence, sequence.cache->tokens());
  end(sequence, goes_on ? FinishReason::length : FinishReason::stop);
}

// A prefix is kept if there is room for what it takes of its own; others that are less recently used go for it.
void Scheduler::keep_prefix(Sequence& sequence, std::size_t tokens) {
  std::vector<int> text = sequence.request.prompt;
  text.insert(text.end(), sequence.written.begin(), sequence.written.end());
  text.resize(tokens);
  try {
    if (prefixes_.keep(*sequence.cache, text)) ++changes_;
  } catch (const std::bad_alloc&) {
    return;  // it would only have saved work
  }
  make_room();
}

void Scheduler::publish(bool at_once) {
  const double time = now();
  if (!at_once && time - published_ < 0.1) {
    const std::lock_guard lock{mutex_};
    queued_ = waiting_.size() + inbox_.size();
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
    if (one.cache) {
      view.read_tokens = one.cache->tokens();
      view.bytes = one.cache->bytes();
      view.shared_bytes = one.cache->shared_bytes();
    } else if (one.out) {
      view.read_tokens = one.out->tokens();
      view.bytes = one.out->bytes();
    }
    now_is.requests.push_back(std::move(view));
  };
  for (const auto& one : running_) add(*one, one->reads() ? Phase::reading : Phase::writing);
  for (const auto& one : waiting_) add(*one, one->out ? Phase::moved_out : Phase::waiting);
  now_is.prefixes = prefixes_.list();
  now_is.prefix_statistics = prefixes_.statistics();
  now_is.counters = counters_;
  now_is.budget = options_.memory;
  now_is.live_bytes = memory_.live_bytes();
  now_is.promised_bytes = growth();
  now_is.prefix_only_bytes = prefixes_.evictable_bytes();
  now_is.swapped_bytes = swap_memory_.live_bytes();
  const std::lock_guard lock{mutex_};
  queued_ = waiting_.size() + inbox_.size();
  latest_ = std::move(now_is);
}

}  // namespace kvpolicy::serve
