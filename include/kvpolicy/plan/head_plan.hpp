// SPDX-License-Identifier: Apache-2.0
//
// A plan says which policy each KV head of a model gets, with its settings. A plan can compute what a cache
// will cost before the cache is made (plan/plan_memory.hpp).
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <optional>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/core/separate.hpp>
#include <kvpolicy/plan/cache_options.hpp>
#include <kvpolicy/plan/plan_memory.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/head_settings.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>

namespace kvpolicy {

/// `HeadPlan<float16>` holds the settings of every (layer, KV head), each of any policy over that element
/// type. `HeadPlan<P>` and `HeadPlan<P, Others...>` are plans whose heads start with the policy P.
template <class First, class... Others>
class HeadPlan;

/// The settings of each layer's KV heads. A plan is a value: it can be copied and compared, and a cache
/// owns a copy. In a layer with a window (ModelShape), settings that keep more rows than the window are
/// replaced by a sliding window, as `limit_window` does.
template <Element E>
class HeadPlan<E> {
 public:
  using element_type = E;
  using Settings = HeadSettings<E>;

  /// Gives every head `settings`; by default each keeps every row.
  /// @throws ConfigError if the shape or the settings do not work.
  explicit HeadPlan(const ModelShape& shape,
                    const Settings& settings = typename FullCache<DenseStorage<E>>::Config{});

  [[nodiscard]] const ModelShape& shape() const { return shape_; }

  /// @throws ConfigError if there is no such head.
  [[nodiscard]] const Settings& at(std::size_t layer, std::size_t head) const {
    return heads_[index(layer, head)];
  }

  /// @throws ConfigError if there is no such head or the settings do not work for it.
  void set(std::size_t layer, std::size_t head, const Settings& settings);

  /// Whether the head has policy `P`.
  template <KvPolicy P>
  [[nodiscard]] bool has(std::size_t layer, std::size_t head) const {
    return at(layer, head).template is<P>();
  }

  /// Calls visit(layer, head, settings) for every head.
  template <class Visit>
  void for_each_head(Visit visit) const {
    for (std::size_t layer = 0; layer + 1 < first_.size(); ++layer) {
      for (std::size_t i = first_[layer]; i < first_[layer + 1]; ++i) {
        visit(layer, i - first_[layer], heads_[i]);
      }
    }
  }

  /// The memory of a cache after `tokens` tokens were fed in steps. It is exact, except for two upper
  /// bounds: heads that are compressed count all rows before the compression, or the survivors if
  /// `compressed` is true; and heads that select count, with slow memory, the copies of one selection.
  /// @throws CapacityError for more than `max_text_tokens` tokens, or more bytes than a std::size_t
  /// holds; ConfigError if a policy does not say what it holds
  [[nodiscard]] MemoryEstimate memory(std::size_t tokens, const CacheOptions& options = {},
                                      bool compressed = false) const;

  /// A bound on the memory of a cache on the way to `tokens` tokens, in calls of any number of tokens: an engine that
  /// sets so much aside for a text never runs out. Heads with a budget hold all rows of the first `prompt`
  /// tokens, are then compressed once, layer by layer (`KvCache::compress(layer)`), or at once where a plan has heads
  /// that share over the model (`adaptive_in_model`), and hold all rows that come after; those that compress by
  /// themselves (`compress_every`) hold a call's rows until the call ends. The bound is at most the memory of one
  /// layer, and a few pages of each head with a budget, above the most that the cache will hold (where heads share over
  /// the model, the survivors of all layers). Rows that `append` leaves in all layers and `commit` takes at once count
  /// where `max_rollback` or `max_append` allows more than one. Fast and slow memory together, in bytes.
  /// @throws as `memory`; CapacityError for a prompt that is longer than the text
  [[nodiscard]] std::size_t peak_memory(std::size_t tokens, const CacheOptions& options = {},
                                        std::size_t prompt = 0) const;

