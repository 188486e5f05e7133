// SPDX-License-Identifier: Apache-2.0
//
// An optional value that few objects have. An object without it spends only the size of one pointer.
#pragma once

#include <memory>
#include <utility>

namespace kvpolicy::detail {

/// An optional value on the heap. Copying copies the value.
template <class T>
class Boxed {
 public:
  Boxed() = default;
  /// @throws std::bad_alloc, or what copying a T throws
  Boxed(const Boxed& other) : own_{other ? std::make_unique<T>(*other) : nullptr} {}
  Boxed(Boxed&&) noexcept = default;
  Boxed& operator=(const Boxed& other) { return *this = Boxed{other}; }
  Boxed& operator=(Boxed&&) noexcept = default;
  ~Boxed() = default;

  template <class... Args>
  T& emplace(Args&&... args) {
    own_ = std::make_unique<T>(std::forward<Args>(args)...);
    return *own_;
  }
  void reset() noexcept { own_.reset(); }

  explicit operator bool() const noexcept { return own_ != nullptr; }
  [[nodiscard]] T& operator*() noexcept { return *own_; }
  [[nodiscard]] const T& operator*() const noexcept { return *own_; }
  [[nodiscard]] T* operator->() noexcept { return own_.get(); }
  [[nodiscard]] const T* operator->() const noexcept { return own_.get(); }

 private:
  std::unique_ptr<T> own_;
};

}  // namespace kvpolicy::detail
