// SPDX-License-Identifier: Apache-2.0
//
// Keeps the opening rows of a text (the attention sinks) and a sliding window of the latest ones.
// For heads that look only there; memory stays the same however long the text grows.
//
// Method: StreamingLLM, arXiv:2309.17453, and the streaming heads of DuoAttention,
// arXiv:2410.10819. Rows keep their position in the text, as in DuoAttention; with `rotary_in_cache` the
// sinks look as near as StreamingLLM's renumbering makes them, by rotating the query instead of the
// keys. The published DuoAttention code lets a whole prefill chunk see itself (Mask::prefill_chunk); the
// default gives every query its own window, so results do not depend on how a prompt is cut.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include <kvpolicy/core/head_rule.hpp>
#include <kvpolicy/core/rotary.hpp>
#include <kvpolicy/core/rule_ranges.hpp>
#include <kvpolicy/core/shared_frequencies.hpp>
#include <kvpolicy/policy/instances.hpp>
#include <kvpolicy/policy/policy.hpp>
#include <kvpolicy/policy/shared_config.hpp>

namespace kvpolicy {

/// Whose window it is: each query's own, or its chunk's.
enum class Mask : std::uint8_t {
  exact,         ///< a query reads the sinks and the `recent` rows up to and including its own
  prefill_chunk  ///< a query reads the sinks, the `recent` rows before its call, and the call's rows causally
};

/// The names of the enumerators in files.
[[nodiscard]] constexpr std::array<std::string_view, 2> names_of(Mask) { return {"exact", "chunk"}; }

/// One head's sinks and latest rows. Sinks are kept in full precision whatever the storage, except in an engine's own
/// pages (`ExactStorage`): they are few and every query reads them. Not synchronised: segments are valid until the
/// next `commit`.
template <KvStorage Storage>
class SinkRecentCache {
  static_assert(Storage::movable_rows,
                "SinkRecentCache: a window drops rows one by one, so its storage must not tie rows "
                "together: use per-token groups, not per-channel ones");

 public:
  using element_type = typename Storage::element_type;
  using storage_type = Storage;
  /// How many rows stay at either end, and how they are seen.
  struct Config {
    using policy_type = SinkRecentCache;  ///< Whose settings these are.
    std::size_t sinks = 4;                ///< Opening rows that never go; 0 gives a plain sliding window.
    std::size_t recent = 1020;  ///< Latest rows kept besides, at least 1; StreamingLLM's 1,024 in all.
    Mask mask = Mask::exact;
    /// The model's own rotary embedding: sinks then seem to stand right before the window.
    std::optional<RotaryConfig> rotary_in_cache = {};
    typename Storage::Config storage = {};
    friend bool operator==(const Config&, const Config&) = default;
    void fields(FieldVisitor& visit)
      requires DescribedStorage<Storage>
    {
      visit("sinks", sinks);
      visit("recent", recent);
      visit("mask", mask);
      visit("rotary_in_cache", rotary_in_cache);
      visit("storage", storage);
    }
  };
  static constexpr std::string_view name = "sink_recent";

  /// @throws ConfigError if `recent` is 0, a size is absurd, or the storage's config does not fit.
  SinkRecentCache(const Config& config, const StorageContext& context)
      : SinkRecentCache{SharedConfig{config}, context} {}
  SinkRecentCache(const SharedConfig<Config>& config, const StorageContext& context)
      : config_{config},
        sinks_{exact_config<Storage>(config->storage), context},
        recent_{config->storage, context} {
    validate(*config, context);
    if (config->rotary_in_cache) {
      frequencies_ = detail::shared_frequencies(*config->rotary_in_cache, context.head_dim);
    }
  }

  static void validate(const Config& config, const StorageContext& context) {
    constexpr std::size_t most = std::size_t{1} << 40;  // keeps sums of rows from wrapping
    require(config.recent >= 1 && config.recent <= most, "SinkRecentCache: recent is ", config.recent,
            ", must be 1 to 2^40");
    require(config.sinks <= most, "SinkRecentCache: sinks is ", config.sinks, ", must be at most 2^40");
    if (config.rotary_in_cache) config.rotary_in_cache->validate();
    Storage::validate(config.storage, context);
  }

