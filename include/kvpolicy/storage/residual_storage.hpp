// SPDX-License-Identifier: Apache-2.0
//
// A head's rows at 2, 4 or 8 bits, with the latest ones in full precision. Rows enter the
// residual; those that leave it are quantised, once and never again, while later rows come in.
//
// Method: KIVI, arXiv:2402.02750 (keys per channel in groups of rows, values per token), and the
// QuantizedCache of Hugging Face transformers (both per token). Differences: the residual is a
// promise, not a buffer that empties: at least `residual` latest rows are always exact, the prompt's
// included. `flush = Flush::kivi` gives the published behaviour: all keys leave at once whenever
// their number reaches a multiple of `residual`, so between none and residual - 1 are exact.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/row.hpp>
#include <kvpolicy/storage/dense_storage.hpp>

namespace kvpolicy {

enum class Flush : std::uint8_t { steady, kivi };

struct ResidualConfig {
  std::size_t bits = 4;         ///< 2, 4 or 8.
  std::size_t key_group = 0;    ///< Channels (per token; 0: the whole row) or rows (per channel; 0: 32).
  std::size_t value_group = 0;  ///< Channels; 0: the whole row.
  std::size_t residual = 128;   ///< Latest rows kept exact, at least.
  Flush flush = Flush::steady;

  friend bool operator==(const ResidualConfig&, const ResidualConfig&) = default;
};

template <Element E, Granularity Keys = Granularity::per_token>
class ResidualStorage {
 public:
  using element_type = E;
  struct Config : ResidualConfig {
    friend bool operator==(const Config&, const Config&) = default;
  };
  static constexpr Granularity key_granularity = Keys;
  static constexpr std::string_view name =
      Keys == Granularity::per_token ? "residual_per_token" : "residual_per_channel";
  /// A key quantised together with its neighbours cannot leave them.
  static constexpr bool movable_rows = Keys == Granularity::per_token;

  ResidualStorage(const Config& config, const StorageContext& context)
      : config_{config}, context_{context}, keys_{key_format(config, context), context},
        values_{value_format(config, context), context} {
    validate(config, context);
  }

  static void validate(const Config& config, const StorageContext& context) {
    require(config.bits == 2 || config.bits == 4 || config.bits == 8, "ResidualStorage: bits is ",
            config.bits, ", must be 2, 4 or 8");
    const auto [keys, values] = groups(config, context);
    const std::size_t key_unit = Keys == Granularity::per_token ? context.head_dim : context.page_rows;
    require(key_unit % keys == 0, "ResidualStorage: key_group is ", keys, ", must divide ",
            Keys == Granularity::per_token ? "head_dim = " : "the rows of a page = ", key_unit);
    require(context.head_dim % values == 0, "ResidualStorage: value_group is ", values,
            ", must divide head_dim = ", context.head_dim);
    require(config.residual < (std::size_t{1} << 40), "ResidualStorage: residual is ",
            config.residual, ", must be below 2^40");
    if (config.flush == Flush::kivi) {
      const std::size_t unit = Keys == Granularity::per_token ? 1 : keys;
      require(config.residual > 0 && config.residual % unit == 0,
              "ResidualStorage: kivi's flush needs a residual that is a positive multiple of ",
              unit, ", not ", config.residual);
    }
  }

  /// @throws ShapeError where a number of `rows` is not finite or beyond half's range, for its
  /// scale or zero could not be held.
  void check(const Segment& rows) const {
    std::vector<float> row(context_.head_dim);
    for (const Plane* side : {&rows.keys, &rows.values}) {
      for (std::size_t i = 0; i < rows.rows; ++i) {
        load_row(*side, i, row);
        for (std::size_t channel = 0; channel < row.size(); ++channel) {
          require<ShapeError>(std::abs(row[channel]) <= largest_quantizable,
                              "ResidualStorage: ", side == &rows.keys ? "key" : "value",
                              " at position ", rows.position_of(i), ", channel ", channel, " is ",
                              row[channel], "; to be quantised it must be finite and at most ",
                              largest_quantizable);
        }
      }
    }
  }