  /// The longest text that a cache of `bytes` can take token by token: it never needs more on the way, and
  /// with one token more it would. Returns nothing if not even one token fits, and 2^40 for plans that no
  /// text can fill. A call with many tokens takes more for its duration, up to another window in heads that
  /// have one. Heads with a budget count as compressed. `bytes` counts fast and slow memory together.
  /// @throws ConfigError if a policy does not say what it holds
  [[nodiscard]] std::optional<std::size_t> max_context(std::size_t bytes,
                                                       const CacheOptions& options = {}) const;

  /// How many queries a cache must keep of a layer for the heads that compress: the most that any head
  /// needs.
  [[nodiscard]] std::size_t observed_queries(std::size_t layer) const;

  /// Whether a commit can change how rows of some head read, because the head quantises them.
  [[nodiscard]] bool commit_changes_rows() const {
    return std::ranges::any_of(heads_, &Settings::commit_changes_rows);
  }

  /// Limits a layer whose model attends to the last `window` tokens only. Its heads become sliding windows,
  /// unless their settings keep no more rows than that already. Does nothing for a layer without a cache of
  /// its own.
  /// @throws ConfigError for a window of 0 or a layer that does not exist.
  void limit_window(std::size_t layer, std::size_t window);

  friend bool operator==(const HeadPlan&, const HeadPlan&) = default;

 private:
  [[nodiscard]] const std::vector<Settings>& described() const {
    require(!heads_.empty(), "HeadPlan: this plan was moved from, it can only be assigned to or destroyed");
    return heads_;
  }

  [[nodiscard]] std::size_t index(std::size_t layer, std::size_t head) const;

  static void validate(const LayerShape& layer, const Settings& settings) {
    // Checks with the largest pages there are; whether the real pages fit is known when a cache is made.
    settings.validate(
        StorageContext{.head_dim = layer.head_dim, .page_rows = 4096, .value_dim = layer.value_dim});
  }

  // `settings`, limited to the window of this layer.
  [[nodiscard]] static Settings limited(const LayerShape& layer, const Settings& settings);

