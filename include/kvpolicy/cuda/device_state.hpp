// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of a cache find by fixed addresses: each layer's counters, the descriptions of its
// heads, and the rotary tables of heads with in-cache positions. The addresses never change, so
// captured graphs stay valid while pages come and go.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/core/rotary.hpp>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/layer.hpp>
#include <kvpolicy/cuda/memory.hpp>
#include <kvpolicy/cuda/served_rule.hpp>
#include <kvpolicy/cuda/writes.hpp>

namespace kvpolicy::gpu {

/// Not synchronised; writes go on the stream of their DeviceWrites.
class DeviceState {
 public:
  DeviceState() = default;  ///< Nothing yet.
  /// `slow`: heads may be in slow memory, and have a second description.
  /// @throws std::bad_alloc, DeviceError
  DeviceState(const ModelShape& shape, bool slow, MemoryResource* memory, cudaStream_t stream)
      : shape_{shape}, slow_{slow}, memory_{memory}, block_{allocate(memory, block_bytes(), stream)} {
    check(cudaMemsetAsync(block_.get(), 0, block_bytes(), stream), "cudaMemsetAsync");
  }

  [[nodiscard]] LayerState* counters(std::size_t layer) const {
    return reinterpret_cast<LayerState*>(block_.get()) + layer;
  }
  /// Counts numbers that were clamped when they were quantised.
  [[nodiscard]] int* out_of_range() const { return reinterpret_cast<int*>(counters(shape_.layers)); }
  [[nodiscard]] HeadView* heads(std::size_t layer) const {
    return reinterpret_cast<HeadView*>(counters(shape_.layers + 1)) + layer * shape_.kv_heads;
  }
  /// As selected reads find them.
  [[nodiscard]] HeadView* selected_heads(std::size_t layer) const {
    return heads(layer) + (slow_ ? shape_.kv_head_count() : 0);
  }
  void describe(std::size_t layer, const Layer& own, DeviceWrites& writes) const {
    for (std::size_t head = 0; head < own.heads.size(); ++head) {
      writes.write(heads(layer) + head, own.heads[head].view());
    }
    describe_selected(layer, own, writes);
  }
  void describe_selected(std::size_t layer, const Layer& own, DeviceWrites& writes) const {
    if (!slow_) return;
    for (std::size_t head = 0; head < own.heads.size(); ++head) {
      writes.write(selected_heads(layer) + head, own.heads[head].selected_view());
    }
  }

  /// A head's rotary table [head_dim / 2], or null; heads with equal settings share one.
  /// @throws std::bad_alloc, DeviceError
  const float* frequencies(const HeadRule& head, DeviceWrites& writes) {
    if (!head.rotary_in_cache) return nullptr;
    for (const auto& [config, table] : frequencies_) {
      if (config == *head.rotary_in_cache) return reinterpret_cast<const float*>(table.get());
    }
    struct Pair {
      float number[2];
    };
    const std::vector<float> numbers = inverse_frequencies(*head.rotary_in_cache, shape_.head_dim);
    DeviceBuffer table = allocate(memory_, table_bytes(), writes.stream());
    for (std::size_t i = 0; i < numbers.size(); i += 2) {
      writes.write(reinterpret_cast<Pair*>(table.get()) + i / 2, Pair{{numbers[i], numbers[i + 1]}});
    }
    frequencies_.emplace_back(*head.rotary_in_cache, std::move(table));
    return reinterpret_cast<const float*>(frequencies_.back().second.get());
  }

  [[nodiscard]] std::size_t bytes() const { return block_bytes() + frequencies_.size() * table_bytes(); }
  void give_back_on(const LastUse& use) noexcept {
    for (auto& [config, table] : frequencies_) table.give_back_on(use);
    block_.give_back_on(use);
  }

 private:
  // Counters, one more for out_of_range, then heads, and heads once more.
  [[nodiscard]] std::size_t block_bytes() const {
    return (shape_.layers + 1) * sizeof(LayerState) +
           shape_.kv_head_count() * (slow_ ? 2 : 1) * sizeof(HeadView);
  }
  [[nodiscard]] std::size_t table_bytes() const { return shape_.head_dim / 2 * sizeof(float); }

  ModelShape shape_;
  bool slow_ = false;
  MemoryResource* memory_ = nullptr;
  DeviceBuffer block_;
  std::vector<std::pair<RotaryConfig, DeviceBuffer>> frequencies_;
};

}  // namespace kvpolicy::gpu
