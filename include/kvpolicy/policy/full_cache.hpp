// SPDX-License-Identifier: Apache-2.0
//
// Keeps every row and shows them all. Over a ResidualStorage it is a quantised cache.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>

#include <kvpolicy/policy/instances.hpp>
#include <kvpolicy/policy/policy.hpp>

namespace kvpolicy {

/// One head's rows. Not synchronised: segments are valid until the next `commit`.
template <KvStorage Storage>
class FullCache {
 public:
  using element_type = typename Storage::element_type;
  using storage_type = Storage;
  /// How the rows are stored.
  struct Config {
    using policy_type = FullCache;  ///< Whose settings these are.
    typename Storage::Config storage = {};
    friend bool operator==(const Config&, const Config&) = default;
    void fields(FieldVisitor& visit)
      requires DescribedStorage<Storage>
    {
      visit("storage", storage);
    }
  };
  static constexpr std::string_view name = "full";

  /// @throws ConfigError if the storage's config does not fit.
  FullCache(const Config& config, const StorageContext& context) : storage_{config.storage, context} {}

  static void validate(const Config& config, const StorageContext& context) {
    Storage::validate(config.storage, context);
  }
  [[nodiscard]] static HeadRule rule(const Config& config, std::size_t head_dim)
    requires DescribedStorage<Storage>
  {
    HeadRule rule;
    config.storage.describe(rule, head_dim);
    return rule;
  }

  void check(const Segment& rows) const { storage_.check(rows); }
  void reserve(std::size_t rows) { storage_.reserve(rows); }
  void release_unused() noexcept { storage_.release_unused(); }

  void commit(const Segment& rows) noexcept { storage_.append(rows); }

  void segments(const ReadRequest&, SegmentList& out) const {
    storage_.show(0, storage_.end(), Segment{}, out);
  }

  /// Goes back to what it was when row `row` had not come; false if that is not known any more.
  [[nodiscard]] bool cut(std::size_t row) noexcept {
    if constexpr (requires { storage_.cut(row); }) return storage_.cut(row);
    return false;
  }

  /// What keeps the rows.
  [[nodiscard]] const Storage& storage() const { return storage_; }
  [[nodiscard]] Storage& storage() { return storage_; }
  /// A new head takes what another one of its settings holds.
  void take(const HeadContents& contents)
    requires TakingStorage<Storage>
  {
    for (const Segment& rows : contents.rows) storage_.take(rows, static_cast<std::size_t>(rows.position));
  }

  [[nodiscard]] std::size_t rows() const { return storage_.end(); }
  [[nodiscard]] std::size_t bytes() const { return storage_.bytes(); }
  [[nodiscard]] std::size_t shared_bytes() const { return storage_.shared_bytes(); }
  [[nodiscard]] std::size_t overhead_bytes() const { return overhead_of(storage_); }

  [[nodiscard]] static std::size_t bytes_of_tokens(const Config& config, const StorageContext& context,
                                                   std::size_t tokens) {
    return Storage::bytes_of_rows(config.storage, context, 0, tokens);
  }
  [[nodiscard]] static std::size_t bytes_of_step(const Config& config, const StorageContext& context,
                                                 std::size_t tokens) {
    return Storage::bytes_of_step(config.storage, context, unlimited_rows, tokens);
  }
  [[nodiscard]] static std::size_t max_bytes(const Config& config, const StorageContext& context,
                                             std::size_t tokens) {
    return Storage::max_bytes(config.storage, context, unlimited_rows, tokens);
  }

  template <class Archive>
  void serialize(Archive& archive) {
    archive(storage_);
    archive.check(storage_.begin() == 0 && storage_.end() == archive.rows(), "all ", archive.rows(), " rows");
  }

 private:
  Storage storage_;
};

KVPOLICY_DECLARE_POLICY(FullCache, DenseStorage)

}  // namespace kvpolicy
