// SPDX-License-Identifier: Apache-2.0
//
// Lets heads of one layer drop the rows that they rank lowest: score the rows, choose, move the survivors
// to pages of their own, give the old ones back. How many survive is known without asking the device, so
// nothing waits.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <kvpolicy/cuda/engine.hpp>
#include <kvpolicy/cuda/layer.hpp>
#include <kvpolicy/cuda/observation.hpp>
#include <kvpolicy/cuda/options.hpp>
#include <kvpolicy/cuda/places.hpp>

namespace kvpolicy::cuda {

/// What a compression needs on the device while it goes on.
struct CompressionMemory {
  HeadView* to = nullptr;  // all [kv_heads]
  Compression* how = nullptr;
  const int** kept = nullptr;
  const long long** old_positions = nullptr;
  long long** new_positions = nullptr;
  int* old_counts = nullptr;  // two to a word, as they are written
  int* counts = nullptr;
  int* rows = nullptr;             // [kv_heads, survivors]
  float* scores = nullptr;         // [kv_heads, rows]
  float* unpooled = nullptr;       // the same

  CompressionMemory(Places& places, std::size_t heads, std::size_t survivors, std::size_t rows_)
      : to{places.take<HeadView>(heads)}, how{places.take<Compression>(heads)},
        kept{places.take<const int*>(heads)}, old_positions{places.take<const long long*>(heads)},
        new_positions{places.take<long long*>(heads)}, old_counts{places.take<int>(heads + 1)},
        counts{places.take<int>(heads)}, rows{places.take<int>(heads * survivors)},
        scores{places.take<float>(heads * rows_)}, unpooled{places.take<float>(heads * rows_)} {}
};

/// Compresses the `wanted` heads of one layer: all memory first, so that several layers can be
/// prepared before any of them changes, then the work.
template <Element E>
class LayerCompression {
 public:
  LayerCompression(const Engine<E>& engine, Layer& layer, std::vector<bool> wanted,
                   const CacheOptions& options)
      : engine_{&engine}, layer_{&layer}, wanted_{std::move(wanted)}, to_(layer.heads.size()),
        page_rows_{static_cast<int>(options.page_rows)} {
    for (std::size_t head = 0; head < layer.heads.size(); ++head) {
      if (!wanted_[head]) continue;
      const HeadRule& settings = layer.heads[head].settings();
      longest_ = std::max(longest_, layer.survivors_of(head));
      rows_ = std::max(rows_, rows_of(head));
      packs_ = packs_ || settings.is_quantized();
      if (layer.survivors_of(head) == rows_of(head)) continue;
      queries_ = std::max(queries_, settings.window);
      ranks_keys_ = ranks_keys_ || ranks_keys(settings);
    }
  }

  /// Of the memory that `run` needs while it goes on; one block serves layer after layer.
  [[nodiscard]] std::size_t scratch_bytes() const {
    Places counted;
    static_cast<void>(memory_in(counted));
    if (queries_ > 0) static_cast<void>(engine_->observe_memory(counted, static_cast<int>(queries_)));
    return counted.bytes();
  }
  /// Obtains the pages of the survivors. @throws std::bad_alloc, DeviceError
  void prepare(cudaStream_t stream) {
    DeviceWrites writes{stream};
    for (std::size_t head = 0; head < to_.size(); ++head) {
      if (!wanted_[head]) continue;
      to_[head] = layer_->heads[head].compacted(layer_->survivors_of(head), layer_->tokens,
                                                layer_->reserved, writes);
    }
    writes.flush();
  }

  /// Behind `prepare`, once all rows of the layer are committed. @throws DeviceError
  void run(std::byte* scratch, HeadView* views, const LayerState* state, int* out_of_range,
           cudaStream_t stream) {
    Places places{scratch};
    const CompressionMemory memory = memory_in(places);
    const std::size_t heads = to_.size();
    describe(memory, stream);
    score(memory, places, views, state, stream);
    engine_->keep({.heads = views, .state = state, .compressions = memory.how,
                   .scores = {memory.scores, memory.unpooled, pitch()},
                   .kept = const_cast<int* const*>(memory.kept), .counts = memory.counts},
                  stream);
    engine_->compact({.from = views, .to = memory.to, .kv_heads = static_cast<int>(heads),
                      .page_rows = page_rows_,
                      .kept = memory.kept, .counts = memory.counts,
                      .old_positions = memory.old_positions, .old_counts = memory.old_counts,
                      .new_positions = memory.new_positions, .out_of_range = out_of_range},
                     longest_, stream);
    DeviceWrites writes{stream};
    for (std::size_t head = 0; head < heads; ++head) {
      if (wanted_[head]) writes.write(views + head, to_[head]->view());
    }
    writes.flush();
    for (std::size_t head = 0; head < heads; ++head) {
      if (!wanted_[head]) continue;
      std::swap(layer_->heads[head], *to_[head]);
      to_[head]->give_back_on(stream);
      to_[head].reset();
    }
  }

