// SPDX-License-Identifier: Apache-2.0
//
// Lets heads of one layer drop the rows that they rank lowest: score the rows, choose, move the survivors
// to pages of their own, give the old ones back. How many survive is known without asking the device, so
// nothing waits; but for heads that share a budget, of their layer or of the model.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/cuda/array_carver.hpp>
#include <kvpolicy/cuda/engine.hpp>
#include <kvpolicy/cuda/layer.hpp>
#include <kvpolicy/cuda/options.hpp>
#include <kvpolicy/cuda/row_scoring.hpp>
#include <kvpolicy/cuda/shared_budget.hpp>

namespace kvpolicy::gpu {

/// What a compression needs on the device while it goes on.
struct CompressionMemory {
  HeadView* to = nullptr;  // all [kv_heads]
  const int** kept = nullptr;
  const long long** old_positions = nullptr;
  long long** new_positions = nullptr;
  int* old_counts = nullptr;  // two to a word, as they are written
  int* counts = nullptr;      // the same
  int* rows = nullptr;        // [kv_heads, survivors]

  CompressionMemory(ArrayCarver& carver, std::size_t heads, std::size_t survivors)
      : to{carver.take<HeadView>(heads)},
        kept{carver.take<const int*>(heads)},
        old_positions{carver.take<const long long*>(heads)},
        new_positions{carver.take<long long*>(heads)},
        old_counts{carver.take<int>(heads + 1)},
        counts{carver.take<int>(heads + 1)},
        rows{carver.take<int>(heads * survivors)} {}
};

/// Compresses the `wanted` heads of one layer: all memory first, so that several layers can be
/// prepared before any of them changes, then the work. `in_model`: the competition of heads that share over the model,
/// among whose layers this one is number `place`; null if none of them drops rows.
template <Element E>
class LayerCompression {
 public:
  LayerCompression(const Engine<E>& engine, Layer& layer, std::vector<bool> wanted,
                   const CacheOptions& options, const SharedBudget<E>* in_model, std::size_t place)
      : engine_{&engine},
        layer_{&layer},
        options_{&options},
        in_model_{in_model},
        place_{place},
        wanted_{std::move(wanted)},
        survivors_(layer.heads.size(), 0),
        to_(layer.heads.size()),
        scoring_{engine, layer, options.page_rows} {
    for (std::size_t head = 0; head < wanted_.size(); ++head) {
      if (!wanted_[head]) continue;
      if (competes(head)) {
        if (is_in_model(head)) survivors_[head] = list(head).count;
        continue;
      }
      survivors_[head] = layer.survivors_of(head);
      scoring_.add(head, survivors_[head]);
    }
  }

  /// Whether heads compete for the layer's budget, so that `share` must come before `prepare`.
  [[nodiscard]] bool shares() const {
    for (std::size_t head = 0; head < wanted_.size(); ++head) {
      if (wanted_[head] && competes(head) && !is_in_model(head)) return true;
    }
    return false;
  }
  /// Lets them compete, once all rows of the layer are committed. Waits for the stream.
  /// @throws std::bad_alloc, CapacityError, DeviceError
  void share(const HeadView* views, const LayerState* state, cudaStream_t stream) {
    const CompetingLayer alone{layer_, views, state};
    shared_.emplace(*engine_, std::span{&alone, 1}, SharedBudget<E>::Among::layer, options_->page_rows,
                    options_->memory, stream);
    for (std::size_t head = 0; head < wanted_.size(); ++head) {
      if (wanted_[head] && competes(head) && !is_in_model(head)) survivors_[head] = list(head).count;
    }
  }

  /// Bytes of device memory that `run` needs until it has finished. One block serves all layers, one after another.
  [[nodiscard]] std::size_t scratch_bytes() const {
    ArrayCarver counted;
    static_cast<void>(memory_in(counted));
    static_cast<void>(scoring_.take(counted));
    return counted.bytes();
  }
  /// Obtains the pages of the survivors. @throws std::bad_alloc, DeviceError
  void prepare(cudaStream_t stream) {
    DeviceWrites writes{stream};
    for (std::size_t head = 0; head < to_.size(); ++head) {
      if (!wanted_[head]) continue;
      to_[head] = layer_->heads[head].compacted(survivors_[head], layer_->tokens, layer_->reserved, writes);
      to_[head]->set_evicted_unshared(layer_->tokens - layer_->survivors_of(head));
    }
    writes.flush();
  }

