// SPDX-License-Identifier: Apache-2.0
//
// Computes the memory of a cache from the settings of its heads, before the cache is made.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/head_rule.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/plan/cache_options.hpp>
#include <kvpolicy/plan/saturating.hpp>
#include <kvpolicy/policy/head_settings.hpp>
#include <kvpolicy/storage/dense_storage.hpp>
#include <kvpolicy/storage/storage_context.hpp>

namespace kvpolicy {

/// The memory of a cache under a plan, in bytes.
struct MemoryEstimate {
  std::size_t heads = 0;    ///< rows that the policies keep
  std::size_t tail = 0;     ///< rows that may still be rolled back
  std::size_t queries = 0;  ///< queries kept for compression
  std::size_t slow = 0;     ///< the part of `heads` that is in slow memory; all else is in fast memory
  [[nodiscard]] std::size_t total() const {
    return detail::saturating_sum(heads, detail::saturating_sum(tail, queries));
  }
};

namespace detail {

/// What a head with a budget holds at most, in bytes, on the way to a text's end. A quantised page takes no more than
/// an exact one.
template <Element E>
class BudgetMemory {
 public:
  /// The head is compressed after the first `prompt` of `tokens` tokens, and then only by itself, if at all.
  BudgetMemory(const HeadSettings<E>& settings, const StorageContext& context, std::size_t tokens,
               std::size_t prompt)
      : settings_{settings}, context_{context}, tokens_{tokens}, prompt_{prompt} {
    // What is not known is taken to cost more.
    is_quantized_ = true;
    shares_ = settings.roles().shares;
    if (!settings.has_rule()) return;
    const HeadRule rule = settings.rule(context.head_dim);
    is_quantized_ = rule.is_quantized();
    shares_ = rule.adaptive_in_layer;
    every_ = rule.compress_every;
    most_rows_ = std::max(saturating_sum(rule.budget_rule().capacity(), every_), rule.compress_from);
  }

  /// Until the compression.
  [[nodiscard]] std::size_t before() const { return settings_.bytes_of_tokens(context_, prompt_); }
  /// From then on.
  [[nodiscard]] std::size_t after() const {
    const std::size_t kept = saturating_sum(settings_.bytes_compressed(context_, prompt_), parts_of_pages());
    if (!settings_.compresses_by_itself()) return saturating_sum(kept, bytes_of_more(tokens_ - prompt_));
    if (!settings_.has_rule()) return settings_.max_bytes(context_, tokens_);
    const std::size_t whole = settings_.bytes_of_tokens(context_, std::min(tokens_, most_rows_));
    if (!is_quantized_) return saturating_sum(whole, parts_of_pages());
    const std::size_t compressed =
        saturating_sum(settings_.bytes_compressed(context_, tokens_), parts_of_pages());
    return std::max(whole, saturating_sum(compressed, bytes_of_more(std::min(tokens_, every_))));
  }
  [[nodiscard]] std::size_t most() const { return std::max(before(), after()); }

  /// Besides that, while a call's rows are there, or the survivors are copied.
  [[nodiscard]] std::size_t during_call() const {
    // A head that compresses by itself does so after the call. Survivors are quantised in the copy.
    const std::size_t rows = settings_.compresses_by_itself()
                                 ? DenseStorage<E>::bytes_of_rows({}, context_, 0, tokens_)
                                 : std::min(most(), settings_.max_bytes(context_, tokens_));
    const std::size_t copies = is_quantized_ ? settings_.bytes_compressed(context_, tokens_) : 0;
    return saturating_sum(rows, saturating_sum(copies, parts_of_pages()));
  }

  /// What so many rows more than a compressed head holds take.
  [[nodiscard]] std::size_t bytes_of_more(std::size_t rows) const {
    if (rows == 0) return 0;
    const std::size_t exact = DenseStorage<E>::bytes_of_rows({}, context_, 0, rows);
    // Each page that rows leave for a quantised one makes up for that one, but the first.
    return is_quantized_ ? saturating_sum(exact, page()) : exact;
  }

