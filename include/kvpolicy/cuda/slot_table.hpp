// SPDX-License-Identifier: Apache-2.0
//
// The sequences of ragged calls on the device (kernels/call_slot.cuh), for each layer: a table at a fixed
// address, of which the host keeps a copy, so that only what changed is written. While the same sequences decode
// nothing is.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/cuda/kernels/call_slot.cuh>
#include <kvpolicy/cuda/memory.hpp>
#include <kvpolicy/cuda/runtime.hpp>
#include <kvpolicy/cuda/writes.hpp>

namespace kvpolicy::cuda {

/// Not synchronised; writes go on the stream of their DeviceWrites.
class SlotTable {
 public:
  /// All slots empty. @throws std::bad_alloc, DeviceError
  SlotTable(std::size_t layers, std::size_t slots, MemoryResource* memory, cudaStream_t stream)
      : slots_{slots}, rows_(layers * slots), table_{allocate(memory, bytes(), stream)} {
    check(cudaMemsetAsync(table_.get(), 0, bytes(), stream), "cudaMemsetAsync");
  }

  [[nodiscard]] std::size_t slots() const { return slots_; }
  [[nodiscard]] std::size_t bytes() const { return rows_.size() * sizeof(CallSlot); }
  /// [slots], on the device.
  [[nodiscard]] const CallSlot* layer(std::size_t layer) const {
    return reinterpret_cast<const CallSlot*>(table_.get()) + layer * slots_;
  }
  void write(std::size_t layer, std::size_t slot, const CallSlot& value, DeviceWrites& writes) {
    CallSlot& known = rows_[layer * slots_ + slot];
    if (std::memcmp(&known, &value, sizeof value) == 0) return;
    writes.write(reinterpret_cast<CallSlot*>(table_.get()) + layer * slots_ + slot, value);
    known = value;
  }
  /// Where the memory goes back.
  void give_back_on(cudaStream_t stream) noexcept { cuda::give_back_on(table_, stream); }

 private:
  std::size_t slots_;
  std::vector<CallSlot> rows_;  // [layers, slots], as on the device
  DeviceBuffer table_;
};

/// @throws ConfigError if an engine cannot serve so many sequences in a call
template <class Engine>
void check_slots(const char* name, const Engine& engine, std::size_t slots) {
  const std::size_t most = Engine::max_heads / engine.shape().kv_heads;
  require(slots >= 1 && slots <= most, name, ": ", slots, " slots, must be 1 to ", most,
          ", for a call serves at most ", Engine::max_heads, " KV heads");
}

}  // namespace kvpolicy::cuda