 private:
  [[nodiscard]] std::size_t rows_of(std::size_t head) const {
    return layer_->tokens - layer_->heads[head].evicted();
  }
  [[nodiscard]] CompressionMemory memory_in(Places& places) const {
    return {places, to_.size(), longest_, rows_};
  }
  [[nodiscard]] long long pitch() const { return static_cast<long long>(rows_); }

  // Tells the kernels of every head what becomes of it.
  void describe(const CompressionMemory& memory, cudaStream_t stream) const {
    DeviceWrites writes{stream};
    struct TwoCounts {
      int count[2] = {};
    };
    TwoCounts old_counts;
    for (std::size_t head = 0; head < to_.size(); ++head) {
      const HeadStore& from = layer_->heads[head];
      const HeadRule& settings = from.settings();
      Compression how;
      if (wanted_[head]) {
        // All but the window, where the text stays whole.
        const std::size_t left = layer_->survivors_of(head);
        how = {.ranking = accumulates(settings)  ? Ranking::sums
                          : ranks_keys(settings) ? Ranking::keys
                                                 : Ranking::attention,
               .average = settings.pooling == Pooling::average,
               .queries = static_cast<int>(settings.window),
               .kept_rows = static_cast<int>(settings.kept_rows),
               .budget = static_cast<int>(settings.budget_rule().candidates(left)),
               .kernel = static_cast<int>(settings.pooled_rows)};
      }
      writes.write(memory.to + head, wanted_[head] ? to_[head]->view() : HeadView{});
      writes.write(memory.how + head, how);
      writes.write(memory.kept + head,
                   wanted_[head] ? static_cast<const int*>(memory.rows + head * longest_) : nullptr);
      writes.write(memory.old_positions + head,
                   reinterpret_cast<const long long*>(from.positions().get()));
      writes.write(memory.new_positions + head,
                   wanted_[head] ? reinterpret_cast<long long*>(to_[head]->positions().get())
                                 : nullptr);
      old_counts.count[head % 2] = static_cast<int>(from.survivors());
      if (head % 2 == 1 || head + 1 == to_.size()) {
        writes.write(reinterpret_cast<TwoCounts*>(memory.old_counts) + head / 2, old_counts);
      }
    }
    writes.flush();
  }

  // The scores of the rows of heads that drop some; sums that are added up need no work.
  void score(const CompressionMemory& memory, Places& places, const HeadView* views,
             const LayerState* state, cudaStream_t stream) const {
    if (ranks_keys_) {
      engine_->score_keys({.heads = views, .state = state, .compressions = memory.how,
                           .page_rows = page_rows_, .scores = memory.scores, .pitch = pitch()},
                          stream);
    }
    if (queries_ == 0) return;
    ObserveParams observed = observe_latest(*engine_, *layer_, views, state, page_rows_,
                                            engine_->observe_memory(places, static_cast<int>(queries_)),
                                            stream);
    observed.compressions = memory.how;
    observed.queries = static_cast<int>(queries_);
    engine_->score_votes({.observed = observed, .scores = memory.scores, .unpooled = memory.unpooled,
                          .pitch = pitch()},
                         packs_, stream);
  }

  const Engine<E>* engine_;
  Layer* layer_;
  std::vector<bool> wanted_;
  std::vector<std::optional<HeadStore>> to_;
  int page_rows_;
  std::size_t longest_ = 0;  // survivors of a head
  std::size_t rows_ = 0;     // rows of a head
  std::size_t queries_ = 0;  // latest queries that a head that drops rows asks
  bool ranks_keys_ = false;  // whether a head that drops rows asks its keys
  bool packs_ = false;
};

}  // namespace kvpolicy::cuda