 private:
  [[nodiscard]] std::size_t page() const { return DenseStorage<E>::bytes_of_rows({}, context_, 0, 1); }
  // Heads that share keep as many rows together as they would alone, but may begin a page more.
  [[nodiscard]] std::size_t parts_of_pages() const {
    if (!shares_) return 0;
    return is_quantized_ ? 2 * page() : page();
  }

  const HeadSettings<E>& settings_;
  const StorageContext& context_;
  std::size_t tokens_;
  std::size_t prompt_;
  bool is_quantized_;
  bool shares_;
  std::size_t every_ = 0;
  std::size_t most_rows_ = 0;  // between calls, of a head that compresses by itself
};

/// Implements HeadPlan's `memory` and `max_context`, which document the calls: the memory of the heads of
/// all layers under some options.
template <Element E>
class PlanMemory {
 public:
  /// @throws ConfigError if the options do not work, alone or with a head's settings
  PlanMemory(const ModelShape& shape, std::span<const HeadSettings<E>> heads, const CacheOptions& options)
      : shape_{shape}, heads_{heads}, options_{options} {
    options.validate();
    std::size_t number = 0;
    for (std::size_t layer = 0; layer < shape.layers; ++layer) {
      const LayerShape own = shape.layer(layer);
      for (std::size_t head = 0; head < own.kv_heads; ++head) add(own, heads[number++]);
    }
  }

  [[nodiscard]] MemoryEstimate memory(std::size_t tokens, bool compressed) const {
    check_text_tokens("HeadPlan::memory", tokens);
    const std::size_t committed = tokens - std::min(tokens, options_.max_rollback);
    MemoryEstimate estimate = fixed();
    estimate.heads = sum([&](const Kind& kind) {
      return compressed ? kind.settings->bytes_compressed(kind.context, committed)
                        : kind.settings->bytes_of_tokens(kind.context, committed);
    });
    estimate.slow =
        sum([&](const Kind& kind) { return kind.settings->slow_bytes_of_tokens(kind.context, committed); });
    require<CapacityError>(estimate.total() < too_many_bytes, "HeadPlan::memory: ", tokens,
                           " tokens take more bytes than a std::size_t holds");
    return estimate;
  }

  [[nodiscard]] std::size_t peak(std::size_t tokens, std::size_t prompt) const {
    check_text_tokens("HeadPlan::peak_memory", tokens);
    require<CapacityError>(prompt <= tokens, "HeadPlan::peak_memory: a prompt of ", prompt,
                           " tokens, must be at most the ", tokens, " of the text");
    const auto held = [&](const Kind& kind) {
      const auto& [settings, context] = kind;
      if (settings->roles().compresses) return BudgetMemory<E>{*settings, context, tokens, prompt}.most();
      // Memory goes down as well as up, by what falls out of windows and residuals.
      std::size_t most = 0;
      const std::size_t steady = std::min<std::size_t>(tokens, std::size_t{1} << 16);
      for (std::size_t t = tokens - steady; t <= tokens; ++t) {
        most = std::max(most, settings->bytes_of_tokens(context, t));
      }
      return steady < tokens ? settings->max_bytes(context, tokens) : most;
    };
    // While a call's rows come, the heads of one layer hold new pages besides those that will be free after
    // it, and while a layer is compressed, what stays besides what goes.
    std::vector<std::size_t> most, more;
    for (const Kind& kind : kinds_) {
      most.push_back(held(kind));
      if (const auto free = free_after_call(kind, tokens)) {
        more.push_back(*free);
      } else if (kind.settings->roles().compresses) {
        more.push_back(BudgetMemory<E>{*kind.settings, kind.context, tokens, prompt}.during_call());
      } else {
        more.push_back(std::min(most.back(), kind.settings->max_bytes(kind.context, tokens)));
      }
    }
    std::size_t total = fixed().total();
    std::size_t largest = 0;
    std::size_t compressing = 0;  // of all layers
    std::size_t committing = 0;   // likewise: rows of the tail may go to all of them at once
    bool in_model = false;        // heads that share over the model are compressed together with all others
    std::size_t head = 0;
    for (std::size_t l = 0; l < shape_.layers; ++l) {
      std::size_t layer = 0;
      for (const std::size_t end = head + shape_.layer(l).kv_heads; head < end; ++head) {
        const std::size_t kind = of_head_[head];
        total = saturating_sum(total, most[kind]);
        layer = saturating_sum(layer, more[kind]);
        const HeadSettings<E>& settings = *kinds_[kind].settings;
        in_model = in_model || settings.is_adaptive_in_model();
        if (settings.roles().compresses) compressing = saturating_sum(compressing, more[kind]);
        committing = saturating_sum(committing, of_tail(kinds_[kind], tokens));
      }
      largest = std::max(largest, layer);
    }
    if (in_model) largest = std::max(largest, compressing);
    return saturating_sum(total, std::max(largest, committing));
  }

