// SPDX-License-Identifier: Apache-2.0
//
// Keeps a fixed number of rows, those that its scorer ranks highest, and the rows since. Until it is
// compressed it keeps everything; each head may have another budget.
//
// Method: HeadKV, arXiv:2410.19258 (a budget per head), with SnapKV's choice of rows inside a head
// (policy/snapkv_scorer.hpp), or another one's (tova_scorer.hpp, h2o_scorer.hpp, key_norm_scorer.hpp, and of those that
// need no question key_diff_scorer.hpp, expected_attention_scorer.hpp and kvzip_scorer.hpp).
// `budget` counts rows besides those that the scorer always keeps, SnapKV's window: the papers'
// "capacity" is budget + window. Heads of a layer, or of the model, may share their budgets (shared_rows.hpp: Ada-KV).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <kvpolicy/core/boxed.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/head_rule.hpp>
#include <kvpolicy/core/row.hpp>
#include <kvpolicy/core/rule_ranges.hpp>
#include <kvpolicy/core/value_outputs.hpp>
#include <kvpolicy/policy/instances.hpp>
#include <kvpolicy/policy/policy.hpp>
#include <kvpolicy/policy/row_ranking.hpp>
#include <kvpolicy/policy/row_scorer.hpp>
#include <kvpolicy/policy/shared_config.hpp>
#include <kvpolicy/policy/shared_rows.hpp>
#include <kvpolicy/policy/snapkv_scorer.hpp>
#include <kvpolicy/policy/weighed_scores.hpp>

namespace kvpolicy {

/// One head's surviving rows. Not synchronised: segments are valid until the next `commit` or
/// `finish_compress`. The survivors' positions (8 bytes a row) are bookkeeping, not in `bytes()`,
/// and so are the sums of a scorer that adds up (8 more).
template <KvStorage Storage, RowScorer Scorer = SnapKvScorer>
class HeadBudgetCache {
  static_assert(Storage::movable_rows,
                "HeadBudgetCache: eviction keeps single rows, so its storage must not tie rows "
                "together: use per-token groups, not per-channel ones");

 public:
  using element_type = typename Storage::element_type;
  using storage_type = Storage;
  using scorer_type = Scorer;
  /// How many rows survive, and when the others go.
  struct Config {
    using policy_type = HeadBudgetCache;  ///< Whose settings these are.
    std::size_t budget = 120;             ///< Rows kept by rank, besides those that the scorer always keeps.
    /// A text of fewer rows stays whole, however small the budget. The published code asks whether
    /// the prompt is shorter than the average capacity of all heads; with 0 each head compares with its own
    /// capacity.
    std::size_t compress_from = 0;
    /// Compress whenever this many rows have come on top of the capacity; 0: only when `compress` is called. Rows
    /// that an `append` left in the tail count once they are committed.
    std::size_t compress_every = 0;
    /// `compress_every` begins with the first call of `compress`, after a prompt: until then a prompt is attended to
    /// as a whole, in however many calls it comes.
    bool after_first_compress = false;
    /// The rows of all heads of the layer that share compete for the sum of their budgets (Ada-KV).
    /// Such heads must agree in all but the budget.
    bool adaptive_in_layer = false;
    /// So do the rows of all heads of all layers: one threshold for the model (KVzip). Such heads are compressed all at
    /// once (`compress()`), so `compress_every` must be 0.
    bool adaptive_in_model = false;
    /// A row's score is multiplied by a norm of its value: a row that adds little to a result may go, however much
    /// attention it gets (Expected Attention; CriticalKV, arXiv:2502.03805). For scorers that go by attention.
    bool weigh_values = false;
    /// Which norm; `output_l1`, CriticalKV's, needs `CacheOptions::value_outputs`.
    ValueNorm value_norm = ValueNorm::value_l2;
    /// Share of the budget that goes to the rows of the highest scores before these are multiplied; the others compete
    /// for what is left (CriticalKV's alpha, 0.5 in the paper). Heads that share their budgets divide them by
    /// these scores then, and each chooses of its part in the two steps; with 0 the multiplied scores compete.
    double unweighed_share = 0.0;
    /// Share of its budget that a head keeps whatever the others have, where heads share (Ada-KV's alpha).
    double safeguard = 0.2;
    typename Scorer::Config scorer = {};
    typename Storage::Config storage = {};
    friend bool operator==(const Config&, const Config&) = default;
    void fields(FieldVisitor& visit)
      requires DescribedStorage<Storage>
    {
      visit("budget", budget);
      visit("compress_every", compress_every);
      visit.brief("after_first_compress", after_first_compress, false);
      visit.brief_renamed("adaptive_in_layer", "share_in_layer", adaptive_in_layer, false);
      visit.brief("safeguard", safeguard, 0.2);
      scorer.fields(visit);
      visit("storage", storage);
      visit.later("compress_from", compress_from, 0);
      visit.later("adaptive_in_model", adaptive_in_model, false);
      visit.later("weigh_values", weigh_values, false);
      visit.later("value_norm", value_norm, ValueNorm::value_l2);
      visit.later("unweighed_share", unweighed_share, 0.0);
    }
  };
  static constexpr std::string_view name = "head_budget";

