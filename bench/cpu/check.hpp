// SPDX-License-Identifier: Apache-2.0
//
// The expected results of a call for some of its tokens and heads, and the error of the results.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/core/tensor_view.hpp>

#include "verify.hpp"
#include "workload.hpp"

namespace kvpolicy::bench {

class Check {
 public:
  Check(const ModelShape& shape, const TensorView<const float>& queries) : shape_{shape}, queries_{queries} {}

  /// Expects the attention of query token `token`, in all query heads of KV head `head`, over these
  /// segments.
  void expect(std::size_t token, std::size_t head, std::span<const Segment> segments, const Sight& sight) {
    const std::size_t group = shape_.queries_per_kv();
    const std::span<const float> q{queries_.row(token, head * group), group * shape_.head_dim};
    const auto found = attention(q, shape_.head_dim, segments, sight);
    for (std::size_t member = 0; member < group; ++member) {
      expected_.push_back({token, head * group + member, found[member]});
    }
  }

  /// Checks that the segments of head `head` have as many rows as `reads` counts. Returns the
  /// error, if any.
  [[nodiscard]] std::optional<std::string> count(std::size_t head, HeadReads reads, const Run& run) const {
    if (run.spoil == Spoil::rows) ++reads.keys.exact;
    for (const Expected& one : expected_) {
      const Reference& found = one.reference;
      if (one.q_head / shape_.queries_per_kv() != head) continue;
      if (found.keys == reads.keys && found.values == reads.values) continue;
      return message("KV head ", head, " reads ", found.keys.exact, " exact and ", found.keys.packed,
                     " quantised keys, ", found.values.exact, " and ", found.values.packed,
                     " values; counted were ", reads.keys.exact, ", ", reads.keys.packed, ", ",
                     reads.values.exact, " and ", reads.values.packed);
    }
    return std::nullopt;
  }

  /// Compares `out` [tokens, q_heads, head_dim]. Returns the error, if any.
  [[nodiscard]] std::optional<std::string> compare(std::span<const float> out) {
    for (const Expected& one : expected_) {
      const std::size_t at = (one.token * shape_.q_heads + one.q_head) * shape_.head_dim;
      const double error = relative_error(out.subspan(at, shape_.head_dim), one.reference.out);
      const bool packed = one.reference.keys.packed + one.reference.values.packed > 0;
      const double most = packed ? most_error_packed : most_error_exact;
      if (!(error <= most)) {
        return message("token ", one.token, ", query head ", one.q_head, " is off by ", error,
                       ", allowed are ", most);
      }
      error_ = std::max(error_, error);
    }
    return std::nullopt;
  }
  /// The largest relative error that `compare` found.
  [[nodiscard]] double error() const { return error_; }

 private:
  struct Expected {
    std::size_t token;
    std::size_t q_head;
    Reference reference;
  };

  ModelShape shape_;
  TensorView<const float> queries_;
  std::vector<Expected> expected_;
  double error_ = 0.0;
};

}  // namespace kvpolicy::bench
