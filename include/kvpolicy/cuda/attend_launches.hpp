// SPDX-License-Identifier: Apache-2.0
//
// Attention's launches for one model shape on one device: which kernel serves a call, and with how many blocks.
// Decode's serves calls of few queries. For many there is a kernel for all devices (kernels/prefill.cuh) and Hopper's
// (kernels/prefill_hopper.cuh). Used by engine.hpp, in whose memory blocks leave their results.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/cuda/dispatch.hpp>
#include <kvpolicy/cuda/kernels/append.cuh>  // can_quantize
#include <kvpolicy/cuda/kernels/attend.cuh>
#include <kvpolicy/cuda/kernels/decode.cuh>
#include <kvpolicy/cuda/kernels/prefill.cuh>
#include <kvpolicy/cuda/kernels/prefill_hopper.cuh>
#include <kvpolicy/cuda/runtime.hpp>

namespace kvpolicy::gpu {

/// The same call for the heads [first, first + count) of one sequence.
[[nodiscard]] inline AttendParams heads_of(AttendParams params, std::size_t first, std::size_t count) {
  const auto skip = [](Tensor& tensor, std::size_t heads) {
    if (tensor.data != nullptr) {
      tensor.data +=
          static_cast<long long>(heads) * tensor.head_stride * static_cast<long long>(sizeof(std::uint16_t));
    }
  };
  const auto group = static_cast<std::size_t>(params.group);
  params.log_sum_exp_heads = params.state_heads();
  params.heads += first;
  params.kv_heads = static_cast<int>(count);
  skip(params.q, first * group);
  skip(params.out, first * group);
  skip(params.k, first);
  skip(params.v, first);
  if (params.log_sum_exp != nullptr) params.log_sum_exp += first * group;
  if (params.attention_sink_bias != nullptr) params.attention_sink_bias += first * group;
  return params;
}

/// Launches the kernel that serves a call of attention. What a call attends to is said by AttendParams
/// (kernels/attend.cuh). Immutable, so safe to share among threads.
template <Element E>
class AttendLaunches {
 public:
  /// The most heads (sequences x KV heads) of a call, whatever the device; one with less shared memory takes fewer.
  static constexpr std::size_t max_heads = 4096;

  /// How long the arrays of a Workspace must be.
  struct Counts {
    std::size_t tickets = 0;
    std::size_t states = 0;
    std::size_t values = 0;
  };

  /// @throws ConfigError for a head_dim that is not compiled or more KV heads than a call may bring, DeviceError if the
  /// device's blocks have too little shared memory
  AttendLaunches(const ModelShape& shape, const Device& device) : head_dim_{shape.head_dim}, device_{device} {
    dispatch_head_dim(head_dim_, [&]<int D>() { lay_out<D>(); });
    require(shape.kv_heads <= most_heads_, "gpu::Engine: kv_heads is ", shape.kv_heads, ", must be at most ",
            most_heads_);
  }

  /// max_heads, or fewer where a block of the device has too little shared memory to list the work of so many (about
  /// 3,800 for head_dim 256 on compute capability 8.6, 8.9 and 12.0).
  [[nodiscard]] std::size_t most_heads() const { return most_heads_; }
  /// Whether calls of many queries are served by Hopper's kernel, if no head packs.
  [[nodiscard]] bool uses_warpgroups() const { return uses_warpgroups_; }
  [[nodiscard]] const Counts& counts() const { return counts_; }

  /// @throws ShapeError
  void check_heads(int sequences, int kv_heads) const {
    const bool fits = sequences >= 1 && kv_heads >= 1 &&
                      static_cast<std::size_t>(sequences) * static_cast<std::size_t>(kv_heads) <= most_heads_;
    require<ShapeError>(fits, "gpu::Engine: ", sequences, " sequences of ", kv_heads,
                        " KV heads in one call, must be 1 to ", most_heads_, " heads in all");
  }
  /// @throws ShapeError
  static void check_queries(int queries, int group) {
    require<ShapeError>(group >= 1 && group <= 16, "gpu::Engine: ", group,
                        " query heads share a KV head, the kernels serve 1 to 16");
    require<ShapeError>(queries < most_query_rows / group, "gpu::Engine: ", queries, " queries of ", group,
                        " heads each in one call, must be fewer than ", most_query_rows / group);
  }

  /// Attention of one call that passes both checks. `params.workspace` has counts(). `packs`: some head may have
  /// quantised rows. `longest`: about the most rows that a query reads of a head, by which the work of few query tiles
  /// is split. @throws DeviceError
  void attend(AttendParams params, bool packs, std::size_t longest, cudaStream_t stream) const {
    dispatch_head_dim(head_dim_, [&]<int D>() {
      const int columns = params.request.queries * params.group;
      if constexpr (can_quantize<D>) {
        if (packs) return attend_with<D, true>(params, columns, longest, stream);
      }
      attend_with<D, false>(params, columns, longest, stream);
    });
  }
  /// The same for a ragged call (AttendParams::ragged): `queries` are those of each sequence. @throws DeviceError
  void attend_ragged(AttendParams params, std::span<const int> queries, bool packs, std::size_t longest,
                     cudaStream_t stream) const {
    const int most_few = decode_most_columns / params.group;
    int few = 0;
    int many = 0;
    for (const int count : queries) {
      int& most = count <= most_few ? few : many;
      most = std::max(most, count);
    }
    dispatch_head_dim(head_dim_, [&]<int D>() {
      const auto attend_packs = [&]<bool Packed>() {
        if (few > 0) {
          params.request.queries = few;
          params.least_queries = 1;
          attend_few<D, Packed>(params, few * params.group, stream);
        }
        if (many == 0) return;
        with_prefill_shape<D, Packed>([&]<class Shape>() {
          std::size_t items = 0;
          for (const int count : queries) {
            if (count <= most_few) continue;
            params.request.queries = count;
            items += static_cast<std::size_t>(params.kv_heads *
                                              prefill_tiles<Shape>(params.request, params.group));
          }
          params.request.queries = many;
          params.least_queries = most_few + 1;
          attend_many<Shape, Packed>(params, items, longest, stream);
        });
      };
      if constexpr (can_quantize<D>) {
        if (packs) return attend_packs.template operator()<true>();
      }
      attend_packs.template operator()<false>();
    });
  }

