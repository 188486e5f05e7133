// SPDX-License-Identifier: Apache-2.0
//
// A batch with a fixed number of seats, whose steps can be captured: a graph is recorded once and replayed while
// sequences come and go, for its launches find on the device who has which seat.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/tensor_view.hpp>
#include <kvpolicy/cuda/call_checks.hpp>
#include <kvpolicy/cuda/kv_cache.hpp>
#include <kvpolicy/cuda/sequence_table.hpp>

namespace kvpolicy::gpu {

/// Steps of the sequences that have a seat, `tokens` tokens each: the rows of seat i are
/// [i * tokens, (i + 1) * tokens) of all tensors, and those of an empty seat are neither read nor written. A step
/// of a layer is two launches, whoever has the seats, and asks nothing of the host.
///
/// The device's side of a step is `step`, on a stream or captured; the host's is `replayed`, which comes before
/// each. What a cache does besides (other steps, compressions, rollbacks) goes on by its own calls in between.
///
/// Not synchronised; calls are in order whatever their stream, as KvCache's. A cache with a seat must stay where it is.
template <Element E>
class SeatedBatch {
 public:
  using Cache = KvCache<E>;
  using Rows = TensorView<const E>;
  using Out = TensorView<E>;

  /// For caches of this engine, with pages of `page_rows` rows.
  /// @throws ConfigError for numbers of seats or tokens that do not fit, std::bad_alloc, DeviceError
  SeatedBatch(std::shared_ptr<Engine<E>> engine, std::size_t seats, std::size_t tokens = 1,
              std::size_t page_rows = CacheOptions{}.page_rows, MemoryResource* memory = default_memory(),
              cudaStream_t stream = nullptr)
      : engine_{std::move(engine)},
        tokens_{tokens},
        page_rows_{page_rows},
        caches_(seats),
        queries_(seats, static_cast<int>(tokens)),
        table_{checked_layers(), seats, memory, stream},
        order_{stream} {
    order_.mark();
  }
  SeatedBatch(SeatedBatch&&) noexcept = default;
  SeatedBatch& operator=(SeatedBatch&&) = delete;
  ~SeatedBatch() { table_.give_back_on(order_.end()); }

  [[nodiscard]] const std::shared_ptr<Engine<E>>& engine() const { return engine_; }
  [[nodiscard]] std::size_t seats() const { return caches_.size(); }
  [[nodiscard]] std::size_t tokens() const { return tokens_; }
  /// Who has a seat; null if it is empty. @throws ShapeError
  [[nodiscard]] Cache* at(std::size_t seat) const { return caches_[checked(seat)]; }

  /// Gives a seat to a cache, from the next step on that is put on the stream, captured ones included. A read of
  /// selected chunks takes those that were chosen by the cache's own calls, or all rows if none were.
  /// @throws ShapeError for a seat that is not there, ConfigError for a cache that has a seat already, or of
  /// another engine or page size, or that is to be read with a bound, or whose steps need more than the two launches:
  /// heads that add up attention, compress by themselves, have a summary of the caller's own, or have rows in slow
  /// memory; CaptureError inside a capture, RollbackError if a tree is pending, DeviceError
  void seat(std::size_t seat, Cache& cache, Read read = Read::all, cudaStream_t stream = nullptr) {
    static_cast<void>(checked(seat));
    require(read != Read::bounded,
            "gpu::SeatedBatch: a seat reads with Read::bounded, which asks for memory by the length of the "
            "text; it "
            "must read all, selected or upper_half");
    refuse_capture(stream, "giving a seat");
    check_fits(cache);
    DeviceWrites writes{stream};
    const CachedLayers<E>& own = cache.cache_;
    own.enter(stream);
    order_.enter(stream);
    for (std::size_t l = 0; l < own.layers.size(); ++l) {
      const HeadView* heads = own.device.heads(l);
      const QueryRing& queries = own.layers[l].queries;
      table_.write(l, seat,
                   {.read_heads = heads,
                    .heads = heads,
                    .state = own.device.counters(l),
                    .out_of_range = own.device.out_of_range(),
                    .query_ring = queries.numbers(),
                    .query_slots = static_cast<int>(queries.slots()),
                    .first = static_cast<int>(seat * tokens_),
                    .tokens = static_cast<int>(tokens_),
                    .max_rollback = static_cast<int>(own.options.max_rollback),
                    .selected = read == Read::selected,
                    .upper_half = read == Read::upper_half},
                   writes);
    }
    writes.flush();
    order_.mark();
    caches_[seat] = &cache;
  }
  /// Empties a seat. @throws ShapeError, CaptureError inside a capture, DeviceError
  void vacate(std::size_t seat, cudaStream_t stream = nullptr) {
    static_cast<void>(checked(seat));
    refuse_capture(stream, "emptying a seat");
    order_.enter(stream);
    DeviceWrites writes{stream};
    for (std::size_t l = 0; l < engine_->shape().layers; ++l) table_.write(l, seat, {}, writes);
    writes.flush();
    order_.mark();
    caches_[seat] = nullptr;
  }

