// SPDX-License-Identifier: Apache-2.0
//
// Layers that no policy would show: any mix of formats, pages, strides, runs, positions, windows and
// rotated segments in one head.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/rotary.hpp>
#include <kvpolicy/core/row.hpp>

#include "support/oracle.hpp"
#include "support/tensors.hpp"

namespace test {

inline constexpr double theta = 10000.0;

inline const std::vector<kvpolicy::Encoding> dense_encodings{
    kvpolicy::Encoding::float32, kvpolicy::Encoding::float16, kvpolicy::Encoding::bfloat16};

/// Every format for a head_dim: dense, per token with each sensible group, per channel.
inline std::vector<kvpolicy::RowFormat> all_formats(std::size_t head_dim) {
  using kvpolicy::Encoding;
  using kvpolicy::Granularity;
  std::vector<kvpolicy::RowFormat> formats;
  for (const Encoding encoding : dense_encodings) formats.push_back({.encoding = encoding});
  for (const Encoding encoding : {Encoding::uint8, Encoding::uint6, Encoding::uint5, Encoding::uint4,
                                  Encoding::uint3, Encoding::uint2, Encoding::uint4x2}) {
    for (std::size_t group = 1; group <= head_dim; ++group) {
      const bool telling = group <= 5 || group >= 16;
      if (head_dim % group == 0 && telling) {
        formats.push_back({encoding, Granularity::per_token, group});
      }
      if (group == head_dim || (group == 32 && head_dim % group == 0)) {
        formats.push_back({encoding, Granularity::per_token, group, true});
      }
    }
    for (const std::size_t group : std::initializer_list<std::size_t>{1, 2, 16}) {
      formats.push_back({encoding, Granularity::per_channel, group});
    }
  }
  using kvpolicy::Codebook;
  for (const Encoding encoding : {Encoding::uint4, Encoding::uint3, Encoding::uint2}) {
    for (const std::size_t group :
         {std::size_t{8}, std::size_t{16}, std::size_t{32}, head_dim / 2, head_dim}) {
      if (head_dim % group != 0) continue;
      formats.push_back({encoding, Granularity::per_token, group, group == head_dim, Codebook::normal});
    }
  }
  formats.push_back({Encoding::uint8, Granularity::per_token, head_dim, false, Codebook::fp8, 0.007F});
  for (const auto& [codebook, scale] : {std::pair{Codebook::mxfp4, 1.0F}, std::pair{Codebook::nvfp4, 0.4F}}) {
    const std::size_t block = kvpolicy::block_channels(codebook);
    if (head_dim % block == 0) {
      formats.push_back({Encoding::uint4, Granularity::per_token, block, false, codebook, scale});
    }
  }
  return formats;
}

/// Owns the bytes of one side of a segment.
class RandomPlane {
 public:
  RandomPlane(Random& random, const kvpolicy::RowFormat& format, std::size_t rows, std::size_t head_dim) {
    plane_.format = format;
    const bool quantized = kvpolicy::is_quantized(format.encoding);
    if (!quantized && below(random, 3) == 0) {  // strided
      const std::size_t bytes = kvpolicy::bits_of(format.encoding) / 8;
      plane_.row_stride = (head_dim + below(random, 3)) * bytes;
      plane_.first_row = below(random, 3);
      auto& memory = pages_.emplace_back((plane_.first_row + rows) * plane_.row_stride + 1);
      for (std::size_t at = 0; at + bytes <= memory.size(); at += bytes) {
        write(random, format.encoding, memory.data() + at);
      }
      plane_.base = memory.data();
      return;
    }
    plane_.page_rows = std::size_t{16} << below(random, 3);
    plane_.first_row = below(random, plane_.page_rows);
    const kvpolicy::PageLayout layout{format, head_dim, plane_.page_rows};
    // Rows with a distance between them, as in an inference engine's memory. They have a random
    // generator of their own, so that all other random numbers stay the same.
    Random own{rows * 64 + plane_.first_row};
    if (!quantized && below(own, 3) == 0) {
      const std::size_t bytes = kvpolicy::bits_of(format.encoding) / 8;
      plane_.row_stride = (head_dim * (1 + below(own, 3)) + below(own, 3)) * bytes;
      plane_.page_offset = below(own, 70) * bytes;
    }
    for (std::size_t row = 0; row < plane_.first_row + rows; row += plane_.page_rows) {
      auto& page = pages_.emplace_back(layout.page_bytes);
      if (!quantized) {
        const std::size_t bytes = kvpolicy::bits_of(format.encoding) / 8;
        for (std::size_t at = 0; at < page.size(); at += bytes) {
          write(random, format.encoding, page.data() + at);
        }
        if (plane_.row_stride != 0) page = apart(page, layout.row_bytes);
        continue;
      }
      for (std::size_t at = 0; at < layout.scales_offset; ++at) {
        page[at] = static_cast<std::byte>(random() & 0xff);
      }
      if (format.codebook != kvpolicy::Codebook::even) {
        write_code_scales(random, format, layout, page);
        continue;
      }
      const auto levels = static_cast<float>((1U << kvpolicy::bits_of(format.encoding)) - 1U);
      for (std::size_t at = layout.scales_offset; at < layout.page_bytes; at += 2) {
        // Codes times scale have a range of about 3, and zeros are about -1.5.
        const float number = at < layout.zeros_offset ? (2.5F + 0.3F * normal(random)) / levels
                                                      : -1.3F + 0.3F * normal(random);
        kvpolicy::store_dense(kvpolicy::Encoding::float16, {&number, 1}, page.data() + at);
      }
    }
    // Here, pages are in memory in the order of the table, but nothing may depend on it.
    for (const auto& page : pages_) table_.push_back(page.data());
    table_.push_back(nullptr);
    plane_.pages = table_.data();
  }
  RandomPlane(RandomPlane&&) = default;
  RandomPlane& operator=(RandomPlane&&) = default;
  RandomPlane(const RandomPlane&) = delete;
  RandomPlane& operator=(const RandomPlane&) = delete;
  ~RandomPlane() = default;