  ModelShape shape_;
  std::vector<Settings> heads_;     // of all layers, one layer after another
  std::vector<std::size_t> first_;  // [layers + 1] first head of each layer in heads_; last, their number
};

// Outside the class for the sake of `extern template` (core/separate.hpp): what is defined inside it is inline, and a file
// that only declares the class would compile it all the same.

template <Element E>
HeadPlan<E>::HeadPlan(const ModelShape& shape, const Settings& settings) : shape_{shape} {
  shape.validate();
  // If layers differ, these numbers are not used; a reader that expects a uniform shape gets those of
  // layer 0.
  const LayerShape first = shape.layer(0);
  shape_.q_heads = first.q_heads;
  shape_.kv_heads = first.kv_heads;
  shape_.head_dim = first.head_dim;
  heads_.reserve(shape.kv_head_count());
  first_.reserve(shape.layers + 1);
  first_.push_back(0);
  for (std::size_t l = 0; l < shape.layers; ++l) {
    const LayerShape own = shape.layer(l);
    // A layer that equals the one before it was checked with that one.
    if (own.kv_heads > 0 && (l == 0 || own != shape.layer(l - 1))) validate(own, settings);
    heads_.insert(heads_.end(), own.kv_heads, limited(own, settings));
    first_.push_back(heads_.size());
  }
}

template <Element E>
void HeadPlan<E>::set(std::size_t layer, std::size_t head, const Settings& settings) {
  const std::size_t number = index(layer, head);
  const LayerShape own = shape_.layer(layer);
  validate(own, settings);
  heads_[number] = limited(own, settings);
}

template <Element E>
MemoryEstimate HeadPlan<E>::memory(std::size_t tokens, const CacheOptions& options, bool compressed) const {
  return detail::PlanMemory<E>{shape_, described(), options}.memory(tokens, compressed);
}

template <Element E>
std::size_t HeadPlan<E>::peak_memory(std::size_t tokens, const CacheOptions& options,
                                     std::size_t prompt) const {
  return detail::PlanMemory<E>{shape_, described(), options}.peak(tokens, prompt);
}

template <Element E>
std::optional<std::size_t> HeadPlan<E>::max_context(std::size_t bytes, const CacheOptions& options) const {
  return detail::PlanMemory<E>{shape_, described(), options}.max_context(bytes);
}

template <Element E>
std::size_t HeadPlan<E>::observed_queries(std::size_t layer) const {
  std::size_t most = 0;
  for (std::size_t head = 0; head < shape_.layer(layer).kv_heads; ++head) {
    most = std::max(most, at(layer, head).observed_queries());
  }
  return most;
}

template <Element E>
void HeadPlan<E>::limit_window(std::size_t layer, std::size_t window) {
  require(window >= 1, "HeadPlan::limit_window: window is 0, must be at least 1");
  require(layer < shape_.layers, "HeadPlan::limit_window: there is no layer ", layer, ", the shape has ",
          shape_.layers);
  LayerShape own = shape_.layer(layer);
  own.window = window;
  for (std::size_t head = 0; head < own.kv_heads; ++head) {
    set(layer, head, limited(own, at(layer, head)));
  }
}

template <Element E>
std::size_t HeadPlan<E>::index(std::size_t layer, std::size_t head) const {
  static_cast<void>(described());
  require(layer < shape_.layers, "HeadPlan: there is no KV head ", head, " in layer ", layer,
          ", the shape has ", shape_.layers, " layers");
  const std::size_t heads = first_[layer + 1] - first_[layer];
  require(head < heads, "HeadPlan: there is no KV head ", head, " in layer ", layer, ", which has ", heads,
          heads == 0 ? ", for it has no cache of its own" : "");
  return first_[layer] + head;
}

template <Element E>
HeadSettings<E> HeadPlan<E>::limited(const LayerShape& layer, const Settings& settings) {
  if (layer.window == 0) return settings;
  const HeadRule rule = settings.has_rule() ? settings.rule(layer.head_dim) : HeadRule{};
  // With a mask for the whole call, a query would see rows beyond its own window.
  const bool narrower = rule.recent > 0 && rule.recent <= layer.window && !rule.prefill_chunk_mask &&
                        rule.sinks <= layer.window - rule.recent;
  return narrower ? settings : settings.sliding_window(layer.window);
}

/// A plan whose heads start with the policy `First`. Otherwise it equals the HeadPlan of the policies'
/// element type, and can be copied to one.
template <KvPolicy First, KvPolicy... Others>
class HeadPlan<First, Others...> : public HeadPlan<typename First::element_type> {
  static_assert((std::same_as<typename First::element_type, typename Others::element_type> && ...),
                "HeadPlan: all policies of a plan must share one element type");

 public:
  using Base = HeadPlan<typename First::element_type>;
  /// Gives every head `settings`; by default those of `First`.
  /// @throws ConfigError if the shape or the settings do not work.
  explicit HeadPlan(const ModelShape& shape,
                    const typename Base::Settings& settings = Base::Settings::template of<First>())
      : Base{shape, settings} {}
};

/// `HeadPlan plan{shape, config}` is a plan over the element type of the config's policy.
template <PolicyConfig Config>
HeadPlan(const ModelShape&, const Config&) -> HeadPlan<typename Config::policy_type::element_type>;
template <Element E>
HeadPlan(const ModelShape&, const HeadSettings<E>&) -> HeadPlan<E>;

/// A plan with the same policy and settings for every head:
/// `uniform_plan<FullCache<DenseStorage<float>>>(shape)`.
template <KvPolicy P>
[[nodiscard]] HeadPlan<typename P::element_type> uniform_plan(const ModelShape& shape,
                                                              const typename P::Config& config = {}) {
  return HeadPlan<typename P::element_type>{shape,
                                            HeadSettings<typename P::element_type>::template of<P>(config)};
}

/// The plans of one element type; SPEC is `template` or `extern template`, as for the other macros of this kind.
#define KVPOLICY_PLAN_INSTANCE(SPEC, E) SPEC class HeadPlan<E>;
KVPOLICY_DECLARE_INSTANCES(KVPOLICY_PLAN_INSTANCE)

}  // namespace kvpolicy