 private:
  template <int D>
  void lay_out() {
    constexpr bool packs = can_quantize<D>;
    most_heads_ = std::min(max_heads, decode_most_heads<E, D, packs>(device_.shared_bytes_of_block));
    require<DeviceError>(
        most_heads_ > 0, "gpu::Engine: a block of device ", device_.id, " may have ",
        device_.shared_bytes_of_block, " bytes of shared memory, head_dim ", D, " needs ",
        std::max(decode_shared_bytes<E, D, 1, packs>(1), decode_shared_bytes<E, D, 2, packs>(1)), " or more");
    decode_grid_ = device_.multiprocessors * decode_blocks_per_multiprocessor;
    prefill_slots_ = static_cast<std::size_t>(2 * device_.multiprocessors);
    const auto decode_rows =
        static_cast<std::size_t>(decode_workspace_slots(decode_grid_)) * decode_most_columns;
    const std::size_t prefill_rows = prefill_slots_ * PrefillShape<D>::query_rows;
    if constexpr (has_hopper_prefill<D>) {
      // One block on a multiprocessor, where the other kernel has two.
      static_assert(HopperShape<D>::query_rows <= 2 * PrefillShape<D>::query_rows);
      uses_warpgroups_ = device_.shared_bytes_of_block >= prefill_hopper_shared_bytes<D>() &&
                         is_compiled_for(&prefill_hopper_kernel<E, D>, HopperShape<D>::threads);
    }
    const std::size_t states = std::max(decode_rows, prefill_rows);
    counts_ = {.tickets = std::max(max_heads, prefill_slots_), .states = states, .values = states * D};
  }

  template <int D, bool Packed>
  void attend_with(AttendParams& params, int columns, std::size_t longest, cudaStream_t stream) const {
    if (columns <= decode_most_columns) return attend_few<D, Packed>(params, columns, stream);
    with_prefill_shape<D, Packed>([&]<class Shape>() {
      attend_many<Shape, Packed>(params, static_cast<std::size_t>(prefill_items<Shape>(params)), longest,
                                 stream);
    });
  }
  template <int D, bool Packed>
  void attend_few(const AttendParams& params, int columns, cudaStream_t stream) const {
    columns <= 8 ? decode_with<D, 1, Packed>(params, stream) : decode_with<D, 2, Packed>(params, stream);
  }
  // Calls f<Shape>() with the shape of the kernel for many queries: Hopper's where it can be used and no head packs.
  template <int D, bool Packed, class F>
  void with_prefill_shape(F f) const {
    if constexpr (has_hopper_prefill<D> && !Packed) {
      if (uses_warpgroups_) return f.template operator()<HopperShape<D>>();
    }
    f.template operator()<PrefillShape<D>>();
  }
  template <class Shape, bool Packed>
  void attend_many(AttendParams& params, std::size_t items, std::size_t longest, cudaStream_t stream) const {
    constexpr int D = Shape::head_dim;
    constexpr bool warpgroups = !std::is_same_v<Shape, PrefillShape<D>>;
    // Few tiles of queries over many rows: several blocks share a tile, as long as one block has
    // some work (a tile of keys is 64 rows or more).
    constexpr std::size_t min_rows = 512;
    const std::size_t slots = warpgroups ? prefill_slots_ / 2 : prefill_slots_;
    params.splits = static_cast<int>(
        std::max<std::size_t>(1, std::min(slots / std::max<std::size_t>(items, 1), longest / min_rows)));
    LaunchShape shape{.grid_x = static_cast<int>(items) * params.splits,
                      .threads = Shape::threads,
                      .early = device_.launches_early};
    if constexpr (warpgroups) {
      shape.shared_bytes = prefill_hopper_shared_bytes<D>();
      launch(prefill_hopper_kernel<E, D>, shape, stream, params, "prefill_hopper_kernel");
    } else {
      shape.shared_bytes = prefill_shared_bytes<D>();
      launch(prefill_kernel<E, D, Packed>, shape, stream, params, "prefill_kernel");
    }
  }
  template <int D, int ColumnTiles, bool Packed>
  void decode_with(const AttendParams& params, cudaStream_t stream) const {
    launch(
        decode_kernel<E, D, ColumnTiles, Packed>,
        {.grid_x = decode_grid_,
         .threads = decode_threads<D, ColumnTiles, Packed>,
         .shared_bytes = decode_shared_bytes<E, D, ColumnTiles, Packed>(params.sequences * params.kv_heads),
         .early = device_.launches_early},
        stream, params, "decode_kernel");
  }

  std::size_t head_dim_;
  Device device_;
  std::size_t most_heads_ = max_heads;
  int decode_grid_ = 1;
  bool uses_warpgroups_ = false;  // by the kernel for many queries
  std::size_t prefill_slots_ = 0;
  Counts counts_;
};

}  // namespace kvpolicy::gpu
