// SPDX-License-Identifier: Apache-2.0
//
// Keeps a fixed number of rows, those that the text's own last queries attend to most, and the
// rows since. Until it is compressed it keeps everything; each head may have another budget.
//
// Method: HeadKV, arXiv:2410.19258 (a budget per head), with SnapKV's choice of rows inside a head
// (policy/snapkv_scorer.hpp). `budget` counts rows besides the window: the papers' "capacity" is
// budget + window.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <kvpolicy/policy/policy.hpp>
#include <kvpolicy/policy/snapkv_scorer.hpp>
#include <kvpolicy/policy/top_rows.hpp>

namespace kvpolicy {

/// One head's surviving rows. Not synchronised: segments are valid until the next `commit` or
/// `finish_compress`. The survivors' positions (8 bytes a row) are bookkeeping, not in `bytes()`.
template <KvStorage Storage, RowScorer Scorer = SnapKvScorer>
class HeadBudgetCache {
  static_assert(Storage::movable_rows,
                "HeadBudgetCache: eviction keeps single rows, so its storage must not tie rows "
                "together: use per-token groups, not per-channel ones");

 public:
  using element_type = typename Storage::element_type;
  using storage_type = Storage;
  using scorer_type = Scorer;
  struct Config {
    std::size_t budget = 120;  ///< Rows kept besides the observed window; 0 keeps the window alone.
    /// Compress whenever this many rows have come on top; 0: only when the cache is told to.
    std::size_t compress_every = 0;
    typename Scorer::Config scorer = {};
    typename Storage::Config storage = {};
    friend bool operator==(const Config&, const Config&) = default;
  };
  static constexpr std::string_view name = "head_budget";

  /// @throws ConfigError if the scorer's or the storage's config does not fit.
  HeadBudgetCache(const Config& config, const StorageContext& context)
      : config_{config}, storage_{config.storage, context.fast()} {
    validate(config, context);
    hold(storage_, true);  // survivors first, then bits
  }

  static void validate(const Config& config, const StorageContext& context) {
    constexpr std::size_t most = std::size_t{1} << 40;
    require(config.budget <= most, "HeadBudgetCache: budget is ", config.budget,
            ", must be at most 2^40");
    Scorer::validate(config.scorer);
    Storage::validate(config.storage, context);
  }

  void check(const Segment& rows) const { storage_.check(rows); }
  void reserve(std::size_t rows) {
    storage_.reserve(rows);
    if (positions_.empty() || positions_.capacity() - positions_.size() >= rows) return;
    positions_.reserve(std::max(positions_.size() + rows, 2 * positions_.capacity()));
  }
  void release_spare() noexcept { storage_.release_spare(); }

  void commit(const Segment& rows) {
    storage_.append(rows);
    if (positions_.empty()) return;  // nothing evicted so far: row numbers are positions
    for (std::size_t i = 0; i < rows.rows; ++i) positions_.push_back(rows.position_of(i));
  }

  void segments(const ReadRequest&, SegmentList& out) const {
    storage_.show(0, storage_.end(),
                  {.positions = positions_.empty() ? nullptr : positions_.data()}, out);
  }

  /// Latest queries whose attention decides; the cache keeps them.
  [[nodiscard]] static std::size_t observed_queries(const Config& config) {
    return Scorer::observed_queries(config.scorer);
  }
  [[nodiscard]] std::size_t observed_queries() const { return observed_queries(config_); }
  /// Whether compressing would evict anything, once `more` rows were committed.
  [[nodiscard]] bool is_compressible(std::size_t more = 0) const {
    return storage_.end() + more > config_.budget + observed_queries();
  }
  /// Whether the config asks for a compression now.
  [[nodiscard]] bool wants_compress() const {
    return config_.compress_every > 0 &&
           storage_.end() >= config_.budget + observed_queries() + config_.compress_every;
  }
  [[nodiscard]] static bool compresses_by_itself(const Config& config) {
    return config.compress_every > 0;
  }

  /// Chooses the survivors by `sums` [group, rows], each row's probability summed over `queries`
  /// observed queries, and copies them. Nothing changes until `finish_compress`.
  /// @throws std::bad_alloc
  void prepare_compress(std::span<const float> sums, std::size_t group, std::size_t queries) {
    const std::size_t window = std::min(observed_queries(), storage_.end());
    const std::size_t candidates = storage_.end() - window;
    std::vector<float> scores(candidates);
    Scorer::score(config_.scorer, sums, group, queries, scores);
    std::vector<std::size_t> numbers = top_rows(scores, config_.budget);
    for (std::size_t row = candidates; row < storage_.end(); ++row) numbers.push_back(row);
    std::vector<std::int64_t> positions;
    positions.reserve(numbers.size());
    for (const std::size_t row : numbers) {
      positions.push_back(positions_.empty() ? static_cast<std::int64_t>(row) : positions_[row]);
    }
    // The copy holds nothing back: survivors that do not fit its residual are quantised in it.
    pending_.emplace(storage_.select(numbers), std::move(positions));
  }
  void finish_compress() noexcept {
    if (pending_) {
      storage_ = std::move(pending_->first);
      positions_ = std::move(pending_->second);
      pending_.reset();
    } else {
      hold(storage_, false);  // everything survived
    }
  }
  void abandon_compress() noexcept { pending_.reset(); }

  [[nodiscard]] std::size_t rows() const { return storage_.end(); }
  [[nodiscard]] std::size_t bytes() const {
    return storage_.bytes() + (pending_ ? pending_->first.bytes() : 0);
  }
  [[nodiscard]] std::size_t shared_bytes() const { return storage_.shared_bytes(); }

  /// A bound where a text is compressed: the rows that survive, and `compress_every` on top. A head
  /// that compresses only when told to may hold the whole text: that is what this counts then.
  [[nodiscard]] static std::size_t bytes_of_tokens(const Config& config,
                                                   const StorageContext& context,
                                                   std::size_t tokens) {
    const std::size_t kept = config.budget + observed_queries(config);
    const std::size_t rows =
        config.compress_every == 0 ? tokens : std::min(tokens, kept + config.compress_every);
    return exact_bytes(config, context, rows);
  }
  /// Right after a compression of a text of `tokens`.
  [[nodiscard]] static std::size_t bytes_compressed(const Config& config,
                                                    const StorageContext& context,
                                                    std::size_t tokens) {
    const std::size_t kept = config.budget + observed_queries(config);
    if (tokens <= kept) return exact_bytes(config, context, tokens);
    return Storage::bytes_of_rows(config.storage, context, 0, kept);
  }

 private:
  // Rows that were not compressed are exact whatever the storage.
  [[nodiscard]] static std::size_t exact_bytes(const Config&, const StorageContext& context,
                                               std::size_t rows) {
    return DenseStorage<element_type>::bytes_of_rows({}, context, 0, rows);
  }

  static void hold(Storage& storage, bool held) {
    if constexpr (requires { storage.hold(held); }) storage.hold(held);
  }

  Config config_;
  Storage storage_;
  std::vector<std::int64_t> positions_;  // of each row, once rows were evicted
  std::optional<std::pair<Storage, std::vector<std::int64_t>>> pending_;
};

}  // namespace kvpolicy