  /// @throws ConfigError if the scorer's or the storage's config does not fit, or `value_norm` needs an output
  /// projection that `context` lacks; ShapeError for one of other values.
  HeadBudgetCache(const Config& config, const StorageContext& context)
      : HeadBudgetCache{SharedConfig{config}, context} {}
  HeadBudgetCache(const SharedConfig<Config>& config, const StorageContext& context)
      : config_{config},
        head_dim_{static_cast<std::uint32_t>(context.head_dim)},
        value_dim_{static_cast<std::uint32_t>(context.value_channels())},
        value_output_{config->value_norm == ValueNorm::output_l1 ? context.value_output : nullptr},
        storage_{config->storage, context} {
    validate(*config, context);
    if (config->value_norm == ValueNorm::output_l1) check_value_output(value_output_, value_dim_);
    defer_quantization(storage_, true);  // rows are quantised once the first survivors are chosen
  }

  static void validate(const Config& config, const StorageContext& context) {
    constexpr std::size_t most = std::size_t{1} << 40;
    require(config.budget <= most, "HeadBudgetCache: budget is ", config.budget, ", must be at most 2^40");
    require(config.compress_from <= most, "HeadBudgetCache: compress_from is ", config.compress_from,
            ", must be at most 2^40");
    require(config.compress_every <= most, "HeadBudgetCache: compress_every is ", config.compress_every,
            ", must be at most 2^40; 0 is never");
    // Written so that NaN fails.
    require(config.safeguard >= 0.0 && config.safeguard <= 1.0, "HeadBudgetCache: safeguard is ",
            config.safeguard, ", must be 0 to 1");
    require(config.compress_every == 0 || !config.adaptive_in_model, "HeadBudgetCache: compress_every is ",
            config.compress_every,
            ", must be 0 with adaptive_in_model, because all layers have to be compressed at once");
    require(config.compress_every == 0 || !waits, "HeadBudgetCache: compress_every is ",
            config.compress_every,
            ", must be 0 under a scorer that needs a scoring pass before each compression");
    require(
        !waits || votes_of(config.scorer) == Votes::largest,
        "HeadBudgetCache: votes is 'mean', must be 'largest' under a scorer that waits for scoring passes: "
        "rows that none has seen have no sum to add to");
    require(!config.weigh_values || ObservingScorer<Scorer> || AccumulatingScorer<Scorer>,
            "HeadBudgetCache: weigh_values is true, but the scorer goes by keys, not by attention");
    require(config.weigh_values || config.value_norm == ValueNorm::value_l2,
            "HeadBudgetCache: value_norm is 'output_l1', must be 'value_l2' unless weigh_values is true");
    // Written so that NaN fails.
    require(config.unweighed_share >= 0.0 && config.unweighed_share <= 1.0,
            "HeadBudgetCache: unweighed_share is ", config.unweighed_share, ", must be 0 to 1");
    require(config.unweighed_share == 0.0 || config.weigh_values, "HeadBudgetCache: unweighed_share is ",
            config.unweighed_share, ", must be 0 unless weigh_values is true");
    Scorer::validate(config.scorer);
    if constexpr (requires { config.scorer.sinks; }) {
      require(config.budget >= config.scorer.sinks, "HeadBudgetCache: budget is ", config.budget,
              ", must be at least the ", config.scorer.sinks, " first rows that its scorer always keeps");
    }
    Storage::validate(config.storage, context);
  }

