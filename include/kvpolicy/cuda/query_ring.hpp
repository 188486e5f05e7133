// SPDX-License-Identifier: Apache-2.0
//
// The latest queries of one layer on the device (kernels/queries.cuh writes them), and which text
// positions they belong to.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include <kvpolicy/cuda/kernels/accept.cuh>
#include <kvpolicy/cuda/kernels/queries.cuh>
#include <kvpolicy/cuda/memory.hpp>
#include <kvpolicy/cuda/runtime.hpp>

namespace kvpolicy::cuda {

/// Not synchronised. The positions are the host's knowledge: `push` and `truncate` keep it.
class QueryRing {
 public:
  /// Keeps `window` queries [q_heads, head_dim] even after the latest `tail` were taken back.
  QueryRing(std::size_t window, std::size_t tail, std::size_t q_heads, std::size_t head_dim,
            MemoryResource* memory, cudaStream_t stream)
      : window_{window}, slots_{window == 0 ? 0 : window + tail}, q_heads_{q_heads},
        head_dim_{head_dim}, memory_{memory} {
    if (slots_ > 0) queries_ = allocate(memory, bytes(), stream);
  }

  [[nodiscard]] std::size_t bytes() const { return slots_ * q_heads_ * head_dim_ * 2; }
  [[nodiscard]] bool is_kept() const { return slots_ > 0; }
  [[nodiscard]] std::size_t slots() const { return slots_; }
  [[nodiscard]] const std::uint16_t* data() const {
    return reinterpret_cast<const std::uint16_t*>(queries_.get());
  }
  /// How many queries are known, at most `window`; they end at text position `end`.
  [[nodiscard]] std::size_t size() const { return std::min(end_ - begin_, window_); }
  [[nodiscard]] std::size_t end() const { return end_; }

  /// Puts a copy of the call's queries on the stream, in front of whatever moves `state` on.
  void copy(const LayerState* state, const Request& request, const Tensor& q, cudaStream_t stream) const {
    if (slots_ == 0) return;
    const KeepQueriesParams params{.state = state, .request = request, .q = q,
                                   .q_heads = static_cast<int>(q_heads_),
                                   .head_dim = static_cast<int>(head_dim_),
                                   .slots = static_cast<int>(slots_),
                                   .ring = reinterpret_cast<std::uint16_t*>(queries_.get())};
    launch(keep_queries_kernel<>,
           {.grid_x = std::min(request.queries, params.slots), .threads = keep_queries_threads}, stream,
           params, "keep_queries_kernel");
  }
  /// `count` queries came, the first at text position `position`.
  void push(std::size_t position, std::size_t count) {
    if (slots_ == 0) return;
    if (position > end_) begin_ = position;  // queries between were never shown
    end_ = position + count;
    written_ = std::max(written_, end_);
    begin_ = std::max(begin_, written_ - std::min(written_, slots_));
  }
  /// Where the memory goes back.
  void give_back_on(cudaStream_t stream) noexcept { cuda::give_back_on(queries_, stream); }
  void truncate(std::size_t position) {
    end_ = std::min(end_, position);
    begin_ = std::min(begin_, end_);
  }

  /// Moves the queries of a part of a tree's path, as their rows are moved.
  void accept(const PathPart& path, cudaStream_t stream) const {
    if (slots_ == 0) return;
    constexpr int numbers_of_thread = 8;
    const AcceptQueriesParams params{.ring = reinterpret_cast<std::uint16_t*>(queries_.get()),
                                     .slots = static_cast<int>(slots_),
                                     .numbers = static_cast<int>(q_heads_ * head_dim_), .path = path};
    launch(accept_queries_kernel<>,
           {.grid_x = quotient_up(params.numbers, numbers_of_thread * accept_threads),
            .threads = accept_threads},
           stream, params, "accept_queries_kernel");
  }
  /// The nodes of `path`, of a tree behind position `root`, are the text from now on.
  void note_accepted(std::size_t root, std::span<const std::size_t> path) {
    const std::size_t begin = begin_;
    const std::size_t end = end_;
    truncate(root);
    for (std::size_t i = 0; i < path.size(); ++i) {
      const std::size_t was_at = root + path[i];
      if (was_at >= begin && was_at < end) push(root + i, 1);  // else it came without a query
    }
  }

  [[nodiscard]] QueryRing fork(cudaStream_t stream) const {
    QueryRing other = *this;
    if (slots_ == 0) return other;
    other.queries_ = allocate(memory_, bytes(), stream);
    check(cudaMemcpyAsync(other.queries_.get(), queries_.get(), bytes(), cudaMemcpyDeviceToDevice,
                          stream),
          "cudaMemcpyAsync");
    return other;
  }

 private:
  std::size_t window_;
  std::size_t slots_;
  std::size_t q_heads_;
  std::size_t head_dim_;
  MemoryResource* memory_;
  std::size_t begin_ = 0;    // positions held: [begin_, end_)
  std::size_t end_ = 0;
  std::size_t written_ = 0;  // the furthest position ever written
  Block queries_;
};

}  // namespace kvpolicy::cuda