  [[nodiscard]] static HeadRule rule(const Config& config, std::size_t head_dim)
    requires DescribedStorage<Storage>
  {
    HeadRule rule;
    rule.sinks = config.sinks;
    rule.recent = config.recent;
    rule.prefill_chunk_mask = config.mask == Mask::prefill_chunk;
    rule.rotary_in_cache = config.rotary_in_cache;
    config.storage.describe(rule, head_dim);
    return rule;
  }

  /// Sinks stay exact in most storages, so any number may stand in them.
  void check(const Segment& rows) const {
    const std::size_t sinks = std::min(rows.rows, config_->sinks - sinks_.end());
    sinks_.check(rows.part(0, sinks));
    recent_.check(rows.part(sinks, rows.rows - sinks));
  }

  void reserve(std::size_t rows) {
    const std::size_t sinks = std::min(rows, config_->sinks - sinks_.end());
    sinks_.reserve(sinks);
    recent_.reserve(rows - sinks, config_->recent);
  }
  void release_unused() noexcept {
    sinks_.release_unused();
    recent_.release_unused();
  }

  void commit(const Segment& rows) noexcept {
    const std::size_t sinks = std::min(rows.rows, config_->sinks - sinks_.end());
    sinks_.append(rows.part(0, sinks));
    recent_.append(rows.part(sinks, rows.rows - sinks), config_->recent);
  }

  void segments(const ReadRequest& request, SegmentList& out) const {
    sinks_.show(0, sinks_.end(), sink_prototype(), out);
    const std::size_t sinks = config_->sinks;
    const Rows shown = window_rule(*config_).recent_among({sinks + recent_.begin(), sinks + recent_.end()},
                                                          first_position(request));
    recent_.show(shown.begin - sinks, shown.rows(),
                 {.position = static_cast<std::int64_t>(shown.begin), .window = query_window()}, out);
  }

  void uncommitted(const Segment& rows, const ReadRequest& request, SegmentList& out) const {
    if (rows.positions != nullptr) return uncommitted_nodes(rows, request, out);
    const WindowRule<std::size_t> rule = window_rule(*config_);
    const auto position = static_cast<std::size_t>(rows.position);
    const Rows all{position, position + rows.rows};
    if (const Rows sinks = rule.sinks_among(all); sinks.rows() > 0) {
      Segment segment = rows.part(0, sinks.rows());
      segment.rotation = sink_prototype().rotation;
      out.push_back(segment);
    }
    if (const Rows recent = rule.recent_among(all, first_position(request)); recent.rows() > 0) {
      Segment segment = rows.part(recent.begin - position, recent.rows());
      segment.window = query_window();
      out.push_back(segment);
    }
  }

  /// A new head takes what another one of its settings holds.
  void take(const HeadContents& contents)
    requires TakingStorage<Storage>
  {
    for (const Segment& rows : contents.rows) {
      const auto first = static_cast<std::size_t>(rows.position);
      if (first < config_->sinks) {
        sinks_.take(rows, 0);
      } else {
        recent_.take(rows, first - config_->sinks);
      }
    }
  }

  [[nodiscard]] std::size_t rows() const { return sinks_.end() + recent_.end() - recent_.begin(); }
  [[nodiscard]] std::size_t bytes() const { return sinks_.bytes() + recent_.bytes(); }
  [[nodiscard]] std::size_t shared_bytes() const { return sinks_.shared_bytes() + recent_.shared_bytes(); }
  [[nodiscard]] std::size_t overhead_bytes() const { return overhead_of(sinks_) + overhead_of(recent_); }

  [[nodiscard]] static std::size_t bytes_of_tokens(const Config& config, const StorageContext& context,
                                                   std::size_t tokens) {
    const std::size_t sinks = std::min(tokens, config.sinks);
    const std::size_t end = tokens - sinks;
    return Sinks::bytes_of_rows(exact_config<Storage>(config.storage), context, 0, sinks) +
           Storage::bytes_of_rows(config.storage, context, first_recent(config, end), end);
  }

