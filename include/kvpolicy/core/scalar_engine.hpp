// SPDX-License-Identifier: Apache-2.0
//
// The definition of attention over segments: one row after another, in float. It needs only the standard
// library and takes no shortcuts. Faster engines are compared with it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/attention_state.hpp>
#include <kvpolicy/core/key_width.hpp>
#include <kvpolicy/core/rotary.hpp>
#include <kvpolicy/core/row.hpp>

/// @def KVPOLICY_ONE_BODY
/// One body for all callers. Compilers may make a copy of a function for a caller whose arguments they know, and
/// contract or reorder its arithmetic otherwise: the same rows would give other bits by another way.
#if defined(__clang__)
#define KVPOLICY_ONE_BODY [[gnu::noinline]]
#elif defined(__GNUC__)
#define KVPOLICY_ONE_BODY [[gnu::noipa]]
#else
#define KVPOLICY_ONE_BODY
#endif

namespace kvpolicy {

/// An AttentionEngine in plain loops, for any head_dim and value_dim. It has no state, so one
/// object may serve all threads.
class ScalarEngine {
 public:
  KVPOLICY_ONE_BODY void attend(const LayerAttention& work) {
    const std::size_t value_dim = work.out.head_dim;
    std::vector<float> query(work.queries.head_dim);
    std::vector<float> row(value_dim);
    std::vector<float> values(value_dim);
    for (std::size_t head = 0; head < work.queries.heads; ++head) {
      const auto segments = work.heads[head / work.queries_per_kv()];
      for (std::size_t token = 0; token < work.queries.tokens; ++token) {
        load_dense(work.queries.encoding, work.queries.row(token, head), query);
        values.assign(value_dim, 0.0F);
        SoftmaxState state;
        if (!work.options.attention_sink_bias.empty()) state = {work.options.attention_sink_bias[head], 1.0F};
        const auto sees = [&](const Segment& segment, std::size_t index) {
          return work.sees(token, segment, index);
        };
        for_each_logit(segments, query, work.position(token), work.scale(), work.options.softcap, sees,
                       [&](const Segment& segment, std::size_t index, std::size_t, float logit) {
                         load_row(segment.values, index, row);
                         accumulate(state, values, logit, row);
                       });
        normalize(state, values);
        store_dense(work.out.encoding, values, work.out.row(token, head));
        if (!work.options.log_sum_exp.empty()) {
          work.options.log_sum_exp[token * work.queries.heads + head] = state.log_sum_exp();
        }
      }
    }
  }

  KVPOLICY_ONE_BODY void observe(const LayerObservation& work) {
    const std::size_t head_dim = work.queries.head_dim;
    std::vector<float> query(head_dim);
    std::vector<float> logits;
    for (std::size_t head = 0; head < work.queries.heads; ++head) {
      const std::size_t kv_head = head / work.queries_per_kv();
      const auto segments = work.heads[kv_head];
      if (segments.empty()) continue;
      const std::size_t rows = work.sums[kv_head].size() / work.queries_per_kv();
      const auto sums = work.sums[kv_head].subspan(head % work.queries_per_kv() * rows, rows);
      for (float& sum : sums) sum = 0.0F;
      for (std::size_t token = 0; token < work.queries.tokens; ++token) {
        load_dense(work.queries.encoding, work.queries.row(token, head), query);
        logits.assign(rows, -std::numeric_limits<float>::infinity());
        SoftmaxState state;
        if (!work.options.attention_sink_bias.empty()) state = {work.options.attention_sink_bias[head], 1.0F};
        const auto t = work.first_position + static_cast<std::int64_t>(token);
        const auto sees = [&](const Segment& segment, std::size_t index) {
          return is_visible(segment.position_of(index), t, segment.window);
        };
        for_each_logit(segments, query, t, work.scale(), work.options.softcap, sees,
                       [&](const Segment&, std::size_t, std::size_t ordinal, float logit) {
                         logits[ordinal] = logit;
                         accumulate(state, {}, logit, {});
                       });
        const float total = state.log_sum_exp();
        for (std::size_t i = 0; i < rows; ++i) {
          if (logits[i] > -std::numeric_limits<float>::infinity()) {
            sums[i] = with_vote(work.votes, sums[i], std::exp(logits[i] - total));
          }
        }
      }
    }
  }

  KVPOLICY_ONE_BODY void score(const Plane& rows, std::span<const float> query, std::span<float> out) {
    std::vector<float> row(query.size());
    for (std::size_t i = 0; i < out.size(); ++i) {
      load_row(rows, i, row);
      out[i] = dot(query, row);
    }
  }

