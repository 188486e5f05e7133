// SPDX-License-Identifier: Apache-2.0
//
// Which policy each KV head of a model gets, with its settings: for each layer a row of its heads.
// A plan knows, before any cache is made, what the cache will cost (plan/plan_memory.hpp).
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <optional>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/plan/cache_options.hpp>
#include <kvpolicy/plan/plan_memory.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/head_settings.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>

namespace kvpolicy {

/// `HeadPlan<half>`: the settings of every (layer, KV head), each of any policy over that element type.
/// `HeadPlan<P>` and `HeadPlan<P, Others...>` are plans whose heads begin with the policy P.
template <class First, class... Others>
class HeadPlan;

/// The settings of each layer's KV heads. A value: copied, compared, and owned by the cache that is
/// made of it. Heads of a layer with a window (ModelShape) keep no more than the window: what is
/// set for them otherwise becomes a sliding window, as by `limit_window`.
template <Element E>
class HeadPlan<E> {
 public:
  using element_type = E;
  using Settings = HeadSettings<E>;

  /// Every head gets `settings`; by default it keeps every row.
  /// @throws ConfigError if the shape or the settings do not work.
  explicit HeadPlan(const ModelShape& shape,
                    const Settings& settings = typename FullCache<DenseStorage<E>>::Config{})
      : shape_{shape} {
    shape.validate();
    // Where layers differ, these numbers mean nothing; a reader of uniform shapes finds layer 0's.
    const LayerShape first = shape.layer(0);
    shape_.q_heads = first.q_heads;
    shape_.kv_heads = first.kv_heads;
    shape_.head_dim = first.head_dim;
    heads_.reserve(shape.kv_head_count());
    first_.reserve(shape.layers + 1);
    first_.push_back(0);
    for (std::size_t l = 0; l < shape.layers; ++l) {
      const LayerShape own = shape.layer(l);
      // Layers that are alike need no second look.
      if (own.kv_heads > 0 && (l == 0 || own != shape.layer(l - 1))) validate(own, settings);
      heads_.insert(heads_.end(), own.kv_heads, limited(own, settings));
      first_.push_back(heads_.size());
    }
  }

  [[nodiscard]] const ModelShape& shape() const { return shape_; }

  /// @throws ConfigError if there is no such head.
  [[nodiscard]] const Settings& at(std::size_t layer, std::size_t head) const {
    return heads_[index(layer, head)];
  }

  /// @throws ConfigError if there is no such head or the settings do not work for it.
  void set(std::size_t layer, std::size_t head, const Settings& settings) {
    const std::size_t number = index(layer, head);
    const LayerShape own = shape_.layer(layer);
    validate(own, settings);
    heads_[number] = limited(own, settings);
  }

  /// Whether the head has policy `P`.
  template <KvPolicy P>
  [[nodiscard]] bool has(std::size_t layer, std::size_t head) const {
    return at(layer, head).template is<P>();
  }

  /// Every head: visit(layer, head, settings).
  template <class Visit>
  void for_each_head(Visit visit) const {
    for (std::size_t layer = 0; layer + 1 < first_.size(); ++layer) {
      for (std::size_t i = first_[layer]; i < first_[layer + 1]; ++i) {
        visit(layer, i - first_[layer], heads_[i]);
      }
    }
  }

  /// What a cache holds once `tokens` were fed in steps. Exact, but for heads that are compressed:
  /// for these a bound, until the compression all rows, after it (`compressed`) the survivors. With
  /// slow memory also a bound for heads that select: they count the copies of one choice.
  /// @throws CapacityError for more than `max_text_tokens` tokens, or more bytes than a std::size_t
  /// holds; ConfigError if a policy does not say what it holds
  [[nodiscard]] MemoryEstimate memory(std::size_t tokens, const CacheOptions& options = {},
                                      bool compressed = false) const {
    return detail::PlanMemory<E>{shape_, heads_, options}.memory(tokens, compressed);
  }

  /// The longest text that a cache of `bytes` can take token by token: at no moment on the way does
  /// it ask for more, with one token more it would. Nothing if not even one token fits; 2^40 for
  /// plans that no text can fill. A longer chunk takes more while it comes in, up to another window
  /// in heads that have one. Compressed heads count as compressed. `bytes` are those of fast and
  /// slow memory together.
  /// @throws ConfigError if a policy does not say what it holds
  [[nodiscard]] std::optional<std::size_t> max_context(std::size_t bytes,
                                                       const CacheOptions& options = {}) const {
    return detail::PlanMemory<E>{shape_, heads_, options}.max_context(bytes);
  }

