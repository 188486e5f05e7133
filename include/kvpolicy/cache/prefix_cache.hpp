// SPDX-License-Identifier: Apache-2.0
//
// A prefix cache: beginnings that many texts share (a system prompt, the turns of a chat, a document) are read
// once, and every later text with the same beginning continues from a fork, whatever the policies of its heads.
//
// A prefix ends at a mark: a text length at which the engine stopped reading and called `keep`. What a head drops,
// quantises or chooses depends on the length of the text, so a fork from any other length would lack rows of a
// window or exact rows of a residual. Heads that keep every row unchanged need no mark: if all heads of a plan
// do, a text is found up to the last page boundary that it shares with a kept text.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <span>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/cache/prefix_tree.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/try.hpp>
#include <kvpolicy/storage/page_visitor.hpp>

namespace kvpolicy {

/// Settings of a PrefixCache.
struct PrefixOptions {
  /// The most bytes that all prefixes hold together. A page counts once, however many prefixes hold it, and also if
  /// a running sequence holds it. 0: no limit; the engine calls `evict`.
  std::size_t max_bytes = 0;
};

/// Counters of a PrefixCache since its construction, and what it holds now.
struct PrefixStatistics {
  std::size_t lookups = 0;       ///< calls of `find`
  std::size_t hits = 0;          ///< calls of `find` that found a prefix
  std::size_t asked_tokens = 0;  ///< tokens of all texts that were looked up
  std::size_t found_tokens = 0;  ///< tokens of these texts that a found prefix holds
  std::size_t kept = 0;          ///< prefixes that were put in
  std::size_t evicted = 0;       ///< prefixes that were removed
  std::size_t prefixes = 0;      ///< prefixes that are in the cache now
  std::size_t bytes = 0;         ///< bytes that they hold now, each page counted once
};

/// A description of one prefix, for displays and logs.
struct PrefixInfo {
  std::size_t plan = 0;         ///< a number for each plan, in the order in which they came
  std::size_t tokens = 0;       ///< its length
  std::size_t parent = 0;       ///< length of the longest prefix that it begins with, 0 if there is none
  std::size_t bytes = 0;        ///< bytes that it holds, shared pages included
  std::size_t freed_bytes = 0;  ///< bytes that its removal would free
  std::size_t hits = 0;         ///< texts that continued from it
  std::size_t last_use = 0;     ///< a number that is higher for later uses
};

namespace detail {

/// A page of some pool, and its address, which no two pages in use have in common.
struct HeldPage {
  const PagePool* pool;
  PageId id;
  const std::byte* address;
  std::size_t bytes;
};

/// How many prefixes hold each page. Not synchronised.
class PageTally {
 public:
  /// @throws std::bad_alloc, with the tally as it was
  void add(std::span<const HeldPage> pages) {
    std::size_t added = 0;
    KVPOLICY_TRY {
      for (; added < pages.size(); ++added) {
        Held& held = holders_.try_emplace(pages[added].address, Held{pages[added], 0}).first->second;
        if (++held.holders == 1) bytes_ += pages[added].bytes;
      }
    }
    KVPOLICY_CATCH_ALL {
      remove(pages.first(added));
      KVPOLICY_RETHROW;
    }
  }
  void remove(std::span<const HeldPage> pages) noexcept {
    for (const HeldPage& page : pages) {
      const auto entry = holders_.find(page.address);
      if (--entry->second.holders > 0) continue;
      bytes_ -= page.bytes;
      holders_.erase(entry);
    }
  }
  /// Bytes of all pages; each page counts once.
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  /// Bytes of the pages that no owner outside of the tally holds.
  [[nodiscard]] std::size_t unshared_bytes() const {
    std::size_t total = 0;
    for (const auto& [address, held] : holders_) {
      if (held.page.pool->owners(held.page.id) == held.holders) total += held.page.bytes;
    }
    return total;
  }

