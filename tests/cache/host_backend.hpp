// SPDX-License-Identifier: Apache-2.0
//
// What a Sequence (cache/sequence.hpp) asks of a cache besides its interface, for kvpolicy::KvCache.
#pragma once

#include <doctest/doctest.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include <kvpolicy/kvpolicy.hpp>

#include "support/memory.hpp"
#include "support/oracle.hpp"
#include "support/policy_model.hpp"
#include "support/tensors.hpp"

namespace test {

using kvpolicy::CacheOptions;
using kvpolicy::Read;
using oracle::HeadModel;

/// Rows that a policy shows, by position.
using Rows = std::map<std::int64_t, oracle::Row>;

/// The rows of segments, as the library reads them; fails if a position is shown twice.
inline Rows rows_of_segments(const kvpolicy::SegmentList& list, const kvpolicy::LayerShape& layer) {
  Rows rows;
  std::vector<float> row(layer.head_dim);
  std::vector<float> value(layer.value_dim);
  bool once = true;
  for (const kvpolicy::Segment& segment : list) {
    segment.for_each_run([&](const kvpolicy::RowRun& run) {
      for (std::size_t i = run.first; i < run.first + run.rows; ++i) {
        oracle::Row& shown = rows[segment.position_of(i)];
        once = once && shown.key.empty();
        shown.position = segment.position_of(i);
        kvpolicy::load_row(segment.keys, i, row);
        shown.key.assign(row.begin(), row.end());
        kvpolicy::load_row(segment.values, i, value);
        shown.value.assign(value.begin(), value.end());
      }
    });
  }
  CHECK(once);
  return rows;
}

/// Functions on a cache that a Sequence needs besides its interface, and the accepted errors.
template <kvpolicy::Element E>
struct HostBackend {
  using Cache = kvpolicy::KvCache<E>;
  using Options = CacheOptions;
  using Memory = CountingResource;
  using Out = float;
  static constexpr double out_error = 2e-5;
  static constexpr double lse_error = 2e-5;
  static constexpr double score_error = 2e-6;  // of the score by which a row survives
  // Error of a chunk's score: a mean is rounded to the cache's type, a bound of rounded keys is not.
  static constexpr double mean_error = std::same_as<E, float> ? 1e-3 : 0.2;
  static constexpr double bound_error = 1e-3;
  static constexpr Layout odd_layout = Layout::padded;
  static constexpr std::size_t flush_rows = 1;
  static constexpr bool trees = true;

  /// The rows that a policy holds, without those of the tail.
  static Rows held(const auto& cache, std::size_t l, std::size_t h, Read read, std::size_t /*appended*/) {
    kvpolicy::SegmentList list;
    cache.head(l, h).show({0, 1, read}, list);
    return rows_of_segments(list, cache.plan().shape().layer(l));
  }
  /// The rows that the next query would read.
  static Rows shown(const auto& cache, std::size_t l, std::size_t h, Read read) {
    return rows_of_segments(cache.segments(l, h, read), cache.plan().shape().layer(l));
  }
  static void check_held(const auto& cache, std::size_t l, std::size_t h, const Rows& rows,
                         const HeadModel& model) {
    std::vector<std::int64_t> positions;
    for (const auto& [position, row] : rows) positions.push_back(position);
    REQUIRE(positions == model.kept());
    CHECK(cache.head(l, h).rows() == rows.size());
  }
  /// Bytes that are allocated for these caches.
  template <class AnyCache>
  static std::size_t live_bytes(const std::vector<const AnyCache*>& caches) {
    std::size_t total = 0;
    for (const AnyCache* cache : caches) total += cache->bytes();
    return total - (caches.size() > 1 ? caches.front()->shared_bytes() : 0);
  }
};

}  // namespace test