  /// After `prepare`, once all rows of the layer are committed. @throws DeviceError
  void run(std::byte* scratch, HeadView* views, const LayerState* state, int* out_of_range,
           cudaStream_t stream) {
    ArrayCarver carver{scratch};
    const CompressionMemory memory = memory_in(carver);
    const typename RowScoring<E>::Memory ranking = scoring_.take(carver);
    const std::size_t heads = to_.size();
    describe(memory, stream);
    scoring_.run(ranking, views, state, stream);
    engine_->keep({.heads = views,
                   .state = state,
                   .compressions = ranking.how,
                   .scores = scoring_.scores(ranking),
                   .kept = const_cast<int* const*>(memory.kept),
                   .counts = memory.counts},
                  stream);
    engine_->compact({.from = views,
                      .to = memory.to,
                      .kv_heads = static_cast<int>(heads),
                      .page_rows = static_cast<int>(options_->page_rows),
                      .kept = memory.kept,
                      .counts = memory.counts,
                      .old_positions = memory.old_positions,
                      .old_counts = memory.old_counts,
                      .new_positions = memory.new_positions,
                      .out_of_range = out_of_range},
                     longest(), stream);
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
    shared_.reset();
  }

 private:
  // Whether the head's rows compete with those of others.
  [[nodiscard]] bool competes(std::size_t head) const {
    return layer_->heads[head].settings().adaptive_in_layer && layer_->ranks(head, in_model_ != nullptr);
  }
  [[nodiscard]] bool is_in_model(std::size_t head) const {
    return layer_->heads[head].settings().adaptive_in_model;
  }
  // What survives of a head that competes.
  [[nodiscard]] const typename SharedBudget<E>::List& list(std::size_t head) const {
    return is_in_model(head) ? in_model_->list(place_, head) : shared_->list(0, head);
  }
  [[nodiscard]] std::size_t longest() const { return *std::ranges::max_element(survivors_); }
  [[nodiscard]] CompressionMemory memory_in(ArrayCarver& carver) const {
    return {carver, to_.size(), longest()};
  }

  // Tells the kernels of every head what becomes of it. Heads that compete know their survivors already,
  // for the others the kernels write them.
  void describe(const CompressionMemory& memory, cudaStream_t stream) const {
    DeviceWrites writes{stream};
    struct TwoCounts {
      int count[2] = {};
    };
    TwoCounts old_counts;
    TwoCounts counts;
    for (std::size_t head = 0; head < to_.size(); ++head) {
      const HeadStore& from = layer_->heads[head];
      const int* kept = memory.rows + head * longest();
      if (wanted_[head] && competes(head)) kept = list(head).rows;
      writes.write(memory.to + head, wanted_[head] ? to_[head]->view() : HeadView{});
      writes.write(memory.kept + head, wanted_[head] ? kept : nullptr);
      writes.write(memory.old_positions + head, reinterpret_cast<const long long*>(from.positions().get()));
      writes.write(memory.new_positions + head,
                   wanted_[head] ? reinterpret_cast<long long*>(to_[head]->positions().get()) : nullptr);
      old_counts.count[head % 2] = static_cast<int>(from.survivors());
      counts.count[head % 2] = static_cast<int>(survivors_[head]);
      if (head % 2 == 1 || head + 1 == to_.size()) {
        writes.write(reinterpret_cast<TwoCounts*>(memory.old_counts) + head / 2, old_counts);
        writes.write(reinterpret_cast<TwoCounts*>(memory.counts) + head / 2, counts);
      }
    }
    writes.flush();
  }

  const Engine<E>* engine_;
  Layer* layer_;
  const CacheOptions* options_;
  const SharedBudget<E>* in_model_;
  std::size_t place_;
  std::vector<bool> wanted_;
  std::vector<std::size_t> survivors_;  // of each head
  std::vector<std::optional<HeadStore>> to_;
  RowScoring<E> scoring_;                  // of heads that do not compete
  std::optional<SharedBudget<E>> shared_;  // of heads that do within the layer
};

}  // namespace kvpolicy::gpu
