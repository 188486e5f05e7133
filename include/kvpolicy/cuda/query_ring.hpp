// SPDX-License-Identifier: Apache-2.0
//
// The latest queries of one layer on the device (kernels/queries.cuh writes them), and which text
// positions they belong to.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include <kvpolicy/cache/query_range.hpp>
#include <kvpolicy/cuda/kernel_tables.hpp>
#include <kvpolicy/cuda/kernels/accept.cuh>
#include <kvpolicy/cuda/kernels/queries.cuh>
#include <kvpolicy/cuda/memory.hpp>
#include <kvpolicy/cuda/runtime.hpp>

namespace kvpolicy::gpu {

/// Not synchronised. The positions are the host's knowledge: `push` and `truncate` keep it.
class QueryRing {
 public:
  /// Keeps `window` queries [q_heads, head_dim] even after the latest `tail` were taken back.
  QueryRing(std::size_t window, std::size_t tail, std::size_t q_heads, std::size_t head_dim,
            MemoryResource* memory, cudaStream_t stream)
      : window_{window},
        held_{window == 0 ? 0 : window + tail},
        q_heads_{q_heads},
        head_dim_{head_dim},
        memory_{memory} {
    if (is_kept()) queries_ = allocate(memory, bytes(), stream);
  }

  [[nodiscard]] std::size_t bytes() const { return slots() * q_heads_ * head_dim_ * 2; }
  [[nodiscard]] bool is_kept() const { return slots() > 0; }
  [[nodiscard]] std::size_t slots() const { return held_.slots(); }
  /// [1, slots, q_heads, head_dim]; the query at position p is in slot p % slots.
  [[nodiscard]] Tensor view() const {
    return {.data = queries_.get(),
            .token_stride = static_cast<long long>(q_heads_ * head_dim_),
            .head_stride = static_cast<long long>(head_dim_)};
  }
  /// The same numbers on the device; null if none are kept.
  [[nodiscard]] std::uint16_t* numbers() const { return reinterpret_cast<std::uint16_t*>(queries_.get()); }
  /// How many queries are known, at most `window`; they end at text position `end`.
  [[nodiscard]] std::size_t size() const { return std::min(held_.size(), window_); }
  [[nodiscard]] std::size_t end() const { return held_.end(); }

  /// Puts a copy of the call's queries on the stream, in front of whatever moves `state` on.
  void copy(const LayerState* state, const Request& request, const Tensor& q, cudaStream_t stream) const {
    if (!is_kept()) return;
    const KeepQueriesParams params{.state = state,
                                   .request = request,
                                   .q = q,
                                   .q_heads = static_cast<int>(q_heads_),
                                   .head_dim = static_cast<int>(head_dim_),
                                   .slots = static_cast<int>(slots()),
                                   .ring = numbers()};
    launch(detail::common_kernels<>().keep_queries, {.x = std::min(request.queries, params.slots)}, stream,
           params);
  }
  /// `count` queries came, the first at text position `position`.
  void push(std::size_t position, std::size_t count) { held_.push(position, count); }
  /// Where the memory goes back.
  void give_back_on(const LastUse& use) noexcept { queries_.give_back_on(use); }
  void truncate(std::size_t position) { held_.truncate(position); }

  /// Moves the queries of a part of a tree's path, as their rows are moved.
  void accept(const PathPart& path, cudaStream_t stream) const {
    if (!is_kept()) return;
    constexpr int numbers_of_thread = 8;
    const AcceptQueriesParams params{.ring = numbers(),
                                     .slots = static_cast<int>(slots()),
                                     .numbers = static_cast<int>(q_heads_ * head_dim_),
                                     .path = path};
    launch(detail::common_kernels<>().accept_queries,
           {.x = quotient_up(params.numbers, numbers_of_thread * accept_threads)}, stream, params);
  }
  /// The nodes of `path`, of a tree after position `root`, are the text from now on.
  void note_accepted(std::size_t root, std::span<const std::size_t> path) { held_.accept(root, path); }

  /// A new ring learns what another one of the same queries knows, as far as it has room.
  void take(const QueryRing& other, cudaStream_t stream) {
    if (!is_kept()) return;
    held_.reset(other.held_.end(), other.held_.size());
    const std::size_t query_bytes = q_heads_ * head_dim_ * 2;
    for (std::size_t at = held_.begin(); at < held_.end();) {
      const std::size_t from = at % other.slots();
      const std::size_t to = at % slots();
      const std::size_t count = std::min({held_.end() - at, other.slots() - from, slots() - to});
      check(cudaMemcpyAsync(queries_.get() + to * query_bytes, other.queries_.get() + from * query_bytes,
                            count * query_bytes, cudaMemcpyDeviceToDevice, stream),
            "cudaMemcpyAsync");
      at += count;
    }
  }

  /// Which queries the ring holds.
  [[nodiscard]] const QueryRange& held() const { return held_; }
  /// Numbers of one token's queries.
  [[nodiscard]] std::size_t query_numbers() const { return q_heads_ * head_dim_; }
  /// Copies the queries that the ring holds to the host, [held().size(), q_heads, head_dim]. Not there before
  /// the stream was waited for. @throws DeviceError
  void download(std::uint16_t* out, cudaStream_t stream) const {
    for_each_run(held_.begin(), [&](std::size_t slot, std::size_t done, std::size_t count) {
      check(cudaMemcpyAsync(out + done * query_numbers(), numbers() + slot * query_numbers(),
                            count * query_numbers() * 2, cudaMemcpyDeviceToHost, stream),
            "cudaMemcpyAsync");
    });
  }
  /// A new ring takes the queries of the host that `held` says, as far as it has room. @throws DeviceError
  void upload(const std::uint16_t* queries, const QueryRange& held, cudaStream_t stream) {
    if (!is_kept()) return;
    held_.reset(held.end(), held.size());
    const std::size_t skipped = held_.begin() - held.begin();
    for_each_run(held_.begin(), [&](std::size_t slot, std::size_t done, std::size_t count) {
      check(cudaMemcpyAsync(numbers() + slot * query_numbers(), queries + (skipped + done) * query_numbers(),
                            count * query_numbers() * 2, cudaMemcpyHostToDevice, stream),
            "cudaMemcpyAsync");
    });
  }

  [[nodiscard]] QueryRing fork(cudaStream_t stream) const {
    QueryRing other{window_, slots() - window_, q_heads_, head_dim_, memory_, stream};
    other.held_ = held_;
    if (!is_kept()) return other;
    check(cudaMemcpyAsync(other.queries_.get(), queries_.get(), bytes(), cudaMemcpyDeviceToDevice, stream),
          "cudaMemcpyAsync");
    return other;
  }

 private:
  // visit(slot, queries before, count) for each run of neighbouring slots of the queries from `at` on.
  template <class Visit>
  void for_each_run(std::size_t at, Visit visit) const {
    for (std::size_t done = 0; at + done < held_.end();) {
      const std::size_t slot = (at + done) % slots();
      const std::size_t count = std::min(held_.end() - at - done, slots() - slot);
      visit(slot, done, count);
      done += count;
    }
  }

  std::size_t window_;
  QueryRange held_;
  std::size_t q_heads_;
  std::size_t head_dim_;
  MemoryResource* memory_;
  DeviceBuffer queries_;
};

}  // namespace kvpolicy::gpu
