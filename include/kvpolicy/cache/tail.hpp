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
  /// A tail of `rows` slots for each of `kv_heads` heads, whose keys and values have so many channels.
  Tail(std::size_t rows, std::size_t kv_heads, std::size_t head_dim, std::size_t value_dim,
       std::pmr::memory_resource* memory)
      : slots_{rows}, kv_heads_{kv_heads}, dims_{head_dim, value_dim}, rows_{memory, bytes()} {}
  Tail(const Tail& other) : slots_{other.slots_}, kv_heads_{other.kv_heads_}, dims_{other.dims_} {
    if (slots_ == 0) return;
    rows_ = Buffer{other.rows_.memory(), bytes()};
    std::memcpy(rows_.get(), other.rows_.get(), bytes());
  }
  Tail(Tail&&) noexcept = default;
  Tail& operator=(const Tail&) = delete;
  Tail& operator=(Tail&&) noexcept = default;
  ~Tail() = default;

  /// All rows, whatever they mean.
  [[nodiscard]] Buffer& buffer() noexcept { return rows_; }
  [[nodiscard]] std::size_t bytes() const { return slots_ * kv_heads_ * (row_bytes(0) + row_bytes(1)); }

  /// The tokens [first, last) of `keys` and `values` become the rows from `position` on.
  void write(const ConstTensor& keys, const ConstTensor& values, std::size_t first, std::size_t last,
             std::size_t position) {
    for (std::size_t token = first; token < last; ++token, ++position) {
      for (std::size_t head = 0; head < kv_heads_; ++head) {
        write_row(keys, token, head, 0, position);
        write_row(values, token, head, 1, position);
      }
    }
  }

  /// Row `to` becomes what row `from` is, in every head.
  void move(std::size_t from, std::size_t to) noexcept {
    if (from == to) return;
    for (std::size_t head = 0; head < kv_heads_; ++head) {
      for (std::size_t which = 0; which < 2; ++which) {
        std::memcpy(row(head, which, to), row(head, which, from), row_bytes(which));
      }
    }
  }

  /// The rows [from, to) in another tail of so many slots. A tail without slots holds no memory, and
  /// takes no row.
  /// @throws std::bad_alloc
  [[nodiscard]] Tail with_slots(std::size_t slots, std::size_t from, std::size_t to,
                                std::pmr::memory_resource* memory) const {
    KVPOLICY_ASSERT(to - from <= slots);
    Tail other{slots, kv_heads_, dims_};
    if (slots > 0) other.rows_ = Buffer{memory, other.bytes()};
    for (std::size_t head = 0; head < kv_heads_; ++head) {
      for (std::size_t which = 0; which < 2; ++which) {
        for (std::size_t row = from; row < to; ++row) {
          std::memcpy(other.row(head, which, row), this->row(head, which, row), row_bytes(which));
        }
      }
    }
    return other;
  }

  /// The rows [from, to), of which there is room for all.
  template <class Archive>
  void serialize(Archive& archive, std::size_t from, std::size_t to) {
    for (std::size_t head = 0; head < kv_heads_; ++head) {
      for (std::size_t which = 0; which < 2; ++which) {
        for (std::size_t row = from; row < to; ++row) {
          archive.bytes(std::span{this->row(head, which, row), row_bytes(which)});
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
      visit(Segment{.keys = plane(head, 0, slot),
                    .values = plane(head, 1, slot),
                    .rows = count,
                    .position = static_cast<std::int64_t>(from)});
      from += count;
    }
  }

 private:
  Tail(std::size_t slots, std::size_t kv_heads, const std::array<std::size_t, 2>& dims)
      : slots_{slots}, kv_heads_{kv_heads}, dims_{dims} {}

  // `which`: 0 for keys, 1 for values.
  [[nodiscard]] std::size_t row_bytes(std::size_t which) const { return dims_[which] * sizeof(E); }
  [[nodiscard]] std::byte* side(std::size_t head, std::size_t which) const {
    const std::size_t before = head * (row_bytes(0) + row_bytes(1)) + which * row_bytes(0);
    return rows_.get() + slots_ * before;
  }
  [[nodiscard]] std::byte* row(std::size_t head, std::size_t which, std::size_t position) const {
    return side(head, which) + position % slots_ * row_bytes(which);
  }
  void write_row(const ConstTensor& rows, std::size_t token, std::size_t head, std::size_t which,
                 std::size_t position) {
    std::array<float, max_head_dim> memory;
    const std::span<float> numbers = std::span{memory}.first(dims_[which]);
    load_dense(rows.encoding, rows.row(token, head), numbers);
    store_dense(encoding_of<E>, numbers, row(head, which, position));
  }
  [[nodiscard]] Plane plane(std::size_t head, std::size_t which, std::size_t slot) const {
    return {.format = {.encoding = encoding_of<E>},
            .base = side(head, which),
            .row_stride = row_bytes(which),
            .first_row = slot};
  }

  std::size_t slots_;
  std::size_t kv_heads_;
  std::array<std::size_t, 2> dims_;  // of keys and of values
  Buffer rows_;  // of each head first its keys, [slots, head_dim], then its values, [slots, value_dim]
};

}  // namespace kvpolicy
