// SPDX-License-Identifier: Apache-2.0
//
// Keeps every row and reads few: the text is cut into chunks, each with a summary of its keys, and
// a query reads the chunks whose summaries answer it best. The same rows serve full attention, so
// a target model can verify over `Read::all` what was drafted over `Read::selected`.
//
// Method: TriForce, arXiv:2404.11912 (mean keys, a selection that stands for many steps), and
// Quest, arXiv:2406.10774 (min/max keys, a selection for each step). Differences: selection is per
// KV head, by the sum over its query heads; every committed chunk can be chosen, not the prompt's
// alone; rows appended since the selection are read on top of the budget instead of over its end.
// Quest's code leaves the first two layers dense; here a plan says which heads select, and
// `uniform_plan` makes all of them do so: `plan.set` gives the first layers a FullCache.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <kvpolicy/core/head_rule.hpp>
#include <kvpolicy/core/rule_ranges.hpp>
#include <kvpolicy/policy/chunk_selection.hpp>
#include <kvpolicy/policy/chunk_summaries.hpp>
#include <kvpolicy/policy/chunk_summary.hpp>
#include <kvpolicy/policy/instances.hpp>
#include <kvpolicy/policy/policy.hpp>
#include <kvpolicy/policy/shared_config.hpp>

namespace kvpolicy {

/// One head's rows and chunk summaries. Not synchronised: segments are valid until the next
/// `commit`, `refresh` or `segments`.
template <KvStorage Storage, ChunkSummary Summary = MeanKey>
class ChunkRetrievalCache {
 public:
  using element_type = typename Storage::element_type;
  using storage_type = Storage;
  using summary_type = Summary;
  /// How large a chunk is, how much is read, and when that is chosen again.
  struct Config {
    using policy_type = ChunkRetrievalCache;  ///< Whose settings these are.
    std::size_t chunk = 8;                    ///< Rows chosen together; a multiple of a quantised key group.
    std::size_t budget = 4096;                ///< Rows chosen, chunk 0 included; a multiple of `chunk`.
    /// A selection is chosen again once this many rows were committed after it; 0: only when asked.
    std::size_t refresh_every = 0;
    typename Storage::Config storage = {};
    friend bool operator==(const Config&, const Config&) = default;
    void fields(FieldVisitor& visit)
      requires DescribedStorage<Storage>
    {
      visit("chunk", chunk);
      visit("budget", budget);
      visit("refresh_every", refresh_every);
      visit("storage", storage);
    }
  };
  static constexpr std::string_view name = "chunk_retrieval";

  /// @throws ConfigError if chunk and budget do not fit each other or the storage.
  ChunkRetrievalCache(const Config& config, const StorageContext& context)
      : ChunkRetrievalCache{SharedConfig{config}, context} {}
  ChunkRetrievalCache(const SharedConfig<Config>& config, const StorageContext& context)
      : config_{config}, storage_{config->storage, context}, summaries_{context} {
    validate(*config, context);
  }

  static void validate(const Config& config, const StorageContext& context) {
    constexpr std::size_t most = std::size_t{1} << 20;
    require(config.chunk >= 1 && config.chunk <= most, "ChunkRetrievalCache: chunk is ", config.chunk,
            ", must be 1 to ", most);
    require(config.budget >= config.chunk && config.budget % config.chunk == 0,
            "ChunkRetrievalCache: budget is ", config.budget,
            ", must be a positive multiple of chunk = ", config.chunk);
    constexpr std::size_t most_rows = std::size_t{1} << 40;
    require(config.budget <= most_rows, "ChunkRetrievalCache: budget is ", config.budget,
            ", must be at most 2^40");
    Storage::validate(config.storage, context);
    if constexpr (!Storage::movable_rows) {
      const std::size_t group = Storage::key_rows(config.storage);
      require(config.chunk % group == 0, "ChunkRetrievalCache: chunk is ", config.chunk,
              ", must be a multiple of the ", group, " rows that share a scale");
    }
  }

