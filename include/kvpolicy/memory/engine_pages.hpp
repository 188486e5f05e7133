// SPDX-License-Identifier: Apache-2.0
//
// Describes paged memory that an inference engine already has, so that a pool
// (memory/page_pool.hpp) hands out its pages in place. A page holds the keys and the values of one
// KV head for `page_rows` tokens; engines with vLLM's or FlashInfer's layout have kv_heads such
// pages in what they call a block.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy {

/// Strided memory of an engine. All strides and offsets are bytes. Key row r of head h in block b
/// of an arena starts at
///     arena + b * block_stride + h * head_stride + r * row_stride,
/// and its value row lies `values_offset` bytes after it.
struct EnginePages {
  /// One or more tensors with this layout: engines have one for each layer. They must outlive the
  /// pool.
  std::vector<std::span<std::byte>> arenas = {};
  std::size_t blocks = 0;  ///< in each arena
  std::size_t block_stride = 0;
  std::size_t heads = 1;        ///< KV heads in each block
  std::size_t head_stride = 0;  ///< only read if there are several heads
  std::size_t page_rows = 0;    ///< tokens in a block
  std::size_t row_stride = 0;
  std::size_t row_bytes = 0;      ///< of one head's key, and of its value
  std::size_t values_offset = 0;  ///< 0: a row has no value besides its key (a latent cache)

  /// Bytes of one page: its keys and its values.
  [[nodiscard]] std::size_t page_bytes() const {
    return page_rows * row_bytes * (values_offset == 0 ? 1 : 2);
  }

  /// The largest power of two that all rows are a multiple of.
  [[nodiscard]] std::size_t alignment() const {
    std::uintptr_t bits = block_stride | row_stride | values_offset | (heads > 1 ? head_stride : 0);
    for (const std::span<std::byte> arena : arenas) bits |= reinterpret_cast<std::uintptr_t>(arena.data());
    return static_cast<std::size_t>(bits & (~bits + 1));
  }

  /// @throws ConfigError if rows would overlap or lie outside an arena.
  void validate() const {
    require(!arenas.empty(), "EnginePages: there is no arena, must be at least one");
    for (const auto& [value, name] : {std::pair{blocks, "blocks"}, std::pair{heads, "heads"},
                                      std::pair{page_rows, "page_rows"}, std::pair{row_bytes, "row_bytes"}}) {
      require(value > 0, "EnginePages: ", name, " is 0, must be at least 1");
    }
    for (std::size_t i = 0; i < arenas.size(); ++i) {
      const auto begin = reinterpret_cast<std::uintptr_t>(arenas[i].data());
      for (std::size_t other = 0; other < i; ++other) {
        const auto from = reinterpret_cast<std::uintptr_t>(arenas[other].data());
        require(begin >= from + arenas[other].size() || from >= begin + arenas[i].size(),
                "EnginePages: arenas ", other, " and ", i, " overlap, must be memory of their own");
      }
    }
    // Rows cannot overlap if each stride steps over all that smaller strides reach.
    struct Axis {
      const char* name;
      std::size_t stride, count;
    };
    std::array axes{Axis{"block_stride", block_stride, blocks}, Axis{"head_stride", head_stride, heads},
                    Axis{"row_stride", row_stride, page_rows},
                    Axis{"values_offset", values_offset, values_offset == 0 ? std::size_t{1} : 2}};
    std::ranges::sort(axes, {}, &Axis::stride);
    const std::size_t limit = std::ranges::min(arenas, {}, &std::span<std::byte>::size).size();
    std::size_t reach = row_bytes;
    for (const Axis& axis : axes) {
      if (axis.count == 1) continue;
      require(axis.stride >= reach, "EnginePages: ", axis.name, " is ", axis.stride,
              " bytes, must be at least ", reach, ", or rows overlap");
      require(reach <= limit && axis.count - 1 <= (limit - reach) / axis.stride, "EnginePages: an arena has ",
              limit, " bytes, too few for ", axis.count, " times a ", axis.name, " of ", axis.stride,
              " (give all of the tensor, or fewer blocks)");
      reach += (axis.count - 1) * axis.stride;
    }
    require(reach <= limit, "EnginePages: an arena has ", limit, " bytes, must have at least ", reach);
  }
};

/// Sizes of an engine's KV tensor. `row_bytes` is head_dim times the bytes of a number.
struct BlockShape {
  std::size_t blocks = 0;
  std::size_t block_size = 0;  ///< tokens in a block
  std::size_t kv_heads = 0;
  std::size_t row_bytes = 0;
};

namespace detail {

// Divides instead of multiplying, because a product may wrap around.
inline void check_tensor_bytes(std::span<const std::byte> tensor, const BlockShape& shape) {
  const auto [blocks, block_size, kv_heads, row_bytes] = shape;
  const bool positive = blocks > 0 && block_size > 0 && kv_heads > 0 && row_bytes > 0;
  require(positive && tensor.size() / 2 / row_bytes / kv_heads / block_size >= blocks,
          "EnginePages: a tensor of ", tensor.size(), " bytes cannot be keys and values of ", blocks,
          " blocks of ", block_size, " tokens, ", kv_heads, " heads and ", row_bytes,
          " bytes a row; none may be 0");
}

}  // namespace detail

/// vLLM's NHD: [2, blocks, block_size, kv_heads, head_dim]. @throws ConfigError
[[nodiscard]] inline EnginePages vllm_nhd(std::span<std::byte> tensor, const BlockShape& shape) {
  detail::check_tensor_bytes(tensor, shape);
  const std::size_t token = shape.kv_heads * shape.row_bytes;
  const std::size_t block = shape.block_size * token;
  return {.arenas = {tensor},
          .blocks = shape.blocks,
          .block_stride = block,
          .heads = shape.kv_heads,
          .head_stride = shape.row_bytes,
          .page_rows = shape.block_size,
          .row_stride = token,
          .row_bytes = shape.row_bytes,
          .values_offset = shape.blocks * block};
}

/// FlashInfer's NHD: [blocks, 2, block_size, kv_heads, head_dim]. @throws ConfigError
[[nodiscard]] inline EnginePages flashinfer_nhd(std::span<std::byte> tensor, const BlockShape& shape) {
  EnginePages pages = vllm_nhd(tensor, shape);
  pages.values_offset = pages.block_stride;
  pages.block_stride *= 2;
  return pages;
}

/// FlashInfer's HND: [blocks, 2, kv_heads, block_size, head_dim]. @throws ConfigError
[[nodiscard]] inline EnginePages flashinfer_hnd(std::span<std::byte> tensor, const BlockShape& shape) {
  EnginePages pages = flashinfer_nhd(tensor, shape);
  pages.head_stride = shape.block_size * shape.row_bytes;
  pages.row_stride = shape.row_bytes;
  return pages;
}

}  // namespace kvpolicy
