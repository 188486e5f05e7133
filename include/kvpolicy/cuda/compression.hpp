// SPDX-License-Identifier: Apache-2.0
//
// Lets heads of one layer drop the rows that their latest queries attend to least: observe, choose,
// move the survivors to pages of their own, give the old ones back. How many survive is known
// without asking the device, so nothing waits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <kvpolicy/cuda/engine.hpp>
#include <kvpolicy/cuda/layer.hpp>
#include <kvpolicy/cuda/options.hpp>

namespace kvpolicy::cuda {

/// Places in one block of device memory; without a block it only counts what they need.
class Places {
 public:
  explicit Places(std::byte* start = nullptr) : start_{start} {}

  template <class T>
  [[nodiscard]] T* take(std::size_t count) {
    constexpr std::size_t alignment = 256;
    const std::size_t at = bytes_;
    bytes_ += (count * sizeof(T) + alignment - 1) / alignment * alignment;
    return start_ == nullptr ? nullptr : reinterpret_cast<T*>(start_ + at);
  }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 private:
  std::byte* start_;
  std::size_t bytes_ = 0;
};

/// What a compression needs on the device while it goes on.
struct CompressionMemory {
  HeadView* to = nullptr;  // all [kv_heads]
  Compression* how = nullptr;
  const int** kept = nullptr;
  const long long** old_positions = nullptr;
  long long** new_positions = nullptr;
  int* old_counts = nullptr;  // two to a word, as they are written
  int* counts = nullptr;
  std::uint32_t* tickets = nullptr;
  int* rows = nullptr;             // [kv_heads, survivors]
  PartialState* partial = nullptr; // [kv_heads, blocks, columns]
  float* log_sum_exp = nullptr;    // [kv_heads, columns]
  float* scores = nullptr;         // [kv_heads, rows]
  float* unpooled = nullptr;       // the same

  CompressionMemory(Places& places, std::size_t heads, std::size_t survivors, std::size_t rows_,
                    std::size_t blocks, std::size_t columns)
      : to{places.take<HeadView>(heads)}, how{places.take<Compression>(heads)},
        kept{places.take<const int*>(heads)}, old_positions{places.take<const long long*>(heads)},
        new_positions{places.take<long long*>(heads)}, old_counts{places.take<int>(heads + 1)},
        counts{places.take<int>(heads)}, tickets{places.take<std::uint32_t>(heads)},
        rows{places.take<int>(heads * survivors)},
        partial{places.take<PartialState>(heads * blocks * columns)},
        log_sum_exp{places.take<float>(heads * columns)}, scores{places.take<float>(heads * rows_)},
        unpooled{places.take<float>(heads * rows_)} {}
};

/// Compresses the `wanted` heads of one layer: all memory first, so that several layers can be
/// prepared before any of them changes, then the work.
template <Element E>
class LayerCompression {
 public:
  LayerCompression(const Engine<E>& engine, Layer& layer, std::vector<bool> wanted,
                   const CacheOptions& options)
      : engine_{&engine}, layer_{&layer}, wanted_{std::move(wanted)}, to_(layer.heads.size()),
        page_rows_{static_cast<int>(options.page_rows)},
        blocks_{static_cast<std::size_t>(engine.observe_blocks())} {
    for (std::size_t head = 0; head < layer.heads.size(); ++head) {
      if (!wanted_[head]) continue;
      const HeadRule& settings = layer.heads[head].settings();
      longest_ = std::max(longest_, layer.survivors_of(head));
      window_ = std::max(window_, settings.window);
      rows_ = std::max(rows_, rows_of(head));
      drops_ = drops_ || layer.survivors_of(head) < rows_of(head);
      packs_ = packs_ || settings.is_quantized();
    }
    columns_ = static_cast<std::size_t>(
        observe_columns(static_cast<int>(engine.shape().queries_per_kv()), static_cast<int>(window_)));
  }

  /// Of the memory that `run` needs while it goes on; one block serves layer after layer.
  [[nodiscard]] std::size_t scratch_bytes() const {
    Places counted;
    static_cast<void>(memory_in(counted));
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
    check(cudaMemsetAsync(memory.tickets, 0, heads * sizeof(std::uint32_t), stream),
          "cudaMemsetAsync");
    describe(memory, stream);

    const auto pitch = static_cast<long long>(rows_);
    const auto kv_heads = static_cast<int>(heads);
    if (drops_) observe(memory, views, state, stream);
    engine_->keep({.heads = views, .state = state, .compressions = memory.how,
                   .scores = memory.scores, .unpooled = memory.unpooled, .pitch = pitch,
                   .kept = const_cast<int* const*>(memory.kept), .counts = memory.counts},
                  stream);
    engine_->compact({.from = views, .to = memory.to, .kv_heads = kv_heads, .page_rows = page_rows_,
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
    return {places, to_.size(), longest_, rows_, blocks_, columns_};
  }

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
        how = {.window = static_cast<int>(settings.window),
               .budget = static_cast<int>(settings.budget_rule().candidates(left)),
               .kernel = static_cast<int>(settings.pooled_rows),
               .average = settings.pooling == Pooling::average};
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

  void observe(const CompressionMemory& memory, const HeadView* views, const LayerState* state,
               cudaStream_t stream) const {
    const ModelShape& shape = engine_->shape();
    const QueryRing& queries = layer_->queries;
    const float scale = layer_->scale.value_or(1.0F / std::sqrt(static_cast<float>(shape.head_dim)));
    engine_->observe(
        {.heads = views, .state = state, .compressions = memory.how,
         .kv_heads = static_cast<int>(to_.size()), .group = static_cast<int>(shape.queries_per_kv()),
         .page_rows = page_rows_, .window = static_cast<int>(window_), .queries = queries.data(),
         .query_slots = static_cast<int>(queries.slots()),
         .first_query = static_cast<int>(queries.end() - queries.size()),
         .attention_sink_bias = layer_->attention_sink_bias(), .scale_log2 = scale * log2_e,
         .softcap = layer_->softcap, .partial = memory.partial, .tickets = memory.tickets,
         .log_sum_exp = memory.log_sum_exp, .scores = memory.scores,
         .unpooled = memory.unpooled, .pitch = static_cast<long long>(rows_)},
        packs_, stream);
  }

  const Engine<E>* engine_;
  Layer* layer_;
  std::vector<bool> wanted_;
  std::vector<std::optional<HeadStore>> to_;
  int page_rows_;
  std::size_t blocks_;
  std::size_t longest_ = 0;  // survivors of a head
  std::size_t window_ = 1;
  std::size_t rows_ = 0;
  std::size_t columns_ = 0;
  bool drops_ = false;
  bool packs_ = false;
};

}  // namespace kvpolicy::cuda