  [[nodiscard]] std::optional<std::size_t> max_context(std::size_t bytes) const {
    constexpr std::size_t most = max_text_tokens;
    const std::size_t constant = fixed().total();
    if (constant > bytes) return std::nullopt;
    // A monotonic bound finds where to begin. From there the exact size is computed token by token, because
    // it goes down as well as up.
    const auto bound = [&](std::size_t tokens) {
      const std::size_t committed = tokens - std::min(tokens, options_.max_rollback);
      return saturating_sum(
          constant, sum([&](const Kind& kind) { return kind.settings->max_bytes(kind.context, committed); }));
    };
    if (bound(most) <= bytes) return most;
    std::size_t low = 0;
    for (std::size_t step = most / 2; step > 0; step /= 2) {
      if (bound(low + step) <= bytes) low += step;
    }
    // Once the bound is constant, memory only varies as windows and residuals reuse pages.
    const std::size_t turns = low + (std::size_t{1} << 16);
    const bool endless = bound(turns) == bound(most);
    while (saturating_sum(constant, bytes_of_step(low + 1)) <= bytes) {
      ++low;
      if (endless && low >= turns) return most;
    }
    return low == 0 ? std::nullopt : std::optional{low};
  }

 private:
  // Heads that hold the same number of bytes, because settings and channels are equal.
  struct Kind {
    const HeadSettings<E>* settings;
    StorageContext context;
  };

  void add(const LayerShape& layer, const HeadSettings<E>& settings) {
    const auto same = std::ranges::find_if(kinds_, [&](const Kind& known) {
      return known.context.head_dim == layer.head_dim && known.context.value_dim == layer.value_dim &&
             *known.settings == settings;
    });
    of_head_.push_back(static_cast<std::size_t>(same - kinds_.begin()));
    if (same != kinds_.end()) return;
    kinds_.push_back({&settings, options_.context(layer.head_dim, layer.value_dim)});
    settings.validate(kinds_.back().context);
  }

  // What the head holds in a call and not after it, if it keeps every row in fast memory: nothing where rows stay
  // exact; else the rows that leave the residual, which is not filled beyond the next group however many rows come.
  [[nodiscard]] static std::optional<std::size_t> free_after_call(const Kind& kind, std::size_t tokens) {
    if (!kind.settings->has_rule() || kind.context.slow_tier != 0) return std::nullopt;
    const HeadRule rule = kind.settings->rule(kind.context.head_dim);
    if (!rule.keeps_every_row()) return std::nullopt;
    if (!rule.is_quantized()) return 0;
    return exact_bytes(kind, std::min(tokens, rule.most_exact_rows(kind.context.page_rows)));
  }