  [[nodiscard]] static HeadRule rule(const Config& config, std::size_t head_dim)
    requires DescribedStorage<Storage>
  {
    HeadRule rule;
    rule.compresses = true;
    rule.budget = config.budget;
    rule.kept_rows = Scorer::kept_rows(config.scorer);
    rule.compress_from = config.compress_from;
    rule.compress_every = config.compress_every;
    rule.after_first_compress = config.after_first_compress;
    rule.adaptive_in_layer = is_adaptive_in_layer(config);
    rule.adaptive_in_model = config.adaptive_in_model;
    if (rule.adaptive_in_layer) rule.safeguard = config.safeguard;
    rule.observation_window = observed_queries(config);
    if constexpr (requires { Scorer::name; }) rule.scorer = Scorer::name;
    if constexpr (requires { config.scorer.describe(rule); }) config.scorer.describe(rule);
    rule.weighs_values = config.weigh_values;
    rule.value_norm = config.value_norm;
    rule.unweighed_share = config.unweighed_share;
    rule.waits_for_scoring = waits;
    config.storage.describe(rule, head_dim);
    return rule;
  }
  /// Whether heads of these settings may share a layer's budget: they agree in all else.
  [[nodiscard]] static bool may_share(const Config& a, Config b) {
    b.budget = a.budget;
    return a == b;
  }
  [[nodiscard]] static bool is_adaptive_in_layer(const Config& config) {
    return config.adaptive_in_layer || config.adaptive_in_model;
  }
  [[nodiscard]] static bool is_adaptive_in_model(const Config& config) { return config.adaptive_in_model; }

  void check(const Segment& rows) const { storage_.check(rows); }
  void reserve(std::size_t rows) {
    storage_.reserve(rows);
    if (evicted_) reserve_more(positions_, rows);
    if (accumulates) reserve_more(sums_, rows);
  }
  void release_unused() noexcept { storage_.release_unused(); }

  void commit(const Segment& rows) noexcept {
    storage_.append(rows);
    unshared_rows_ += rows.rows;
    if (accumulates) sums_.resize(storage_.end(), waits ? unscored : 0.0);
    if (!evicted_) return;  // row numbers are positions
    for (std::size_t i = 0; i < rows.rows; ++i) positions_.push_back(rows.position_of(i));
  }

  void segments(const ReadRequest&, SegmentList& out) const {
    storage_.show(0, storage_.end(), {.positions = evicted_ ? positions_.data() : nullptr}, out);
  }

  /// Latest queries whose attention decides; the cache keeps them. 0: no query is asked.
  [[nodiscard]] static std::size_t observed_queries(const Config& config) {
    if constexpr (ObservingScorer<Scorer>) return Scorer::observed_queries(config.scorer);
    return 0;
  }
  [[nodiscard]] std::size_t observed_queries() const { return observed_queries(*config_); }
  /// Rows that stay when a longer text is compressed, where heads do not share.
  [[nodiscard]] static std::size_t capacity(const Config& config) { return budget_rule(config).capacity(); }
  /// Whether compressing would evict anything, once `more` rows were committed; of heads that share
  /// one may lose rows because another one would.
  [[nodiscard]] bool is_compressible(std::size_t more = 0) const {
    return budget_rule(*config_).drops_rows(unshared_rows_ + more, tokens(more));
  }
  /// Whether the config asks for a compression now.
  [[nodiscard]] bool wants_compress() const {
    return budget_rule(*config_).is_due(unshared_rows_, tokens(), compressed_once_);
  }
  [[nodiscard]] static bool compresses_by_itself(const Config& config) { return config.compress_every > 0; }
  [[nodiscard]] bool is_adaptive_in_layer() const { return is_adaptive_in_layer(*config_); }
  [[nodiscard]] bool is_adaptive_in_model() const { return config_->adaptive_in_model; }
  /// What the attention of several queries comes to.
  [[nodiscard]] Votes votes() const { return votes_of(config_->scorer); }

