// SPDX-License-Identifier: Apache-2.0
//
// A head's rows at 2 to 8 bits, keys and values apart, with the latest ones in full precision. Rows enter
// the residual; those that leave it are quantised, once and never again, while later rows come in.
//
// Method: KIVI, arXiv:2402.02750 (keys per channel in groups of rows, values per token), and the
// QuantizedCache of Hugging Face transformers (both per token). Differences: the residual is a
// promise, not a buffer that empties: at least `residual` latest rows are always exact, the prompt's
// included. `flush = Flush::kivi` gives the published behaviour: all keys leave at once whenever
// their number reaches a multiple of `residual`, so between none and residual - 1 are exact.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string_view>
#include <utility>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/fields.hpp>
#include <kvpolicy/core/head_rule.hpp>
#include <kvpolicy/core/rule_ranges.hpp>
#include <kvpolicy/storage/dense_storage.hpp>
#include <kvpolicy/storage/quantizable_rows.hpp>
#include <kvpolicy/storage/residual_side.hpp>

namespace kvpolicy {

/// When keys leave the residual: one by one, so that `residual` rows are always exact, or as KIVI
/// does.
enum class Flush : std::uint8_t { steady, kivi };

/// The names of the enumerators in files.
[[nodiscard]] constexpr std::array<std::string_view, 2> names_of(Flush) { return {"steady", "kivi"}; }

/// How many bits, which numbers share a scale, and how many rows stay exact. A type of its own for each
/// storage, so that a plan tells them apart; each becomes any other where that is asked for.
template <class Storage>
struct ResidualConfigOf {
  using storage_type = Storage;  ///< Whose settings these are; void: any such storage's.
  std::size_t bits = 4;          ///< Bits of keys and values: 2, 3, 4, 5, 6 or 8.
  std::size_t key_bits = 0;      ///< Bits of keys; 0: `bits`.
  std::size_t value_bits = 0;    ///< Bits of values; 0: `bits`.
  std::size_t key_group = 0;     ///< Channels (per token; 0: the whole row) or rows (per channel; 0: 32).
  std::size_t value_group = 0;   ///< Channels; 0: the whole row.
  std::size_t residual = 128;    ///< Latest rows kept exact, at least.
  Flush flush = Flush::steady;
  bool key_hadamard = false;    ///< Keys are rotated before they are quantised (core/hadamard.hpp).
  bool value_hadamard = false;  ///< The same for values.
  bool halves = false;          ///< Codes of 8 bits are stored in halves, for Read::upper_half.
  Codebook key_codebook =
      Codebook::even;  ///< What codes stand for (core/codebook.hpp); others need keys per token.
  Codebook value_codebook = Codebook::even;  ///< The same for values.
  double key_scale = 1.0;    ///< The head's, where the codebook has one (fp8, nvfp4); otherwise 1.
  double value_scale = 1.0;  ///< The same for values.

  template <class Other>
  operator ResidualConfigOf<Other>() const {
    return {bits,         key_bits,       value_bits, key_group,    value_group,    residual,  flush,
            key_hadamard, value_hadamard, halves,     key_codebook, value_codebook, key_scale, value_scale};
  }
  friend bool operator==(const ResidualConfigOf&, const ResidualConfigOf&) = default;
  void fields(FieldVisitor& visit) {
    visit("bits", bits);
    visit.later("key_bits", key_bits, 0);
    visit.later("value_bits", value_bits, 0);
    visit("key_group", key_group);
    visit("value_group", value_group);
    visit("residual", residual);
    visit("flush", flush);
    visit.later("key_hadamard", key_hadamard, false);
    visit.later("value_hadamard", value_hadamard, false);
    visit.later("halves", halves, false);
    visit.later("key_codebook", key_codebook, Codebook::even);
    visit.later("value_codebook", value_codebook, Codebook::even);
    visit.later("key_scale", key_scale, 1.0);
    visit.later("value_scale", value_scale, 1.0);
  }
  [[nodiscard]] Encoding key_encoding() const { return encoding_for(key_bits == 0 ? bits : key_bits); }
  [[nodiscard]] Encoding value_encoding() const { return encoding_for(value_bits == 0 ? bits : value_bits); }
  /// The channels that share a scale where no group is set.
  [[nodiscard]] static std::size_t usual_group(Codebook codebook, std::size_t channels) {
    return block_channels(codebook) == 0 ? channels : block_channels(codebook);
  }
  /// Adds how rows lie to a head's rule.
  void describe(HeadRule& rule, std::size_t head_dim) const {
    rule.key_encoding = key_encoding();
    rule.value_encoding = value_encoding();
    rule.key_per_channel = Storage::key_granularity == Granularity::per_channel;
    const std::size_t whole = rule.key_per_channel ? 32 : usual_group(key_codebook, head_dim);
    rule.key_group = key_group == 0 ? whole : key_group;
    rule.value_group = value_group == 0 ? usual_group(value_codebook, head_dim) : value_group;
    rule.key_hadamard = key_hadamard;
    rule.value_hadamard = value_hadamard;
    rule.key_codebook = key_codebook;
    rule.value_codebook = value_codebook;
    rule.key_scale = key_scale;
    rule.value_scale = value_scale;
    rule.residual = residual;
    rule.kivi_flush = flush == Flush::kivi;
  }

