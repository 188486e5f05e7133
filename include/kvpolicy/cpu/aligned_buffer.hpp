// SPDX-License-Identifier: Apache-2.0
//
// Scratch memory of an engine. It grows and never shrinks; a copy does not get its contents.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace kvpolicy::cpu {

/// Numbers aligned for the widest vector. A copy starts empty.
template <class T>
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  AlignedBuffer(const AlignedBuffer&) noexcept {}
  AlignedBuffer(AlignedBuffer&&) noexcept = default;
  AlignedBuffer& operator=(const AlignedBuffer&) noexcept { return *this; }
  AlignedBuffer& operator=(AlignedBuffer&&) noexcept = default;
  ~AlignedBuffer() = default;

  /// At least `count` numbers. New memory is zero; earlier contents may be lost.
  /// @throws std::bad_alloc
  T* resize(std::size_t count) {
    if (count > size_) {
      numbers_.reset(new (alignment) T[count]());
      size_ = count;
    }
    return numbers_.get();
  }
  [[nodiscard]] T* data() const { return numbers_.get(); }

 private:
  static constexpr std::align_val_t alignment{64};
  struct Free {
    void operator()(T* numbers) const { ::operator delete[](numbers, alignment); }
  };

  std::unique_ptr<T[], Free> numbers_;
  std::size_t size_ = 0;
};

using AlignedFloats = AlignedBuffer<float>;

}  // namespace kvpolicy::cpu