  [[nodiscard]] const kvpolicy::Plane& plane() const { return plane_; }

  /// Sets all channels of row `row` of a dense plane to `number`.
  void overwrite(std::size_t row, std::size_t head_dim, float number) {
    const auto place = plane_.address_of(row);
    const std::vector<float> numbers(head_dim, number);
    const std::size_t row_bytes = head_dim * kvpolicy::bits_of(plane_.format.encoding) / 8;
    kvpolicy::store_dense(plane_.format.encoding, numbers,
                          const_cast<std::byte*>(place.page) + place.row * row_bytes);
  }

 private:
  // Moves the rows of a page `row_stride` bytes apart; the bytes between them are NaN.
  [[nodiscard]] std::vector<std::byte> apart(const std::vector<std::byte>& page,
                                             std::size_t row_bytes) const {
    std::vector<std::byte> all(plane_.page_offset + plane_.page_rows * plane_.row_stride, std::byte{0xff});
    for (std::size_t row = 0; row < plane_.page_rows; ++row) {
      std::copy_n(page.data() + row * row_bytes, row_bytes,
                  all.data() + plane_.page_offset + row * plane_.row_stride);
    }
    return all;
  }
  // Scales with which most numbers are between -3 and 3. No code of fp8 is NaN.
  static void write_code_scales(Random& random, const kvpolicy::RowFormat& format,
                                const kvpolicy::PageLayout& layout, std::vector<std::byte>& page) {
    using kvpolicy::Codebook;
    if (format.codebook == Codebook::fp8) {
      for (std::byte& code : page) {
        if ((code & std::byte{0x7f}) == std::byte{0x7f}) code ^= std::byte{1};
      }
    }
    for (std::size_t at = layout.scales_offset; at < layout.page_bytes; at += scale_bytes(format.codebook)) {
      if (format.codebook == Codebook::normal) {
        const float scale = (2.0F + 0.3F * normal(random)) / 127.0F;
        kvpolicy::store_dense(kvpolicy::Encoding::float16, {&scale, 1}, page.data() + at);
      } else {
        const std::size_t least = format.codebook == Codebook::mxfp4 ? 124 : 0x30;  // 2^-3; 0.5 in E4M3
        page[at] = static_cast<std::byte>(least + below(random, format.codebook == Codebook::mxfp4 ? 3 : 16));
      }
    }
  }
  static void write(Random& random, kvpolicy::Encoding encoding, std::byte* out) {
    const float number = normal(random);
    kvpolicy::store_dense(encoding, {&number, 1}, out);
  }

