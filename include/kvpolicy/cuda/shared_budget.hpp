// SPDX-License-Identifier: Apache-2.0
//
// The rows that survive in heads that share a layer's budget (policy/shared_rows.hpp). How many each head
// keeps depends on what the text made of them, so the host asks the device, and waits.
#pragma once

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/cuda/array_carver.hpp>
#include <kvpolicy/cuda/engine.hpp>
#include <kvpolicy/cuda/layer.hpp>
#include <kvpolicy/cuda/memory.hpp>
#include <kvpolicy/cuda/row_scoring.hpp>
#include <kvpolicy/cuda/writes.hpp>

namespace kvpolicy::cuda {

/// One competition. Its device memory lives as long as the object.
template <Element E>
class SharedBudget {
 public:
  /// Lets the heads of a layer that share compete; some head has rows to drop, and all rows are
  /// committed. Changes nothing. `views` and `state` are the layer's on the device. Waits for the stream.
  /// @throws CapacityError for 2^31 rows or more in these heads, std::bad_alloc, DeviceError
  SharedBudget(const Engine<E>& engine, const Layer& layer, const HeadView* views, const LayerState* state,
               std::size_t page_rows, MemoryResource* resource, cudaStream_t stream)
      : lists_(layer.heads.size()) {
    RowScoring<E> scoring{engine, layer, page_rows};
    std::vector<SharedHead> shared;
    std::size_t candidates = 0;
    std::size_t budget = 0;
    std::size_t kept_rows = 0;
    for (std::size_t head = 0; head < layer.heads.size(); ++head) {
      const HeadStore& store = layer.heads[head];
      const HeadRule& rule = store.settings();
      if (!rule.adaptive_in_layer) continue;
      const std::size_t rows = layer.tokens - store.evicted();
      const std::size_t ranked = rule.budget_rule().candidates(rows);
      const std::size_t own = rule.budget_rule().chosen(layer.unshared_rows(head));
      shared.push_back({.head = static_cast<int>(head),
                        .candidates = static_cast<int>(ranked),
                        .first = static_cast<int>(candidates),
                        .safe = static_cast<int>(std::min(safe_rows(rule.safeguard, rule.budget), own)),
                        .kept_rows = static_cast<int>(rows - ranked),
                        .kept_before = static_cast<int>(kept_rows)});
      scoring.add(head, layer.survivors_of(head));
      candidates += ranked;
      budget += own;
      kept_rows += rows - ranked;
      require<CapacityError>(candidates + kept_rows < INT_MAX,
                             "cuda::KvCache: the heads that share a "
                             "layer's budget hold ",
                             candidates + kept_rows, " rows, must be fewer than 2^31");
    }
    budget = std::min(budget, candidates);
    const std::size_t count = shared.size();
    struct Memory {
      SharedHead* shared;
      std::uint64_t* ranks;
      int* chosen;
      int* begins;
      int* rows;
      typename RowScoring<E>::Memory scoring;
    };
    const auto take = [&](ArrayCarver& carver) {
      return Memory{
          carver.take<SharedHead>(count), carver.take<std::uint64_t>(candidates), carver.take<int>(budget),
          carver.take<int>(count + 1),    carver.take<int>(budget + kept_rows),   scoring.take(carver)};
    };
    ArrayCarver counted;
    static_cast<void>(take(counted));
    memory_ = allocate(resource, counted.bytes(), stream);
    ArrayCarver carver{memory_.get()};
    const Memory memory = take(carver);

    scoring.run(memory.scoring, views, state, stream);
    DeviceWrites writes{stream};
    for (std::size_t i = 0; i < count; ++i) writes.write(memory.shared + i, shared[i]);
    writes.flush();
    engine.share({.heads = views,
                  .compressions = memory.scoring.how,
                  .scores = scoring.scores(memory.scoring),
                  .shared = memory.shared,
                  .count = static_cast<int>(count),
                  .candidates = static_cast<int>(candidates),
                  .budget = static_cast<int>(budget),
                  .ranks = memory.ranks,
                  .chosen = memory.chosen,
                  .begins = memory.begins,
                  .rows = memory.rows},
                 stream);
    std::vector<int> begins(count + 1);
    check(cudaMemcpyAsync(begins.data(), memory.begins, begins.size() * sizeof(int), cudaMemcpyDeviceToHost,
                          stream),
          "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    for (std::size_t i = 0; i < count; ++i) {
      lists_[static_cast<std::size_t>(shared[i].head)] = {
          memory.rows + begins[i] + shared[i].kept_before,
          static_cast<std::size_t>(begins[i + 1] - begins[i] + shared[i].kept_rows)};
    }
  }

  /// The surviving rows of a head that shares: their numbers, ascending, on the device.
  struct List {
    const int* rows = nullptr;
    std::size_t count = 0;
  };
  [[nodiscard]] const List& list(std::size_t head) const { return lists_[head]; }

 private:
  DeviceBuffer memory_;
  std::vector<List> lists_;  // of each head
};

}  // namespace kvpolicy::cuda