 private:
  [[nodiscard]] Encoding encoding_for(std::size_t code_bits) const {
    return halves && code_bits == 8 ? Encoding::uint4x2 : code_encoding(code_bits);
  }
};
/// Settings for any such storage: `.storage = quantized` with either of the two.
using ResidualConfig = ResidualConfigOf<void>;

/// One head's rows, the latest as numbers of type `E`, the others quantised. Copying makes a fork.
/// Not synchronised.
template <Element E, Granularity Keys = Granularity::per_token>
class ResidualStorage {
 public:
  using element_type = E;
  using Config = ResidualConfigOf<ResidualStorage>;
  static constexpr Granularity key_granularity = Keys;
  static constexpr std::string_view name =
      Keys == Granularity::per_token ? "residual_per_token" : "residual_per_channel";
  /// A key quantised together with its neighbours cannot leave them.
  static constexpr bool movable_rows = Keys == Granularity::per_token;
  /// Rows read otherwise once they have left the residual, which they do as others are committed.
  static constexpr bool commit_changes_rows = true;

  ResidualStorage(const Config& config, const StorageContext& context)
      : keys_{key_format(config, context), encoding_of<E>, context},
        values_{value_format(config, context), encoding_of<E>, context.of_values()},
        residual_{config.residual},
        flush_{config.flush} {
    validate(config, context);
  }

  static void validate(const Config& config, const StorageContext& context) {
    context.validate();
    require(is_code_width(config.bits), "ResidualStorage: bits is ", config.bits,
            ", must be 2, 3, 4, 5, 6 or 8");
    const auto check_own = [&](const char* setting, std::size_t bits) {
      require(bits == 0 || is_code_width(bits), "ResidualStorage: ", setting, " is ", bits,
              ", must be 2, 3, 4, 5, 6 or 8, or 0 for bits = ", config.bits);
    };
    check_own("key_bits", config.key_bits);
    check_own("value_bits", config.value_bits);
    require(!config.halves || is_in_halves(config.key_encoding()) || is_in_halves(config.value_encoding()),
            "ResidualStorage: halves are of codes of 8 bits; keys have ", bits_of(config.key_encoding()),
            " bits and values ", bits_of(config.value_encoding()));
    check_codebook("key", config.key_codebook, config.key_encoding(), config.key_group, config.key_scale);
    check_codebook("value", config.value_codebook, config.value_encoding(), config.value_group,
                   config.value_scale);
    require(Keys == Granularity::per_token || config.key_codebook == Codebook::even,
            "ResidualStorage: key_codebook is '", name_of(config.key_codebook),
            "', must be 'even' where keys share scales along the text (per channel)");
    const auto [keys, values] = groups(config, context);
    if constexpr (Keys == Granularity::per_token) {
      require(context.head_dim % keys == 0, "ResidualStorage: key_group is ", keys,
              ", must divide head_dim = ", context.head_dim);
    } else {
      require(keys <= context.page_rows || !std::has_single_bit(keys), "ResidualStorage: key_group is ", keys,
              ", must divide the rows of a page = ", context.page_rows, ": give the cache pages of at least ",
              keys, " rows, or the head key_group=", context.page_rows);
      require(context.page_rows % keys == 0, "ResidualStorage: key_group is ", keys,
              ", must divide the rows of a page = ", context.page_rows);
    }
    require(context.value_channels() % values == 0, "ResidualStorage: value_group is ", values,
            ", must divide ", context.value_channels() == context.head_dim ? "head_dim = " : "value_dim = ",
            context.value_channels());
    require(config.residual < (std::size_t{1} << 40), "ResidualStorage: residual is ", config.residual,
            ", must be below 2^40");
    if (config.flush == Flush::kivi) {
      const std::size_t unit = Keys == Granularity::per_token ? 1 : keys;
      require(config.residual > 0 && config.residual % unit == 0,
              "ResidualStorage: kivi's flush needs a residual that is a positive multiple of ", unit,
              ", not ", config.residual);
    }
  }