  kvpolicy::Plane plane_;
  std::vector<std::vector<std::byte>> pages_;
  std::vector<const std::byte*> table_;
};

/// How much 16-bit factors may add to the error of outputs and of log-sum-exps over quantised rows with random
/// queries: about one and a half of the largest differences seen. Rounded weights of values cost 1.7e-4 at most,
/// whatever the head. The error of a logit grows with the scale of logits and, because errors of channels add up,
/// with the square root of their number; whether keys have one scale, several or those of channels makes no
/// difference.
[[nodiscard]] inline double integer_tolerance(double scale, std::size_t head_dim) {
  return 2.5e-4 + 8e-5 * std::abs(scale) * std::sqrt(static_cast<double>(head_dim));
}

/// What a random segment may have in addition to rows.
struct Traits {
  bool runs = true;
  bool positions = true;
  bool window = true;
  bool rotation = true;
};

/// One KV head: its segments and everything that they point to.
class RandomHead {
 public:
  explicit RandomHead(std::size_t head_dim, std::size_t value_dim = 0)
      : head_dim_{head_dim},
        value_dim_{value_dim == 0 ? head_dim : value_dim},
        frequencies_{std::make_unique<std::vector<float>>(kvpolicy::inverse_frequencies({}, head_dim))} {}

  /// Adds rows at positions from about `position` on.
  void add(Random& random, const kvpolicy::RowFormat& keys, const kvpolicy::RowFormat& values,
           std::size_t rows, std::int64_t position, std::int64_t queries_at, const Traits& traits) {
    keys_.emplace_back(random, keys, rows, head_dim_);
    values_.emplace_back(random, values, rows, value_dim_);
    kvpolicy::Segment segment;
    segment.keys = keys_.back().plane();
    segment.values = values_.back().plane();
    segment.rows = rows;
    segment.position = position;
    auto& positions = positions_.emplace_back();
    if (traits.positions && below(random, 3) == 0) {
      for (std::size_t i = 0; i < rows; ++i) {
        positions.push_back(position + static_cast<std::int64_t>(below(random, rows + 8)));
      }
      segment.positions = positions.data();
    }
    auto& runs = runs_.emplace_back();
    if (traits.runs && rows > 0 && below(random, 3) == 0) {
      for (std::size_t at = below(random, 5); at < rows;) {
        const std::size_t count = std::min(rows - at, 1 + below(random, 20));
        runs.push_back({at, count});
        at += count + 1 + below(random, 9);
      }
      if (runs.empty()) runs.push_back({rows - 1, 1});
      segment.runs = runs;
    }
    if (traits.window && below(random, 3) == 0) {
      segment.window = static_cast<std::int64_t>(1 + below(random, rows + 20));
    }
    if (traits.rotation && below(random, 4) == 0) {
      segment.rotation = {frequencies_->data(),
                          queries_at + static_cast<std::int64_t>(below(random, 20)) - 10};
    }
    segments_.push_back(segment);
  }

  [[nodiscard]] std::span<const kvpolicy::Segment> segments() const { return segments_; }
  [[nodiscard]] RandomPlane& keys(std::size_t segment) { return keys_[segment]; }
  [[nodiscard]] RandomPlane& values(std::size_t segment) { return values_[segment]; }
  [[nodiscard]] kvpolicy::Segment& segment(std::size_t i) { return segments_[i]; }

  /// Whether a segment may rotate queries.
  [[nodiscard]] bool is_rotated() const {
    return std::ranges::any_of(segments_, [](const kvpolicy::Segment& segment) {
      return segment.rotation.inverse_frequencies != nullptr || segment.keys.format.hadamard;
    });
  }

