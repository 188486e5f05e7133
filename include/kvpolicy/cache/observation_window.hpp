// SPDX-License-Identifier: Apache-2.0
//
// The latest queries of one layer, kept because a compression asks how they attend
// (policy/head_budget_cache.hpp). A ring over text positions, so a rollback needs no copy.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <memory_resource>
#include <span>
#include <vector>

#include <kvpolicy/cache/query_range.hpp>
#include <kvpolicy/core/row.hpp>
#include <kvpolicy/core/tensor_view.hpp>
#include <kvpolicy/memory/buffer.hpp>
#include <kvpolicy/storage/storage_context.hpp>

namespace kvpolicy {

/// Copying copies the queries. Not synchronised.
template <Element E>
class ObservationWindow {
 public:
  /// Keeps `window` queries [q_heads, head_dim] even after the latest `rollback` were taken back.
  ObservationWindow(std::size_t window, std::size_t rollback, std::size_t q_heads, std::size_t head_dim,
                    std::pmr::memory_resource* memory)
      : window_{window}, held_{window == 0 ? 0 : window + rollback}, q_heads_{q_heads}, head_dim_{head_dim} {
    if (is_kept()) queries_ = Buffer{memory, bytes()};
  }
  ObservationWindow(const ObservationWindow& other)
      : window_{other.window_}, held_{other.held_}, q_heads_{other.q_heads_}, head_dim_{other.head_dim_} {
    if (!is_kept()) return;
    queries_ = Buffer{other.queries_.memory(), bytes()};
    std::memcpy(queries_.get(), other.queries_.get(), bytes());
  }
  ObservationWindow(ObservationWindow&&) noexcept = default;
  ObservationWindow& operator=(const ObservationWindow&) = delete;
  ObservationWindow& operator=(ObservationWindow&&) noexcept = default;
  ~ObservationWindow() = default;

  /// All queries, whatever they mean.
  [[nodiscard]] Buffer& buffer() noexcept { return queries_; }
  [[nodiscard]] std::size_t bytes() const { return held_.slots() * query_bytes(); }

  /// The queries of the tokens from text position `position` on.
  void push(const ConstTensor& queries, std::size_t position) {
    if (!is_kept() || queries.tokens == 0) return;
    std::array<float, max_head_dim> numbers;
    const std::span<float> row = std::span{numbers}.first(head_dim_);
    const std::size_t skipped = queries.tokens - std::min(queries.tokens, held_.slots());
    for (std::size_t token = skipped; token < queries.tokens; ++token) {
      for (std::size_t head = 0; head < q_heads_; ++head) {
        load_dense(queries.encoding, queries.row(token, head), row);
        store_dense(encoding_of<E>, row, query(position + token) + head * head_dim_ * sizeof(E));
      }
    }
    held_.push(position, queries.tokens);
  }

  /// A new window learns what another one of the same queries knows, as far as it has room.
  void take(const ObservationWindow& other) {
    if (!is_kept()) return;
    held_.reset(other.held_.end(), other.held_.size());
    for (std::size_t position = held_.begin(); position < held_.end(); ++position) {
      std::memcpy(query(position), other.query(position), query_bytes());
    }
  }

  /// Forgets the queries at `position` and after it.
  void truncate(std::size_t position) { held_.truncate(position); }

  /// Moves the queries at `position + path[i]` to `position + i`. All other queries from `position` on are
  /// forgotten. `path` ascends.
  void keep(std::size_t position, std::span<const std::size_t> path) noexcept {
    for (std::size_t i = 0; i < path.size(); ++i) {
      if (path[i] == i || !held_.holds(position + path[i])) continue;
      std::memcpy(query(position + i), query(position + path[i]), query_bytes());
    }
    held_.accept(position, path);
  }

  /// Which queries are held, those included that only a rollback makes the latest.
  [[nodiscard]] const QueryRange& held() const { return held_; }
  /// All of them: [held().size(), q_heads, head_dim].
  void copy_held(E* out) const {
    for (std::size_t position = held_.begin(); position < held_.end(); ++position) {
      std::memcpy(out + (position - held_.begin()) * q_heads_ * head_dim_, query(position), query_bytes());
    }
  }
  /// The latest queries, at most `window`: [count, q_heads, head_dim] copied into `out`. They
  /// belong to the positions that end at `end()`.
  [[nodiscard]] std::size_t copy_latest(std::size_t count, E* out) const {
    count = std::min(count, size());
    const std::size_t row = q_heads_ * head_dim_;
    for (std::size_t i = 0; i < count; ++i) {
      std::memcpy(out + i * row, query(end() - count + i), query_bytes());
    }
    return count;
  }
  /// For a text of `tokens` tokens. Loading takes as many of the latest queries as there is room for.
  template <class Archive>
  void serialize(Archive& archive, std::size_t tokens) {
    std::size_t end = held_.end();
    std::size_t count = held_.size();
    archive(end, count);
    archive.check(count <= end && end <= tokens, "queries of the text's ", tokens, " tokens");
    if constexpr (Archive::loading) {
      std::vector<std::byte> forgotten(query_bytes());
      for (std::size_t position = end - count; position < end; ++position) {
        const bool kept = end - position <= held_.slots();
        archive.bytes(kept ? std::span{query(position), query_bytes()} : std::span{forgotten});
      }
      if (is_kept()) held_.reset(end, count);
    } else {
      for (std::size_t position = held_.begin(); position < end; ++position) {
        archive.bytes(std::span{query(position), query_bytes()});
      }
    }
  }

  /// How many queries are known, at most `window`.
  [[nodiscard]] std::size_t size() const { return std::min(held_.size(), window_); }
  [[nodiscard]] std::size_t end() const { return held_.end(); }

 private:
  [[nodiscard]] bool is_kept() const { return held_.slots() > 0; }
  // The bytes of one token's queries, [q_heads, head_dim].
  [[nodiscard]] std::size_t query_bytes() const { return q_heads_ * head_dim_ * sizeof(E); }
  [[nodiscard]] std::byte* query(std::size_t position) const {
    return queries_.get() + position % held_.slots() * query_bytes();
  }

  std::size_t window_;
  QueryRange held_;
  std::size_t q_heads_;
  std::size_t head_dim_;
  Buffer queries_;
};

}  // namespace kvpolicy
