// SPDX-License-Identifier: Apache-2.0
//
// Which policy each KV head of a model gets, with its settings: a table of [layers, kv_heads].
// A plan allocates nothing and knows, before any cache is made, what the cache will cost.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <limits>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/plan/cache_options.hpp>
#include <kvpolicy/plan/saturating.hpp>
#include <kvpolicy/policy/policy.hpp>

namespace kvpolicy {

/// What a cache under a plan holds, in bytes.
struct MemoryEstimate {
  std::size_t heads = 0;    ///< rows that the policies keep
  std::size_t tail = 0;     ///< rows that may still be rolled back
  std::size_t queries = 0;  ///< queries kept for compression
  std::size_t slow = 0;     ///< of `heads`, in slow memory, the rest of all being in fast memory
  [[nodiscard]] std::size_t total() const {
    return detail::saturating_sum(heads, detail::saturating_sum(tail, queries));
  }
};

/// A policy of sinks and a sliding window.
template <class P>
concept WindowPolicy = requires(typename P::Config config) {
  config.sinks;
  config.recent;
};

/// @cond
// The first of them that is a WindowPolicy. (Doxygen takes the recursion for a circle.)
template <class P, class... Others>
struct FirstWindow : FirstWindow<Others...> {};
template <WindowPolicy P, class... Others>
struct FirstWindow<P, Others...> {
  using Config = typename P::Config;
};
/// @endcond

/// A policy and its settings for every (layer, KV head): one of `First, Others...` each. A value:
/// copied, compared, and owned by the cache that is made of it.
template <KvPolicy First, KvPolicy... Others>
class HeadPlan {
  static_assert((std::same_as<typename First::element_type, typename Others::element_type> && ...),
                "HeadPlan: all policies of a plan must share one element type");

 public:
  using element_type = typename First::element_type;
  /// One head's settings; which alternative it holds says which policy the head has.
  using Config = std::variant<typename First::Config, typename Others::Config...>;
  using Policy = std::variant<First, Others...>;

  /// Every head gets `config`.
  /// @throws ConfigError if the shape or the config does not work.
  explicit HeadPlan(const ModelShape& shape, const Config& config = {}) : shape_{shape} {
    shape.validate();
    validate(config);
    heads_.assign(shape.kv_head_count(), config);
  }

  [[nodiscard]] const ModelShape& shape() const { return shape_; }

  /// @throws ConfigError if there is no such head.
  [[nodiscard]] const Config& at(std::size_t layer, std::size_t head) const {
    return heads_[index(layer, head)];
  }

  /// @throws ConfigError if there is no such head or the config does not work for it.
  void set(std::size_t layer, std::size_t head, const Config& config) {
    const std::size_t place = index(layer, head);
    validate(config);
    heads_[place] = config;
  }

  /// Whether the head has policy `P`.
  template <class P>
  [[nodiscard]] bool has(std::size_t layer, std::size_t head) const {
    return std::holds_alternative<typename P::Config>(at(layer, head));
  }

  /// Every head with its place: visit(layer, head, config of the policy it has).
  template <class Visit>
  void for_each_head(Visit visit) const {
    for (std::size_t i = 0; i < heads_.size(); ++i) {
      std::visit([&](const auto& config) { visit(i / shape_.kv_heads, i % shape_.kv_heads, config); },
                 heads_[i]);
    }
  }

  /// What a cache holds once `tokens` were fed in steps. Exact, but for heads that are compressed:
  /// for these a bound, until the compression all rows, after it (`compressed`) the survivors. With
  /// slow memory also a bound for heads that select: they count the copies of one choice.
  /// @throws CapacityError for more than `max_text_tokens` tokens, or more bytes than a std::size_t holds
  [[nodiscard]] MemoryEstimate memory(std::size_t tokens, const CacheOptions& options = {},
                                      bool compressed = false) const {
    check_text_tokens("HeadPlan::memory", tokens);
    const std::size_t committed = tokens - std::min(tokens, options.max_rollback);
    MemoryEstimate estimate = fixed_memory(options);
    estimate.heads = sum(options, [&]<class P>(const typename P::Config& config,
                                               const StorageContext& context) {
      return compressed ? bytes_at_rest<P>(config, context, committed)
                        : P::bytes_of_tokens(config, context, committed);
    });
    estimate.slow = sum(options, [&]<class P>(const typename P::Config& config,
                                              const StorageContext& context) {
      if constexpr (requires { P::slow_bytes_of_tokens(config, context, committed); }) {
        return P::slow_bytes_of_tokens(config, context, committed);
      } else {
        return std::size_t{0};
      }
    });
    require<CapacityError>(estimate.total() < detail::too_many_bytes, "HeadPlan::memory: ", tokens,
                           " tokens take more bytes than a std::size_t holds");
    return estimate;
  }

