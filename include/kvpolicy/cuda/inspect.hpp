// SPDX-License-Identifier: Apache-2.0
//
// A head's rows, read back from the device: for tests, for looking at what a policy kept, and for
// moving rows elsewhere. Waits for the stream; not for the hot path.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/hadamard.hpp>
#include <kvpolicy/core/token_tree.hpp>
#include <kvpolicy/cuda/device_tree.hpp>
#include <kvpolicy/cuda/head_store.hpp>
#include <kvpolicy/cuda/kernels/packing.cuh>

namespace kvpolicy::gpu {

struct CachedRows {
  /// The text position of each row, ascending; then the positions of the nodes of a pending tree.
  std::vector<std::int64_t> positions;
  std::vector<bool> quantized;  ///< of each row, whether its key is
  std::vector<float> keys;      ///< [rows, head_dim], dequantised where they must be
  std::vector<float> values;    ///< [rows, head_dim]
  std::size_t nodes = 0;        ///< how many of the rows, the last ones, are nodes of a tree
};

namespace detail {

/// The words of a tile on a page, for `code_at`. Kernels call that as well, so that nvcc takes no lambda of the host's.
struct TileWords {
  const std::byte* tile;

  KVPOLICY_HOST_DEVICE std::uint32_t operator()(int i) const {
    std::uint32_t word;
    std::memcpy(&word, tile + 4 * i, sizeof word);
    return word;
  }
};

}  // namespace detail

/// One row of a page of quantised rows as numbers, as the view reads them: the host's way through the fragment order.
inline void load_packed_row(const std::byte* page, const HeadView& head, int head_dim, int page_rows, int row,
                            bool key, float* out) {
  const int width = head.widths().of(key);
  const PackedLayout layout = head.packed_layout(head_dim, page_rows);
  const std::byte* tile =
      page + (key ? 0 : layout.values_offset) + row / tile_rows * layout.tile_bytes.of(key);
  const auto param = [&](int offset, int index) {
    float16 number;
    std::memcpy(&number, page + offset + 2 * index, sizeof number);
    return static_cast<float>(number);
  };
  for (int channel = 0; channel < head_dim; ++channel) {
    const TileOffset at = key ? offset_of_key(row % tile_rows, channel, head_dim)
                              : offset_of_value(row % tile_rows, channel, head_dim);
    const std::uint32_t code = code_at(at, width, head_dim, detail::TileWords{tile});
    const int index = key ? key_param(row, channel, head_dim, page_rows, head.key_per_channel, head.key_group)
                          : value_param(row, channel, page_rows, head.value_group);
    const float scale = param(key ? layout.key_scales_offset : layout.value_scales_offset, index);
    const float zero = param(key ? layout.key_zeros_offset : layout.value_zeros_offset, index);
    out[channel] = scale * static_cast<float>(code) + zero;
  }
  if (key ? head.key_hadamard : head.value_hadamard) {
    rotate_hadamard({out, static_cast<std::size_t>(head_dim)});
  }
}

/// The rows that a call reads of a head, besides its own. Where a `tree` is pending, one of the latest
/// nodes' queries, or, with own rows, one right after the text.
template <Element E>
[[nodiscard]] CachedRows download_rows(const HeadStore& store, const LayerState& state, Request request,
                                       const TokenTree& tree, std::size_t head_dim, std::size_t page_rows,
                                       cudaStream_t stream) {
  std::vector<int> depths;
  for (std::size_t node = 0; node < tree.size(); ++node) {
    depths.push_back(static_cast<int>(tree.depth(node)));
  }
  if (!tree.empty()) {
    request.queries = std::min(request.queries, static_cast<int>(tree.size()));
    if (request.own_rows) {
      request.tree.nodes = static_cast<int>(tree.size()) + request.queries;
    } else {
      request.tree = DeviceTree::shape_of(tree, static_cast<std::size_t>(request.queries));
    }
  }
  // From the device or from slow memory; a copy within the host need not wait for the stream.
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  const auto fetch = [&](void* to, const void* from, std::size_t bytes) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  };
  HeadView view = store.view();
  Selections choice;
  std::vector<int> numbers;
  if (request.selected && view.selections != nullptr) {
    fetch(&choice, view.selections, sizeof choice);
    numbers.resize(static_cast<std::size_t>(choice.slots * (3 + view.budget_chunks)));
    fetch(numbers.data(), choice.tokens, numbers.size() * sizeof(int));
    choice.tokens = numbers.data();
    choice.ends = choice.tokens + choice.slots;
    choice.counts = choice.ends + choice.slots;
    choice.chunks = choice.counts + choice.slots;
    view.selections = &choice;
  }
  std::vector<long long> survivors(store.survivors());
  if (!survivors.empty()) {
    fetch(survivors.data(), store.positions().get(), survivors.size() * sizeof(long long));
  }
  std::map<const std::byte*, std::vector<std::byte>> fetched;
  const auto page = [&](const Pages& pages, std::size_t index) -> const std::byte* {
    auto& copy = fetched[pages.page(index)];
    if (copy.empty()) {
      copy.resize(pages.page_bytes());
      pages.copy_page(index, copy.data(), stream);
      check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    }
    return copy.data();
  };

  CachedRows rows;
  const DeviceSegmentList list = segments_of(view, state, request);
  const auto dim = static_cast<int>(head_dim);
  const auto rows_of_page = static_cast<int>(page_rows);
  std::vector<float> row(head_dim);
  for (int s = 0; s < list.count; ++s) {
    const DeviceSegment& segment = list.segment[s];
    if (segment.source == DeviceSegment::Source::call) continue;
    const bool packed = segment.source == DeviceSegment::Source::packed;
    for (int i = 0; i < segment.rows; ++i) {
      if (segment.node >= 0) {
        const int depth = depths[static_cast<std::size_t>(segment.node + i)];
        if (depth < segment.depth_begin || depth >= segment.depth_end) continue;
        ++rows.nodes;
      }
      const int number = segment.row(i);
      rows.positions.push_back(
          segment.node >= 0 ? segment.position + depths[static_cast<std::size_t>(segment.node + i)]
          : static_cast<std::size_t>(number) < survivors.size() ? survivors[static_cast<std::size_t>(number)]
                                                                : number + view.evicted);
      // A key or value may have codes though its row is read from its exact slot, where the number that they
      // stand for is rounded.
      const auto has_codes = [&](bool key) {
        return packed || (segment.node < 0 && number >= view.sinks &&
                          number < (key ? view.keys_end(state.committed) : view.values_end(state.committed)));
      };
      rows.quantized.push_back(has_codes(true));
      for (const bool key : {true, false}) {
        const bool coded = has_codes(key);
        const int slot = coded ? view.packed_slot(number) : view.exact_slot(number);
        const auto index = static_cast<std::size_t>(slot / rows_of_page);
        const std::byte* start = coded ? page(store.packed(), index) : page(store.exact(), index);
        if (coded) {
          HeadView read = view;
          read.upper_half = request.upper_half && packed;
          load_packed_row(start, read, dim, rows_of_page, slot % rows_of_page, key, row.data());
        } else {
          const auto* numbers16 =
              reinterpret_cast<const E*>(start) + ((key ? 0 : rows_of_page) + slot % rows_of_page) * dim;
          for (std::size_t c = 0; c < head_dim; ++c) row[c] = static_cast<float>(numbers16[c]);
        }
        auto& side = key ? rows.keys : rows.values;
        side.insert(side.end(), row.begin(), row.end());
      }
    }
  }
  return rows;
}

}  // namespace kvpolicy::gpu