  KVPOLICY_ONE_BODY void bound(const LayerBounds& work) {
    const std::size_t head_dim = work.queries.head_dim;
    const std::size_t group = work.queries_per_kv();
    std::vector<float> query(head_dim);
    std::vector<float> key(head_dim);
    for (std::size_t kv_head = 0; kv_head < work.heads.size(); ++kv_head) {
      const std::span<UnitBound> all = work.units[kv_head];
      std::ranges::fill(all, UnitBound{});
      const std::size_t units = units_of(work.heads[kv_head]);
      for (std::size_t q = 0; q < work.queries.tokens * group && units > 0; ++q) {
        load_dense(work.queries.encoding, work.queries.row(q / group, kv_head * group + q % group), query);
        for (float& number : query) number *= work.scale;
        std::span<UnitBound> own = all.subspan(q * units, units);
        for (const Segment& segment : work.heads[kv_head]) {
          for (std::size_t row = 0; row < segment.rows; ++row) {
            load_row(segment.keys, row, key);
            const detail::KeyWidth parts = key_width(segment.keys, row, query);
            const float slack = parts.slack(head_dim);
            float width = parts.width(work.certainty, slack);
            float logit = dot(query, key) + width;
            if (work.softcap > 0.0F) {
              logit = work.softcap * (std::tanh(logit / work.softcap) + detail::cap_error);
              width += work.softcap * detail::cap_error;
            }
            detail::add_bound(own[row / bounded_unit], logit, width, slack);
          }
          own = own.subspan(units_of(segment.rows));
        }
      }
    }
  }

 private:
  // What the channels of a row's key, of which `keys` shows upper halves, add to the width of the query's logit.
  [[nodiscard]] static detail::KeyWidth key_width(const Plane& keys, std::size_t row,
                                                  std::span<const float> query) {
    KVPOLICY_ASSERT(keys.format.codebook == Codebook::even);
    std::vector<float> turned(query.begin(), query.end());
    if (keys.format.hadamard) rotate_hadamard(turned);
    const PageLayout layout{keys.format, query.size(), keys.page_rows};
    const RowAddress place = keys.address_of(row);
    const bool per_token = keys.format.granularity == Granularity::per_token;
    const std::size_t first = (per_token ? place.row : place.row / keys.format.group) * layout.params_per_row;
    const auto* scales = reinterpret_cast<const float16*>(place.page + layout.scales_offset) + first;
    const auto* zeros = reinterpret_cast<const float16*>(place.page + layout.zeros_offset) + first;
    detail::KeyWidth sum;
    for (std::size_t channel = 0; channel < turned.size(); ++channel) {
      const std::size_t at = per_token ? channel / keys.format.group : channel;
      sum.add(turned[channel], static_cast<float>(scales[at]), static_cast<float>(zeros[at]));
    }
    // One rounding may serve all groups of a row: then the largest step counts for every channel.
    if (per_token) {
      const auto most = std::ranges::max_element(turned, {}, [](float x) { return std::abs(x); });
      float step = 0.0F;
      for (std::size_t g = 0; g < layout.params_per_row; ++g)
        step = std::max(step, static_cast<float>(scales[g]));
      sum.largest = std::abs(*most) * step;
    }
    return sum;
  }

  [[nodiscard]] static float dot(std::span<const float> a, std::span<const float> b) {
    float sum = 0.0F;
    for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
  }

  // Calls visit(segment, plane row, ordinal among all rows shown, logit) for each row that the
  // query at position t sees.
  template <class Sees, class Visit>
  static void for_each_logit(std::span<const Segment> segments, std::span<const float> query, std::int64_t t,
                             float scale, float softcap, Sees sees, Visit visit) {
    std::vector<float> row(query.size());
    std::vector<float> rotated;
    std::size_t ordinal = 0;
    for (const Segment& segment : segments) {
      std::span<const float> q = query;
      if (segment.rotation.inverse_frequencies != nullptr && t > segment.rotation.latest_position) {
        rotated.assign(query.begin(), query.end());
        rotate(rotated, {segment.rotation.inverse_frequencies, query.size() / 2},
               segment.rotation.latest_position - t);
        q = rotated;
      }
      segment.for_each_run([&](const RowRun& run) {
        for (std::size_t i = run.first; i < run.first + run.rows; ++i, ++ordinal) {
          if (!sees(segment, i)) continue;
          load_row(segment.keys, i, row);
          float logit = dot(q, row) * scale;
          if (softcap > 0.0F) logit = softcap * std::tanh(logit / softcap);
          visit(segment, i, ordinal, logit);
        }
      });
    }
  }
};

static_assert(BoundingEngine<ScalarEngine>);

}  // namespace kvpolicy