  [[nodiscard]] static HeadRule rule(const Config& config, std::size_t head_dim)
    requires DescribedStorage<Storage>
  {
    HeadRule rule;
    rule.chunk = config.chunk;
    rule.chosen_rows = config.budget;
    rule.refresh_every = config.refresh_every;
    if constexpr (requires { Summary::name; }) rule.summary = Summary::name;
    rule.summary_vectors = Summary::vectors;
    config.storage.describe(rule, head_dim);
    return rule;
  }

  void check(const Segment& rows) const { storage_.check(rows); }

  void reserve(std::size_t rows) {
    storage_.reserve(rows);
    if (rows > 0) summaries_.reserve(chunk_rule(*config_).closed(storage_.end() + rows));
  }
  void release_unused() noexcept {
    storage_.release_unused();
    summaries_.release_unused();
  }

  void commit(const Segment& rows) noexcept {
    if (rows.rows > 0) summaries_.reserve(chunk_rule(*config_).closed(storage_.end() + rows.rows));
    storage_.append(rows);
    const std::size_t first = storage_.end() - rows.rows;
    for (std::size_t i = 0; i < rows.rows; ++i) {
      summaries_.add(rows.keys, i);
      if ((first + i + 1) % config_->chunk == 0) summaries_.close_chunk();
    }
    choices_.drop_old(storage_.end());
  }

  /// Whether a selected read must choose first.
  [[nodiscard]] bool selection_is_stale() const {
    return choices_.is_stale(chunk_rule(*config_), storage_.end());
  }

  /// Chooses the chunks for the queries [group, head_dim] of this head; `score(rows, query, out)`
  /// is an engine's.
  template <class Engine>
  void refresh(std::span<const float> queries, Engine& engine) {
    prepare_refresh(queries, engine, 0);
    finish_refresh();
  }

  /// The same in two steps: `segments` shows the new choice at once, but only `finish_refresh`
  /// keeps it. `tokens`: how long the text is with the query that chooses.
  /// @throws std::bad_alloc, StorageError, with the choice as it was
  template <class Engine>
  void prepare_refresh(std::span<const float> queries, Engine& engine, std::size_t tokens) {
    const std::span<float> scores = detail::refresh_scratch().scores.take(summaries_.chunks());
    summaries_.score(queries, engine, scores);
    choices_.prepare(chunk_rule(*config_), scores, storage_.end(), tokens);
  }
  void finish_refresh() noexcept {
    choices_.finish();
    choices_.drop_old(storage_.end());
  }
  void abandon_refresh() noexcept { choices_.abandon(); }

  /// Takes back what queries after the first `tokens` tokens chose: the text goes on from there.
  void undo_refresh(std::size_t tokens) noexcept { choices_.undo(tokens); }
  /// The next selected read chooses first.
  void forget_selection() noexcept { choices_.forget(); }

  void segments(const ReadRequest& request, SegmentList& out) const {
    const std::size_t first = out.size();
    storage_.show(0, storage_.end(), Segment{}, out);
    if (request.read == Read::selected && choices_.current() != nullptr) choices_.limit(out, first);
  }

  /// The chosen rows, as runs of row numbers; rows after `selected_until()` are read as well.
  [[nodiscard]] std::span<const RowRun> selection() const {
    const detail::ChunkSelection* current = choices_.current();
    return current == nullptr ? std::span<const RowRun>{} : std::span<const RowRun>{current->runs};
  }
  [[nodiscard]] std::size_t selected_until() const {
    return choices_.current() == nullptr ? 0 : choices_.current()->chunks_end;
  }