  [[nodiscard]] bool is_quantized() const {
    return std::ranges::any_of(segments_, [](const kvpolicy::Segment& segment) {
      return kvpolicy::is_quantized(segment.keys.format.encoding) ||
             kvpolicy::is_quantized(segment.values.format.encoding);
    });
  }

  [[nodiscard]] bool is_in_half() const {
    return std::ranges::any_of(segments_, [](const kvpolicy::Segment& segment) {
      return segment.values.format.encoding == kvpolicy::Encoding::float16;
    });
  }

  [[nodiscard]] std::size_t rows_shown() const {
    std::size_t rows = 0;
    for (const auto& segment : segments_) {
      segment.for_each_run([&](const kvpolicy::RowRun& run) { rows += run.rows; });
    }
    return rows;
  }

  /// The rows that a query at position t sees, in double. Instead of the query, the keys of segments
  /// with a rotation are rotated, forwards.
  [[nodiscard]] std::vector<oracle::Row> seen_from(std::int64_t t) const {
    std::vector<oracle::Row> rows;
    std::vector<float> row(head_dim_);
    std::vector<float> value(value_dim_);
    for (const kvpolicy::Segment& segment : segments_) {
      segment.for_each_run([&](const kvpolicy::RowRun& run) {
        for (std::size_t i = run.first; i < run.first + run.rows; ++i) {
          const std::int64_t position = segment.positions != nullptr
                                            ? segment.positions[i]
                                            : segment.position + static_cast<std::int64_t>(i);
          const bool reached = segment.window == kvpolicy::unlimited_window || position > t - segment.window;
          if (position > t || !reached) continue;
          oracle::Row& seen = rows.emplace_back();
          kvpolicy::load_row(segment.keys, i, row);
          seen.key.assign(row.begin(), row.end());
          kvpolicy::load_row(segment.values, i, value);
          seen.value.assign(value.begin(), value.end());
          const std::int64_t latest = segment.rotation.latest_position;
          if (segment.rotation.inverse_frequencies != nullptr && t > latest) {
            seen.key = oracle::turn(seen.key, static_cast<double>(t - latest), theta);
          }
        }
      });
    }
    return rows;
  }

  /// Attention in double.
  [[nodiscard]] oracle::Result attend(const std::vector<double>& query, std::int64_t t,
                                      const oracle::Options& options) const {
    const std::vector<oracle::Row> rows = seen_from(t);
    std::vector<const oracle::Row*> list;
    for (const auto& seen : rows) list.push_back(&seen);
    return oracle::attend(query, list, options, value_dim_);
  }

 private:
  std::size_t head_dim_;
  std::size_t value_dim_;
  std::unique_ptr<std::vector<float>> frequencies_;
  std::vector<RandomPlane> keys_;
  std::vector<RandomPlane> values_;
  std::vector<std::vector<std::int64_t>> positions_;
  std::vector<std::vector<kvpolicy::RowRun>> runs_;
  std::vector<kvpolicy::Segment> segments_;
};

/// Row counts around the sizes of vectors, row tiles and pages, and primes.
inline const std::vector<std::size_t> hard_sizes{0,  1,  2,  3,  5,   7,   15,  16,  17,  31, 32,
                                                 33, 63, 64, 65, 101, 127, 128, 129, 257, 509};

/// Several segments that end near the positions of the queries.
inline RandomHead random_head(Random& random, std::size_t head_dim, std::int64_t queries_at,
                              std::size_t tokens, const Traits& traits = {}, std::size_t value_dim = 0) {
  RandomHead head{head_dim, value_dim};
  const auto formats = all_formats(head_dim);
  const auto value_formats = value_dim == 0 ? formats : all_formats(value_dim);
  const std::size_t segments = below(random, 5);
  for (std::size_t i = 0; i < segments; ++i) {
    const std::size_t rows = one_of(random, hard_sizes);
    const auto start =
        std::max<std::int64_t>(0, queries_at + static_cast<std::int64_t>(below(random, tokens + 4)) -
                                      static_cast<std::int64_t>(rows));
    head.add(random, one_of(random, formats), one_of(random, value_formats), rows, start, queries_at, traits);
  }
  return head;
}

/// A whole call: heads, queries and memory for results.
template <class Q>
struct RandomCall {
  std::size_t group;
  std::vector<RandomHead> heads;
  Tensor<Q> queries;
  std::vector<float> attention_sink_bias;
  kvpolicy::AttendOptions options;
  std::int64_t first_position;
  std::vector<std::span<const kvpolicy::Segment>> segments;