 private:
  struct Held {
    HeldPage page;
    std::size_t holders;
  };
  std::unordered_map<const std::byte*, Held> holders_;
  std::size_t bytes_ = 0;
};

}  // namespace detail

class SavedPrefixes;

/// Maps the tokens of a text and its plan to caches that have read a prefix of it. Caches must be made with the same
/// options as the PrefixCache; with `CacheOptions::pool` all pages are in one pool.
///
/// A cache that `find` returns continues bit for bit like a cache that has read the same tokens and stopped at the
/// same marks. It shares its full pages with the prefix. A prefix takes the memory of a fork: a head that keeps every
/// row holds one open page beyond the pages that longer prefixes hold anyway, a head with a window holds its rows.
///
/// Any number of threads may call `find` and the other const functions while a thread calls `keep`, `evict` or
/// `clear`. The cache that was found belongs to the caller. The memory resources of the options must be thread-safe
/// then.
template <Element E, AttentionEngine Engine = ScalarEngine>
class PrefixCache {
 public:
  using Cache = KvCache<E, Engine>;
  using Plan = HeadPlan<E>;
  /// A token's number in the vocabulary.
  using Token = std::int32_t;

  /// A fork, and how many tokens of the text it has read.
  struct Found {
    Cache cache;
    std::size_t tokens = 0;
  };

  /// @throws ConfigError for options that do not work
  explicit PrefixCache(const CacheOptions& cache_options = {}, const PrefixOptions& options = {})
      : cache_options_{cache_options}, options_{options} {
    cache_options_.validate();
  }

  [[nodiscard]] const CacheOptions& cache_options() const { return cache_options_; }

  /// A fork of the longest kept prefix of `tokens` under this plan. The model must read the last token of a prompt to
  /// get its logits, so pass the prompt without it.
  /// @throws std::bad_alloc
  [[nodiscard]] std::optional<Found> find(const Plan& plan, std::span<const Token> tokens) const {
    Source source;
    {
      const std::shared_lock lock{mutex_};
      source = find_source(plan, tokens);
    }
    lookups_.fetch_add(1, std::memory_order_relaxed);
    asked_tokens_.fetch_add(tokens.size(), std::memory_order_relaxed);
    std::optional<Found> found;
    if (source.beyond != nullptr) found = fork_until(*source.beyond, source.boundary, *source.texts);
    if (!found && source.longest != nullptr) {
      Cache fork = source.longest->fork();
      const std::size_t length = fork.tokens();
      found.emplace(Found{std::move(fork), length});
    }
    if (!found) return found;
    resize_tails(found->cache, cache_options_.tail_rows());
    hits_.fetch_add(1, std::memory_order_relaxed);
    found_tokens_.fetch_add(found->tokens, std::memory_order_relaxed);
    return found;
  }

  /// Keeps a fork of `cache`, which has read exactly `tokens`: this text length is a mark. Returns whether the prefix
  /// is new and there is room for it; less recently used prefixes are removed first. Heads that rank rows by the latest
  /// queries drop rows that this one text did not ask for, so keep the prefix before `compress`. A head that compresses
  /// by itself (compress_every) does so at fixed text lengths and may be kept at any time.
  /// @throws ConfigError if the cache has other options or a head has been compressed for one question, or a policy
  /// cannot be saved; ShapeError if the cache has read another number of tokens; RollbackError inside a step or while a
  /// tree is pending; std::bad_alloc. Nothing changed then.
  bool keep(const Cache& cache, std::span<const Token> tokens) {
    check(cache, tokens);
    if (touch(cache.plan(), tokens)) return false;
    Cache fork = cache.fork();
    return adopt(std::move(fork), tokens);
  }