  /// Adds what the queries of a call paid, once its rows are committed: `sums` [group, rows()], each
  /// row's probability summed over the queries, or the largest of them, as `votes` says.
  void accumulate(std::span<const float> sums, std::size_t group) noexcept
    requires AccumulatingScorer<Scorer>
  {
    if (votes() == Votes::largest) {
      for (std::size_t i = 0; i < group * sums_.size(); ++i) {
        double& most = sums_[i % sums_.size()];
        most = with_vote(Votes::largest, most, static_cast<double>(sums[i]));
      }
      return;
    }
    for (std::size_t row = 0; row < sums_.size(); ++row) {
      double total = 0.0;
      for (std::size_t head = 0; head < group; ++head) {
        total += static_cast<double>(sums[head * sums_.size() + row]);
      }
      sums_[row] += total / static_cast<double>(group);
    }
  }
  /// Set if rows are ranked by the attention of queries that have not come.
  [[nodiscard]] std::optional<ExpectedQueries> expected_queries() const {
    if constexpr (ExpectingScorer<Scorer>) return Scorer::expected_queries(config_->scorer);
    return {};
  }
  /// Whether the heads' scorer adds up in scoring passes alone.
  static constexpr bool waits_for_scoring = kvpolicy::waits_for_scoring<Scorer>();
  /// Candidates that no scoring pass has seen once `more` rows were committed, where the scorer waits for one.
  [[nodiscard]] std::size_t unscored_rows(std::size_t more = 0) const {
    if (!waits) return 0;
    const std::size_t ranked = budget_rule(*config_).candidates(storage_.end() + more);
    const auto own = std::span{sums_}.first(std::min(ranked, sums_.size()));
    return static_cast<std::size_t>(std::ranges::count(own, unscored)) + ranked - own.size();
  }
  /// What was added up so far, for each row; to give to another head that holds the same rows, or these and more.
  [[nodiscard]] std::span<const double> accumulated() const
    requires AccumulatingScorer<Scorer>
  {
    return sums_;
  }
  void inherit(std::span<const double> accumulated)
    requires AccumulatingScorer<Scorer>
  {
    KVPOLICY_ASSERT(accumulated.size() >= sums_.size());
    std::ranges::copy(accumulated.first(sums_.size()), sums_.begin());
  }

  /// Chooses the survivors by `sums` [group, rows], each row's probability summed over `queries`
  /// observed queries (empty for a scorer that observes none), and copies them. Nothing changes until
  /// `finish_compress`.
  /// @throws std::bad_alloc
  void prepare_compress(std::span<const float> sums, std::size_t group, std::size_t queries) {
    prepare_survivors(ranked(sums, group, queries).best(config_->budget));
  }
  /// The same in two steps, for heads that share: what the candidates are worth, ...
  [[nodiscard]] SharingHead compete(std::span<const float> sums, std::size_t group,
                                    std::size_t queries) const {
    SharingHead own = ranked(sums, group, queries);
    own.rows = budget_rule(*config_).chosen(unshared_rows_);
    own.safeguard = safe_rows(config_->safeguard, config_->budget);
    return own;
  }
  /// ... and which of them survive, ascending, besides the rows that always do.
  void prepare_survivors(std::vector<std::size_t> numbers) {
    for (std::size_t row = candidates(); row < storage_.end(); ++row) numbers.push_back(row);
    Survivors kept{storage_.select(numbers), {}, {}};
    // The copy holds nothing back: survivors that do not fit its residual are quantised in it.
    kept.positions.reserve(numbers.size());
    for (const std::size_t row : numbers) {
      kept.positions.push_back(evicted_ ? positions_[row] : static_cast<std::int64_t>(row));
      if (accumulates) kept.sums.push_back(sums_[row]);
    }
    pending_.emplace(std::move(kept));
  }
  void finish_compress() noexcept {
    unshared_rows_ = budget_rule(*config_).survivors(unshared_rows_, tokens());
    compressed_once_ = true;
    if (pending_) {
      storage_ = std::move(pending_->storage);
      positions_ = std::move(pending_->positions);
      sums_ = std::move(pending_->sums);
      pending_.reset();
      evicted_ = true;
    } else {
      defer_quantization(storage_, false);  // everything survived, and is quantised as other rows come
    }
  }
  void abandon_compress() noexcept { pending_.reset(); }

