// SPDX-License-Identifier: Apache-2.0
//
// One KV head's settings, under whichever policy: what a HeadPlan holds for each head. A policy is
// instantiated where its settings become HeadSettings, and nowhere else.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <memory>
#include <type_traits>
#include <utility>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/fields.hpp>
#include <kvpolicy/core/head_rule.hpp>
#include <kvpolicy/offload/slow_rule.hpp>
#include <kvpolicy/policy/head.hpp>
#include <kvpolicy/policy/policy_head.hpp>
#include <kvpolicy/policy/policy_traits.hpp>

namespace kvpolicy {

namespace detail {

/// What is asked of settings whose policy is not known.
class AnySettings {
 public:
  AnySettings() = default;
  AnySettings(const AnySettings&) = delete;
  AnySettings& operator=(const AnySettings&) = delete;
  virtual ~AnySettings() = default;

  [[nodiscard]] virtual TypeTag policy_type() const noexcept = 0;
  [[nodiscard]] virtual const void* config() const noexcept = 0;
  [[nodiscard]] virtual bool equals(const AnySettings& other) const = 0;
  [[nodiscard]] virtual bool may_share(const AnySettings& other) const = 0;
  [[nodiscard]] virtual PolicyNames names() const = 0;
  [[nodiscard]] virtual bool has_names() const = 0;
  [[nodiscard]] virtual bool is_savable() const = 0;
  virtual void write_fields(FieldVisitor& visit) const = 0;
  virtual void validate(const StorageContext& context) const = 0;
  /// `self` owns these settings, which the head then shares.
  [[nodiscard]] virtual HeadPtr make_head(const std::shared_ptr<const AnySettings>& self,
                                          const StorageContext& context) const = 0;
  [[nodiscard]] virtual std::size_t bytes_of_tokens(const StorageContext&, std::size_t) const = 0;
  [[nodiscard]] virtual std::size_t bytes_compressed(const StorageContext&, std::size_t) const = 0;
  [[nodiscard]] virtual std::size_t bytes_of_step(const StorageContext&, std::size_t) const = 0;
  [[nodiscard]] virtual std::size_t max_bytes(const StorageContext&, std::size_t) const = 0;
  [[nodiscard]] virtual std::size_t slow_bytes_of_tokens(const StorageContext&, std::size_t) const = 0;
  [[nodiscard]] virtual bool predicts_memory() const = 0;
  [[nodiscard]] virtual bool predicts_compressed() const = 0;
  [[nodiscard]] virtual HeadRoles roles() const = 0;
  [[nodiscard]] virtual std::size_t observed_queries() const = 0;
  [[nodiscard]] virtual bool compresses_by_itself() const = 0;
  [[nodiscard]] virtual bool is_adaptive_in_layer() const = 0;
  [[nodiscard]] virtual bool commit_changes_rows() const = 0;
  [[nodiscard]] virtual bool has_rule() const = 0;
  [[nodiscard]] virtual HeadRule rule(std::size_t head_dim) const = 0;
};

template <KvPolicy P>
class PolicySettings final : public AnySettings {
  using Traits = policy_traits<P>;
  using Config = typename P::Config;

 public:
  explicit PolicySettings(const Config& config) : config_{config} {}

  [[nodiscard]] TypeTag policy_type() const noexcept override { return type_tag_of<P>(); }
  [[nodiscard]] const void* config() const noexcept override { return &config_; }
  [[nodiscard]] bool equals(const AnySettings& other) const override {
    return other.policy_type() == policy_type() && of(other) == config_;
  }
  [[nodiscard]] bool may_share([[maybe_unused]] const AnySettings& other) const override {
    if constexpr (Traits::shares) {
      return other.policy_type() == policy_type() && P::may_share(config_, of(other));
    }
    return false;
  }
  [[nodiscard]] PolicyNames names() const override { return Traits::names(); }
  [[nodiscard]] bool has_names() const override {
    return Traits::has_name && HasFields<Config>;
  }
  [[nodiscard]] bool is_savable() const override { return PolicyHead<P>::is_savable; }
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
  [[nodiscard]] std::size_t bytes_of_tokens(const StorageContext& context,
                                            std::size_t tokens) const override {
    return Traits::bytes_of_tokens(config_, context, tokens) + slow(context).bytes_of_copies(tokens);
  }
  [[nodiscard]] std::size_t bytes_compressed(const StorageContext& context,
                                             std::size_t tokens) const override {
    return Traits::bytes_compressed(config_, context, tokens) + slow(context).bytes_of_copies(tokens);
  }
  [[nodiscard]] std::size_t bytes_of_step(const StorageContext& context,
                                          std::size_t tokens) const override {
    const Slow rule = slow(context);
    return Traits::bytes_of_step(config_, context, tokens) + rule.bytes(tokens) -
           rule.bytes(tokens - std::min<std::size_t>(tokens, 1)) +
           2 * rule.bytes_of_copies(tokens);  // of the old choice and the new
  }
  [[nodiscard]] std::size_t max_bytes(const StorageContext& context,
                                      std::size_t tokens) const override {
    const Slow rule = slow(context);
    return Traits::max_bytes(config_, context, tokens) + rule.max_bytes_of_move(tokens) +
           2 * rule.bytes_of_copies(tokens);
  }
  [[nodiscard]] std::size_t slow_bytes_of_tokens(const StorageContext& context,
                                                 std::size_t tokens) const override {
    return slow(context).bytes(tokens);
  }
  [[nodiscard]] bool predicts_memory() const override { return Traits::predicts_memory; }
  [[nodiscard]] bool predicts_compressed() const override { return Traits::predicts_compressed; }
  [[nodiscard]] HeadRoles roles() const override {
    return {Traits::selects, Traits::compresses, Traits::accumulates, Traits::shares};
  }
  [[nodiscard]] std::size_t observed_queries() const override {
    return Traits::observed_queries(config_);
  }
  [[nodiscard]] bool compresses_by_itself() const override {
    return Traits::compresses_by_itself(config_);
  }
  [[nodiscard]] bool is_adaptive_in_layer() const override { return Traits::is_adaptive_in_layer(config_); }
  [[nodiscard]] bool commit_changes_rows() const override { return Traits::commit_changes_rows; }
  [[nodiscard]] bool has_rule() const override { return Traits::has_rule; }
  [[nodiscard]] HeadRule rule([[maybe_unused]] std::size_t head_dim) const override {
    if constexpr (Traits::has_rule) {
      return P::rule(config_, head_dim);
    } else {
      fail<ConfigError>(Traits::names().policy, " does not state its rule; give it static HeadRule "
                        "rule(const Config&, std::size_t head_dim)");
    }
  }

