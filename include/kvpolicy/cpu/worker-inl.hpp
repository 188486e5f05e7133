// SPDX-License-Identifier: Apache-2.0
//
// The work of one thread of the engine: it reads the row tiles of a task with the kernels that suit the
// number of queries. It owns the memory for that.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/cpu/aligned_buffer.hpp>
#include <kvpolicy/cpu/hadamard-inl.hpp>
#include <kvpolicy/cpu/key_bounds-inl.hpp>
#include <kvpolicy/cpu/matrix_unit.hpp>
#include <kvpolicy/cpu/partial-inl.hpp>
#include <kvpolicy/cpu/query_tile-inl.hpp>
#include <kvpolicy/cpu/row_tile-inl.hpp>
#include <kvpolicy/cpu/stream-inl.hpp>
#include <kvpolicy/cpu/tile-inl.hpp>

namespace kvpolicy::cpu {

/// Sizes that decide speed but not results, and how products are computed. Derive from this struct and
/// override members to try others.
struct DefaultTuning {
  static constexpr std::size_t stream_rows = 64;            ///< rows of a row tile for few queries; <= 64
  static constexpr std::size_t stream_quantized_rows = 64;  ///< the same, for quantised keys
  static constexpr std::size_t tile_rows = 64;       ///< rows of a row tile for a tile of queries; <= 64
  static constexpr std::size_t stream_queries = 12;  ///< with more queries, a call works in tiles
  static constexpr std::size_t tile_queries = 128;
  static constexpr std::size_t paired_queries =
      512;  ///< the most of a tile in tile registers; a window asks for less
  static constexpr std::size_t tasks_per_thread = 4;                 ///< evens out other load of the machine
  static constexpr std::size_t task_weight = std::size_t{64} << 10;  ///< least cost of a part of a tile

  // The following members change results, within the limits that they state.
  static constexpr Bfloat16Products bfloat16_products = Bfloat16Products::where_exact;
  using Tiles = x86::AmxTiles;  ///< tile registers, if matrix_unit() says so
  [[nodiscard]] static MatrixUnit matrix_unit() { return cpu::matrix_unit(); }
};

namespace HWY_NAMESPACE {

template <class Tuning>
class Worker {
  static_assert(Tuning::stream_rows >= 1 && Tuning::stream_rows <= max_tile_rows);
  static_assert(Tuning::stream_quantized_rows >= 1 && Tuning::stream_quantized_rows <= max_tile_rows);
  static_assert(Tuning::tile_rows >= 1 && Tuning::tile_rows <= max_tile_rows);
  static_assert(Tuning::stream_queries >= 1 && Tuning::tile_queries >= 1);
  static_assert(Tuning::stream_queries <= TileBounds::most_queries);

  using Pass = TilePass<typename Tuning::Tiles>;

 public:
  /// Words of memory that products of tiles of at most `queries` rows take, computed as planned.
  [[nodiscard]] static std::size_t scratch_words(std::size_t queries, const HeadWidth& width,
                                                 const ProductPlan& products) {
    return Pass::scratch_words(products, queries, width);
  }

  /// Reserves memory for tiles of at most `queries` rows, whose products take at most `scratch_words`. No other
  /// member allocates or throws.
  /// @throws std::bad_alloc
  void reserve(std::size_t queries, const HeadWidth& width, std::size_t scratch_words) {
    const std::size_t partial = Partial::floats(padded_queries(queries), width.values);
    // Tiles of more queries are not streamed, whatever the number of the largest one.
    const std::size_t streamed = StreamPass::scratch_floats(std::min(queries, Tuning::stream_queries), width);
    floats_.resize(partial + queries * width.keys + std::max(streamed, Pass::scratch_floats(queries, width)));
    words_.resize(scratch_words);
    queries_ = floats_.data() + partial;
    scratch_ = queries_ + queries * width.keys;
    if (row_tiles_ == nullptr) row_tiles_ = std::make_unique<std::array<RowTile, 2>>();
  }

  /// A partial result in the worker's own memory; its next task overwrites it.
  [[nodiscard]] Partial own_partial(const QueryTile& tile) const {
    return {floats_.data(), padded_queries(tile.rows)};
  }

  /// Computes attention of `tile` over the rows whose cumulated cost begins in [from, to).
  void attend(std::span<const Segment> segments, const QueryTile& tile, std::size_t from, std::size_t to,
              const ProductPlan& products, const Partial& partial);

