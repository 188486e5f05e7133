// SPDX-License-Identifier: Apache-2.0
//
// The latest queries of one layer, kept because a compression asks how they attend
// (policy/head_budget_cache.hpp). A ring over text positions, so a rollback needs no copy.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory_resource>
#include <span>
#include <vector>

#include <kvpolicy/core/row.hpp>
#include <kvpolicy/core/tensor_view.hpp>
#include <kvpolicy/storage/page.hpp>

namespace kvpolicy {

/// Copying copies the queries. Not synchronised.
template <Element E>
class ObservationWindow {
 public:
  /// Keeps `window` queries [q_heads, head_dim] even after the latest `rollback` were taken back.
  ObservationWindow(std::size_t window, std::size_t rollback, std::size_t q_heads, std::size_t head_dim,
              std::pmr::memory_resource* memory)
      : window_{window}, slots_{window == 0 ? 0 : window + rollback}, q_heads_{q_heads},
        head_dim_{head_dim}, memory_{memory}, row_(head_dim) {
    if (slots_ > 0) queries_ = Page{memory, bytes()};
  }
  ObservationWindow(const ObservationWindow& other)
      : window_{other.window_}, slots_{other.slots_}, q_heads_{other.q_heads_},
        head_dim_{other.head_dim_}, memory_{other.memory_}, begin_{other.begin_},
        end_{other.end_}, written_{other.written_}, row_{other.row_} {
    if (slots_ == 0) return;
    queries_ = Page{memory_, bytes()};
    std::memcpy(queries_.get(), other.queries_.get(), bytes());
  }
  ObservationWindow(ObservationWindow&&) noexcept = default;
  ObservationWindow& operator=(const ObservationWindow&) = delete;
  ObservationWindow& operator=(ObservationWindow&&) noexcept = default;
  ~ObservationWindow() = default;

  [[nodiscard]] std::size_t bytes() const { return slots_ * q_heads_ * head_dim_ * sizeof(E); }

  /// The queries of the tokens from text position `position` on.
  void push(const ConstTensor& queries, std::size_t position) {
    if (slots_ == 0 || queries.tokens == 0) return;
    if (position > end_) begin_ = position;  // queries between were never shown
    const std::size_t skipped = queries.tokens - std::min(queries.tokens, slots_);
    for (std::size_t token = skipped; token < queries.tokens; ++token) {
      for (std::size_t head = 0; head < q_heads_; ++head) {
        load_dense(queries.encoding, queries.row(token, head), row_);
        store_dense(encoding_of<E>, row_, slot((position + token) % slots_, head));
      }
    }
    end_ = position + queries.tokens;
    written_ = std::max(written_, end_);
    begin_ = std::max(begin_, written_ - std::min(written_, slots_));
  }

  /// A new window learns what another one of the same queries knows, as far as it has room.
  void take(const ObservationWindow& other) {
    if (slots_ == 0) return;
    const std::size_t count = std::min(other.end_ - other.begin_, slots_);
    for (std::size_t position = other.end_ - count; position < other.end_; ++position) {
      std::memcpy(slot(position % slots_, 0), other.slot(position % other.slots_, 0),
                  bytes() / slots_);
    }
    begin_ = other.end_ - count;
    end_ = written_ = other.end_;
  }

  /// Forgets the queries at `position` and behind.
  void truncate(std::size_t position) {
    end_ = std::min(end_, position);
    begin_ = std::min(begin_, end_);
  }

  /// Of the queries from `position` on, those at `position + path[i]` are from now on the ones at
  /// `position + i`; the others are forgotten. `path` ascends.
  void keep(std::size_t position, std::span<const std::size_t> path) noexcept {
    std::size_t unknown = 0;  // the first of the path, where they were never shown
    std::size_t known = 0;
    for (std::size_t i = 0; i < path.size() && position + path[i] < end_; ++i) {
      known = i + 1;
      if (position + path[i] < begin_) {
        unknown = i + 1;
      } else if (path[i] != i && slots_ > 0) {
        std::memcpy(slot((position + i) % slots_, 0), slot((position + path[i]) % slots_, 0),
                    bytes() / slots_);
      }
    }
    if (begin_ > position) begin_ = position + unknown;
    truncate(position + known);
  }

  /// The latest queries, at most `window`: [count, q_heads, head_dim] copied into `out`. They
  /// belong to the positions that end at `end()`.
  [[nodiscard]] std::size_t copy_latest(std::size_t count, E* out) const {
    count = std::min(count, size());
    const std::size_t row = q_heads_ * head_dim_;
    for (std::size_t i = 0; i < count; ++i) {
      std::memcpy(out + i * row, slot((end_ - count + i) % slots_, 0), row * sizeof(E));
    }
    return count;
  }
  /// Of a text of `tokens` tokens. Loading takes as many of the latest queries as there is room for.
  template <class Archive>
  void serialize(Archive& archive, std::size_t tokens) {
    std::size_t end = end_;
    std::size_t count = end_ - begin_;
    archive(end, count);
    archive.check(count <= end && end <= tokens, "queries of the text's ", tokens, " tokens");
    const std::size_t query_bytes = q_heads_ * head_dim_ * sizeof(E);
    if constexpr (Archive::loading) {
      std::vector<std::byte> forgotten(query_bytes);
      for (std::size_t position = end - count; position < end; ++position) {
        const bool kept = end - position <= slots_;
        archive.bytes(kept ? std::span{slot(position % slots_, 0), query_bytes}
                           : std::span{forgotten});
      }
      if (slots_ == 0) return;
      begin_ = end - std::min(count, slots_);
      end_ = written_ = end;
    } else {
      for (std::size_t position = begin_; position < end_; ++position) {
        archive.bytes(std::span{slot(position % slots_, 0), query_bytes});
      }
    }
  }

  /// How many queries are known, at most `window`.
  [[nodiscard]] std::size_t size() const { return std::min(end_ - begin_, window_); }
  [[nodiscard]] std::size_t end() const { return end_; }

 private:
  [[nodiscard]] std::byte* slot(std::size_t place, std::size_t head) const {
    return queries_.get() + (place * q_heads_ + head) * head_dim_ * sizeof(E);
  }

  std::size_t window_;
  std::size_t slots_;
  std::size_t q_heads_;
  std::size_t head_dim_;
  std::pmr::memory_resource* memory_;
  std::size_t begin_ = 0;    // positions held: [begin_, end_)
  std::size_t end_ = 0;
  std::size_t written_ = 0;  // the furthest position ever written
  Page queries_;
  std::vector<float> row_;
};

}  // namespace kvpolicy
