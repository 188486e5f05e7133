// SPDX-License-Identifier: Apache-2.0
//
// Threads of a block as fibers: each has a stack of its own and names the fiber that runs next. Boost.Context
// switches in a few nanoseconds; where it is missing (KVPOLICY_SIMT_UCONTEXT), ucontext takes some hundred
// times as long. AddressSanitizer is informed of every switch.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <new>

#if defined(KVPOLICY_SIMT_UCONTEXT) || !__has_include(<boost/context/detail/fcontext.hpp>)
#define KVPOLICY_SIMT_HAS_FCONTEXT 0
#include <ucontext.h>
#else
#define KVPOLICY_SIMT_HAS_FCONTEXT 1
#include <boost/context/detail/fcontext.hpp>
#endif

#if defined(__SANITIZE_ADDRESS__)
#define KVPOLICY_SIMT_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVPOLICY_SIMT_ASAN 1
#endif
#endif
#ifndef KVPOLICY_SIMT_ASAN
#define KVPOLICY_SIMT_ASAN 0
#endif
#if KVPOLICY_SIMT_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace kvpolicy::gpu::simt {

/// A flow of control. A default-constructed one stands for the flow that runs already, whose stack is not
/// ours; `start` gives it a stack and a function, which must never return.
class Fiber {
 public:
  using Entry = void (*)(void* argument);

  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber() {
    if (mapping_ != nullptr) ::munmap(mapping_, mapping_bytes());
  }

  /// The next switch to this fiber begins entry(argument), whatever the fiber did before.
  void start(Entry entry, void* argument) {
    if (mapping_ == nullptr) map_stack();
#if KVPOLICY_SIMT_ASAN
    // The frames of an abandoned flow are still poisoned in the shadow memory.
    ASAN_UNPOISON_MEMORY_REGION(bottom_, size_);
    fake_stack_ = nullptr;
#endif
    entry_ = entry;
    argument_ = argument;
#if KVPOLICY_SIMT_HAS_FCONTEXT
    context_ =
        boost::context::detail::make_fcontext(static_cast<char*>(bottom_) + size_, size_, &Fiber::land_first);
#else
    ::getcontext(&context_);
    context_.uc_stack.ss_sp = bottom_;
    context_.uc_stack.ss_size = size_;
    context_.uc_link = nullptr;
    ::makecontext(&context_, &Fiber::land_first, 0);
#endif
  }
  [[nodiscard]] bool started() const { return entry_ != nullptr; }

  /// Stops `from`, which must be the running fiber, and continues `to`. Returns when another fiber switches
  /// to `from`.
  static void switch_to(Fiber& from, Fiber& to) {
#if KVPOLICY_SIMT_ASAN
    __sanitizer_start_switch_fiber(&from.fake_stack_, to.bottom_, to.size_);
#endif
#if KVPOLICY_SIMT_HAS_FCONTEXT
    passing_ = &to;
    const boost::context::detail::transfer_t came = boost::context::detail::jump_fcontext(to.context_, &from);
    Fiber& left = *static_cast<Fiber*>(came.data);
    left.context_ = came.fctx;
    from.landed(left);
#else
    passing_ = &to;
    left_ = &from;
    ::swapcontext(&from.context_, &to.context_);
    from.landed(*left_);
#endif
  }

 private:
  // Enough for a kernel's frames under AddressSanitizer; only touched pages take memory.
  static constexpr std::size_t stack_bytes = std::size_t{256} << 10;

  static std::size_t page_bytes() { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }
  static std::size_t mapping_bytes() { return stack_bytes + page_bytes(); }

  void map_stack() {
    void* address = ::mmap(nullptr, mapping_bytes(), PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) throw std::bad_alloc();
    mapping_ = address;
    // A stack overflow hits the page below, which cannot be accessed.
    ::mprotect(mapping_, page_bytes(), PROT_NONE);
    bottom_ = static_cast<char*>(mapping_) + page_bytes();
    // Stacks begin at different offsets in a page; otherwise all would use the same few sets of the cache.
    static thread_local std::size_t count = 0;
    size_ = stack_bytes - count++ % 61 * 320;
  }

  // The end of a switch, executed by the fiber that continues.
  void landed([[maybe_unused]] Fiber& left) {
#if KVPOLICY_SIMT_ASAN
    const void* bottom = nullptr;
    std::size_t size = 0;
    __sanitizer_finish_switch_fiber(fake_stack_, &bottom, &size);
    if (left.mapping_ == nullptr) {
      left.bottom_ = const_cast<void*>(bottom);
      left.size_ = size;
    }
#endif
  }

#if KVPOLICY_SIMT_HAS_FCONTEXT
  static void land_first(boost::context::detail::transfer_t came) {
    Fiber& left = *static_cast<Fiber*>(came.data);
    left.context_ = came.fctx;
    begin(left);
  }
  boost::context::detail::fcontext_t context_ = nullptr;
#else
  static void land_first() { begin(*left_); }
  ucontext_t context_{};
  inline static thread_local Fiber* left_ = nullptr;
#endif
  static void begin(Fiber& left) {
    Fiber& self = *passing_;
    self.landed(left);
    self.entry_(self.argument_);
  }

  inline static thread_local Fiber* passing_ = nullptr;

  void* mapping_ = nullptr;  // guard page and stack; null: the stack is not ours
  void* bottom_ = nullptr;
  std::size_t size_ = 0;
  [[maybe_unused]] void* fake_stack_ = nullptr;
  Entry entry_ = nullptr;
  void* argument_ = nullptr;
};

}  // namespace kvpolicy::gpu::simt
