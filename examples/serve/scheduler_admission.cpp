// SPDX-License-Identifier: Apache-2.0
//
// Who comes in: whether a sequence fits besides those that run, which prefixes go for it, and who waits in its place.
#include <algorithm>
#include <new>
#include <span>
#include <utility>

#include <kvpolicy/cache/admission.hpp>

#include "serve/scheduler.hpp"
#include "serve/sequence.hpp"

namespace kvpolicy::serve {

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

// Whether a running sequence that came earlier reads just now what this one begins with: soon it is there as a prefix.
// That sequence has a part in every few steps and is not moved out before it writes, and those that came earlier are not
// many, so nobody waits for ever.
bool Scheduler::is_being_read(const Sequence& sequence) const {
  const std::span<const int> prompt = sequence.request.prompt;
  return std::ranges::any_of(running_, [&](const auto& one) {
    if (!one->reads() || one->id > sequence.id) return false;
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
  if (options_.bring_prefixes_back) {
    options_.bring_prefixes_back(prefixes_, *sequence.request.plan);
    make_room();  // for what the running sequences were promised
  }
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
  // A prefix may hold rows that the text itself soon drops (a window has moved on), and with it the text would not even fit
  // where nobody else runs. Then the prefix goes, if that is enough.
  if (sequence.cached == 0 || !fits(sequence.promise.peak)) return false;
  sequence.cached = 0;
  make_room(sequence.promise.peak);
  try {
    sequence.cache.emplace(*sequence.request.plan, cache_options_);
  } catch (const std::bad_alloc&) {
    return false;
  }
  return true;
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

}  // namespace kvpolicy::serve
