// SPDX-License-Identifier: Apache-2.0
//
// One rank's rows of a head that is cut by rows (rank_cache.hpp): a cache of one head, which knows where in the text
// each of its rows stands.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/row.hpp>
#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/core/tensor_view.hpp>
#include <kvpolicy/plan/shards.hpp>

namespace kvpolicy::reference {

template <Element E, class Engine>
class CutHead {
 public:
  using Cache = KvCache<E, Engine>;

  /// What a call brings: the rows that stay here, and the log-sum-exps [tokens, group] of its queries over the rows
  /// that are here, minus infinity where a query sees none.
  struct Call {
    std::vector<E> keys, values;
    std::vector<std::int64_t> positions;
    std::vector<float> log_sum_exp;
  };

  /// `cache` has one head.
  CutHead(const HeadPart& part, Cache cache) : part_{part}, cache_{std::move(cache)} {}

  [[nodiscard]] const HeadPart& part() const { return part_; }
  [[nodiscard]] std::size_t bytes() const { return cache_.bytes(); }
  /// @throws std::bad_alloc
  [[nodiscard]] CutHead fork() const {
    CutHead other{part_, cache_.fork()};
    other.positions_ = positions_;
    return other;
  }

  /// Attends to the rows that are here, and to those of the call's that are to stay here; changes nothing. The call's
  /// first token stands at `first`; k and v have one head.
  /// @throws ShapeError for a number that does not fit E; what the engine throws, std::bad_alloc
  [[nodiscard]] Call attend(std::size_t first, const ConstTensor& q, const ConstTensor& k,
                            const ConstTensor& v, const MutableTensor& out, AttendOptions options) {
    Call call = own_rows(first, k, v);
    std::vector<Segment> segments;
    std::size_t shown = 0;
    if (!positions_.empty()) {
      for (const Segment& segment : cache_.segments(0, 0, Read::all)) {
        segments.push_back(segment);
        segments.back().positions = positions_.data() + shown;
        shown += segment.rows;
      }
    }
    if (!call.positions.empty()) {
      Segment own;
      own.keys = plane(call.keys, k.head_dim);
      own.values = plane(call.values, v.head_dim);
      own.rows = call.positions.size();
      own.positions = call.positions.data();
      segments.push_back(own);
    }
    call.log_sum_exp.resize(q.tokens * q.heads);
    const std::span<const Segment> all{segments};
    LayerAttention work;
    work.queries = q;
    work.out = out;
    work.first_position = static_cast<std::int64_t>(first);
    work.heads = {&all, 1};
    work.options.scale = options.scale;
    const float softcap = cache_.plan().shape().layer(0).softcap;
    work.options.softcap = options.softcap == 0.0F ? softcap : options.softcap;
    work.options.log_sum_exp = call.log_sum_exp;
    cache_.engine().attend(work);
    return call;
  }
  /// The rows of a call that are to stay here, without log-sum-exps. @throws ShapeError for a number that does not fit
  /// E; std::bad_alloc
  [[nodiscard]] Call own_rows(std::size_t first, const ConstTensor& k, const ConstTensor& v) const {
    check_range<E>("k", k);
    check_range<E>("v", v);
    Call call;
    std::vector<float> row;
    const auto round = [&](const ConstTensor& from, std::size_t token, std::vector<E>& to) {
      row.resize(from.head_dim);
      load_dense(from.encoding, from.row(token, 0), row);
      for (const float number : row) to.push_back(E{number});
    };
    for (std::size_t t = 0; t < k.tokens; ++t) {
      if (!part_.rows.has(first + t)) continue;
      round(k, t, call.keys);
      round(v, t, call.values);
      call.positions.push_back(static_cast<std::int64_t>(first + t));
    }
    return call;
  }
  /// Adds the rows of a call. @throws std::bad_alloc, StorageError
  void append(const Call& call) {
    const LayerShape shape = cache_.plan().shape().layer(0);
    for (std::size_t row = 0; row < call.positions.size(); ++row) {
      cache_.append(0, TensorView<const E>{call.keys.data() + row * shape.head_dim, 1, 1, shape.head_dim},
                    TensorView<const E>{call.values.data() + row * shape.value_dim, 1, 1, shape.value_dim});
      positions_.push_back(call.positions[row]);
    }
  }

  /// Takes back the rows from text position `tokens` on. @throws RollbackError
  void truncate(std::size_t tokens) {
    const auto end = std::ranges::lower_bound(positions_, static_cast<std::int64_t>(tokens));
    const auto rows = static_cast<std::size_t>(end - positions_.begin());
    cache_.truncate(rows);
    positions_.resize(rows);
  }
  void commit() { cache_.commit(); }

 private:
  [[nodiscard]] static Plane plane(const std::vector<E>& numbers, std::size_t channels) {
    return {.format = {.encoding = encoding_of<E>},
            .base = reinterpret_cast<const std::byte*>(numbers.data()),
            .row_stride = channels * sizeof(E)};
  }

  HeadPart part_;
  Cache cache_;
  std::vector<std::int64_t> positions_;  // of each row in the text
};

}  // namespace kvpolicy::reference
