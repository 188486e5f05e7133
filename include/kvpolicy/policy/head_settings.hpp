// SPDX-License-Identifier: Apache-2.0
//
// One KV head's settings, under whichever policy: what a HeadPlan holds for each head. A policy is
// instantiated where its settings become HeadSettings, and nowhere else.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/fields.hpp>
#include <kvpolicy/core/head_rule.hpp>
#include <kvpolicy/policy/head.hpp>
#include <kvpolicy/policy/instances.hpp>
#include <kvpolicy/policy/policy_head.hpp>
#include <kvpolicy/policy/policy_traits.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>
#include <kvpolicy/policy/slow_rule.hpp>
#include <kvpolicy/storage/dense_storage.hpp>

namespace kvpolicy {

namespace detail {

/// What follows from a policy's type and its settings alone.
struct SettingsFacts {
  TypeTag policy_type;
  PolicyNames names;
  HeadRoles roles;
  std::size_t observed_queries;
  bool has_names;
  bool is_savable;
  bool predicts_memory;
  bool predicts_compressed;
  bool compresses_by_itself;
  bool is_adaptive_in_layer;
  bool is_adaptive_in_model;
  bool commit_changes_rows;
  bool has_rule;
};

/// A number of bytes that settings predict for a text of some tokens: policy_traits.hpp says what each of
/// them means.
enum class MemoryOf : std::uint8_t { tokens, compressed, step, maximum, slow_memory };

/// What is asked of settings whose policy is not known.
class AnySettings {
 public:
  AnySettings(const AnySettings&) = delete;
  AnySettings& operator=(const AnySettings&) = delete;
  virtual ~AnySettings() = default;

  [[nodiscard]] const SettingsFacts& facts() const noexcept { return facts_; }
  [[nodiscard]] const void* config() const noexcept { return config_; }
  [[nodiscard]] bool has_policy_of(const AnySettings& other) const {
    return facts_.policy_type == other.facts_.policy_type;
  }

  /// `other` is of the same policy.
  [[nodiscard]] virtual bool equals(const AnySettings& other) const = 0;
  [[nodiscard]] virtual bool may_share(const AnySettings& other) const = 0;
  virtual void write_fields(FieldVisitor& visit) const = 0;
  virtual void validate(const StorageContext& context) const = 0;
  /// `self` owns these settings, which the head then shares.
  [[nodiscard]] virtual HeadPtr make_head(const std::shared_ptr<const AnySettings>& self,
                                          const StorageContext& context) const = 0;
  [[nodiscard]] virtual std::size_t bytes(MemoryOf what, const StorageContext& context,
                                          std::size_t tokens) const = 0;
  [[nodiscard]] virtual HeadRule rule(std::size_t head_dim) const = 0;
  /// Settings of a head that keeps the latest `rows` rows, exact, in the kind of memory of these.
  [[nodiscard]] virtual std::shared_ptr<const AnySettings> sliding_window(std::size_t rows) const = 0;

 protected:
  AnySettings(const SettingsFacts& facts, const void* config) : facts_{facts}, config_{config} {}

 private:
  SettingsFacts facts_;
  const void* config_;
};

template <KvPolicy P>
class PolicySettings;

template <KvPolicy P>
std::shared_ptr<const AnySettings> share_settings(const typename P::Config& config) {
  return std::unique_ptr<const AnySettings>{new PolicySettings<P>(config)};
}

template <KvPolicy P>
class PolicySettings final : public AnySettings {
  using Traits = policy_traits<P>;
  using Config = typename P::Config;

 public:
  explicit PolicySettings(const Config& config)
      : AnySettings{{.policy_type = type_tag_of<P>(),
                     .names = Traits::names(),
                     .roles = {Traits::selects, Traits::compresses, Traits::accumulates, Traits::shares,
                               Traits::waits_for_scoring},
                     .observed_queries = Traits::observed_queries(config),
                     .has_names = Traits::has_name && HasFields<Config>,
                     .is_savable = Traits::is_savable,
                     .predicts_memory = Traits::predicts_memory,
                     .predicts_compressed = Traits::predicts_compressed,
                     .compresses_by_itself = Traits::compresses_by_itself(config),
                     .is_adaptive_in_layer = Traits::is_adaptive_in_layer(config),
                     .is_adaptive_in_model = Traits::is_adaptive_in_model(config),
                     .commit_changes_rows = Traits::commit_changes_rows,
                     .has_rule = Traits::has_rule},
                    &config_},
        config_{config} {}