  [[nodiscard]] std::size_t begin() const { return keys_.begin(); }
  [[nodiscard]] std::size_t end() const { return keys_.end(); }
  [[nodiscard]] std::size_t bytes() const { return keys_.bytes() + values_.bytes(); }
  [[nodiscard]] std::size_t shared_bytes() const {
    return keys_.shared_bytes() + values_.shared_bytes();
  }
  /// How many keys and values, counted from row 0, are quantised once `end` rows came.
  [[nodiscard]] static std::pair<std::size_t, std::size_t> quantized_rows(
      const Config& config, const StorageContext& context, std::size_t end) {
    const std::size_t beyond = end - std::min(end, config.residual);
    const std::size_t unit =
        Keys == Granularity::per_token ? 1 : groups(config, context).first;
    const std::size_t keys = config.flush == Flush::kivi ? end - end % config.residual
                                                         : beyond - beyond % unit;
    return {keys, beyond};
  }
  [[nodiscard]] static std::size_t bytes_of_rows(const Config& config,
                                                 const StorageContext& context, std::size_t begin,
                                                 std::size_t end) {
    const auto [keys, values] = quantized_rows(config, context, end);
    const auto side = [&](const RowFormat& format, std::size_t boundary) {
      boundary = std::max(begin, boundary);
      return PlaneStore::bytes_of_rows(format, context, begin, boundary) +
             PlaneStore::bytes_of_rows(dense_format(), context, boundary, end);
    };
    return side(key_format(config, context), keys) + side(value_format(config, context), values);
  }

  /// Neighbouring keys that share a scale.
  [[nodiscard]] static std::size_t key_rows(const Config& config) {
    if (Keys == Granularity::per_token) return 1;
    return config.key_group == 0 ? 32 : config.key_group;
  }
  [[nodiscard]] static std::size_t period(const Config& config, const StorageContext& context) {
    return config.flush == Flush::kivi ? std::lcm(context.page_rows, config.residual)
                                       : context.page_rows;
  }

  /// While held, no row leaves the residual: for policies that choose survivors first.
  void hold(bool held) { held_ = held; }

  void reserve(std::size_t rows, std::size_t window = unlimited_rows) {
    const Step step = plan(rows, window);
    keys_.reserve(step.to, step.front, step.keys);
    values_.reserve(step.to, step.front, step.values);
  }
  void release_spare() noexcept {
    keys_.release_spare();
    values_.release_spare();
  }

  void append(const Segment& rows, std::size_t window = unlimited_rows) {
    const Step step = plan(rows.rows, window);
    reserve(rows.rows, window);
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
      segment.positions =
          prototype.positions == nullptr ? nullptr : prototype.positions + (first - origin);
      out.push_back(segment);
      first = to;
    }
  }

  /// The rows of these ascending numbers alone, numbered anew from 0. Quantised rows are copied as
  /// they are; exact ones stay exact until they leave the residual.
  [[nodiscard]] ResidualStorage select(std::span<const std::size_t> numbers) const
    requires movable_rows
  {
    ResidualStorage kept{config_, context_};
    keys_.select(numbers, kept.keys_);
    values_.select(numbers, kept.values_);
    kept.append({}, unlimited_rows);  // what no longer fits into the residual leaves it
    return kept;
  }

 private:
  struct Step {
    std::size_t to, front, keys, values;  // row numbers: new end, new begin, boundaries
  };

  // One side: quantised rows [begin, boundary), then exact rows [boundary, end).
  class Side {
   public:
    Side(const RowFormat& format, const StorageContext& context)
        : quantized_{format, context}, exact_{dense_format(), context} {}

    [[nodiscard]] std::size_t begin() const {
      return quantized_.rows() > 0 ? quantized_.begin() : exact_.begin();
    }
    [[nodiscard]] std::size_t end() const { return exact_.end(); }
    [[nodiscard]] std::size_t boundary() const { return exact_.begin(); }
    [[nodiscard]] std::size_t bytes() const { return quantized_.bytes() + exact_.bytes(); }
    [[nodiscard]] std::size_t shared_bytes() const {
      return quantized_.shared_bytes() + exact_.shared_bytes();
    }
    [[nodiscard]] Plane plane(std::size_t row) const {
      return row < boundary() ? quantized_.plane(row) : exact_.plane(row);
    }