  /// @throws ShapeError where a number of `rows`, rounded to `E` as it is kept, cannot be
  /// quantised: it is not finite, or its scale or zero would be beyond half (core/quantizable.hpp).
  void check(const Segment& rows) const {
    detail::check_quantizable("ResidualStorage", rows, {keys_.format(), values_.format()}, encoding_of<E>,
                              {keys_.context().head_dim, values_.context().head_dim});
  }

  [[nodiscard]] std::size_t begin() const { return keys_.begin(); }
  [[nodiscard]] std::size_t end() const { return keys_.end(); }
  [[nodiscard]] std::size_t bytes() const { return keys_.bytes() + values_.bytes(); }
  [[nodiscard]] std::size_t shared_bytes() const { return keys_.shared_bytes() + values_.shared_bytes(); }
  /// As in DenseStorage.
  [[nodiscard]] std::size_t overhead_bytes() const {
    return keys_.overhead_bytes() + values_.overhead_bytes();
  }
  /// How many keys and values, counted from row 0, are quantised once `end` rows came.
  [[nodiscard]] static std::pair<std::size_t, std::size_t> quantized_rows(const Config& config,
                                                                          std::size_t end) {
    const ResidualRule<std::size_t> keys{config.residual, key_rows(config), config.flush == Flush::kivi};
    const ResidualRule<std::size_t> values{config.residual};
    return {keys.quantized(end), values.quantized(end)};
  }
  [[nodiscard]] static std::size_t bytes_of_rows(const Config& config, const StorageContext& context,
                                                 std::size_t begin, std::size_t end) {
    const auto [keys, values] = quantized_rows(config, end);
    const auto side = [&](const RowFormat& format, const StorageContext& own, std::size_t boundary) {
      boundary = std::max(begin, boundary);
      return PlaneStore::bytes_of_rows(format, own, begin, boundary) +
             PlaneStore::bytes_of_rows(dense_format(), own, boundary, end);
    };
    return side(key_format(config, context), context, keys) +
           side(value_format(config, context), context.of_values(), values);
  }

  /// Neighbouring keys that share a scale.
  [[nodiscard]] static std::size_t key_rows(const Config& config) {
    if (Keys == Granularity::per_token) return 1;
    return config.key_group == 0 ? 32 : config.key_group;
  }
  [[nodiscard]] static std::size_t bytes_of_step(const Config& config, const StorageContext& context,
                                                 std::size_t window, std::size_t end) {
    const std::size_t before = end - std::min<std::size_t>(end, 1);
    const std::size_t front = before - std::min(before, window);
    const auto [old_keys, old_values] = quantized_rows(config, before);
    const auto [keys, values] = quantized_rows(config, end);
    // Rows that leave the residual stand in both formats for a moment.
    const auto side = [&](const RowFormat& format, const StorageContext& own, std::size_t old_boundary,
                          std::size_t boundary) {
      return PlaneStore::bytes_of_rows(format, own, front, std::max(front, boundary)) +
             PlaneStore::bytes_of_rows(dense_format(), own, std::max(front, old_boundary), end);
    };
    return side(key_format(config, context), context, old_keys, keys) +
           side(value_format(config, context), context.of_values(), old_values, values);
  }
  [[nodiscard]] static std::size_t max_bytes(const Config& config, const StorageContext& context,
                                             std::size_t window, std::size_t end) {
    const std::size_t rows = end > window ? window + 1 : end;
    const std::size_t exact = std::min(rows, config.residual + key_rows(config));
    const auto side = [&](const RowFormat& format, const StorageContext& own) {
      return PlaneStore::max_bytes(format, own, rows) + PlaneStore::max_bytes(dense_format(), own, exact);
    };
    return side(key_format(config, context), context) +
           side(value_format(config, context), context.of_values());
  }

  // ---- final rows (FinalRowsStorage): those of which key and value are quantised

