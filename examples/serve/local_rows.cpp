// SPDX-License-Identifier: Apache-2.0
#include "serve/local_rows.hpp"

#include <algorithm>
#include <array>
#include <new>
#include <utility>

#include <kvpolicy/cache/saved_cache.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/state/archive.hpp>

namespace kvpolicy::serve {

void RowsOptions::validate() const {
  require(memory > 0, "server: memory is 0 bytes, must be at least 1");
  require(swap_to != nullptr, "server: swap_to is null, must be a memory resource");
}

LocalRows::LocalRows(ServedModel& model, const RowsOptions& options, reference::Communicator* ranks)
    : model_{model},
      options_{options},
      ranks_{ranks},
      memory_{options.memory},
      swap_memory_{options.swap_memory, options.swap_to},
      // Each page by itself: the budget is counted in bytes that are in use, and none lie idle.
      pool_{&memory_, {.max_slab_bytes = 0}},
      swap_pool_{&swap_memory_, {.max_slab_bytes = 0}},
      cache_options_{.page_rows = options.page_rows,
                     .memory = &memory_,
                     .pool = &pool_,
                     .value_outputs = model.value_outputs()},
      prefixes_{cache_options_} {
  options_.validate();
}

std::size_t LocalRows::peak_bytes(const Plan& plan, std::size_t prompt, std::size_t max_new) const {
  return plan.peak_memory(prompt + max_new, cache_options_, prompt);
}

bool LocalRows::everywhere(bool own) const {
  if (ranks_ == nullptr) return own;
  std::vector<bool> fails{!own};
  any_of_ranks(*ranks_, fails);
  return !fails.front();
}

LocalRows::Text& LocalRows::known(std::uint64_t id) {
  return const_cast<Text&>(std::as_const(*this).known(id));
}
const LocalRows::Text& LocalRows::known(std::uint64_t id) const {
  const auto found = texts_.find(id);
  require(found != texts_.end(), "server: there is no text ", id);
  return found->second;
}

std::size_t LocalRows::tokens(std::uint64_t id) const { return known(id).read.size(); }
std::size_t LocalRows::bytes(std::uint64_t id) const {
  const Text& text = known(id);
  return text.cache ? text.cache->bytes() : text.out ? text.out->bytes() : 0;
}
std::size_t LocalRows::shared_bytes(std::uint64_t id) const {
  const Text& text = known(id);
  return text.cache ? text.cache->shared_bytes() : 0;
}

std::size_t LocalRows::growth() const {
  std::size_t total = 0;
  for (const auto& [id, text] : texts_) {
    if (text.cache) total += growth_of(*text.cache, text.promise);
  }
  return total;
}

// Whether `more` bytes fit besides what the running texts hold and may take; prefixes go for them.
bool LocalRows::fits(std::size_t more) const {
  const std::size_t live = memory_.live_bytes();
  const std::size_t needed = live - std::min(live, prefixes_.evictable_bytes()) + growth() + more;
  return everywhere(needed <= options_.memory);
}

// Lets prefixes go until all that the running texts may take, and `more`, is free.
void LocalRows::make_room(std::size_t more) {
  for (;;) {
    const std::size_t needed = memory_.live_bytes() + growth() + more;
    if (everywhere(needed <= options_.memory)) return;
    if (!evict(needed - std::min(needed, options_.memory))) return;
  }
}

// Lets prefixes go, one that all ranks have if there are several. False if none would free anything.
bool LocalRows::evict(std::size_t bytes) {
  if (ranks_ == nullptr) return prefixes_.evict(bytes) > 0;
  const std::vector<PrefixInfo> all = prefixes_.list();  // on all ranks in the same order
  std::vector<bool> frees;
  for (const PrefixInfo& one : all) frees.push_back(one.freed_bytes > 0);
  any_of_ranks(*ranks_, frees);
  std::size_t victim = all.size();
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (frees[i] && (victim == all.size() || all[i].last_use < all[victim].last_use)) victim = i;
  }
  // Ranks find prefixes by different ways, so which was used last is what rank 0 says.
  victim = gather_counts(*ranks_, std::array{victim}).front();
  if (victim == all.size()) return false;
  static_cast<void>(prefixes_.evict(all[victim]));
  return true;
}