  [[nodiscard]] static std::size_t bytes_of_step(const Config& config, const StorageContext& context,
                                                 std::size_t tokens) {
    const std::size_t sinks = std::min(tokens, config.sinks);
    return Sinks::bytes_of_rows(exact_config<Storage>(config.storage), context, 0, sinks) +
           Storage::bytes_of_step(config.storage, context, config.recent, tokens - sinks);
  }
  [[nodiscard]] static std::size_t max_bytes(const Config& config, const StorageContext& context,
                                             std::size_t tokens) {
    const std::size_t sinks = std::min(tokens, config.sinks);
    return Sinks::bytes_of_rows(exact_config<Storage>(config.storage), context, 0, sinks) +
           Storage::max_bytes(config.storage, context, config.recent, tokens - sinks);
  }

  template <class Archive>
  void serialize(Archive& archive) {
    archive(sinks_, recent_);
    const std::size_t sinks = std::min(config_->sinks, archive.rows());
    const std::size_t end = archive.rows() - sinks;
    archive.check(sinks_.begin() == 0 && sinks_.end() == sinks && recent_.end() == end &&
                      recent_.begin() == first_recent(*config_, end),
                  "the first ", sinks, " and the latest ", std::min(end, config_->recent), " of ",
                  archive.rows(), " rows");
  }

 private:
  using Sinks = ExactStorage<Storage>;
  using Rows = RowRange<std::size_t>;

  [[nodiscard]] static WindowRule<std::size_t> window_rule(const Config& config) {
    return {config.sinks, config.recent, config.mask == Mask::prefill_chunk};
  }
  // Rows of `recent_` are numbered from 0 after the sinks: the oldest one that stays of `end`.
  [[nodiscard]] static std::size_t first_recent(const Config& config, std::size_t end) {
    return window_rule(config).first_kept(config.sinks + end) - config.sinks;
  }
  [[nodiscard]] std::int64_t query_window() const {
    return window_rule(*config_).query_window(unlimited_window);
  }
  [[nodiscard]] static std::size_t first_position(const ReadRequest& request) {
    return static_cast<std::size_t>(request.first_position);
  }

  // The same for nodes of a tree, whose positions need not ascend.
  void uncommitted_nodes(const Segment& rows, const ReadRequest& request, SegmentList& out) const {
    enum class Seen { as_sink, in_window, never };
    const auto sinks = static_cast<std::int64_t>(config_->sinks);
    const auto oldest = static_cast<std::int64_t>(window_rule(*config_).first_read(first_position(request)));
    const auto seen = [&](std::size_t row) {
      const std::int64_t position = rows.position_of(row);
      return position < sinks ? Seen::as_sink : position < oldest ? Seen::never : Seen::in_window;
    };
    for (std::size_t first = 0, end = 0; first < rows.rows; first = end) {
      const Seen kind = seen(first);
      for (end = first + 1; end < rows.rows && seen(end) == kind;) ++end;
      if (kind == Seen::never) continue;
      Segment segment = rows.part(first, end - first);
      if (kind == Seen::as_sink) segment.rotation = sink_prototype().rotation;
      if (kind == Seen::in_window) segment.window = query_window();
      out.push_back(segment);
    }
  }

  [[nodiscard]] Segment sink_prototype() const {
    Segment prototype;
    if (config_->rotary_in_cache) {
      prototype.rotation = {frequencies_->data(),
                            static_cast<std::int64_t>(config_->sinks + config_->recent) - 1};
    }
    return prototype;
  }

  SharedConfig<Config> config_;
  std::shared_ptr<const std::vector<float>> frequencies_;  // of rotary_in_cache
  Sinks sinks_;
  Storage recent_;
};

KVPOLICY_DECLARE_POLICY(SinkRecentCache, DenseStorage)
KVPOLICY_DECLARE_POLICY(SinkRecentCache, PerTokenStorage)

}  // namespace kvpolicy