  /// Adds to sums [group, rows] the probabilities that the tile's queries give each row, or keeps the largest.
  void observe(std::span<const Segment> segments, const QueryTile& tile, const ProductPlan& products,
               std::span<const float> attention_sink_bias, Votes votes, std::span<float> sums);

  /// out[i] = query . row i, for the rows whose cumulated cost begins in [from, to).
  void score(const Segment& rows, const QueryTile& tile, std::span<const float> query, std::size_t from,
             std::size_t to, std::span<float> out);

  /// Bounds the logits of the tile's queries with all of `rows`, whose keys are upper halves: query m's units begin at
  /// out + m * units.
  void bound(const Segment& rows, const QueryTile& tile, Certainty certainty, UnitBound* out,
             std::size_t units);

 private:
  static constexpr RowTileLimit stream_limit{Tuning::stream_rows, Tuning::stream_quantized_rows};
  static constexpr RowTileLimit tile_limit{Tuning::tile_rows, Tuning::tile_rows};

  // The tile's queries, rotated as the current segment requires.
  class Queries {
   public:
    Queries(const QueryTile& tile, float factor, float* rows) : tile_{tile}, factor_{factor}, rows_{rows} {}

    /// Loads them for a segment's keys. `turns_keys_back`: whether rotated keys of this format are rotated back instead
    /// of queries that nothing else rotates. Returns whether the queries have changed.
    bool load_for(const Segment& segment, bool turns_keys_back = false) {
      const QueryRotation rotation =
          tile_.is_rotated_by(segment.rotation) ? segment.rotation : QueryRotation{};
      const bool hadamard =
          segment.keys.format.hadamard && !(turns_keys_back && rotation.inverse_frequencies == nullptr);
      if (loaded_ && rotation.inverse_frequencies == rotation_.inverse_frequencies &&
          rotation.latest_position == rotation_.latest_position && hadamard == hadamard_) {
        return false;
      }
      tile_.load(rotation, factor_, rows_);
      if (hadamard) rotate_rows(rows_, tile_.rows, tile_.width().keys, tile_.key_dim());
      rotation_ = rotation;
      hadamard_ = hadamard;
      return loaded_ = true;
    }
    [[nodiscard]] bool rotated() const { return rotation_.inverse_frequencies != nullptr || hadamard_; }
    [[nodiscard]] bool hadamard() const { return hadamard_; }

   private:
    const QueryTile& tile_;
    float factor_;
    float* rows_;
    QueryRotation rotation_ = {};
    bool hadamard_ = false;
    bool loaded_ = false;
  };

  template <class Visit>
  void for_each_row_tile(RowTileReader& reader, Queries& queries, Pass& pass, Visit visit) {
    RowTile* row_tile = row_tiles_->data();
    RowTile* next = row_tile + 1;
    for (reader.read(*row_tile, tile_limit); row_tile->rows > 0; std::swap(row_tile, next)) {
      reader.read(*next, tile_limit);
      const Segment& segment = *row_tile->segment;
      if (queries.load_for(segment, pass.turns_back(segment.keys.format))) {
        pass.set_queries(queries_, queries.rotated(), queries.hadamard());
      }
      visit(*row_tile, *next);
    }
  }