// Gives a text a cache that has read the longest prefix of `tokens` that all ranks know. False without memory for it.
bool LocalRows::begin_cache(Text& text, std::span<const int> tokens, std::size_t& cached) {
  const auto try_it = [&](std::span<const int> most) {
    text.cache.reset();
    cached = 0;
    bool has_memory = true;
    try {
      auto found = most.empty() ? std::nullopt : prefixes_.find(*text.plan, most);
      cached = found ? found->tokens : 0;
      if (found) {
        text.cache.emplace(std::move(found->cache));
      } else {
        text.cache.emplace(*text.plan, cache_options_);
      }
    } catch (const std::bad_alloc&) {
      has_memory = false;
    }
    if (everywhere(has_memory)) return true;
    text.cache.reset();
    return false;
  };
  if (!try_it(tokens)) return false;
  if (ranks_ == nullptr) return true;
  // A rank whose heads keep every row goes on from any page, one with a window from a mark: all do from the shortest.
  const auto of_ranks = gather_counts(*ranks_, std::array{cached});
  const std::size_t least = std::ranges::min(of_ranks);
  if (std::ranges::max(of_ranks) == least) return true;
  if (!try_it(tokens.first(least))) return false;
  return everywhere(cached == least) || try_it({});
}

// Prefixes are known by the part of a plan that a rank has. Two plans that differ on one rank alone have the same part
// on the others, whose prefixes would not be those of that rank: the plan that comes second has none.
bool LocalRows::may_have_prefixes(const Plan& whole, const Plan& own) {
  if (ranks_ == nullptr) return true;
  const std::uint64_t of_whole = SavedCache::digest_of(whole);
  const auto known = may_have_prefixes_.find(of_whole);
  if (known != may_have_prefixes_.end()) return known->second;
  const auto owner = plan_of_part_.try_emplace(SavedCache::digest_of(own), of_whole).first;
  return may_have_prefixes_[of_whole] = everywhere(owner->second == of_whole);
}

void LocalRows::bring_prefixes_back(const Plan& plan) {
  std::vector<bool> brought{options_.bring_prefixes_back(prefixes_, plan)};
  if (ranks_ != nullptr) any_of_ranks(*ranks_, brought);
  if (!brought.front()) return;
  if (ranks_ != nullptr) {
    // A crash while files were written may have left one rank's new ones beside another's old ones.
    const auto of_ranks = gather_counts(*ranks_, std::array{std::size_t{digest(prefixes_.texts(plan))}});
    if (std::ranges::max(of_ranks) != std::ranges::min(of_ranks)) {
      prefixes_.clear(plan);
      options_.tell("not loaded: the ranks' files have different prefixes");
    }
  }
  make_room();  // for what the running texts were promised
}

void LocalRows::tick() {
  if (options_.take_prefixes_in && options_.take_prefixes_in(prefixes_)) make_room();
}

std::optional<std::size_t> LocalRows::begin(const NewText& given) {
  Text made;
  made.plan = model_.own_plan(given.plan);
  made.needs = tools::needs_of(*made.plan);
  made.promise =
      promise_of(*made.plan, given.prompt.size() + given.max_new, cache_options_, given.prompt.size());
  made.has_prefixes = may_have_prefixes(*given.plan, *made.plan);
  Text& text = texts_.insert_or_assign(given.id, std::move(made)).first->second;
  const auto refuse = [&] {
    texts_.erase(given.id);
    return std::nullopt;
  };
  if (options_.bring_prefixes_back && text.has_prefixes) bring_prefixes_back(*text.plan);
  const std::span<const int> findable =
      text.has_prefixes ? given.prompt.first(given.prompt.size() - 1) : std::span<const int>{};
  std::size_t cached = 0;
  if (!begin_cache(text, findable, cached)) {
    make_room(text.promise.peak);
    if (!begin_cache(text, findable, cached)) return refuse();
  }
  if (fits(0)) {
    const auto known_already = given.prompt.first(cached);
    text.read.assign(known_already.begin(), known_already.end());
    return cached;
  }
  text.cache.reset();
  // A prefix may hold rows that the text itself soon drops (a window has moved on), and with it the text would not even
  // fit where nobody else runs. Then the prefix goes, if that is enough.
  if (cached == 0 || !fits(text.promise.peak)) return refuse();
  make_room(text.promise.peak);
  if (!begin_cache(text, {}, cached)) return refuse();
  return 0;
}

// What SwappedCache throws leaves the cache as it was.
bool LocalRows::move_away(Text& text) {
  try {
    text.out.emplace(std::move(*text.cache), swap_pool_);
    text.cache.reset();
    return true;
  } catch (const std::bad_alloc&) {
  } catch (const StorageError& error) {  // a full disk
    options_.tell(message("not moved out: ", error.what()));
  }
  text.out.reset();
  return false;
}

bool LocalRows::move_out(std::uint64_t id) {
  Text& text = known(id);
  // First, because a text that was moved out in vain takes more room when it comes back: it shares no page then.
  if (!everywhere(text.cache->bytes() <= swap_memory_.free_bytes())) return false;
  text.bytes_back = text.cache->bytes() + growth_of(*text.cache, text.promise);
  if (everywhere(move_away(text))) return true;
  make_room(text.out ? text.bytes_back : 0);
  const bool is_back = !text.out || move_in(text);
  if (!everywhere(is_back)) throw StorageError("rows that were moved out in vain cannot be brought back");
  return false;
}