  // What a head holds while the rows of the tail are committed in all layers at once, and not after it: the pages that
  // they leave for others. Rows that stay exact, and are never dropped unasked, leave none.
  [[nodiscard]] std::size_t of_tail(const Kind& kind, std::size_t tokens) const {
    if (options_.tail_rows() <= 1 || !kind.settings->has_rule()) return 0;
    const HeadRule rule = kind.settings->rule(kind.context.head_dim);
    if (!rule.is_quantized() && rule.recent == 0 && rule.compress_every == 0) return 0;
    // KIVI's flush empties the whole residual.
    const std::size_t leaving = options_.tail_rows() + (rule.kivi_flush ? rule.residual : 0);
    const std::size_t group = rule.key_per_channel ? rule.key_group : 1;
    const std::size_t pages = (rule.is_quantized() ? 2 : 1) * kind.context.page_rows;
    return exact_bytes(kind, std::min(tokens, leaving + group + pages));
  }
  [[nodiscard]] static std::size_t exact_bytes(const Kind& kind, std::size_t rows) {
    return DenseStorage<E>::bytes_of_rows({}, kind.context, 0, rows);
  }

  // The tail and the kept queries, whose sizes do not grow.
  [[nodiscard]] MemoryEstimate fixed() const {
    MemoryEstimate estimate;
    std::size_t number = 0;
    for (std::size_t l = 0; l < shape_.layers; ++l) {
      const LayerShape layer = shape_.layer(l);
      if (layer.kv_heads == 0) continue;
      const std::size_t rows = layer.kv_heads * (layer.head_dim + layer.value_dim) * sizeof(E);
      estimate.tail = saturating_sum(estimate.tail, saturating_product(options_.tail_rows(), rows));
      std::size_t kept = options_.kept_queries;
      for (std::size_t head = 0; head < layer.kv_heads; ++head) {
        kept = std::max(kept, heads_[number++].observed_queries());
      }
      if (kept == 0) continue;
      estimate.queries = saturating_sum(
          estimate.queries,
          saturating_product((kept + options_.tail_rows()) * layer.head_dim * sizeof(E), layer.q_heads));
    }
    return estimate;
  }

  // The most that the heads hold while token number `tokens` goes through the layers.
  [[nodiscard]] std::size_t bytes_of_step(std::size_t tokens) const {
    struct Held {
      std::size_t before = 0, during = 0, after = 0;
    };
    const std::size_t after = tokens - std::min(tokens, options_.max_rollback);
    const std::size_t before = after - (tokens > options_.max_rollback ? 1 : 0);
    std::vector<Held> held;
    for (const auto& [settings, context] : kinds_) {
      Held one{settings->bytes_compressed(context, before), 0, settings->bytes_compressed(context, after)};
      one.during = after > before ? settings->bytes_of_step(context, after) : std::max(one.before, one.after);
      held.push_back(one);
    }
    std::size_t now = 0;  // layers before the current one have the token, those after it do not
    for (const std::size_t number : of_head_) now += held[number].before;
    std::size_t most = now;
    std::size_t head = 0;
    for (std::size_t l = 0; l < shape_.layers; ++l) {
      Held layer;
      for (const std::size_t end = head + shape_.layer(l).kv_heads; head < end; ++head) {
        const Held& one = held[of_head_[head]];
        layer.before += one.before;
        layer.during = saturating_sum(layer.during, one.during);
        layer.after += one.after;
      }
      most = std::max(most, saturating_sum(now - layer.before, layer.during));
      now = saturating_sum(now - layer.before, layer.after);
    }
    return most;
  }

  // Adds bytes(kind) over all heads; calls it once for each kind.
  template <class Bytes>
  [[nodiscard]] std::size_t sum(Bytes bytes) const {
    std::vector<std::size_t> own;
    for (const Kind& kind : kinds_) own.push_back(bytes(kind));
    std::size_t total = 0;
    for (const std::size_t number : of_head_) total = saturating_sum(total, own[number]);
    return total;
  }

  const ModelShape& shape_;
  std::span<const HeadSettings<E>> heads_;
  const CacheOptions& options_;
  std::vector<Kind> kinds_;
  std::vector<std::size_t> of_head_;  // the index in kinds_ of each head
};

}  // namespace detail
}  // namespace kvpolicy