  AlignedFloats floats_;
  AlignedBuffer<std::uint32_t> words_;
  float* queries_ = nullptr;
  float* scratch_ = nullptr;
  std::unique_ptr<std::array<RowTile, 2>> row_tiles_;
};

// Outside the class, because what is defined inside it is inline: a file that declares the class `extern template`
// would compile all kernels all the same.

template <class Tuning>
void Worker<Tuning>::attend(std::span<const Segment> segments, const QueryTile& tile, std::size_t from,
                            std::size_t to, const ProductPlan& products, const Partial& partial) {
  partial.clear(padded_queries(tile.rows), tile.width().values);
  RowTileReader reader{segments, tile, from, to};
  if (tile.rows <= Tuning::stream_queries) {
    Queries queries{tile, tile.scale, queries_};
    StreamPass pass{tile, partial, scratch_};
    RowTile* row_tile = row_tiles_->data();
    RowTile* next = row_tile + 1;
    for (reader.read(*row_tile, stream_limit); row_tile->rows > 0; std::swap(row_tile, next)) {
      reader.read(*next, stream_limit);
      if (queries.load_for(*row_tile->segment)) pass.set_queries(queries_);
      pass.add(*row_tile, *next);
    }
    pass.finish();
  } else {
    Queries queries{tile, 1.0F, queries_};
    Pass pass{tile, partial, products, scratch_, words_.data()};
    for_each_row_tile(reader, queries, pass,
                      [&](const RowTile& row_tile, const RowTile& next) { pass.add(row_tile, next); });
    pass.finish();
  }
}

template <class Tuning>
void Worker<Tuning>::observe(std::span<const Segment> segments, const QueryTile& tile,
                             const ProductPlan& products, std::span<const float> attention_sink_bias,
                             Votes votes, std::span<float> sums) {
  const std::size_t cost = seen_cost(segments, tile);
  const std::size_t rows = sums.size() / tile.group;
  const Partial partial = own_partial(tile);
  partial.clear(padded_queries(tile.rows), 0);
  Pass pass{tile, partial, products, scratch_, words_.data()};
  {
    RowTileReader reader{segments, tile, 0, cost};
    Queries queries{tile, 1.0F, queries_};
    for_each_row_tile(reader, queries, pass,
                      [&](const RowTile& row_tile, const RowTile& next) { pass.add_keys(row_tile, next); });
  }
  float* log_sum_exp = partial.max;  // reuses its memory
  for (std::size_t m = 0; m < tile.rows; ++m) {
    SoftmaxState total = partial.state(m);
    if (!attention_sink_bias.empty()) merge(total, {}, {attention_sink_bias[tile.head(m)], 1.0F}, {});
    log_sum_exp[m] = total.log_sum_exp();
  }
  RowTileReader reader{segments, tile, 0, cost};
  Queries queries{tile, 1.0F, queries_};
  for_each_row_tile(reader, queries, pass, [&](const RowTile& row_tile, const RowTile& next) {
    const float* probabilities = pass.compute_probabilities(row_tile, next, log_sum_exp);
    for (std::size_t row = 0; row < row_tile.rows; ++row) {
      for (std::size_t m = 0; m < tile.rows; ++m) {
        float& sum = sums[(tile.first + m) % tile.group * rows + row_tile.ordinals[row]];
        sum = with_vote(votes, sum, probabilities[row * pass.width() + m]);
      }
    }
  });
}

template <class Tuning>
void Worker<Tuning>::score(const Segment& rows, const QueryTile& tile, std::span<const float> query,
                           std::size_t from, std::size_t to, std::span<float> out) {
  RowTileReader reader{{&rows, 1}, tile, from, to};
  StreamPass pass{tile, own_partial(tile), scratch_};
  std::fill(std::copy(query.begin(), query.end(), queries_), queries_ + tile.width().keys, 0.0F);
  if (rows.keys.format.hadamard) rotate_rows(queries_, 1, 0, query.size());
  pass.set_queries(queries_);
  RowTile* row_tile = row_tiles_->data();
  RowTile* next = row_tile + 1;
  for (reader.read(*row_tile, stream_limit); row_tile->rows > 0; std::swap(row_tile, next)) {
    reader.read(*next, stream_limit);
    const float* scores = pass.compute_logits(*row_tile, prefetch_of(next->keys, next->rows, query.size()));
    for (std::size_t i = 0; i < row_tile->rows; ++i) out[row_tile->ordinals[i]] = scores[i];
  }
}

template <class Tuning>
void Worker<Tuning>::bound(const Segment& rows, const QueryTile& tile, Certainty certainty, UnitBound* out,
                           std::size_t units) {
  RowTileReader reader{{&rows, 1}, tile, 0, seen_cost({&rows, 1}, tile)};
  Queries queries{tile, tile.scale, queries_};
  StreamPass pass{tile, own_partial(tile), scratch_};
  queries.load_for(rows);
  pass.set_queries(queries_);
  // Where queries are always rounded to bfloat16, a logit of the rows that are read is off by more.
  constexpr bool rounds = Tuning::bfloat16_products == Bfloat16Products::always;
  TileBounds bounds{tile, queries_, certainty, rounds ? 0x1p-7F : 0x1p-13F};
  RowTile* row_tile = row_tiles_->data();
  RowTile* next = row_tile + 1;
  for (reader.read(*row_tile, stream_limit); row_tile->rows > 0; std::swap(row_tile, next)) {
    reader.read(*next, stream_limit);
    float* logits = pass.compute_logits(*row_tile, prefetch_of(next->keys, next->rows, tile.key_dim()));
    bounds.add(*row_tile, *next, row_tile->ordinals[0], logits, StreamPass::stride, out, units);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