// What SwappedCache throws leaves it as it was.
bool LocalRows::move_in(Text& text) {
  try {
    text.cache.emplace(text.out->swap_in());
    text.out.reset();
    return true;
  } catch (const std::bad_alloc&) {
  } catch (const StorageError& error) {
    options_.tell(message("not brought back: ", error.what()));
  }
  text.cache.reset();
  return false;
}

bool LocalRows::bring_back(std::uint64_t id) {
  Text& text = known(id);
  if (!fits(text.bytes_back)) return false;
  make_room(text.bytes_back);
  bool is_readable = true;
  try {
    text.cache.emplace(text.out->swap_in());
    text.out.reset();
  } catch (const std::bad_alloc&) {
    text.cache.reset();
  } catch (const StorageError& error) {
    text.cache.reset();
    is_readable = false;
    options_.tell(message("not brought back: ", error.what()));
  }
  if (everywhere(text.cache.has_value())) return true;
  if (!everywhere(is_readable)) throw StorageError("rows that were moved out cannot be read");
  const bool is_out = !text.cache || move_away(text);
  if (!everywhere(is_out))
    throw StorageError("rows that were brought back in vain cannot be moved out again");
  return false;
}

std::size_t LocalRows::end(std::uint64_t id) {
  const auto found = texts_.find(id);
  if (found == texts_.end()) return 0;
  std::size_t bytes = found->second.cache ? found->second.cache->bytes() : 0;
  texts_.erase(found);
  if (ranks_ == nullptr) return bytes;
  const auto of_ranks = gather_counts(*ranks_, std::array{bytes});
  bytes = 0;
  for (const std::size_t one : of_ranks) bytes += one;
  return bytes;
}

std::vector<reference::BatchedRead> LocalRows::read(std::span<const TextStep> steps) {
  std::vector<StepCall> calls;
  calls.reserve(steps.size());
  for (const TextStep& step : steps)
    calls.push_back({&*known(step.id).cache, step.tokens, step.wants_logits, step.selects});
  auto results = model_.read(calls);
  for (const TextStep& step : steps) {
    std::vector<int>& read = known(step.id).read;
    read.insert(read.end(), step.tokens.begin(), step.tokens.end());
  }
  return results;
}

void LocalRows::compress(std::uint64_t id) {
  Text& text = known(id);
  const ModelShape& shape = text.plan->shape();
  bool has_memory = true;
  try {
    // One layer at a time takes less memory on the way.
    const std::size_t layers = text.needs.in_model ? 0 : shape.layers;
    for (std::size_t layer = 0; layer < layers; ++layer) {
      if (shape.layer(layer).kv_heads > 0) text.cache->compress(layer);
    }
    if (text.needs.in_model) text.cache->compress();
  } catch (const std::bad_alloc&) {
    has_memory = false;
  }
  if (!everywhere(has_memory)) throw std::bad_alloc{};
}

bool LocalRows::keep(std::uint64_t id) {
  const Text& text = known(id);
  if (!text.has_prefixes) return false;
  bool is_new = false;
  bool has_memory = true;
  try {
    is_new = prefixes_.keep(*text.cache, text.read);
  } catch (const std::bad_alloc&) {
    has_memory = false;  // it would only have saved work
  }
  if (!everywhere(has_memory)) {
    if (is_new) {
      const std::vector<PrefixInfo> all = prefixes_.list();
      static_cast<void>(prefixes_.evict(*std::ranges::max_element(all, {}, &PrefixInfo::last_use)));
    }
    return false;
  }
  make_room();
  return is_new;
}

std::size_t LocalRows::save() { return options_.save_prefixes ? options_.save_prefixes(prefixes_) : 0; }

Room LocalRows::room() {
  const Room own{memory_.live_bytes(), growth(), prefixes_.evictable_bytes(), swap_memory_.live_bytes()};
  if (ranks_ == nullptr) return own;
  const auto all = gather_counts(*ranks_, std::array{own.live, own.promised, own.prefix_only, own.swapped});
  Room fullest;
  std::size_t most = 0;
  for (std::size_t at = 0; at < all.size(); at += 4) {
    const Room one{all[at], all[at + 1], all[at + 2], all[at + 3]};
    const std::size_t taken = one.live - std::min(one.live, one.prefix_only) + one.promised;
    if (at == 0 || taken > most) fullest = one;
    most = std::max(most, taken);
  }
  return fullest;
}

}  // namespace kvpolicy::serve