  /// What a copy of the head elsewhere has to know besides the rows.
  void add_to(HeadContents& contents) const {
    if constexpr (requires { storage_.is_quantization_deferred(); })
      contents.quantization_deferred = storage_.is_quantization_deferred();
    contents.compressed_once = compressed_once_;
    contents.unshared_rows = unshared_rows_;
    contents.accumulated = sums_;
  }
  /// A new head takes what another one of its settings holds.
  void take(const HeadContents& contents)
    requires TakingStorage<Storage>
  {
    for (const Segment& rows : contents.rows) {
      storage_.take(rows, storage_.end());
      for (std::size_t i = 0; i < rows.rows; ++i) positions_.push_back(rows.position_of(i));
    }
    defer_quantization(storage_, contents.quantization_deferred);
    unshared_rows_ = contents.unshared_rows;
    sums_ = contents.accumulated;
    evicted_ = storage_.end() < contents.committed;
    if (!evicted_) positions_.clear();
    compressed_once_ = contents.compressed_once;
  }

  [[nodiscard]] std::size_t rows() const { return storage_.end(); }
  [[nodiscard]] std::size_t bytes() const {
    return storage_.bytes() + (pending_ ? pending_->storage.bytes() : 0);
  }
  [[nodiscard]] std::size_t shared_bytes() const { return storage_.shared_bytes(); }
  [[nodiscard]] std::size_t overhead_bytes() const {
    return overhead_of(storage_) + positions_.capacity() * sizeof(std::int64_t) +
           sums_.capacity() * sizeof(double) + (pending_ ? sizeof(Survivors) : 0);
  }

  /// A bound where a text is compressed: the rows that survive, and `compress_every` on top. A head
  /// that compresses only when `compress` is called may hold the whole text: that is what this counts then. Heads
  /// that share count as if they did not: as many rows, but for parts of pages.
  [[nodiscard]] static std::size_t bytes_of_tokens(const Config& config, const StorageContext& context,
                                                   std::size_t tokens) {
    const std::size_t rows =
        config.compress_every == 0 || config.after_first_compress
            ? tokens
            : std::min(tokens, std::max(capacity(config) + config.compress_every, config.compress_from));
    return exact_bytes(config, context, rows);
  }
  /// Right after a compression of a text of `tokens`.
  [[nodiscard]] static std::size_t bytes_compressed(const Config& config, const StorageContext& context,
                                                    std::size_t tokens) {
    const std::size_t kept = capacity(config);
    if (tokens <= most_whole(config)) return exact_bytes(config, context, tokens);
    return Storage::bytes_of_rows(config.storage, context, 0, kept);
  }
  /// The most of that on the way to a text of `tokens`.
  [[nodiscard]] static std::size_t max_bytes(const Config& config, const StorageContext& context,
                                             std::size_t tokens) {
    return std::max(exact_bytes(config, context, std::min(tokens, most_whole(config))),
                    bytes_compressed(config, context, tokens));
  }

