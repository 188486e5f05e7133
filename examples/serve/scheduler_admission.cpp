// SPDX-License-Identifier: Apache-2.0
//
// Who comes in, and who waits in its place.
#include <algorithm>
#include <span>
#include <utility>

#include <kvpolicy/core/error.hpp>

#include "serve/scheduler.hpp"
#include "serve/sequence.hpp"

namespace kvpolicy::serve {

// Whether a running sequence that came earlier reads just now what this one begins with: soon it is there as a prefix.
// That sequence has a part in every few steps and is not moved out before it writes, and those that came earlier are
// not many, so nobody waits for ever.
bool Scheduler::is_being_read(const Sequence& sequence) const {
  const std::span<const int> prompt = sequence.request.prompt;
  return std::ranges::any_of(running_, [&](const auto& one) {
    if (!one->reads() || one->id > sequence.id) return false;
    const std::size_t read = rows_.tokens(one->id);
    if (one->last_mark(prompt.size() - 1, options_.mark_every) <= read) return false;
    const auto& own = sequence.request.plan;
    if (one->request.plan != own && *one->request.plan != *own) return false;
    const std::span<const int> other = one->request.prompt;
    const auto common = std::ranges::mismatch(prompt.first(prompt.size() - 1), other).in1 - prompt.begin();
    return one->last_mark(static_cast<std::size_t>(common), options_.mark_every) > read;
  });
}

bool Scheduler::try_admit(Sequence& sequence) {
  const Request& request = sequence.request;
  const auto cached = rows_.begin({sequence.id, request.plan, request.prompt, request.max_new});
  sequence.cached = cached.value_or(0);
  return cached.has_value();
}

bool Scheduler::bring_back(Sequence& sequence) {
  try {
    if (!rows_.bring_back(sequence.id)) return false;
  } catch (const StorageError& error) {
    end(sequence, FinishReason::failed, error.what());
    return false;
  }
  sequence.is_out = false;
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
  try {
    if (!rows_.move_out(sequence.id)) return false;
  } catch (const StorageError& error) {
    end(sequence, FinishReason::failed, error.what());
    running_.erase(victim);
    return true;  // it makes room, too
  }
  note("request ", sequence.id, " is moved out");
  sequence.is_out = true;
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
    if (!sequence.is_out && is_being_read(sequence)) {
      ++next;
      continue;
    }
    const auto try_it = [&](Sequence& one) {
      if (one.is_over || one.tried_at_change == changes_) return false;
      const bool fit = one.is_out ? bring_back(one) : try_admit(one);
      if (!fit) one.tried_at_change = changes_;
      return fit;
    };
    bool comes_in = try_it(sequence);
    const bool is_first = !passed;
    const bool is_impatient = now() - sequence.waits_since > options_.patience;
    if (!comes_in && is_first && is_impatient) {
      const auto place = next - waiting_.begin();
      while (!comes_in && !sequence.is_over && move_one_out()) {
        comes_in = try_it(sequence);
      }
      next = waiting_.begin() + place;
    }
    if (sequence.is_over) {
      next = waiting_.erase(next);
      continue;
    }
    if (comes_in) {
      (*next)->slice = 0;
      note("request ", (*next)->id, (*next)->written.empty() ? " begins" : " goes on");
      running_.push_back(std::move(*next));
      next = waiting_.erase(next);
      rows_.make_room();
      continue;
    }
    // Nobody passes one who has waited for long.
    if (is_impatient) return;
    passed = true;
    ++next;
  }
}

}  // namespace kvpolicy::serve