    void reserve(std::size_t to, std::size_t front, std::size_t new_boundary) {
      quantized_.reserve(std::max(front, boundary()), std::max(front, new_boundary));
      exact_.reserve(std::max({front, new_boundary, end()}), to);
    }
    void release_spare() noexcept {
      quantized_.release_spare();
      exact_.release_spare();
    }

    // `rows` begins at row number end(); afterwards the side holds [front, to).
    void append(const Plane& rows, std::size_t to, std::size_t front, std::size_t new_boundary) {
      const std::size_t old_end = end();
      std::size_t next = std::max(front, boundary());
      if (new_boundary > next) {
        if (next > quantized_.end() || quantized_.rows() == 0) quantized_.skip_to(next);
        if (next < old_end) {  // rows that leave the residual
          const std::size_t count = std::min(new_boundary, old_end) - next;
          quantized_.append(exact_.plane(next), count);
          next += count;
        }
        if (next < new_boundary) quantized_.append(rows.from(next - old_end), new_boundary - next);
      }
      const std::size_t first_exact = std::max({front, new_boundary, old_end});
      if (first_exact > old_end) exact_.skip_to(first_exact);
      if (to > first_exact) exact_.append(rows.from(first_exact - old_end), to - first_exact);
      exact_.drop_front(std::max({front, new_boundary, exact_.begin()}));
      if (quantized_.rows() > 0) {
        quantized_.drop_front(std::clamp(front, quantized_.begin(), quantized_.end()));
      }
    }

    void select(std::span<const std::size_t> numbers, Side& kept) const {
      const auto exact = std::ranges::lower_bound(numbers, boundary());
      const auto quantized_count = static_cast<std::size_t>(exact - numbers.begin());
      kept.quantized_.reserve(0, quantized_count);
      for (const std::size_t number : numbers.first(quantized_count)) {
        kept.quantized_.append(quantized_.plane(number), 1);
      }
      kept.exact_.skip_to(quantized_count);
      kept.exact_.reserve(quantized_count, numbers.size());
      for (const std::size_t number : numbers.subspan(quantized_count)) {
        kept.exact_.append(exact_.plane(number), 1);
      }
    }

   private:
    PlaneStore quantized_;
    PlaneStore exact_;
  };

  [[nodiscard]] Step plan(std::size_t rows, std::size_t window) const {
    const std::size_t to = end() + rows;
    const std::size_t front = std::max(begin(), to - std::min(to, window));
    if (held_) return {to, front, keys_.boundary(), values_.boundary()};
    const auto [keys, values] = quantized_rows(config_, context_, to);
    return {to, front, std::max(keys, keys_.boundary()), std::max(values, values_.boundary())};
  }

  [[nodiscard]] static std::pair<std::size_t, std::size_t> groups(const Config& config,
                                                                  const StorageContext& context) {
    const std::size_t whole = Keys == Granularity::per_token ? context.head_dim : 32;
    return {config.key_group == 0 ? whole : config.key_group,
            config.value_group == 0 ? context.head_dim : config.value_group};
  }
  [[nodiscard]] static Encoding encoding(const Config& config) {
    return config.bits == 8 ? Encoding::uint8 : config.bits == 4 ? Encoding::uint4 : Encoding::uint2;
  }
  [[nodiscard]] static RowFormat key_format(const Config& config, const StorageContext& context) {
    return {encoding(config), Keys, groups(config, context).first};
  }
  [[nodiscard]] static RowFormat value_format(const Config& config, const StorageContext& context) {
    return {encoding(config), Granularity::per_token, groups(config, context).second};
  }
  [[nodiscard]] static RowFormat dense_format() { return {.encoding = encoding_of<E>}; }

  Config config_;
  StorageContext context_;
  Side keys_;
  Side values_;
  bool held_ = false;
};

static_assert(KvStorage<DenseStorage<float>>);
static_assert(KvStorage<ResidualStorage<float, Granularity::per_token>>);
static_assert(KvStorage<ResidualStorage<float, Granularity::per_channel>>);

}  // namespace kvpolicy