 private:
  using Slow = offload::SlowRule<P>;
  [[nodiscard]] Slow slow(const StorageContext& context) const { return {config_, context}; }
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
      : own_{std::make_shared<detail::PolicySettings<typename Config::policy_type>>(config)} {}

  /// The same for a Config that does not name its policy.
  template <KvPolicy P>
    requires std::same_as<typename P::element_type, E>
  [[nodiscard]] static HeadSettings of(const typename P::Config& config = {}) {
    return HeadSettings{std::make_shared<detail::PolicySettings<P>>(config)};
  }

  /// Whether the head has policy P.
  template <KvPolicy P>
  [[nodiscard]] bool is() const {
    return own_->policy_type() == type_tag_of<P>();
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
  [[nodiscard]] PolicyNames names() const { return own_->names(); }
  /// Whether the policy has a name and its settings have, so that they can stand in files.
  [[nodiscard]] bool has_names() const { return own_->has_names(); }
  /// Whether a head under the settings can be saved and loaded.
  [[nodiscard]] bool is_savable() const { return own_->is_savable(); }
  /// Visits the settings by their names; `visit` writes them down.
  void write_fields(FieldVisitor& visit) const { own_->write_fields(visit); }

  /// @throws ConfigError for settings that cannot work
  void validate(const StorageContext& context) const { own_->validate(context); }
  /// A head that has seen no row. @throws ConfigError, std::bad_alloc
  [[nodiscard]] HeadPtr make_head(const StorageContext& context) const {
    return own_->make_head(own_, context);
  }

  // ---- memory: policy_traits.hpp says what each of them means. Where there is slow memory, pages on
  // their way there and copies of chosen rows come on top (offload/slow_rule.hpp): a bound for a head
  // that holds one choice, besides what a rollback may bring back

  [[nodiscard]] std::size_t bytes_of_tokens(const StorageContext& context, std::size_t tokens) const {
    return own_->bytes_of_tokens(context, tokens);
  }
  [[nodiscard]] std::size_t bytes_compressed(const StorageContext& context, std::size_t tokens) const {
    return own_->bytes_compressed(context, tokens);
  }
  [[nodiscard]] std::size_t bytes_of_step(const StorageContext& context, std::size_t tokens) const {
    return own_->bytes_of_step(context, tokens);
  }
  [[nodiscard]] std::size_t max_bytes(const StorageContext& context, std::size_t tokens) const {
    return own_->max_bytes(context, tokens);
  }
  /// Of `bytes_of_tokens`, bytes in slow memory right after a choice, or without one; of rows that came
  /// since, none are there yet.
  [[nodiscard]] std::size_t slow_bytes_of_tokens(const StorageContext& context,
                                                 std::size_t tokens) const {
    return own_->slow_bytes_of_tokens(context, tokens);
  }
  [[nodiscard]] bool predicts_memory() const { return own_->predicts_memory(); }
  [[nodiscard]] bool predicts_compressed() const { return own_->predicts_compressed(); }

  // ---- what the head does

  [[nodiscard]] HeadRoles roles() const { return own_->roles(); }
  [[nodiscard]] std::size_t observed_queries() const { return own_->observed_queries(); }
  [[nodiscard]] bool compresses_by_itself() const { return own_->compresses_by_itself(); }
  [[nodiscard]] bool commit_changes_rows() const { return own_->commit_changes_rows(); }
  [[nodiscard]] bool is_adaptive_in_layer() const { return own_->is_adaptive_in_layer(); }
  /// Whether heads of the two settings may share a layer's budget.
  [[nodiscard]] bool may_share(const HeadSettings& other) const {
    return own_->may_share(*other.own_);
  }
  [[nodiscard]] bool has_rule() const { return own_->has_rule(); }
  /// What the head keeps and what a query reads. @throws ConfigError if the policy does not say
  [[nodiscard]] HeadRule rule(std::size_t head_dim) const { return own_->rule(head_dim); }

  friend bool operator==(const HeadSettings& a, const HeadSettings& b) {
    return a.own_ == b.own_ || a.own_->equals(*b.own_);
  }

 private:
  explicit HeadSettings(std::shared_ptr<const detail::AnySettings> own) : own_{std::move(own)} {}

  std::shared_ptr<const detail::AnySettings> own_;
};

}  // namespace kvpolicy
