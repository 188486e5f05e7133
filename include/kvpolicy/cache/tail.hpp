// SPDX-License-Identifier: Apache-2.0
//
// The latest rows of one layer, for all its KV heads, in full precision: rows that `truncate` may
// still take back, and rows of an `append` that wait for their `attend`. No policy has seen them.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <memory_resource>
#include <span>

#include <kvpolicy/core/row.hpp>
#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/core/tensor_view.hpp>
#include <kvpolicy/memory/buffer.hpp>
#include <kvpolicy/storage/storage_context.hpp>

namespace kvpolicy {

/// A ring over rows in the order they came: text positions, but for the nodes of a tree, which follow
/// the text in their own order (cache/pending_tree.hpp). Copying copies the rows. Not synchronised.
template <Element E>
class Tail {
 public:
  Tail(std::size_t rows, std::size_t kv_heads, std::size_t head_dim,
       std::pmr::memory_resource* memory)
      : slots_{rows}, kv_heads_{kv_heads}, head_dim_{head_dim}, rows_{memory, bytes()} {}
  Tail(const Tail& other)
      : slots_{other.slots_}, kv_heads_{other.kv_heads_}, head_dim_{other.head_dim_},
        rows_{other.rows_.memory(), bytes()} {
    std::memcpy(rows_.get(), other.rows_.get(), bytes());
  }
  Tail(Tail&&) noexcept = default;
  Tail& operator=(const Tail&) = delete;
  Tail& operator=(Tail&&) noexcept = default;
  ~Tail() = default;

  [[nodiscard]] std::size_t bytes() const {
    return 2 * slots_ * kv_heads_ * head_dim_ * sizeof(E);
  }

  /// The tokens [first, last) of `keys` and `values` become the rows from `position` on.
  void write(const ConstTensor& keys, const ConstTensor& values, std::size_t first,
             std::size_t last, std::size_t position) {
    std::array<float, max_head_dim> numbers;
    const std::span<float> row = std::span{numbers}.first(head_dim_);
    for (std::size_t token = first; token < last; ++token, ++position) {
      for (std::size_t head = 0; head < kv_heads_; ++head) {
        load_dense(keys.encoding, keys.row(token, head), row);
        store_dense(encoding_of<E>, row, side(head, 0) + position % slots_ * row_bytes());
        load_dense(values.encoding, values.row(token, head), row);
        store_dense(encoding_of<E>, row, side(head, 1) + position % slots_ * row_bytes());
      }
    }
  }

  /// Row `to` becomes what row `from` is, in every head.
  void move(std::size_t from, std::size_t to) noexcept {
    if (from == to) return;
    for (std::size_t head = 0; head < kv_heads_; ++head) {
      for (std::size_t which = 0; which < 2; ++which) {
        std::memcpy(side(head, which) + to % slots_ * row_bytes(),
                    side(head, which) + from % slots_ * row_bytes(), row_bytes());
      }
    }
  }

  /// The rows [from, to), of which there is room for all.
  template <class Archive>
  void serialize(Archive& archive, std::size_t from, std::size_t to) {
    for (std::size_t head = 0; head < kv_heads_; ++head) {
      for (std::size_t which = 0; which < 2; ++which) {
        for (std::size_t row = from; row < to; ++row) {
          archive.bytes(std::span{side(head, which) + row % slots_ * row_bytes(), row_bytes()});
        }
      }
    }
  }

  /// Calls visit(segment) for one head's rows [from, to): two segments where the ring wraps.
  template <class Visit>
  void for_each_segment(std::size_t head, std::size_t from, std::size_t to, Visit visit) const {
    while (from < to) {
      const std::size_t slot = from % slots_;
      const std::size_t count = std::min(to - from, slots_ - slot);
      visit(Segment{.keys = plane(head, 0, slot), .values = plane(head, 1, slot), .rows = count,
                    .position = static_cast<std::int64_t>(from)});
      from += count;
    }
  }

 private:
  [[nodiscard]] std::size_t row_bytes() const { return head_dim_ * sizeof(E); }
  [[nodiscard]] std::byte* side(std::size_t head, std::size_t which) const {
    return rows_.get() + (2 * head + which) * slots_ * row_bytes();
  }
  [[nodiscard]] Plane plane(std::size_t head, std::size_t which, std::size_t slot) const {
    return {.format = {.encoding = encoding_of<E>}, .base = side(head, which),
            .row_stride = row_bytes(), .first_row = slot};
  }

  std::size_t slots_;
  std::size_t kv_heads_;
  std::size_t head_dim_;
  Buffer rows_;  // [kv_heads, keys and values, slots, head_dim]
};

}  // namespace kvpolicy