  template <class Archive>
  void serialize(Archive& archive) {
    archive(storage_, evicted_, compressed_once_, unshared_rows_, positions_, sums_);
    const std::size_t rows = storage_.end();
    archive.check(storage_.begin() == 0 && (evicted_ || rows == archive.rows()), "all ", archive.rows(),
                  " rows of a head that dropped none");
    archive.check(unshared_rows_ <= archive.rows() && (is_adaptive_in_layer() || unshared_rows_ == rows),
                  rows, " rows that count, not ", unshared_rows_);
    archive.check(sums_.size() == (accumulates ? rows : 0), "a sum for each row that needs one");
    archive.check(positions_.size() == (evicted_ ? rows : 0) &&
                      std::ranges::adjacent_find(positions_, std::greater_equal{}) == positions_.end() &&
                      (positions_.empty() || (positions_.front() >= 0 &&
                                              positions_.back() < static_cast<std::int64_t>(archive.rows()))),
                  "a position for each row, ascending and below ", archive.rows());
  }

 private:
  static constexpr bool accumulates = AccumulatingScorer<Scorer>;
  static constexpr bool waits = kvpolicy::waits_for_scoring<Scorer>();
  static constexpr double unscored = HeadContents::unscored;

  struct Survivors {
    Storage storage;
    std::vector<std::int64_t> positions;
    std::vector<double> sums;
  };

  // The longest text that a compression leaves whole.
  [[nodiscard]] static std::size_t most_whole(const Config& config) {
    return std::max(capacity(config), config.compress_from - std::min<std::size_t>(config.compress_from, 1));
  }
  [[nodiscard]] static BudgetRule<std::size_t> budget_rule(const Config& config) {
    return {config.budget, Scorer::kept_rows(config.scorer), config.compress_from, config.compress_every,
            config.after_first_compress};
  }
  // Tokens of the text, with `more` rows. While no row is gone all are here, and where one is, the
  // text was long enough.
  [[nodiscard]] std::size_t tokens(std::size_t more = 0) const {
    return (evicted_ ? std::max(storage_.end(), config_->compress_from) : storage_.end()) + more;
  }

  // Rows that were not compressed are exact whatever the storage, as far as `ExactStorage` keeps them so.
  [[nodiscard]] static std::size_t exact_bytes(const Config& config, const StorageContext& context,
                                               std::size_t rows) {
    return ExactStorage<Storage>::bytes_of_rows(exact_config<Storage>(config.storage), context, 0, rows);
  }

  static void defer_quantization(Storage& storage, bool deferred) {
    if constexpr (requires { storage.defer_quantization(deferred); }) {
      storage.defer_quantization(deferred);
    }
  }

  template <class T>
  static void reserve_more(std::vector<T>& list, std::size_t count) {
    if (list.capacity() - list.size() >= count) return;
    list.reserve(std::max(list.size() + count, 2 * list.capacity()));
  }

  // Rows that are ranked: all but the latest that the scorer always keeps.
  [[nodiscard]] std::size_t candidates() const { return budget_rule(*config_).candidates(storage_.end()); }

  [[nodiscard]] SharingHead ranked(std::span<const float> sums, std::size_t group,
                                   std::size_t queries) const {
    return detail::RowRanking<Scorer, Storage, Config>{.config = *config_,
                                                       .storage = storage_,
                                                       .accumulated = sums_,
                                                       .candidates = candidates(),
                                                       .head_dim = head_dim_,
                                                       .value_dim = value_dim_,
                                                       .value_output = value_output_}
        .ranked(sums, group, queries);
  }

  SharedConfig<Config> config_;
  std::uint32_t head_dim_;
  std::uint32_t value_dim_;
  const ValueOutput* value_output_;  // null: scores are not weighed by the output
  bool evicted_ = false;             // whether rows are gone, even all of them
  bool compressed_once_ = false;     // also if no row was dropped
  Storage storage_;
  std::vector<std::int64_t> positions_;  // of each row, once rows were evicted
  std::vector<double> sums_;             // of each row, where the scorer adds up
  std::size_t unshared_rows_ = 0;  // rows that the head would hold if it shared its budget with no other
  detail::Boxed<Survivors> pending_;
};

KVPOLICY_DECLARE_POLICY(HeadBudgetCache, DenseStorage)
KVPOLICY_DECLARE_POLICY(HeadBudgetCache, PerTokenStorage)

}  // namespace kvpolicy
