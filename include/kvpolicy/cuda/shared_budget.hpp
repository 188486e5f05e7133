// SPDX-License-Identifier: Apache-2.0
//
// The rows that survive in heads that share a layer's budget, or the model's (policy/shared_rows.hpp). How many each
// head keeps depends on what the text made of them, so the host asks the device, and waits.
#pragma once

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/cuda/array_carver.hpp>
#include <kvpolicy/cuda/engine.hpp>
#include <kvpolicy/cuda/layer.hpp>
#include <kvpolicy/cuda/memory.hpp>
#include <kvpolicy/cuda/row_scoring.hpp>
#include <kvpolicy/cuda/writes.hpp>

namespace kvpolicy::gpu {

/// A layer whose heads take part in a competition, with its heads and its counters on the device. All its rows are
/// committed.
struct CompetingLayer {
  const Layer* layer = nullptr;
  const HeadView* views = nullptr;
  const LayerState* state = nullptr;
};

/// One competition. Its device memory lives as long as the object.
template <Element E>
class SharedBudget {
 public:
  /// Which heads compete: those that share their layer's budget, of one layer, or those that share the model's.
  enum class Among : std::uint8_t { layer, model };

  /// Lets heads of these layers compete, of which some head has rows to drop. Changes nothing. Layers are scored one
  /// after another in the same memory; what stays of each are ranks. Waits for the stream.
  /// @throws CapacityError for 2^31 rows or more in these heads, std::bad_alloc, DeviceError
  SharedBudget(const Engine<E>& engine, std::span<const CompetingLayer> layers, Among among,
               std::size_t page_rows, MemoryResource* resource, cudaStream_t stream) {
    for (const CompetingLayer& own : layers) add(engine, own, among, page_rows);
    const std::size_t count = shared_.size();
    const std::size_t budget = std::min(budget_, candidates_);
    const bool in_two_steps =
        std::ranges::any_of(shared_, [](const SharedHead& head) { return head.unweighed_share > 0.0; });
    const std::size_t again = in_two_steps ? candidates_ : 0;
    struct Memory {
      SharedHead* shared;
      std::uint64_t* ranks;
      std::uint64_t* unweighed;
      std::uint64_t* weighed;
      int* chosen;
      int* begins;
      int* rows;
      std::byte* scoring;
    };
    const auto take = [&](ArrayCarver& carver) {
      return Memory{carver.take<SharedHead>(count),
                    carver.take<std::uint64_t>(candidates_),
                    carver.take<std::uint64_t>(again),
                    carver.take<std::uint64_t>(again),
                    carver.take<int>(budget),
                    carver.take<int>(count + 1),
                    carver.take<int>(budget + kept_rows_),
                    carver.take<std::byte>(scoring_bytes())};
    };
    ArrayCarver counted;
    static_cast<void>(take(counted));
    memory_ = allocate(resource, counted.bytes(), stream);
    ArrayCarver carver{memory_.get()};
    const Memory memory = take(carver);

    DeviceWrites writes{stream};
    for (std::size_t i = 0; i < count; ++i) writes.write(memory.shared + i, shared_[i]);
    writes.flush();
    SharedBudgetParams params{.shared = memory.shared,
                              .count = static_cast<int>(count),
                              .candidates = static_cast<int>(candidates_),
                              .budget = static_cast<int>(budget),
                              .ranks = memory.ranks,
                              .unweighed = memory.unweighed,
                              .weighed = memory.weighed,
                              .chosen = memory.chosen,
                              .begins = memory.begins,
                              .rows = memory.rows};
    for (std::size_t l = 0; l < layers.size(); ++l) {
      ArrayCarver scratch{memory.scoring};
      const typename RowScoring<E>::Memory scores = scoring_[l].take(scratch);
      scoring_[l].run(scores, layers[l].views, layers[l].state, stream);
      SharedBudgetParams own = params;
      own.heads = layers[l].views;
      own.compressions = scores.how;
      own.scores = scoring_[l].scores(scores);
      own.shared = memory.shared + first_[l];
      own.count = static_cast<int>(first_[l + 1] - first_[l]);
      engine.rank_shared(own, stream);
    }
    engine.choose_shared(params, stream);
    if (in_two_steps) engine.share_weighed(params, stream);
    std::vector<int> begins(count + 1);
    check(cudaMemcpyAsync(begins.data(), memory.begins, begins.size() * sizeof(int), cudaMemcpyDeviceToHost,
                          stream),
          "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    for (std::size_t l = 0; l < layers.size(); ++l) {
      auto& lists = lists_.emplace_back(layers[l].layer->heads.size());
      for (std::size_t i = first_[l]; i < first_[l + 1]; ++i) {
        lists[static_cast<std::size_t>(shared_[i].head)] = {
            memory.rows + begins[i] + shared_[i].kept_before,
            static_cast<std::size_t>(begins[i + 1] - begins[i] + shared_[i].kept_rows)};
      }
    }
  }

