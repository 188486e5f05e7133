// SPDX-License-Identifier: Apache-2.0
//
// Keeps every row: the first ones (the attention sinks) and the latest ones in full precision, all others in
// 2 to 8 bits. storage/residual_storage.hpp names the papers that the rest comes from.
//
// Sinks stay exact because they are the rows that quantising costs most: nearly every query reads them, and their
// keys and values have the outliers that would widen the grids of their neighbours (KVQuant, arXiv:2401.18079;
// KVSink, arXiv:2508.04257). They lie in a page of their own, which is as small as their number allows.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <string_view>

#include <kvpolicy/core/boxed.hpp>
#include <kvpolicy/policy/instances.hpp>
#include <kvpolicy/policy/policy.hpp>
#include <kvpolicy/storage/residual_storage.hpp>

namespace kvpolicy {

/// One head that keeps every row, most of them in few bits. `Keys` says what keys share a scale; values share it
/// within a row. Not synchronised: segments are valid until the next `commit`.
template <Element E, Granularity Keys = Granularity::per_token>
class QuantizedResidualCache {
 public:
  using element_type = E;
  using storage_type = ResidualStorage<E, Keys>;
  /// How many opening rows stay exact, and how the others are stored.
  struct Config {
    using policy_type = QuantizedResidualCache;  ///< Whose settings these are.
    std::size_t sinks = 0;  ///< Opening rows that are never quantised; groups of keys begin after them.
    typename storage_type::Config storage = {};
    friend bool operator==(const Config&, const Config&) = default;
    void fields(FieldVisitor& visit) {
      visit.later("sinks", sinks, 0);
      visit("storage", storage);
    }
  };
  static constexpr std::string_view name = "full";

  /// @throws ConfigError if a setting does not fit.
  QuantizedResidualCache(const Config& config, const StorageContext& context)
      : storage_{config.storage, context}, most_sinks_{config.sinks} {
    validate(config, context);
    if (config.sinks > 0) sinks_.emplace(typename Sinks::Config{}, of_sinks(config, context));
  }

  static void validate(const Config& config, const StorageContext& context) {
    require(config.sinks <= 4096, "QuantizedResidualCache: sinks is ", config.sinks,
            ", must be at most 4096");
    storage_type::validate(config.storage, context);
  }
  [[nodiscard]] static HeadRule rule(const Config& config, std::size_t head_dim) {
    HeadRule rule;
    rule.sinks = config.sinks;
    config.storage.describe(rule, head_dim);
    return rule;
  }

  /// Sinks stay exact, so any number may stand in them.
  void check(const Segment& rows) const {
    const std::size_t sinks = sinks_among(rows.rows);
    storage_.check(rows.part(sinks, rows.rows - sinks));
  }
  void reserve(std::size_t rows) {
    const std::size_t sinks = sinks_among(rows);
    if (sinks > 0) sinks_->reserve(sinks);
    storage_.reserve(rows - sinks);
  }
  void release_unused() noexcept {
    if (sinks_) sinks_->release_unused();
    storage_.release_unused();
  }

  void commit(const Segment& rows) noexcept {
    const std::size_t sinks = sinks_among(rows.rows);
    if (sinks > 0) sinks_->append(rows.part(0, sinks));
    storage_.append(rows.part(sinks, rows.rows - sinks));
  }

  void segments(const ReadRequest&, SegmentList& out) const {
    if (sinks_) sinks_->show(0, sinks_->end(), Segment{}, out);
    storage_.show(0, storage_.end(), {.position = static_cast<std::int64_t>(most_sinks_)}, out);
  }

  /// What keeps the rows besides the sinks, which it counts from 0.
  [[nodiscard]] const storage_type& storage() const { return storage_; }
  [[nodiscard]] storage_type& storage() { return storage_; }
  /// How many rows `storage` has once `rows` rows came.
  [[nodiscard]] static std::size_t stored_rows(const Config& config, std::size_t rows) {
    return rows - std::min(rows, config.sinks);
  }
  [[nodiscard]] std::size_t stored_rows(std::size_t rows) const { return rows - std::min(rows, most_sinks_); }