  [[nodiscard]] bool equals(const AnySettings& other) const override { return of(other) == config_; }
  [[nodiscard]] bool may_share([[maybe_unused]] const AnySettings& other) const override {
    if constexpr (Traits::shares) return P::may_share(config_, of(other));
    return false;
  }
  void write_fields([[maybe_unused]] FieldVisitor& visit) const override {
    if constexpr (HasFields<Config>) {
      Config copy = config_;
      copy.fields(visit);
    }
  }
  void validate(const StorageContext& context) const override { Traits::validate(config_, context); }
  [[nodiscard]] HeadPtr make_head(const std::shared_ptr<const AnySettings>& self,
                                  const StorageContext& context) const override {
    const SharedConfig<Config> config{std::shared_ptr<const Config>{self, &config_}};
    return HeadPtr{std::make_unique<PolicyHead<P>>(config, context)};
  }
  [[nodiscard]] std::size_t bytes(MemoryOf what, const StorageContext& context,
                                  std::size_t tokens) const override {
    const SlowRule<P> slow{config_, context};
    const std::size_t copies = slow.bytes_of_copies(tokens);
    switch (what) {
      case MemoryOf::tokens: return Traits::bytes_of_tokens(config_, context, tokens) + copies;
      case MemoryOf::compressed: return Traits::bytes_compressed(config_, context, tokens) + copies;
      case MemoryOf::step:
        return Traits::bytes_of_step(config_, context, tokens) + slow.bytes(tokens) -
               slow.bytes(tokens - std::min<std::size_t>(tokens, 1)) +
               2 * copies;  // of the old choice and the new
      case MemoryOf::maximum:
        return Traits::max_bytes(config_, context, tokens) + slow.max_bytes_of_move(tokens) + 2 * copies;
      case MemoryOf::slow_memory: break;
    }
    return slow.bytes(tokens);
  }
  [[nodiscard]] HeadRule rule([[maybe_unused]] std::size_t head_dim) const override {
    if constexpr (Traits::has_rule) {
      return P::rule(config_, head_dim);
    } else {
      fail<ConfigError>(Traits::names().policy,
                        " does not state its rule; give it static HeadRule "
                        "rule(const Config&, std::size_t head_dim)");
    }
  }
  [[nodiscard]] std::shared_ptr<const AnySettings> sliding_window(std::size_t rows) const override {
    return share_settings<SinkRecentCache<typename Traits::exact_storage>>(
        {.sinks = 0, .recent = rows, .storage = Traits::exact_config(config_)});
  }

 private:
  [[nodiscard]] static const Config& of(const AnySettings& other) {
    return *static_cast<const Config*>(other.config());
  }
  Config config_;
};

}  // namespace detail

/// The settings of one head whose rows are of element type E. A value that any policy's Config
/// becomes by itself; copies share one object, which never changes, so any thread may read them.
template <Element E>
class HeadSettings {
 public:
  using element_type = E;

  /// The settings of the policy that `config` names (`Config::policy_type`).
  /// @throws std::bad_alloc
  template <class Config>
    requires PolicyConfig<std::remove_cvref_t<Config>> &&
             std::same_as<typename std::remove_cvref_t<Config>::policy_type::element_type, E>
  HeadSettings(const Config& config)  // NOLINT: every Config is such settings
      : own_{detail::share_settings<typename Config::policy_type>(config)} {}

  /// The same for a Config that does not name its policy.
  template <KvPolicy P>
    requires std::same_as<typename P::element_type, E>
  [[nodiscard]] static HeadSettings of(const typename P::Config& config = {}) {
    return HeadSettings{detail::share_settings<P>(config)};
  }

  /// Whether the head has policy P.
  template <KvPolicy P>
  [[nodiscard]] bool is() const {
    return own_->facts().policy_type == type_tag_of<P>();
  }
  /// The settings as P's, if the head has policy P; else null.
  template <KvPolicy P>
  [[nodiscard]] const typename P::Config* get_if() const {
    return is<P>() ? static_cast<const typename P::Config*>(own_->config()) : nullptr;
  }
  /// @throws ConfigError if the head has another policy
  template <KvPolicy P>
  [[nodiscard]] const typename P::Config& get() const {
    const typename P::Config* config = get_if<P>();
    require(config != nullptr, "HeadSettings: the head has the policy ", names().shown(), ", not ",
            policy_traits<P>::names().shown());
    return *config;
  }