  [[nodiscard]] std::array<PlaneStore*, 2> final_planes() {
    return {&keys_.quantized(), &values_.quantized()};
  }
  [[nodiscard]] std::array<const PlaneStore*, 2> final_planes() const {
    return {&keys_.quantized(), &values_.quantized()};
  }
  [[nodiscard]] std::size_t final_rows(std::size_t end) const { return final_rows(config(), end); }
  [[nodiscard]] static std::size_t final_rows(const Config& config, std::size_t end) {
    const auto [keys, values] = quantized_rows(config, end);
    return std::min(keys, values);
  }
  [[nodiscard]] static std::size_t bytes_of_final_rows(const Config& config, const StorageContext& context,
                                                       std::size_t rows) {
    return PlaneStore::bytes_of_rows(key_format(config, context), context, 0, rows) +
           PlaneStore::bytes_of_rows(value_format(config, context), context.of_values(), 0, rows);
  }

  /// While held, no row leaves the residual: for policies that choose survivors first.
  void defer_quantization(bool deferred) { quantization_deferred_ = deferred; }
  [[nodiscard]] bool is_quantization_deferred() const { return quantization_deferred_; }

  /// Appends rows as another storage of these settings keeps them, the first as row number `first`:
  /// quantised rows as they are, and exact rows stay exact until others are appended. Parts of one plane
  /// come one after the other.
  /// @throws std::bad_alloc, with part of the rows taken
  void take(const Segment& rows, std::size_t first) {
    keys_.take(rows.keys, rows.rows, first);
    values_.take(rows.values, rows.rows, first);
  }

  void reserve(std::size_t rows, std::size_t window = unlimited_rows) {
    reserved_ = true;
    const Step step = plan(rows, window);
    const std::size_t unit = key_rows(config());
    // Most exact rows at a time, however the rows come in pieces.
    const std::size_t live = quantization_deferred_ ? window : std::min(window, residual_ + unit);
    keys_.reserve(step.to, step.keys, window, live);
    values_.reserve(step.to, step.values, window, live);
  }
  void release_unused() noexcept {
    keys_.release_unused();
    values_.release_unused();
    reserved_ = false;
  }

  void append(const Segment& rows, std::size_t window = unlimited_rows) {
    const ScopedReserve scope{*this, rows.rows, window};
    const Step step = plan(rows.rows, window);
    keys_.append(rows.keys, step.to, step.front, step.keys);
    values_.append(rows.values, step.to, step.front, step.values);
  }

  void show(std::size_t first, std::size_t count, Segment prototype, SegmentList& out) const {
    const std::size_t last = first + count;
    const std::size_t origin = first;
    for (const std::size_t cut : {std::min(keys_.boundary(), values_.boundary()),
                                  std::max(keys_.boundary(), values_.boundary()), last}) {
      const std::size_t to = std::min(cut, last);
      if (to <= first) continue;
      Segment segment = prototype;
      segment.keys = keys_.plane(first);
      segment.values = values_.plane(first);
      segment.rows = to - first;
      segment.position = prototype.position + static_cast<std::int64_t>(first - origin);
      segment.positions = prototype.positions == nullptr ? nullptr : prototype.positions + (first - origin);
      out.push_back(segment);
      first = to;
    }
  }

  /// The rows of these ascending numbers alone, numbered from 0 again. Quantised rows are copied as
  /// they are; exact ones stay exact until they leave the residual.
  [[nodiscard]] ResidualStorage select(std::span<const std::size_t> numbers) const
    requires movable_rows
  {
    ResidualStorage kept{config(), context()};
    keys_.select(numbers, kept.keys_);
    values_.select(numbers, kept.values_);
    kept.release_unused();
    kept.append({}, unlimited_rows);  // what no longer fits into the residual leaves it
    return kept;
  }

  template <class Archive>
  void serialize(Archive& archive) {
    const bool may_be_deferred = quantization_deferred_;  // whether the policy ever defers
    archive(quantization_deferred_, keys_, values_);
    archive.check(may_be_deferred || !quantization_deferred_,
                  "no deferred quantisation, which this policy does not know");
    archive.check(keys_.begin() == values_.begin() && keys_.end() == values_.end(), "as many values as keys");
  }

 private:
  friend class ScopedReserve<ResidualStorage>;

  struct Step {
    std::size_t to, front, keys, values;  // row numbers: new end, new begin, boundaries
  };