  /// Removes prefixes, the least recently used first, until `bytes` bytes are freed. A prefix whose pages all have
  /// other owners stays, because its removal frees nothing. Returns how many bytes were freed.
  std::size_t evict(std::size_t bytes) {
    const std::unique_lock lock{mutex_};
    std::size_t freed = 0;
    while (freed < bytes) {
      std::size_t own = 0;
      const auto victim = least_recent([&](const Entry& entry) {
        own = entry.freed_bytes();
        return own > 0;
      });
      if (victim == entries_.end()) break;
      remove(victim);
      freed += own;
    }
    return freed;
  }
  /// Removes one prefix, as `list` describes it, and returns how many bytes were freed; 0 if it was used or removed
  /// since.
  std::size_t evict(const PrefixInfo& prefix) {
    const std::unique_lock lock{mutex_};
    const auto found = std::ranges::find_if(entries_, [&](const Held& held) {
      return held.texts->number == prefix.plan && held.node->value->last_use.load() == prefix.last_use;
    });
    if (found == entries_.end()) return 0;
    const std::size_t freed = found->node->value->freed_bytes();
    remove(found);
    return freed;
  }
  /// How many bytes are freed if all prefixes are removed. O(pages).
  [[nodiscard]] std::size_t evictable_bytes() const {
    const std::shared_lock lock{mutex_};
    return tally_.unshared_bytes() + other_bytes_;
  }
  /// Removes all prefixes.
  void clear() {
    const std::unique_lock lock{mutex_};
    while (!entries_.empty()) remove(entries_.end() - 1);
  }
  /// Removes those of one plan.
  void clear(const Plan& plan) {
    const std::unique_lock lock{mutex_};
    const auto is_of_plan = [&](const Held& held) { return held.texts->plan == plan; };
    for (auto next = entries_.begin(); next != entries_.end();) {
      next = std::ranges::find_if(next, entries_.end(), is_of_plan);
      if (next == entries_.end()) return;
      const auto place = next - entries_.begin();
      remove(next);
      next = entries_.begin() + place;
    }
  }

  [[nodiscard]] PrefixStatistics statistics() const {
    const std::shared_lock lock{mutex_};
    const auto read = [](const std::atomic<std::size_t>& count) {
      return count.load(std::memory_order_relaxed);
    };
    return {read(lookups_), read(hits_), read(asked_tokens_), read(found_tokens_),
            kept_,          evicted_,    entries_.size(),     bytes()};
  }
  /// The tokens of each prefix of a plan, in the order of `list`. @throws std::bad_alloc
  [[nodiscard]] std::vector<std::vector<Token>> texts(const Plan& plan) const {
    const std::shared_lock lock{mutex_};
    std::vector<std::vector<Token>> all;
    if (const auto own = texts_of(plan); own != nullptr)
      own->tree.for_each([&](const Node& node) { all.push_back(node.tokens()); });
    return all;
  }
  /// All prefixes; texts that begin alike are next to each other.
  /// @throws std::bad_alloc
  [[nodiscard]] std::vector<PrefixInfo> list() const {
    const std::shared_lock lock{mutex_};
    std::vector<PrefixInfo> all;
    for (const auto& texts : texts_) {
      texts->tree.for_each([&](const Node& node) {
        const Entry& entry = *node.value;
        const Node* parent = node.above();
        all.push_back({texts->number, node.depth(), parent == nullptr ? 0 : parent->depth(),
                       entry.cache->bytes(), entry.freed_bytes(), entry.hits.load(std::memory_order_relaxed),
                       entry.last_use.load(std::memory_order_relaxed)});
      });
    }
    return all;
  }

 private:
  friend class SavedPrefixes;

  struct Entry {
    std::shared_ptr<const Cache> cache;
    std::vector<detail::HeldPage> pages;
    std::size_t other_bytes;  // besides pages
    mutable std::atomic<std::size_t> last_use;
    mutable std::atomic<std::size_t> hits{0};

    Entry(Cache&& own, std::vector<detail::HeldPage>&& held, std::size_t other, std::size_t now)
        : cache{std::make_shared<const Cache>(std::move(own))},
          pages{std::move(held)},
          other_bytes{other},
          last_use{now} {}

    [[nodiscard]] std::size_t freed_bytes() const {
      return cache.use_count() > 1 ? 0 : cache->bytes() - cache->shared_bytes();
    }
  };
  using Tree = detail::PrefixTree<Entry>;
  using Node = typename Tree::Node;

  // The prefixes of one plan.
  struct Texts {
    using Node = PrefixCache::Node;
    Texts(const Plan& own, std::size_t count) : plan{own}, number{count} {}
    Plan plan;
    std::size_t number;
    std::size_t prefixes = 0;
    Tree tree = {};
    mutable std::atomic<bool> may_be_cut{true};  // until a head refuses
  };
  struct Held {
    Texts* texts;
    Node* node;
  };

  // The kept caches that a text may continue from.
  struct Source {
    std::shared_ptr<const Cache> longest;  // continued from its end
    std::shared_ptr<const Cache> beyond;   // continued from `boundary`, if its heads can go back to there
    std::size_t boundary = 0;
    std::shared_ptr<const Texts> texts;
  };