  /// Queries that a cache must keep of a layer, for the heads that compress: the most any wants.
  [[nodiscard]] std::size_t observed_queries(std::size_t layer) const {
    std::size_t most = 0;
    for (std::size_t head = 0; head < shape_.layer(layer).kv_heads; ++head) {
      most = std::max(most, at(layer, head).observed_queries());
    }
    return most;
  }

  /// Whether rows of some head read otherwise after a commit than before: whether it quantises.
  [[nodiscard]] bool commit_changes_rows() const {
    return std::ranges::any_of(heads_, &Settings::commit_changes_rows);
  }

  /// A layer whose model attends to the last `window` tokens only: its heads become sliding
  /// windows, whatever the plan said, unless they keep no more than that already.
  /// A layer without a cache of its own has no heads to limit.
  /// @throws ConfigError for a window of 0 or a layer that does not exist.
  void limit_window(std::size_t layer, std::size_t window) {
    require(window >= 1, "HeadPlan::limit_window: window is 0, must be at least 1");
    require(layer < shape_.layers, "HeadPlan::limit_window: there is no layer ", layer,
            ", the shape has ", shape_.layers);
    LayerShape own = shape_.layer(layer);
    own.window = window;
    for (std::size_t head = 0; head < own.kv_heads; ++head) {
      set(layer, head, limited(own, at(layer, head)));
    }
  }

  friend bool operator==(const HeadPlan&, const HeadPlan&) = default;

 private:
  [[nodiscard]] std::size_t index(std::size_t layer, std::size_t head) const {
    require(!heads_.empty(),
            "HeadPlan: this plan was moved from, it can only be assigned to or destroyed");
    require(layer < shape_.layers, "HeadPlan: there is no KV head ", head, " in layer ", layer,
            ", the shape has ", shape_.layers, " layers");
    const std::size_t heads = first_[layer + 1] - first_[layer];
    require(head < heads, "HeadPlan: there is no KV head ", head, " in layer ", layer,
            ", which has ", heads, heads == 0 ? ", for it has no cache of its own" : "");
    return first_[layer] + head;
  }

  static void validate(const LayerShape& layer, const Settings& settings) {
    // The widest pages there are: whether the real ones fit is known when a cache is made.
    settings.validate(StorageContext{
        .head_dim = layer.head_dim, .page_rows = 4096, .value_dim = layer.value_dim});
  }

  // What a head of this layer may keep of what `settings` ask for.
  [[nodiscard]] static Settings limited(const LayerShape& layer, const Settings& settings) {
    if (layer.window == 0) return settings;
    const HeadRule rule = settings.has_rule() ? settings.rule(layer.head_dim) : HeadRule{};
    const bool narrower =
        rule.recent > 0 && rule.recent <= layer.window && rule.sinks <= layer.window - rule.recent;
    if (narrower) return settings;
    return typename SinkRecentCache<DenseStorage<E>>::Config{.sinks = 0, .recent = layer.window};
  }

  ModelShape shape_;
  std::vector<Settings> heads_;     // of all layers, one layer after another
  std::vector<std::size_t> first_;  // of each layer, its first head in heads_; then their number
};

/// A plan whose heads begin with the policy `First`. It is a HeadPlan of the policies' element type in
/// all else, and becomes one wherever it is copied to one.
template <KvPolicy First, KvPolicy... Others>
class HeadPlan<First, Others...> : public HeadPlan<typename First::element_type> {
  static_assert((std::same_as<typename First::element_type, typename Others::element_type> && ...),
                "HeadPlan: all policies of a plan must share one element type");

 public:
  using Base = HeadPlan<typename First::element_type>;
  /// Every head gets `settings`; by default First's defaults.
  /// @throws ConfigError if the shape or the settings do not work.
  explicit HeadPlan(const ModelShape& shape,
                    const typename Base::Settings& settings = Base::Settings::template of<First>())
      : Base{shape, settings} {}
};

/// `HeadPlan plan{shape, config}` is a plan over the element type of the config's policy.
template <PolicyConfig Config>
HeadPlan(const ModelShape&, const Config&)
    -> HeadPlan<typename Config::policy_type::element_type>;
template <Element E>
HeadPlan(const ModelShape&, const HeadSettings<E>&) -> HeadPlan<E>;

/// The same policy and settings for every head:
/// `uniform_plan<FullCache<DenseStorage<float>>>(shape)`.
template <KvPolicy P>
[[nodiscard]] HeadPlan<typename P::element_type> uniform_plan(
    const ModelShape& shape, const typename P::Config& config = {}) {
  return HeadPlan<typename P::element_type>{
      shape, HeadSettings<typename P::element_type>::template of<P>(config)};
}

}  // namespace kvpolicy