  // Whether a side's codebook can have these bits, group and scale. @throws ConfigError
  static void check_codebook(const char* side, Codebook codebook, Encoding encoding, std::size_t group,
                             double scale) {
    const std::string_view called = name_of(codebook);
    require(fits_codebook(codebook, bits_of(encoding)), "ResidualStorage: ", side, "_codebook '", called,
            "' has ",
            codebook == Codebook::fp8      ? "8"
            : codebook == Codebook::normal ? "2, 3 or 4"
                                           : "4",
            " bits, not ", bits_of(encoding));
    require(codebook == Codebook::even || !is_in_halves(encoding), "ResidualStorage: ", side, "_codebook '",
            called, "' cannot be stored in halves");
    const std::size_t block = block_channels(codebook);
    require(block == 0 || group == 0 || group == block, "ResidualStorage: ", side, "_codebook '", called,
            "' shares a scale among ", block, " channels, so ", side, "_group must be that or 0, not ",
            group);
    require(has_head_scale(codebook) || scale == 1.0, "ResidualStorage: ", side, "_scale is ", scale,
            ", must be 1: '", called, "' codes have no scale of the head; 'fp8' and 'nvfp4' have");
    detail::check_head_scale("ResidualStorage", side, scale);
  }

  [[nodiscard]] Step plan(std::size_t rows, std::size_t window) const {
    const std::size_t to = end() + rows;
    const std::size_t front = std::max(begin(), to - std::min(to, window));
    if (quantization_deferred_) return {to, front, keys_.boundary(), values_.boundary()};
    const auto [keys, values] = quantized_rows(config(), to);
    return {to, front, std::max(keys, keys_.boundary()), std::max(values, values_.boundary())};
  }

  [[nodiscard]] static std::pair<std::size_t, std::size_t> groups(const Config& config,
                                                                  const StorageContext& context) {
    const std::size_t whole =
        Keys == Granularity::per_token ? Config::usual_group(config.key_codebook, context.head_dim) : 32;
    const std::size_t whole_value = Config::usual_group(config.value_codebook, context.value_channels());
    return {config.key_group == 0 ? whole : config.key_group,
            config.value_group == 0 ? whole_value : config.value_group};
  }
  [[nodiscard]] static RowFormat key_format(const Config& config, const StorageContext& context) {
    return {config.key_encoding(),         Keys,
            groups(config, context).first, config.key_hadamard,
            config.key_codebook,           detail::head_scale(config.key_scale)};
  }
  [[nodiscard]] static RowFormat value_format(const Config& config, const StorageContext& context) {
    return {config.value_encoding(), Granularity::per_token, groups(config, context).second,
            config.value_hadamard,   config.value_codebook,  detail::head_scale(config.value_scale)};
  }
  [[nodiscard]] static RowFormat dense_format() { return {.encoding = encoding_of<E>}; }

  [[nodiscard]] StorageContext context() const { return keys_.context().with_values(values_.context()); }
  // Its settings, of which the planes keep bits and groups.
  [[nodiscard]] Config config() const {
    const RowFormat keys = keys_.format();
    const RowFormat values = values_.format();
    return {.bits = bits_of(keys.encoding),
            .value_bits = bits_of(values.encoding),
            .key_group = keys.group,
            .value_group = values.group,
            .residual = residual_,
            .flush = flush_,
            .key_hadamard = keys.hadamard,
            .value_hadamard = values.hadamard,
            .halves = is_in_halves(keys.encoding) || is_in_halves(values.encoding),
            .key_codebook = keys.codebook,
            .value_codebook = values.codebook,
            .key_scale = keys.scale,
            .value_scale = values.scale};
  }

  detail::ResidualSide keys_;
  detail::ResidualSide values_;
  std::size_t residual_;
  Flush flush_;
  bool quantization_deferred_ = false;
  bool reserved_ = false;
};

/// Quantised rows whose keys share scales within a row.
template <Element E>
using PerTokenStorage = ResidualStorage<E, Granularity::per_token>;
/// Quantised rows whose keys share scales along the text (KIVI).
template <Element E>
using PerChannelStorage = ResidualStorage<E, Granularity::per_channel>;

static_assert(FinalRowsStorage<DenseStorage<float>>);
static_assert(FinalRowsStorage<ResidualStorage<float, Granularity::per_token>>);
static_assert(FinalRowsStorage<ResidualStorage<float, Granularity::per_channel>>);

}  // namespace kvpolicy
