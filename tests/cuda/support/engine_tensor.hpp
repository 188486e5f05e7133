// SPDX-License-Identifier: Apache-2.0
//
// A tensor of an inference engine in device memory, for caches whose rows lie in it.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cuda/support/device_cache.hpp"
#include "support/engine_memory.hpp"

namespace test {

/// Its numbers are NaN at first. Other sequences own about half of its pages, which are scattered, and so are
/// therefore those that are left for a cache. No byte of the others' pages may change.
class EngineTensor {
 public:
  static constexpr std::size_t head_dim = 64;

  EngineTensor(EngineLayout kind, std::size_t page_rows, std::size_t blocks, std::size_t heads,
               std::uint64_t seed)
      : kind_{kind},
        page_rows_{page_rows},
        blocks_{blocks},
        heads_{heads},
        tensor_{2 * blocks * page_rows * heads * head_dim},
        pool_{pages()} {
    tensor_.upload(std::vector<std::uint16_t>(tensor_.size(), sentinel));
    Random random{seed};
    for (std::size_t head = 0; head < heads; ++head) {
      for (std::size_t block = 0; block < blocks; ++block) {
        if (below(random, 2) == 0) continue;
        const kvpolicy::PageId page = pool_.engine_page(0, head, block);
        REQUIRE(pool_.claim(page));
        others_.push_back(page);
      }
    }
  }
  EngineTensor(const EngineTensor&) = delete;
  EngineTensor& operator=(const EngineTensor&) = delete;
  ~EngineTensor() {
    CHECK(pool_.live_bytes() == other_bytes());
    check_others();
  }

  [[nodiscard]] kvpolicy::EnginePages pages() const {
    const kvpolicy::BlockShape shape{blocks_, page_rows_, heads_, head_dim * sizeof(kvpolicy::float16)};
    const std::span bytes{reinterpret_cast<std::byte*>(tensor_.data()),
                          tensor_.size() * sizeof(kvpolicy::float16)};
    switch (kind_) {
      case EngineLayout::vllm_nhd: return kvpolicy::vllm_nhd(bytes, shape);
      case EngineLayout::flashinfer_nhd: return kvpolicy::flashinfer_nhd(bytes, shape);
      default: return kvpolicy::flashinfer_hnd(bytes, shape);
    }
  }
  [[nodiscard]] kvpolicy::PagePool& pool() { return pool_; }
  [[nodiscard]] const kvpolicy::PagePool& pool() const { return pool_; }
  [[nodiscard]] std::size_t page_rows() const { return page_rows_; }
  [[nodiscard]] std::size_t other_bytes() const { return others_.size() * 4 * page_rows_ * head_dim; }
  [[nodiscard]] std::size_t cache_bytes() const { return pool_.live_bytes() - other_bytes(); }

  /// The number of the tensor that a row begins with, by the shapes that the engines state. `side`: 0 for keys, 1
  /// for values.
  [[nodiscard]] std::size_t index(std::size_t block, std::size_t side, std::size_t row,
                                  std::size_t head) const {
    switch (kind_) {
      case EngineLayout::vllm_nhd:
        return (((side * blocks_ + block) * page_rows_ + row) * heads_ + head) * head_dim;
      case EngineLayout::flashinfer_nhd:
        return (((block * 2 + side) * page_rows_ + row) * heads_ + head) * head_dim;
      default: return (((block * 2 + side) * heads_ + head) * page_rows_ + row) * head_dim;
    }
  }
  [[nodiscard]] std::vector<std::uint16_t> numbers() const { return tensor_.download(); }
  void check_others() const {
    const std::vector<std::uint16_t> now = numbers();
    std::size_t changed = 0;
    for (const kvpolicy::PageId page : others_) {
      for (std::size_t head = 0; head < heads_; ++head) {
        const kvpolicy::PageId first = pool_.engine_page(0, head, 0);
        if (page < first || static_cast<std::size_t>(page - first) >= blocks_) continue;
        for (std::size_t row = 0; row < page_rows_; ++row) {
          for (const std::size_t side : {0U, 1U}) {
            const auto from = now.begin() + static_cast<std::ptrdiff_t>(index(
                                                static_cast<std::size_t>(page - first), side, row, head));
            changed += static_cast<std::size_t>(head_dim - std::count(from, from + head_dim, sentinel));
          }
        }
      }
    }
    CHECK(changed == 0);
  }

 private:
  static constexpr std::uint16_t sentinel = 0xffff;

  EngineLayout kind_;
  std::size_t page_rows_, blocks_, heads_;
  DeviceArray<std::uint16_t> tensor_;
  kvpolicy::PagePool pool_;
  std::vector<kvpolicy::PageId> others_;
};

inline constexpr EngineLayout engine_layouts[] = {EngineLayout::vllm_nhd, EngineLayout::flashinfer_nhd,
                                                  EngineLayout::flashinfer_hnd};

}  // namespace test
