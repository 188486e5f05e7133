// SPDX-License-Identifier: Apache-2.0
//
// The summaries of a head's chunks (policy/chunk_retrieval_cache.hpp): kept while rows come, and scored
// when a query chooses.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/boxed.hpp>
#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/row.hpp>
#include <kvpolicy/core/scratch.hpp>
#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/policy/chunk_summary.hpp>
#include <kvpolicy/storage/plane_store.hpp>
#include <kvpolicy/storage/storage_context.hpp>

namespace kvpolicy::detail {

/// The summaries of all full chunks as numbers of type E, one plane [chunks, head_dim] for each vector of a
/// summary, and the summary of the chunk that is not full. Copying makes a fork. Not synchronised.
template <Element E, ChunkSummary Summary>
class ChunkSummaries {
 public:
  explicit ChunkSummaries(const StorageContext& context) {
    planes_.reserve(Summary::vectors);
    for (std::size_t v = 0; v < Summary::vectors; ++v) planes_.emplace_back(format(), context);
  }

  [[nodiscard]] std::size_t head_dim() const { return planes_.front().context().head_dim; }
  /// Full chunks.
  [[nodiscard]] std::size_t chunks() const { return planes_.front().end(); }

  /// Memory for rows to come, until there are `chunks` full chunks.
  /// @throws std::bad_alloc, or what the pool throws
  void reserve(std::size_t chunks) {
    if (!open_) open_.emplace(head_dim());
    for (PlaneStore& plane : planes_) plane.reserve(plane.end(), chunks);
  }
  void release_unused() noexcept {
    for (PlaneStore& plane : planes_) plane.release_unused();
  }
  /// Row `i` of `keys` joins the chunk that is not full.
  void add(const Plane& keys, std::size_t i) {
    std::array<float, max_head_dim> numbers;
    const std::span<float> row = std::span{numbers}.first(head_dim());
    load_row(keys, i, row);
    round_dense(encoding_of<E>, row);  // as it is kept
    open_->add(row);
  }
  /// The chunk is full.
  void close_chunk() {
    std::array<float, max_head_dim> numbers;
    const std::span<float> summary = std::span{numbers}.first(head_dim());
    for (std::size_t v = 0; v < Summary::vectors; ++v) {
      open_->finish(v, summary);
      const Plane plane{.base = reinterpret_cast<const std::byte*>(summary.data()),
                        .row_stride = summary.size_bytes()};
      planes_[v].append(plane, 1);
    }
    open_->clear();
  }

  /// The score of each full chunk for the queries [group, head_dim]; `engine` computes dot products.
  template <class Engine>
  void score(std::span<const float> queries, Engine& engine, std::span<float> scores) const {
    thread_local Scratch<float> part_scratch, split_scratch;
    const std::span<float> part = part_scratch.take(scores.size());
    const std::span<float> split = split_scratch.take(head_dim());
    std::ranges::fill(scores, 0.0F);
    for (std::size_t v = 0; v < Summary::vectors && !scores.empty(); ++v) {
      std::ranges::fill(split, 0.0F);
      for (std::size_t at = 0; at < queries.size(); at += head_dim()) {
        Summary::split(v, queries.subspan(at, head_dim()), split);
      }
      engine.score(planes_[v].plane(0), split, part);
      for (std::size_t i = 0; i < scores.size(); ++i) scores[i] += part[i];
    }
  }

  void add_to(std::vector<Plane>& summaries) const {
    for (const PlaneStore& plane : planes_) summaries.push_back(plane.plane(0));
  }
  /// New summaries take those of `chunks` full chunks. The rows after them are added one by one.
  void take(const std::vector<Plane>& summaries, std::size_t chunks) {
    for (std::size_t v = 0; v < Summary::vectors; ++v) planes_[v].append(summaries[v], chunks);
    open_.emplace(head_dim());
  }

  [[nodiscard]] std::size_t bytes() const { return sum(&PlaneStore::bytes); }
  [[nodiscard]] std::size_t shared_bytes() const { return sum(&PlaneStore::shared_bytes); }
  /// Bookkeeping besides the object itself.
  [[nodiscard]] std::size_t overhead_bytes() const {
    const std::size_t open = sizeof(Summary) + Summary::vectors * head_dim() * sizeof(float);
    return planes_.capacity() * sizeof(PlaneStore) + sum(&PlaneStore::overhead_bytes) + (open_ ? open : 0);
  }
  /// What `bytes()` is for so many full chunks.
  [[nodiscard]] static std::size_t bytes_of_chunks(const StorageContext& context, std::size_t chunks) {
    return Summary::vectors * PlaneStore::bytes_of_rows(format(), context, 0, chunks);
  }

  template <class Archive>
  void serialize(Archive& archive) {
    for (PlaneStore& plane : planes_) archive(plane);
    Summary open = open_ ? *open_ : Summary{head_dim()};
    archive(open);
    if constexpr (Archive::loading) open_.emplace(std::move(open));
  }
  /// Refuses what was loaded unless there are so many full chunks.
  template <class Archive>
  void check(const Archive& archive, std::size_t chunks) const {
    for (const PlaneStore& plane : planes_) {
      archive.check(plane.begin() == 0 && plane.end() == chunks, "summaries of ", chunks, " chunks");
    }
  }

 private:
  [[nodiscard]] static RowFormat format() { return {.encoding = encoding_of<E>}; }
  [[nodiscard]] std::size_t sum(std::size_t (PlaneStore::*bytes_of)() const) const {
    std::size_t total = 0;
    for (const PlaneStore& plane : planes_) total += (plane.*bytes_of)();
    return total;
  }

  std::vector<PlaneStore> planes_;
  Boxed<Summary> open_;  // once there were rows
};

}  // namespace kvpolicy::detail
