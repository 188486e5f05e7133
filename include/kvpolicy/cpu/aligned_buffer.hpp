// SPDX-License-Identifier: Apache-2.0
//
// Scratch memory of an engine: grows, never shrinks, and is worth nothing to a copy.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace kvpolicy::cpu {

/// Uninitialised at first use, aligned for the widest vector. A copy starts empty.
class AlignedFloats {
 public:
  AlignedFloats() = default;
  AlignedFloats(const AlignedFloats&) noexcept {}
  AlignedFloats(AlignedFloats&&) noexcept = default;
  AlignedFloats& operator=(const AlignedFloats&) noexcept { return *this; }
  AlignedFloats& operator=(AlignedFloats&&) noexcept = default;
  ~AlignedFloats() = default;

  /// At least `count` floats, zero where newly obtained; what was there may be lost.
  /// @throws std::bad_alloc
  float* resize(std::size_t count) {
    if (count > size_) {
      floats_.reset(new (alignment) float[count]());
      size_ = count;
    }
    return floats_.get();
  }
  [[nodiscard]] float* data() const { return floats_.get(); }

 private:
  static constexpr std::align_val_t alignment{64};
  struct Free {
    void operator()(float* floats) const { ::operator delete[](floats, alignment); }
  };

  std::unique_ptr<float[], Free> floats_;
  std::size_t size_ = 0;
};

}  // namespace kvpolicy::cpu