  /// The surviving rows of a head that shares: their numbers, ascending, on the device.
  struct List {
    const int* rows = nullptr;
    std::size_t count = 0;
  };
  /// `layer`: its place among those that compete.
  [[nodiscard]] const List& list(std::size_t layer, std::size_t head) const { return lists_[layer][head]; }

 private:
  // What the heads of one layer bring.
  void add(const Engine<E>& engine, const CompetingLayer& competing, Among among, std::size_t page_rows) {
    const Layer& layer = *competing.layer;
    if (first_.empty()) first_.push_back(0);
    RowScoring<E>& scoring = scoring_.emplace_back(engine, layer, page_rows);
    for (std::size_t head = 0; head < layer.heads.size(); ++head) {
      const HeadStore& store = layer.heads[head];
      const HeadRule& rule = store.settings();
      if (!rule.adaptive_in_layer || rule.adaptive_in_model != (among == Among::model)) continue;
      const std::size_t rows = layer.tokens - store.evicted();
      const std::size_t ranked = rule.budget_rule().candidates(rows);
      const std::size_t own = rule.budget_rule().chosen(layer.unshared_rows(head));
      shared_.push_back({.head = static_cast<int>(head),
                         .candidates = static_cast<int>(ranked),
                         .first = static_cast<int>(candidates_),
                         .safe = static_cast<int>(std::min(safe_rows(rule.safeguard, rule.budget), own)),
                         .kept_rows = static_cast<int>(rows - ranked),
                         .kept_before = static_cast<int>(kept_rows_),
                         .unweighed_share = rule.unweighed_share});
      scoring.add(head, layer.survivors_of(head));
      candidates_ += ranked;
      budget_ += own;
      kept_rows_ += rows - ranked;
      require<CapacityError>(candidates_ + kept_rows_ < INT_MAX,
                             "gpu::KvCache: the heads that share a budget hold ", candidates_ + kept_rows_,
                             " rows, must be fewer than 2^31");
    }
    first_.push_back(shared_.size());
  }
  [[nodiscard]] std::size_t scoring_bytes() const {
    std::size_t most = 0;
    for (const RowScoring<E>& scoring : scoring_) {
      ArrayCarver counted;
      static_cast<void>(scoring.take(counted));
      most = std::max(most, counted.bytes());
    }
    return most;
  }

  std::vector<SharedHead> shared_;      // layer after layer
  std::vector<std::size_t> first_;      // [layers + 1]: those before a layer
  std::vector<RowScoring<E>> scoring_;  // of each layer
  std::size_t candidates_ = 0;
  std::size_t budget_ = 0;
  std::size_t kept_rows_ = 0;
  DeviceBuffer memory_;
  std::vector<std::vector<List>> lists_;  // of each head of each layer
};

}  // namespace kvpolicy::gpu