  /// The longest text that a cache of `bytes` can take token by token: at no moment on the way does
  /// it ask for more, with one token more it would. Nothing if not even one token fits; 2^40 for
  /// plans that no text can fill. A longer chunk takes more while it comes in, up to another window
  /// in heads that have one. Compressed heads count as compressed. `bytes` are those of fast and
  /// slow memory together.
  [[nodiscard]] std::optional<std::size_t> max_context(std::size_t bytes,
                                                       const CacheOptions& options = {}) const {
    constexpr std::size_t most = max_text_tokens;
    const std::size_t fixed = fixed_memory(options).total();
    if (fixed > bytes) return std::nullopt;
    // A bound that never falls finds where to begin; from there it is counted token by token, for
    // what is held goes down as well as up.
    const auto bound = [&](std::size_t tokens) {
      return detail::saturating_sum(fixed, max_bytes(tokens, options));
    };
    if (bound(most) <= bytes) return most;
    std::size_t low = 0;
    for (std::size_t step = most / 2; step > 0; step /= 2) {
      if (bound(low + step) <= bytes) low += step;
    }
    // Where the bound has stopped growing, windows and residuals only turn in their pages.
    const std::size_t turns = low + (std::size_t{1} << 16);
    const bool endless = bound(turns) == bound(most);
    const Distinct distinct = distinct_configs();
    while (detail::saturating_sum(fixed, bytes_of_step(low + 1, options, distinct)) <= bytes) {
      ++low;
      if (endless && low >= turns) return most;
    }
    return low == 0 ? std::nullopt : std::optional{low};
  }

  /// Queries that a cache must keep of a layer, for the heads that compress: the most any wants.
  [[nodiscard]] std::size_t observed_queries(std::size_t layer) const {
    std::size_t most = 0;
    for (std::size_t head = 0; head < shape_.kv_heads; ++head) {
      visit(at(layer, head), [&]<class P>(const typename P::Config& config) {
        if constexpr (CompressingPolicy<P>) most = std::max(most, P::observed_queries(config));
      });
    }
    return most;
  }

  /// Whether rows of some head read otherwise after a commit than before: whether it quantises.
  [[nodiscard]] bool commit_changes_rows() const {
    return std::ranges::any_of(heads_, [](const Config& config) {
      bool changes = false;
      visit(config, [&]<class P>(const typename P::Config&) {
        changes = kvpolicy::commit_changes_rows<P>();
      });
      return changes;
    });
  }

  /// A layer whose model attends to the last `window` tokens only: its heads become sliding
  /// windows, whatever the plan said, unless they keep no more than that already. The plan must
  /// have a policy with `sinks` and `recent` over dense rows for it (SinkRecentCache).
  /// @throws ConfigError for a window of 0 or a layer that does not exist.
  void limit_window(std::size_t layer, std::size_t window) {
    using Window = typename FirstWindow<First, Others...>::Config;
    require(window >= 1, "HeadPlan::limit_window: window is 0, must be at least 1");
    for (std::size_t head = 0; head < shape_.kv_heads; ++head) {
      bool narrower = false;
      visit(at(layer, head), [&]<class P>(const typename P::Config& own) {
        if constexpr (WindowPolicy<P>) {
          narrower = own.recent <= window && own.sinks <= window - own.recent;
        }
      });
      if (!narrower) set(layer, head, Window{.sinks = 0, .recent = window});
    }
  }

  friend bool operator==(const HeadPlan&, const HeadPlan&) = default;

  /// Calls `f.template operator()<P>(config)` for the policy P that `config` belongs to.
  template <class F>
  static void visit(const Config& config, F f) {
    const auto call = [&]<class P>() {
      if (const auto* own = std::get_if<typename P::Config>(&config)) f.template operator()<P>(*own);
    };
    call.template operator()<First>();
    (call.template operator()<Others>(), ...);
  }

 private:
  // The settings that differ, and which of them each head has: [layers, kv_heads].
  struct Distinct {
    std::vector<const Config*> configs;
    std::vector<std::size_t> of_head;
  };

  [[nodiscard]] std::size_t index(std::size_t layer, std::size_t head) const {
    require(!heads_.empty(),
            "HeadPlan: this plan was moved from, it can only be assigned to or destroyed");
    require(layer < shape_.layers && head < shape_.kv_heads, "HeadPlan: there is no KV head ", head,
            " in layer ", layer, ", the shape has ", shape_.kv_heads, " heads in ", shape_.layers,
            " layers");
    return layer * shape_.kv_heads + head;
  }

  void validate(const Config& config) const {
    visit(config, [&]<class P>(const typename P::Config& own) {
      // The widest pages there are: whether the real ones fit is known when a cache is made.
      validate_policy<P>(own, StorageContext{.head_dim = shape_.head_dim, .page_rows = 4096});
    });
  }