  /// What the policy is called in files and messages.
  [[nodiscard]] PolicyNames names() const { return own_->facts().names; }
  /// Whether the policy has a name and its settings have, so that they can stand in files.
  [[nodiscard]] bool has_names() const { return own_->facts().has_names; }
  /// Whether a head under the settings can be saved and loaded.
  [[nodiscard]] bool is_savable() const { return own_->facts().is_savable; }
  /// Visits the settings by their names; `visit` writes them down.
  void write_fields(FieldVisitor& visit) const { own_->write_fields(visit); }

  /// @throws ConfigError for settings that cannot work
  void validate(const StorageContext& context) const { own_->validate(context); }
  /// A head that has seen no row. @throws ConfigError, std::bad_alloc
  [[nodiscard]] HeadPtr make_head(const StorageContext& context) const {
    return own_->make_head(own_, context);
  }

  // ---- memory: policy_traits.hpp says what each of them means. Where there is slow memory, pages on
  // their way there and copies of chosen rows come on top (slow_rule.hpp): a bound for a head
  // that holds one choice, besides what a rollback may bring back

  [[nodiscard]] std::size_t bytes_of_tokens(const StorageContext& context, std::size_t tokens) const {
    return own_->bytes(detail::MemoryOf::tokens, context, tokens);
  }
  [[nodiscard]] std::size_t bytes_compressed(const StorageContext& context, std::size_t tokens) const {
    return own_->bytes(detail::MemoryOf::compressed, context, tokens);
  }
  [[nodiscard]] std::size_t bytes_of_step(const StorageContext& context, std::size_t tokens) const {
    return own_->bytes(detail::MemoryOf::step, context, tokens);
  }
  [[nodiscard]] std::size_t max_bytes(const StorageContext& context, std::size_t tokens) const {
    return own_->bytes(detail::MemoryOf::maximum, context, tokens);
  }
  /// The part of `bytes_of_tokens` that is in slow memory right after a choice, or without a choice. Rows that came
  /// after a choice are not there yet.
  [[nodiscard]] std::size_t slow_bytes_of_tokens(const StorageContext& context, std::size_t tokens) const {
    return own_->bytes(detail::MemoryOf::slow_memory, context, tokens);
  }
  [[nodiscard]] bool predicts_memory() const { return own_->facts().predicts_memory; }
  [[nodiscard]] bool predicts_compressed() const { return own_->facts().predicts_compressed; }

  // ---- what the head does

  [[nodiscard]] HeadRoles roles() const { return own_->facts().roles; }
  [[nodiscard]] std::size_t observed_queries() const { return own_->facts().observed_queries; }
  [[nodiscard]] bool compresses_by_itself() const { return own_->facts().compresses_by_itself; }
  [[nodiscard]] bool commit_changes_rows() const { return own_->facts().commit_changes_rows; }
  [[nodiscard]] bool is_adaptive_in_layer() const { return own_->facts().is_adaptive_in_layer; }
  [[nodiscard]] bool is_adaptive_in_model() const { return own_->facts().is_adaptive_in_model; }
  /// Whether heads of the two settings may share a layer's budget.
  [[nodiscard]] bool may_share(const HeadSettings& other) const {
    return own_->has_policy_of(*other.own_) && own_->may_share(*other.own_);
  }
  [[nodiscard]] bool has_rule() const { return own_->facts().has_rule; }
  /// What the head keeps and what a query reads. @throws ConfigError if the policy does not say
  [[nodiscard]] HeadRule rule(std::size_t head_dim) const { return own_->rule(head_dim); }
  /// Settings of a sliding window over the latest `rows` rows, which are exact: in pages of an inference
  /// engine's memory if the rows of these are. @throws std::bad_alloc
  [[nodiscard]] HeadSettings sliding_window(std::size_t rows) const {
    return HeadSettings{own_->sliding_window(rows)};
  }

  friend bool operator==(const HeadSettings& a, const HeadSettings& b) {
    return a.own_ == b.own_ || (a.own_->has_policy_of(*b.own_) && a.own_->equals(*b.own_));
  }

 private:
  explicit HeadSettings(std::shared_ptr<const detail::AnySettings> own) : own_{std::move(own)} {}

  std::shared_ptr<const detail::AnySettings> own_;
};

}  // namespace kvpolicy