  /// The launches of a step of one layer, of tensors of seats() * tokens() tokens. Of the options scale, soft cap,
  /// sink logits and `log_sum_exp` [seats * tokens, q_heads] are heeded.
  /// @throws ShapeError, ConfigError for another option, DeviceError
  void step(std::size_t layer, const Rows& q, const Rows& k, const Rows& v, const Out& out,
            const AttendOptions& options = {}, cudaStream_t stream = nullptr) {
    check_step(layer, q, k, v, out, options);
    order_.enter(stream);
    for (const Cache* cache : caches_) {
      if (cache != nullptr) cache->cache_.enter(stream);
    }
    const ModelShape& shape = engine_->shape();
    AttendParams reading{.ragged = table_.layer(layer),
                         .sequences = static_cast<int>(seats()),
                         .kv_heads = static_cast<int>(shape.kv_heads),
                         .group = static_cast<int>(shape.queries_per_kv()),
                         .page_rows = static_cast<int>(page_rows_),
                         .q = tensor_of(q),
                         .k = tensor_of(k),
                         .v = tensor_of(v),
                         .out = tensor_of(Rows{out})};
    set_logits(reading, options, q.head_dim);
    reading.log_sum_exp = options.log_sum_exp.empty() ? nullptr : options.log_sum_exp.data();
    // Whoever gets a seat later may have quantised rows.
    engine_->attend_ragged(reading, queries_, /*packs=*/true, /*longest=*/0, stream);
    const int rows = static_cast<int>(tokens_);
    engine_->append({.ragged = reading.ragged,
                     .sequences = reading.sequences,
                     .kv_heads = reading.kv_heads,
                     .page_rows = reading.page_rows,
                     .rows = rows,
                     .commit_rows = rows,
                     .k = reading.k,
                     .v = reading.v,
                     .q = reading.q,
                     .group = reading.group},
                    /*jobs=*/0, stream);
  }

  /// Tells all caches with a seat that a step through all layers is about to be put on the stream `times` times.
  /// Call it first: what it refuses must not be launched.
  /// @throws as KvCache::replayed, with the seat's number, and no cache has changed
  void replayed(std::size_t times = 1) {
    for (std::size_t i = 0; i < seats(); ++i) {
      if (caches_[i] == nullptr) continue;
      KVPOLICY_TRY { caches_[i]->check_replay(times, tokens_); }
      KVPOLICY_CATCH_AS(CapacityError, room) { fail<CapacityError>(name, ": seat ", i, ": ", room.what()); }
      KVPOLICY_CATCH_AS(RollbackError, tree) { fail<RollbackError>(name, ": seat ", i, ": ", tree.what()); }
    }
    for (Cache* cache : caches_) {
      if (cache != nullptr) cache->replayed(times, tokens_);
    }
  }

 private:
  static constexpr const char* name = "gpu::SeatedBatch";

  [[nodiscard]] std::size_t checked_layers() const {
    const ModelShape& shape = engine_->shape();
    check_sequence_count(name, *engine_, seats());
    const std::size_t most = static_cast<std::size_t>(decode_most_columns) / shape.queries_per_kv();
    require(tokens_ >= 1 && tokens_ <= most, name, ": ", tokens_, " tokens for each seat, must be 1 to ",
            most, " for ", shape.queries_per_kv(), " query heads that share a KV head");
    return shape.layers;
  }
  [[nodiscard]] std::size_t checked(std::size_t seat) const {
    require<ShapeError>(seat < seats(), name, ": there is no seat ", seat, ", the batch has ", seats());
    return seat;
  }

  void check_fits(const Cache& cache) const {
    require(std::ranges::count(caches_, &cache) == 0, name, ": the cache has a seat already");
    require(cache.engine() == engine_, name,
            ": the cache has another engine; those with a seat share the batch's");
    require(cache.options().page_rows == page_rows_, name, ": the cache has pages of ",
            cache.options().page_rows, " rows, those of this batch have ", page_rows_);
    cache.cache_.refuse_tree("gpu::SeatedBatch::seat");
    require(!cache.options().has_slow_memory(), name,
            ": the cache may have rows in slow memory, which other launches bring");
    for (const Layer& layer : held(cache.cache_.layers)) {
      require(!layer.adds_up(/*scores_rows=*/false), name,
              ": the cache has heads that add up attention, by a launch of their own");
      require(!layer.compresses_by_itself(), name,
              ": the cache compresses by itself, for which it asks for memory");
      require(layer.own_summaries.empty(), name,
              ": the cache has a summary of the caller's own, which has launches of its own");
    }
  }
  void check_step(std::size_t layer, const Rows& q, const Rows& k, const Rows& v, const Out& out,
                  const AttendOptions& options) const {
    const ModelShape& shape = engine_->shape();
    require<ShapeError>(layer < shape.layers, name, ": there is no layer ", layer, ", the shape has ",
                        shape.layers);
    const std::size_t rows = seats() * tokens_;
    check_rows("q", q, rows, shape.q_heads, shape.head_dim);
    check_rows("k", k, rows, shape.kv_heads, shape.head_dim);
    check_rows("v", v, rows, shape.kv_heads, shape.head_dim);
    check_rows("out", Rows{out}, rows, shape.q_heads, shape.head_dim);
    check_written_once(MutableTensor{out});
    check_spans(options, rows, shape.q_heads, shape.kv_heads);
    require(options.tree == nullptr && !options.refresh_selection && !options.selection_query &&
                !options.scores_rows,
            name, "::step: seats have no trees, choose no chunks and score no rows; a cache's own calls do");
    require(options.read == Read::all, name,
            "::step: options.read is not Read::all; each seat is read as was said when it was given (seat)");
  }

  std::shared_ptr<Engine<E>> engine_;
  std::size_t tokens_;
  std::size_t page_rows_;
  std::vector<Cache*> caches_;
  std::vector<int> queries_;  // of each seat, taken or not
  SequenceTable table_;
  StreamOrder order_;
};

}  // namespace kvpolicy::gpu