  [[nodiscard]] MemoryEstimate fixed_memory(const CacheOptions& options) const {
    options.validate();
    const std::size_t row = shape_.head_dim * sizeof(element_type);
    MemoryEstimate estimate;
    estimate.tail =
        detail::saturating_product(2 * options.tail_rows() * row, shape_.kv_head_count());
    for (std::size_t layer = 0; layer < shape_.layers; ++layer) {
      const std::size_t kept = std::max(observed_queries(layer), options.kept_queries);
      if (kept == 0) continue;
      estimate.queries = detail::saturating_sum(
          estimate.queries,
          detail::saturating_product((kept + options.tail_rows()) * row, shape_.q_heads));
    }
    return estimate;
  }

  // A head that compresses counts as compressed.
  template <class P>
  [[nodiscard]] static std::size_t bytes_at_rest(const typename P::Config& config,
                                                 const StorageContext& context,
                                                 std::size_t tokens) {
    if constexpr (requires { P::bytes_compressed(config, context, tokens); }) {
      return P::bytes_compressed(config, context, tokens);
    } else {
      return P::bytes_of_tokens(config, context, tokens);
    }
  }

  // Never falls with `tokens`, and is never below bytes_of_step(tokens).
  [[nodiscard]] std::size_t max_bytes(std::size_t tokens, const CacheOptions& options) const {
    const std::size_t committed = tokens - std::min(tokens, options.max_rollback);
    return sum(options, [&]<class P>(const typename P::Config& config,
                                     const StorageContext& context) {
      if constexpr (requires { P::max_bytes(config, context, committed); }) {
        return P::max_bytes(config, context, committed);
      } else {
        return bytes_at_rest<P>(config, context, committed);
      }
    });
  }

  // The most that the heads hold while token number `tokens` goes through the layers.
  [[nodiscard]] std::size_t bytes_of_step(std::size_t tokens, const CacheOptions& options,
                                          const Distinct& distinct) const {
    struct Held {
      std::size_t before = 0, during = 0, after = 0;
    };
    const std::size_t after = tokens - std::min(tokens, options.max_rollback);
    const std::size_t before = after - (tokens > options.max_rollback ? 1 : 0);
    const StorageContext context = options.context(shape_.head_dim);
    std::vector<Held> held;
    for (const Config* config : distinct.configs) {
      visit(*config, [&]<class P>(const typename P::Config& own) {
        Held one{bytes_at_rest<P>(own, context, before), 0, bytes_at_rest<P>(own, context, after)};
        one.during = std::max(one.before, one.after);
        if constexpr (requires { P::bytes_of_step(own, context, after); }) {
          if (after > before) one.during = P::bytes_of_step(own, context, after);
        }
        held.push_back(one);
      });
    }
    std::size_t now = 0;  // layers in front are done, those behind have not begun
    for (const std::size_t number : distinct.of_head) now += held[number].before;
    std::size_t most = now;
    for (std::size_t first = 0; first < heads_.size(); first += shape_.kv_heads) {
      Held layer;
      for (std::size_t head = first; head < first + shape_.kv_heads; ++head) {
        const Held& one = held[distinct.of_head[head]];
        layer.before += one.before;
        layer.during = detail::saturating_sum(layer.during, one.during);
        layer.after += one.after;
      }
      most = std::max(most, detail::saturating_sum(now - layer.before, layer.during));
      now = detail::saturating_sum(now - layer.before, layer.after);
    }
    return most;
  }

  // Adds bytes.operator()<P>(config, context) over all heads; heads of equal config are asked once.
  template <class Bytes>
  [[nodiscard]] std::size_t sum(const CacheOptions& options, Bytes bytes) const {
    const StorageContext context = options.context(shape_.head_dim);
    const Distinct distinct = distinct_configs();
    std::vector<std::size_t> own;
    for (const Config* config : distinct.configs) {
      visit(*config, [&]<class P>(const typename P::Config& settings) {
        static_assert(requires { P::bytes_of_tokens(settings, context, std::size_t{}); },
                      "HeadPlan: to predict memory a policy needs bytes_of_tokens");
        validate_policy<P>(settings, context);
        own.push_back(bytes.template operator()<P>(settings, context));
      });
    }
    std::size_t total = 0;
    for (const std::size_t number : distinct.of_head) {
      total = detail::saturating_sum(total, own[number]);
    }
    return total;
  }

  [[nodiscard]] Distinct distinct_configs() const {
    Distinct distinct;
    for (const Config& config : heads_) {
      const auto same = std::ranges::find_if(
          distinct.configs, [&](const Config* known) { return *known == config; });
      distinct.of_head.push_back(static_cast<std::size_t>(same - distinct.configs.begin()));
      if (same == distinct.configs.end()) distinct.configs.push_back(&config);
    }
    return distinct;
  }

  ModelShape shape_;
  std::vector<Config> heads_;  // [layers, kv_heads]
};

}  // namespace kvpolicy