  /// What a copy of the head elsewhere has to know besides the rows.
  void add_to(HeadContents& contents) const {
    summaries_.add_to(contents.summaries);
    choices_.add_to(contents.choices);
  }
  /// A new head takes what another one of its settings holds.
  void take(const HeadContents& contents)
    requires TakingStorage<Storage>
  {
    for (const Segment& rows : contents.rows) storage_.take(rows, static_cast<std::size_t>(rows.position));
    const ChunkRule<std::size_t> rule = chunk_rule(*config_);
    if (storage_.end() > 0) summaries_.take(contents.summaries, rule.closed(storage_.end()));
    for (const Segment& rows : contents.rows) {
      const auto first = static_cast<std::size_t>(rows.position);
      const std::size_t closed = rule.closed_rows(storage_.end());
      for (std::size_t i = closed - std::min(closed, first); i < rows.rows; ++i) {
        summaries_.add(rows.keys, i);
      }
    }
    choices_.take(rule, contents.choices);
    choices_.drop_old(storage_.end());
  }

  /// What keeps the rows.
  [[nodiscard]] const Storage& storage() const { return storage_; }
  [[nodiscard]] Storage& storage() { return storage_; }

  [[nodiscard]] std::size_t rows() const { return storage_.end(); }
  [[nodiscard]] std::size_t bytes() const { return storage_.bytes() + summaries_.bytes(); }
  /// Page tables, the sums of the open chunk, and what was chosen: bookkeeping besides the object.
  [[nodiscard]] std::size_t overhead_bytes() const {
    return overhead_of(storage_) + summaries_.overhead_bytes() + choices_.bytes();
  }
  [[nodiscard]] std::size_t shared_bytes() const {
    return storage_.shared_bytes() + summaries_.shared_bytes();
  }

  [[nodiscard]] static std::size_t bytes_of_tokens(const Config& config, const StorageContext& context,
                                                   std::size_t tokens) {
    return Storage::bytes_of_rows(config.storage, context, 0, tokens) +
           bytes_of_summaries(config, context, tokens);
  }
  [[nodiscard]] static std::size_t bytes_of_step(const Config& config, const StorageContext& context,
                                                 std::size_t tokens) {
    return Storage::bytes_of_step(config.storage, context, unlimited_rows, tokens) +
           bytes_of_summaries(config, context, tokens);
  }
  [[nodiscard]] static std::size_t max_bytes(const Config& config, const StorageContext& context,
                                             std::size_t tokens) {
    return Storage::max_bytes(config.storage, context, unlimited_rows, tokens) +
           bytes_of_summaries(config, context, tokens);
  }

  template <class Archive>
  void serialize(Archive& archive) {
    archive(storage_, summaries_, choices_);
    archive.check(storage_.begin() == 0 && storage_.end() == archive.rows(), "all ", archive.rows(), " rows");
    const ChunkRule<std::size_t> rule = chunk_rule(*config_);
    summaries_.check(archive, rule.closed(archive.rows()));
    choices_.check(archive, rule, storage_.end());
  }

 private:
  using Summaries = detail::ChunkSummaries<element_type, Summary>;

  [[nodiscard]] static ChunkRule<std::size_t> chunk_rule(const Config& config) {
    return {config.chunk, config.budget / config.chunk, config.refresh_every};
  }

  [[nodiscard]] static std::size_t bytes_of_summaries(const Config& config, const StorageContext& context,
                                                      std::size_t tokens) {
    return Summaries::bytes_of_chunks(context, chunk_rule(config).closed(tokens));
  }

  SharedConfig<Config> config_;
  Storage storage_;
  Summaries summaries_;
  detail::ChunkChoices choices_;
};

KVPOLICY_DECLARE_POLICY(ChunkRetrievalCache, DenseStorage)
KVPOLICY_DECLARE_POLICY(ChunkRetrievalCache, PerTokenStorage)
KVPOLICY_DECLARE_POLICY(ChunkRetrievalCache, PerChannelStorage)
KVPOLICY_DECLARE_POLICY(ChunkRetrievalCache, DenseStorage, MinMaxKey)
KVPOLICY_DECLARE_POLICY(ChunkRetrievalCache, PerTokenStorage, MinMaxKey)
KVPOLICY_DECLARE_POLICY(ChunkRetrievalCache, PerChannelStorage, MinMaxKey)

}  // namespace kvpolicy
