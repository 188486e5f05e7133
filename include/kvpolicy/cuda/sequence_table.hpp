// SPDX-License-Identifier: Apache-2.0
//
// The sequences of ragged calls on the device (kernels/call_sequence.cuh), for each layer: a table at a fixed
// address, of which the host keeps a copy, so that only what changed is written. While the same sequences decode
// nothing is.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/cuda/kernels/call_sequence.cuh>
#include <kvpolicy/cuda/memory.hpp>
#include <kvpolicy/cuda/runtime.hpp>
#include <kvpolicy/cuda/writes.hpp>

namespace kvpolicy::gpu {

/// Not synchronised; writes go on the stream of their DeviceWrites.
class SequenceTable {
 public:
  /// No sequences. @throws std::bad_alloc, DeviceError
  SequenceTable(std::size_t layers, std::size_t most, MemoryResource* memory, cudaStream_t stream)
      : most_{most}, lines_(layers * most), table_{allocate(memory, bytes(), stream)} {
    check(cudaMemsetAsync(table_.get(), 0, bytes(), stream), "cudaMemsetAsync");
  }

  [[nodiscard]] std::size_t max_sequences() const { return most_; }
  [[nodiscard]] std::size_t bytes() const { return lines_.size() * sizeof(CallSequence); }
  /// [max_sequences()], on the device.
  [[nodiscard]] const CallSequence* layer(std::size_t layer) const {
    return reinterpret_cast<const CallSequence*>(table_.get()) + layer * most_;
  }
  void write(std::size_t layer, std::size_t place, const CallSequence& value, DeviceWrites& writes) {
    CallSequence& known = lines_[layer * most_ + place];
    if (std::memcmp(&known, &value, sizeof value) == 0) return;
    writes.write(reinterpret_cast<CallSequence*>(table_.get()) + layer * most_ + place, value);
    known = value;
  }
  /// Where the memory goes back.
  void give_back_on(const LastUse& use) noexcept { table_.give_back_on(use); }

 private:
  std::size_t most_;
  std::vector<CallSequence> lines_;  // [layers, max_sequences], as on the device
  DeviceBuffer table_;
};

/// Checks how many sequences a call may have. @throws ConfigError if the engine cannot serve so many
template <class Engine>
void check_sequence_count(const char* name, const Engine& engine, std::size_t count) {
  const std::size_t most = engine.most_heads() / engine.shape().kv_heads;
  require(count >= 1 && count <= most, name, ": ", count, " sequences in a call, must be 1 to ", most,
          ", for a call serves at most ", engine.most_heads(), " KV heads");
}

}  // namespace kvpolicy::gpu