  RandomCall(Random& random, std::size_t kv_heads, std::size_t group_, std::size_t head_dim,
             std::size_t tokens, const Traits& traits = {}, std::size_t value_dim = 0)
      : group{group_},
        queries{tokens, kv_heads * group_, head_dim, static_cast<Layout>(below(random, 3))},
        first_position{static_cast<std::int64_t>(below(random, 600))} {
    for (std::size_t head = 0; head < kv_heads; ++head) {
      heads.push_back(random_head(random, head_dim, first_position, tokens, traits, value_dim));
    }
    queries.randomize(random, 1.0F);
    if (below(random, 3) == 0) options.scale = 0.3F * normal(random);
    if (below(random, 3) == 0) options.softcap = 0.2F + 10.0F * static_cast<float>(below(random, 4));
    if (below(random, 3) == 0) {
      for (std::size_t head = 0; head < kv_heads * group; ++head) {
        attention_sink_bias.push_back(2.0F * normal(random));
      }
    }
    bind();
  }
  void bind() {
    segments.clear();
    for (const auto& head : heads) segments.push_back(head.segments());
    options.attention_sink_bias = attention_sink_bias;
  }

  /// What logits are multiplied by.
  [[nodiscard]] double scale() const {
    const auto head_dim = static_cast<double>(queries.view().head_dim);
    return options.scale ? static_cast<double>(*options.scale) : 1.0 / std::sqrt(head_dim);
  }

  /// How far a head's logits of two engines may be apart. Norms bound the sum of a logit's products. Each engine
  /// adds head_dim products in float, whose errors grow with the square root of their number; quantised keys and
  /// queries that a segment rotates may be off by `of_two_terms` of a number besides, where they are split into two.
  [[nodiscard]] double error_of_logits(std::size_t head, double of_two_terms) const {
    const RandomHead& own = heads[head];
    const auto norm = [](const std::vector<double>& row) {
      return std::sqrt(std::inner_product(row.begin(), row.end(), row.begin(), 0.0));
    };
    double query_norm = 0, key_norm = 0;
    for (std::size_t token = 0; token < queries.view().tokens; ++token) {
      for (std::size_t q = head * group; q < (head + 1) * group; ++q) {
        query_norm = std::max(query_norm, norm(queries.row_of_doubles(token, q)));
      }
      for (const auto& row : own.seen_from(first_position + static_cast<std::int64_t>(token))) {
        key_norm = std::max(key_norm, norm(row.key));
      }
    }
    const double split = (own.is_quantized() ? 1.0 : 0.0) + (own.is_rotated() ? 1.0 : 0.0);
    const double sums = 2 * 0x1p-24 * std::sqrt(static_cast<double>(queries.view().head_dim));
    return (split * of_two_terms + sums) * std::abs(scale()) * query_norm * key_norm;
  }

  /// The tolerance `dense`, with an addition if some rows are quantised.
  [[nodiscard]] double tolerance(double dense) const {
    const bool quantized = std::ranges::any_of(heads, &RandomHead::is_quantized);
    return quantized ? dense + integer_tolerance(scale(), queries.view().head_dim) : dense;
  }

  template <class Engine, class Out>
  void attend(Engine& engine, Tensor<Out>& out, std::vector<float>& log_sum_exp) {
    kvpolicy::LayerAttention work;
    work.queries = kvpolicy::ConstTensor{queries.view()};
    work.out = kvpolicy::MutableTensor{out.view()};
    work.first_position = first_position;
    work.heads = segments;
    work.options = options;
    work.options.log_sum_exp = log_sum_exp;
    engine.attend(work);
  }
};

}  // namespace test
