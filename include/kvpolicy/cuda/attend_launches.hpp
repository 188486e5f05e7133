// SPDX-License-Identifier: Apache-2.0
//
// Attention's launches for one model shape on one device: which kernel serves a call, and with how many blocks.
// Decode's serves calls of few queries. For many there is a kernel for all devices (kernels/prefill.cuh) and Hopper's
// (kernels/prefill_hopper.cuh). Used by engine.hpp, in whose memory blocks leave their results.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/cuda/dispatch.hpp>
#include <kvpolicy/cuda/kernel_tables.hpp>
#include <kvpolicy/cuda/kernels/append.cuh>  // can_quantize
#include <kvpolicy/cuda/kernels/attend.cuh>
#include <kvpolicy/cuda/kernels/decode.cuh>
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
  /// device's blocks have too little shared memory or the program has no code for it
  AttendLaunches(const ModelShape& shape, const Device& device) : device_{device} {
    dispatch_head_dim(shape.head_dim, [&]<int D>() { lay_out<D>(); });
    require(shape.kv_heads <= most_heads_, "gpu::Engine: kv_heads is ", shape.kv_heads, ", must be at most ",
            most_heads_);
  }

  /// max_heads, or fewer where a block of the device has too little shared memory to list the work of so many (about
  /// 3,800 for head_dim 256 on compute capability 8.6, 8.9 and 12.0).
  [[nodiscard]] std::size_t most_heads() const { return most_heads_; }
  /// Whether calls of many queries are served by Hopper's kernel, if no head packs.
  [[nodiscard]] bool uses_warpgroups() const { return hopper_.code != nullptr; }
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

  /// Whether its kernels begin before the one in front of them on the stream has ended (Grid::early).
  [[nodiscard]] bool launches_early() const { return launches_early_; }

  /// Attention of one call that passes both checks. `params.workspace` has counts(). `packs`: some head may have
  /// quantised rows. `longest`: about the most rows that a query reads of a head, by which the work of few query tiles
  /// is split. @throws DeviceError
  void attend(AttendParams params, bool packs, std::size_t longest, cudaStream_t stream) const {
    const int columns = params.request.queries * params.group;
    if (columns <= decode_most_columns) return attend_few(params, columns, packs, stream);
    const int items = params.sequences * params.kv_heads * tiles(params.request.queries, params.group, packs);
    attend_many(params, static_cast<std::size_t>(items), packs, longest, stream);
  }
  /// The same for a ragged call (AttendParams::ragged): `queries` are those of each sequence. @throws DeviceError
  void attend_ragged(AttendParams params, std::span<const int> queries, bool packs, std::size_t longest,
                     cudaStream_t stream) const {
    const int most_few = decode_most_columns / params.group;
    int few = 0;
    int many = 0;
    std::size_t items = 0;
    for (const int count : queries) {
      int& most = count <= most_few ? few : many;
      most = std::max(most, count);
      if (count > most_few) {
        items += static_cast<std::size_t>(params.kv_heads * tiles(count, params.group, packs));
      }
    }
    if (few > 0) {
      params.request.queries = few;
      params.least_queries = 1;
      attend_few(params, few * params.group, packs, stream);
    }
    if (many == 0) return;
    params.request.queries = many;
    params.least_queries = most_few + 1;
    attend_many(params, items, packs, longest, stream);
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
    decode_[0] = {detail::decode_kernel_of<E, D, 1, false>(), detail::decode_kernel_of<E, D, 2, false>()};
    prefill_[0] = detail::prefill_kernel_of<E, D, false>();
    if constexpr (packs) {
      decode_[1] = {detail::decode_kernel_of<E, D, 1, true>(), detail::decode_kernel_of<E, D, 2, true>()};
      prefill_[1] = detail::prefill_kernel_of<E, D, true>();
    }
    decode_grid_ = device_.multiprocessors * decode_blocks_per_multiprocessor;
    prefill_slots_ = static_cast<std::size_t>(2 * device_.multiprocessors);
    const auto decode_rows =
        static_cast<std::size_t>(decode_workspace_slots(decode_grid_)) * decode_most_columns;
    const std::size_t prefill_rows = prefill_slots_ * static_cast<std::size_t>(prefill_[0].query_rows);
    const detail::PrefillKernel hopper = detail::prefill_hopper_kernel_of<E, D>();
    if (hopper.code != nullptr && device_.shared_bytes_of_block >= hopper.shared_bytes &&
        is_compiled_for(hopper.code, hopper.threads)) {
      hopper_ = hopper;
    }
    const std::size_t states = std::max(decode_rows, prefill_rows);
    counts_ = {.tickets = std::max(max_heads, prefill_slots_), .states = states, .values = states * D};
    launches_early_ = true;
    const auto prepare = [&](const Kernel<AttendParams>& kernel) {
      if (kernel.code != nullptr && load_kernel(kernel) < first_that_waits) launches_early_ = false;
    };
    for (const auto& kernels : decode_) std::ranges::for_each(kernels, prepare);
    std::ranges::for_each(prefill_, prepare);
    prepare(hopper_);
  }

  // The kernel for many queries: Hopper's where it can be used and no head packs.
  [[nodiscard]] const detail::PrefillKernel& prefill(bool packs) const {
    if (packs && prefill_[1].code != nullptr) return prefill_[1];
    return uses_warpgroups() ? hopper_ : prefill_[0];
  }
  [[nodiscard]] int tiles(int queries, int group, bool packs) const {
    return quotient_up(queries * group, prefill(packs).query_rows);
  }

  void attend_few(const AttendParams& params, int columns, bool packs, cudaStream_t stream) const {
    const auto& of_rows = decode_[packs && decode_[1][0].code != nullptr ? 1 : 0];
    Kernel<AttendParams> kernel = of_rows[columns <= 8 ? 0 : 1];
    kernel.shared_bytes += decode_shared_bytes_of_heads(params.sequences * params.kv_heads - 1);
    launch(kernel, {.x = decode_grid_, .early = launches_early_}, stream, params);
  }
  void attend_many(AttendParams& params, std::size_t items, bool packs, std::size_t longest,
                   cudaStream_t stream) const {
    const detail::PrefillKernel& kernel = prefill(packs);
    // Few tiles of queries over many rows: several blocks share a tile, as long as one block has
    // some work (a tile of keys is 64 rows or more).
    constexpr std::size_t min_rows = 512;
    const std::size_t slots = &kernel == &hopper_ ? prefill_slots_ / 2 : prefill_slots_;
    params.splits = static_cast<int>(
        std::max<std::size_t>(1, std::min(slots / std::max<std::size_t>(items, 1), longest / min_rows)));
    launch(kernel, {.x = static_cast<int>(items) * params.splits, .early = launches_early_}, stream, params);
  }

  Device device_;
  std::size_t most_heads_ = max_heads;
  std::array<std::array<Kernel<AttendParams>, 2>, 2> decode_;  // of exact rows and all, for 8 columns and 16
  std::array<detail::PrefillKernel, 2> prefill_;               // of exact rows and all
  detail::PrefillKernel hopper_;                               // null where it is not to be used
  bool launches_early_ = false;
  int decode_grid_ = 1;
  std::size_t prefill_slots_ = 0;
  Counts counts_;
};

}  // namespace kvpolicy::gpu
