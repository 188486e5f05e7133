// SPDX-License-Identifier: Apache-2.0
//
// The order of work that one owner puts on several streams. Streams know nothing of each other; events make one wait
// for what another had to do, without the host waiting.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/try.hpp>
#include <kvpolicy/cuda/runtime.hpp>

namespace kvpolicy::gpu {

/// An event without a time, of the device that is current when it is made. Not synchronised.
class Event {
 public:
  Event() = default;  ///< Nothing is made before it is recorded.
  Event(Event&& other) noexcept : event_{std::exchange(other.event_, nullptr)} {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  ~Event() {
    if (event_ != nullptr) cudaEventDestroy(event_);
  }

  /// Stands for all that is on `stream` now. @throws DeviceError
  void record(cudaStream_t stream) {
    if (event_ == nullptr) {
      check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    }
    check(cudaEventRecord(event_, stream), "cudaEventRecord");
  }
  /// Work put on `stream` from now on comes after what it stands for. @throws DeviceError
  void precede(cudaStream_t stream) const {
    check(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent");
  }
  /// The host waits for it, even while a stream captures: for work of before the capture. @throws DeviceError
  void wait_on_host() const {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    const cudaError_t waited = cudaEventSynchronize(event_);
    check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    check(waited, "cudaEventSynchronize");
  }
  /// The same for an owner that ends, which has nobody to tell of a failure.
  void wait_at_end() const noexcept {
    KVPOLICY_TRY { wait_on_host(); }
    KVPOLICY_CATCH_ALL {}
  }

 private:
  cudaEvent_t event_ = nullptr;
};

/// Puts calls that come on different streams in their own order. The stream of the latest call must live until the next
/// call, or until the owner is gone, unless it was released. Not synchronised.
class StreamOrder {
 public:
  explicit StreamOrder(cudaStream_t stream = nullptr) noexcept : latest_{stream} {}

  /// Work that is about to be put on `stream` comes after that of all calls before. Where the stream captures, the
  /// graph's launch has to come after them; only what was marked is waited for here.
  /// @throws CaptureError if another stream, on which the latest call came, captures; DeviceError
  void enter(cudaStream_t stream) {
    if (stream == latest_ && !released_) {
      marked_ = false;
      return;
    }
    if (is_capturing(stream)) {
      if (marked_) event_.wait_on_host();
      return;
    }
    if (!marked_) {
      require<CaptureError>(
          !is_capturing(latest_),
          "cuda: the stream of the latest call captures, so a call on another stream cannot come "
          "after it; end the capture first");
      event_.record(latest_);
    }
    event_.precede(stream);  // also where a new stream has the handle of one that is gone
    latest_ = stream;
    marked_ = released_ = false;
  }
  /// A graph may be captured next, on another stream. @throws DeviceError
  void mark() {
    event_.record(latest_);
    marked_ = true;
  }
  /// No work follows on `stream` for now, which may go. Where it captures it may not. @throws DeviceError
  void release(cudaStream_t stream) {
    if (stream != latest_ || released_ || is_capturing(stream)) return;
    mark();
    released_ = true;
  }
  /// A stream for what comes after all of it, for an owner that ends.
  [[nodiscard]] cudaStream_t end() noexcept {
    if (!released_) return latest_;
    KVPOLICY_TRY { event_.precede(cudaStreamPerThread); }
    KVPOLICY_CATCH_ALL { event_.wait_at_end(); }
    return cudaStreamPerThread;
  }

 private:
  cudaStream_t latest_;
  bool marked_ = false;    // the event stands for all work so far
  bool released_ = false;  // and the stream may be gone
  Event event_;
};

/// The end of what an owner of memory does with it: all that is on a stream when it lets go. Copies share one event,
/// which is recorded if somebody has to wait for it. A copy is synchronised with the others.
class LastUse {
 public:
  LastUse(cudaStream_t stream = nullptr) noexcept
      : stream_{stream} {}  // NOLINT: a stream is a use of its own
  /// One for many blocks that are let go of at once.
  [[nodiscard]] static LastUse of_many(cudaStream_t stream) noexcept {
    LastUse use{stream};
    use.share();
    return use;
  }

  [[nodiscard]] cudaStream_t stream() const { return stream_; }
  /// Uses of one stream in the order of their events. 0: not recorded.
  [[nodiscard]] std::uint64_t number() const { return mark_ == nullptr ? 0 : mark_->number; }
  /// Whether both were recorded on one stream. Streams have the handles of others that are gone, so this goes by their
  /// ids.
  [[nodiscard]] bool is_of_same_stream(const LastUse& other) const {
    return number() != 0 && other.number() != 0 && mark_->stream_id != 0 &&
           mark_->stream_id == other.mark_->stream_id;
  }

  /// Records the event, unless that was done. If there can be none, the host waits for the stream instead.
  void record() noexcept {
    share();
    if (mark_ == nullptr || !mark_->record(stream_)) static_cast<void>(cudaStreamSynchronize(stream_));
  }
  /// The host waits for a use that was recorded.
  void wait() const noexcept { mark_->event.wait_at_end(); }
  /// Work put on `stream` from now on comes after a use that was recorded.
  void precede(cudaStream_t stream) const noexcept {
    if (number() == 0) return;
    KVPOLICY_TRY { mark_->event.precede(stream); }
    KVPOLICY_CATCH_ALL { wait(); }
  }

 private:
  struct Mark {
    Event event;
    std::uint64_t number = 0;
    unsigned long long stream_id = 0;  // 0: unknown

    bool record(cudaStream_t stream) noexcept {
      // One at a time, so that numbers are in the order of events on a stream.
      static std::mutex mutex;
      static std::uint64_t latest = 0;
      const std::scoped_lock lock{mutex};
      if (number != 0) return true;
      KVPOLICY_TRY { event.record(stream); }
      KVPOLICY_CATCH_ALL { return false; }
      if (cudaStreamGetId(stream, &stream_id) != cudaSuccess) {
        stream_id = 0;
        static_cast<void>(cudaGetLastError());
      }
      number = ++latest;
      return true;
    }
  };
  void share() noexcept {
    KVPOLICY_TRY {
      if (mark_ == nullptr) mark_ = std::make_shared<Mark>();
    }
    KVPOLICY_CATCH_ALL {}
  }

  cudaStream_t stream_;
  std::shared_ptr<Mark> mark_;
};

}  // namespace kvpolicy::gpu