  class PageLister final : public PageVisitor {
   public:
    void visit(PageTable& table, std::size_t page_bytes) override {
      for (std::size_t i = 0; i < table.size(); ++i) {
        pages.push_back({&table.pool(), table.pages()[i], table.address(i), page_bytes});
      }
    }
    std::vector<detail::HeldPage> pages;
  };

  [[nodiscard]] std::shared_ptr<Texts> texts_of(const Plan& plan) const {
    const auto found = std::ranges::find_if(texts_, [&](const auto& one) { return one->plan == plan; });
    return found == texts_.end() ? nullptr : *found;
  }
  void use(const Entry& entry) const {
    entry.last_use.store(clock_.fetch_add(1, std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }

  [[nodiscard]] Source find_source(const Plan& plan, std::span<const Token> tokens) const {
    Source source;
    source.texts = texts_of(plan);
    if (source.texts == nullptr) return source;
    const auto match = source.texts->tree.match(tokens);
    source.boundary = match.tokens - match.tokens % cache_options_.page_rows;
    const std::size_t length = match.longest == nullptr ? 0 : match.longest->depth();
    if (match.longest != nullptr) source.longest = go_on_from(*match.longest->value);
    if (source.boundary > length && source.texts->may_be_cut.load(std::memory_order_relaxed)) {
      source.beyond = go_on_from(*match.beyond->value);
    }
    return source;
  }
  [[nodiscard]] std::shared_ptr<const Cache> go_on_from(const Entry& entry) const {
    use(entry);
    entry.hits.fetch_add(1, std::memory_order_relaxed);
    return entry.cache;
  }

  // A fork that has read `tokens` tokens only, if all heads can go back to there.
  [[nodiscard]] static std::optional<Found> fork_until(const Cache& cache, std::size_t tokens,
                                                       const Texts& texts) {
    Cache fork = cache.fork();
    for (auto& layer : CacheLayers::of(fork)) {
      if (tokens > layer.committed || layer.queries.bytes() > 0) return std::nullopt;
      for (const HeadPtr& head : layer.heads) {
        if (head->cut(tokens)) continue;
        texts.may_be_cut.store(false, std::memory_order_relaxed);
        return std::nullopt;
      }
      layer.tokens = layer.committed = tokens;
    }
    return Found{std::move(fork), tokens};
  }

  // Gives every layer's tail so many slots; without a number, as many as it has rows.
  static void resize_tails(Cache& cache, std::optional<std::size_t> slots) {
    for (auto& layer : CacheLayers::of(cache)) {
      layer.tail = layer.tail.with_slots(slots.value_or(layer.uncommitted()), layer.committed, layer.tokens,
                                         cache.options().memory);
    }
  }

  void check(const Cache& cache, std::span<const Token> tokens) const {
    require(cache.options() == cache_options_,
            "PrefixCache: the cache was made with other options than the PrefixCache, must have the same");
    require<ShapeError>(!tokens.empty() && tokens.size() == cache.tokens(),
                        "PrefixCache: the cache has read ", cache.tokens(), " tokens, and ", tokens.size(),
                        " are given; it must have read all of them, at least one");
    using Layer = std::remove_cvref_t<decltype(CacheLayers::of(cache).front())>;
    check_between_steps<Layer>("PrefixCache::keep", CacheLayers::of(cache), tokens.size());
    for (const auto& layer : CacheLayers::of(cache)) {
      for (std::size_t head = 0; head < layer.heads.size(); ++head) {
        const auto& settings = cache.plan().at(layer.number, head);
        require(settings.observed_queries() == 0 || settings.compresses_by_itself() ||
                    layer.heads[head]->rows() >= layer.committed,
                "PrefixCache: KV head ", head, " of layer ", layer.number, " has kept ",
                layer.heads[head]->rows(), " of ", layer.committed,
                " rows by what the latest tokens asked, which other texts do not ask; keep the prefix before "
                "`compress`");
      }
    }
  }

  // Whether the prefix has been kept already. It counts as used now.
  [[nodiscard]] bool touch(const Plan& plan, std::span<const Token> tokens) const {
    const std::shared_lock lock{mutex_};
    const auto texts = texts_of(plan);
    if (texts == nullptr) return false;
    const auto match = texts->tree.match(tokens);
    if (match.longest == nullptr || match.longest->depth() < tokens.size()) return false;
    use(*match.longest->value);
    return true;
  }

  // Keeps a cache that belongs to the PrefixCache and has read `tokens`.
  bool adopt(Cache&& own, std::span<const Token> tokens) {
    resize_tails(own, std::nullopt);
    PageLister lister;
    for (const auto& layer : CacheLayers::of(own)) {
      for (const HeadPtr& head : layer.heads) head->visit_pages(lister);
    }
    std::size_t other_bytes = own.bytes();
    for (const detail::HeldPage& page : lister.pages) other_bytes -= page.bytes;

    const std::unique_lock lock{mutex_};
    entries_.reserve(entries_.size() + 1);
    std::shared_ptr<Texts> texts = texts_of(own.plan());
    if (texts == nullptr) {
      texts = texts_.emplace_back(std::make_shared<Texts>(own.plan(), plans_));
      ++plans_;
    }
    KVPOLICY_TRY {
      Node& node = texts->tree.at(tokens);
      if (node.value) return false;
      KVPOLICY_TRY {
        node.value.emplace(std::move(own), std::move(lister.pages), other_bytes, clock_.fetch_add(1) + 1);
        tally_.add(node.value->pages);
      }
      KVPOLICY_CATCH_ALL {
        node.value.reset();
        texts->tree.prune(node);
        KVPOLICY_RETHROW;
      }
      ++texts->prefixes;
      other_bytes_ += other_bytes;
      entries_.push_back({texts.get(), &node});
    }
    KVPOLICY_CATCH_ALL {
      forget_if_empty(*texts);
      KVPOLICY_RETHROW;
    }
    ++kept_;
    const Held added = entries_.back();
    bool stays = true;
    while (options_.max_bytes > 0 && bytes() > options_.max_bytes) {
      const auto victim = least_recent([](const Entry&) { return true; });
      if (victim->node == added.node) stays = false;
      remove(victim);
    }
    return stays;
  }

  // Forgets what `adopt` has just kept, as if it had not come.
  void take_back(const Plan& plan, std::span<const Token> tokens) noexcept {
    const std::unique_lock lock{mutex_};
    const std::shared_ptr<Texts> texts = texts_of(plan);
    if (texts == nullptr) return;
    const Node* const node = texts->tree.match(tokens).longest;
    if (node == nullptr || node->depth() < tokens.size()) return;
    remove(std::ranges::find(entries_, node, &Held::node));
    --kept_;
    --evicted_;
  }

  // The least recently used prefix for which `will_do` is true; the end if there is none.
  template <class WillDo>
  [[nodiscard]] typename std::vector<Held>::iterator least_recent(WillDo will_do) {
    std::ranges::sort(entries_, {}, [](const Held& held) {
      return held.node->value->last_use.load(std::memory_order_relaxed);
    });
    return std::ranges::find_if(entries_, [&](const Held& held) { return will_do(*held.node->value); });
  }
  void remove(typename std::vector<Held>::iterator held) noexcept {
    const auto [texts, node] = *held;
    tally_.remove(node->value->pages);
    other_bytes_ -= node->value->other_bytes;
    node->value.reset();
    texts->tree.prune(*node);
    --texts->prefixes;
    ++evicted_;
    entries_.erase(held);
    forget_if_empty(*texts);
  }
  void forget_if_empty(const Texts& texts) noexcept {
    if (texts.prefixes == 0) std::erase_if(texts_, [&](const auto& one) { return one.get() == &texts; });
  }

  [[nodiscard]] std::size_t bytes() const { return tally_.bytes() + other_bytes_; }

  CacheOptions cache_options_;
  PrefixOptions options_;
  mutable std::shared_mutex mutex_;  // guards all that follows but the counters
  std::vector<std::shared_ptr<Texts>> texts_;
  std::vector<Held> entries_;
  detail::PageTally tally_;
  std::size_t other_bytes_ = 0;
  std::size_t plans_ = 0;
  std::size_t kept_ = 0;
  std::size_t evicted_ = 0;
  mutable std::atomic<std::size_t> clock_{0};
  mutable std::atomic<std::size_t> lookups_{0};
  mutable std::atomic<std::size_t> hits_{0};
  mutable std::atomic<std::size_t> asked_tokens_{0};
  mutable std::atomic<std::size_t> found_tokens_{0};
};

}  // namespace kvpolicy