  /// A new head takes what another one of its settings holds.
  void take(const HeadContents& contents) {
    for (const Segment& rows : contents.rows) {
      const auto first = static_cast<std::size_t>(rows.position);
      if (first < most_sinks_) {
        sinks_->take(rows, first);
      } else {
        storage_.take(rows, first - most_sinks_);
      }
    }
  }

  [[nodiscard]] std::size_t rows() const { return (sinks_ ? sinks_->end() : 0) + storage_.end(); }
  [[nodiscard]] std::size_t bytes() const { return (sinks_ ? sinks_->bytes() : 0) + storage_.bytes(); }
  [[nodiscard]] std::size_t shared_bytes() const {
    return (sinks_ ? sinks_->shared_bytes() : 0) + storage_.shared_bytes();
  }
  [[nodiscard]] std::size_t overhead_bytes() const {
    return overhead_of(storage_) + (sinks_ ? sizeof(Sinks) + overhead_of(*sinks_) : 0);
  }

  [[nodiscard]] static std::size_t bytes_of_tokens(const Config& config, const StorageContext& context,
                                                   std::size_t tokens) {
    return bytes_of_sinks(config, context, tokens) +
           storage_type::bytes_of_rows(config.storage, context, 0, stored_rows(config, tokens));
  }
  [[nodiscard]] static std::size_t bytes_of_step(const Config& config, const StorageContext& context,
                                                 std::size_t tokens) {
    return bytes_of_sinks(config, context, tokens) +
           storage_type::bytes_of_step(config.storage, context, unlimited_rows, stored_rows(config, tokens));
  }
  [[nodiscard]] static std::size_t max_bytes(const Config& config, const StorageContext& context,
                                             std::size_t tokens) {
    return bytes_of_sinks(config, context, tokens) +
           storage_type::max_bytes(config.storage, context, unlimited_rows, stored_rows(config, tokens));
  }

  template <class Archive>
  void serialize(Archive& archive) {
    if (sinks_) archive(*sinks_);
    archive(storage_);
    const std::size_t sinks = std::min(most_sinks_, archive.rows());
    archive.check((!sinks_ || (sinks_->begin() == 0 && sinks_->end() == sinks)) && storage_.begin() == 0 &&
                      storage_.end() == archive.rows() - sinks,
                  "all ", archive.rows(), " rows, the first ", sinks, " exact");
  }

 private:
  using Sinks = ExactStorage<storage_type>;

  // Pages of the sinks, whose rows are few.
  [[nodiscard]] static StorageContext of_sinks(const Config& config, StorageContext context) {
    constexpr std::size_t smallest = 16;
    context.page_rows = std::min(context.page_rows, std::bit_ceil(std::max(smallest, config.sinks)));
    return context;
  }
  [[nodiscard]] static std::size_t bytes_of_sinks(const Config& config, const StorageContext& context,
                                                  std::size_t tokens) {
    return Sinks::bytes_of_rows({}, of_sinks(config, context), 0, std::min(tokens, config.sinks));
  }
  // How many of the next `rows` rows are sinks.
  [[nodiscard]] std::size_t sinks_among(std::size_t rows) const {
    return sinks_ ? std::min(rows, most_sinks_ - sinks_->end()) : 0;
  }

  detail::Boxed<Sinks> sinks_;  // where there are any
  storage_type storage_;
  std::size_t most_sinks_;
};

KVPOLICY_DECLARE_POLICY(QuantizedResidualCache, std::type_identity_t)
KVPOLICY_DECLARE_POLICY(QuantizedResidualCache, std::type_identity_t, Granularity::per_channel)

}  // namespace kvpolicy
