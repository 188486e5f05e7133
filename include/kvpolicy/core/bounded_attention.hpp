// SPDX-License-Identifier: Apache-2.0
//
// Attention that reads the rows which can matter, and says how much the others can have held (Read::bounded). Keys in
// halves are their own sketch: the upper halves of all keys bound every logit, rows are read in full in falling order
// of their bound, and once those that are left can hold only a small share of a query's attention beside what was
// read, they stay unread. Quest (arXiv:2406.10774) and TriForce (arXiv:2404.11912) read a fixed number of rows,
// chosen by summaries of chunks, which cannot say what was missed; Twilight (arXiv:2502.02770) reads until estimated
// weights add up to p, as `Certainty::none` does.
//
// A call takes three steps of an engine: it attends to the rows that are not in halves, bounds the others, and
// attends to the chosen ones. A choice needs the sum of the weights that will be read. It is estimated first; where
// it turns out to be smaller, a second choice, which knows enough, adds the rows that are missing.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/attention_state.hpp>
#include <kvpolicy/core/row.hpp>
#include <kvpolicy/core/scalar_engine.hpp>
#include <kvpolicy/core/unit_choice.hpp>

namespace kvpolicy {

/// If a KV head has more queries in a call, tokens times group, the call reads all rows: together they need most.
inline constexpr std::size_t most_bounded_queries = 64;

/// Performs calls with Read::bounded on any engine, and keeps the memory for that, about 20 bytes for each query and 8
/// rows: a call like the one before it allocates nothing. A copy starts with memory of its own. Not synchronised.
class BoundedAttention {
 public:
  BoundedAttention() = default;
  BoundedAttention(const BoundedAttention&) noexcept {}
  BoundedAttention(BoundedAttention&&) noexcept = default;
  BoundedAttention& operator=(const BoundedAttention&) noexcept { return *this; }
  BoundedAttention& operator=(BoundedAttention&&) noexcept = default;
  ~BoundedAttention() = default;

  /// Attends as `work.options.bound` says and writes its results; nothing is written if it throws.
  /// @throws what the engine throws, std::bad_alloc
  template <AttentionEngine Engine>
  void attend(Engine& engine, const LayerAttention& work) {
    if (work.queries.tokens == 0 || work.heads.empty()) return engine.attend(work);
    split(work);
    if (!any_bounded_) {
      engine.attend(work);
      return report(work);
    }
    attend_to(engine, work, &HeadRows::exact, work.options.attention_sink_bias, total_);
    bound(engine, work);
    choose(work);
    read_chosen(engine, work);
    if (choose_missing(work)) read_chosen(engine, work);
    write(work);
    report(work);
  }

 private:
  // Attention to some of the rows of all heads.
  struct Part {
    std::vector<float> out;          // [tokens, q_heads, value_dim]
    std::vector<float> log_sum_exp;  // [tokens, q_heads]
  };
  // What is known of one KV head.
  struct HeadRows {
    SegmentList exact;                      // read as any rows are
    SegmentList bounded;                    // of which some rows are read
    SegmentList upper;                      // the same, their upper halves
    SegmentList chosen;                     // the rows of `bounded` to be read next, as runs
    std::vector<UnitBound> bounds;          // [queries, units]
    std::vector<float> allowed;             // [queries]: logarithm of what may stay unread
    std::vector<float> slack;               // [queries]: how far a logit may be off by arithmetic
    std::vector<std::vector<RowRun>> runs;  // of each segment of `chosen`
    std::vector<std::uint8_t> read;         // [units]
    detail::UnitChoice choice;
    std::size_t exact_rows = 0;
    bool is_known = false;  // no bound and no logit is NaN or infinite

    [[nodiscard]] std::size_t units() const { return units_of(upper); }
  };

  [[nodiscard]] static std::size_t queries_of(const LayerAttention& work) {
    return work.queries.tokens * work.queries_per_kv();
  }
  // Query q of a KV head, as a row of [tokens, q_heads].
  [[nodiscard]] static std::size_t row_of(const LayerAttention& work, std::size_t kv_head, std::size_t q) {
    const std::size_t group = work.queries_per_kv();
    return q / group * work.queries.heads + kv_head * group + q % group;
  }

  [[nodiscard]] static bool can_be_bounded(const Segment& rows) {
    return is_in_halves(rows.keys.format.encoding) && rows.positions == nullptr && rows.node == no_node &&
           rows.runs.empty() && rows.rotation.inverse_frequencies == nullptr;
  }

  // Divides the rows of each head into those that are read anyway and those that are bounded.
  void split(const LayerAttention& work) {
    std::int64_t earliest = work.position(0);
    std::int64_t latest = earliest;
    for (std::size_t token = 1; token < work.queries.tokens; ++token) {
      earliest = std::min(earliest, work.position(token));
      latest = std::max(latest, work.position(token));
    }
    const bool bounds = work.options.bound.epsilon > 0.0F && queries_of(work) <= most_bounded_queries;
    heads_.resize(work.heads.size());
    any_bounded_ = false;
    for (std::size_t h = 0; h < heads_.size(); ++h) {
      HeadRows& head = heads_[h];
      head.exact.clear();
      head.bounded.clear();
      head.upper.clear();
      head.exact_rows = 0;
      for (const Segment& rows : work.heads[h]) {
        if (bounds && can_be_bounded(rows)) {
          add_seen(rows, earliest, latest, head);
        } else {
          rows.for_each_run([&](const RowRun& run) { head.exact_rows += run.rows; });
          head.exact.push_back(rows);
        }
      }
      any_bounded_ = any_bounded_ || !head.bounded.empty();
    }
  }

  // Adds the rows that queries from `earliest` to `latest` see, if there are any.
  static void add_seen(const Segment& rows, std::int64_t earliest, std::int64_t latest, HeadRows& head) {
    const auto count = static_cast<std::int64_t>(rows.rows);
    std::int64_t first = 0;
    if (rows.window < unlimited_window - std::max<std::int64_t>(earliest, 0)) {
      first = std::clamp<std::int64_t>(earliest - rows.window + 1 - rows.position, 0, count);
    }
    const std::int64_t last = std::clamp<std::int64_t>(latest + 1 - rows.position, first, count);
    if (first == last) return;
    Segment seen = rows.part(static_cast<std::size_t>(first), static_cast<std::size_t>(last - first));
    head.bounded.push_back(seen);
    seen.keys = seen.keys.upper_half();
    seen.values = seen.keys;  // which are not read
    head.upper.push_back(seen);
  }

  // Attends to one list of each head into `part`.
  template <class Engine>
  void attend_to(Engine& engine, const LayerAttention& work, SegmentList HeadRows::*list,
                 std::span<const float> attention_sink_bias, Part& part) {
    const ConstTensor& q = work.queries;
    const std::size_t value_dim = work.out.head_dim;
    part.out.resize(q.tokens * q.heads * value_dim);
    part.log_sum_exp.resize(q.tokens * q.heads);
    lists_.clear();
    for (const HeadRows& head : heads_) lists_.emplace_back(head.*list);
    LayerAttention own = work;
    own.heads = lists_;
    own.out = MutableTensor{TensorView{part.out.data(), q.tokens, q.heads, value_dim}};
    own.options.attention_sink_bias = attention_sink_bias;
    own.options.log_sum_exp = part.log_sum_exp;
    own.options.read = Read::all;
    engine.attend(own);
  }

  template <class Engine>
  void bound(Engine& engine, const LayerAttention& work) {
    lists_.clear();
    bounds_.clear();
    for (HeadRows& head : heads_) {
      head.bounds.resize(queries_of(work) * head.units());
      lists_.emplace_back(head.upper);
      bounds_.emplace_back(head.bounds);
    }
    const LayerBounds asked{.queries = work.queries,
                            .heads = lists_,
                            .units = bounds_,
                            .scale = work.scale(),
                            .softcap = work.options.softcap,
                            .certainty = work.options.bound.certainty};
    if constexpr (BoundingEngine<Engine>) {
      engine.bound(asked);
    } else {
      ScalarEngine{}.bound(asked);
    }
  }

  // Rows of unit u of a head.
  [[nodiscard]] static auto rows_of_units(const HeadRows& head) {
    return [&head](std::size_t unit) {
      if (head.upper.size() == 1) return std::min(bounded_unit, head.upper[0].rows - unit * bounded_unit);
      for (const Segment& rows : head.upper) {
        const std::size_t units = units_of(rows.rows);
        if (unit < units) return std::min(bounded_unit, rows.rows - unit * bounded_unit);
        unit -= units;
      }
      return std::size_t{0};
    };
  }

  // The first choice, by an estimate of what all rows weigh.
  void choose(const LayerAttention& work) {
    const ReadBound& limits = work.options.bound;
    const std::size_t queries = queries_of(work);
    for (std::size_t h = 0; h < heads_.size(); ++h) {
      HeadRows& head = heads_[h];
      const std::size_t units = head.units();
      head.choice.begin(queries, units);
      head.read.assign(units, 0);
      head.allowed.resize(queries);
      head.slack.resize(queries);
      head.is_known = true;
      for (std::size_t q = 0; q < queries; ++q) {
        const std::span<const UnitBound> own{head.bounds.data() + q * units, units};
        const float exact = total_.log_sum_exp[row_of(work, h, q)];
        float top = exact;
        float slack = 0.0F;
        for (const UnitBound& unit : own) {
          head.is_known = head.is_known && is_finite(unit.highest) && is_finite(unit.slack);
          top = std::max(top, unit.highest);
          slack = std::max(slack, unit.slack);
        }
        head.is_known = head.is_known && !is_nan(exact) && exact != std::numeric_limits<float>::infinity();
        if (!head.is_known) break;
        float sum = exact > -std::numeric_limits<float>::infinity() ? std::exp(exact - top) : 0.0F;
        for (const UnitBound& unit : own)
          sum += unit.mass * detail::exp_at_least(unit.highest - unit.width - top);
        head.allowed[q] = top + std::log(limits.epsilon * sum);
        head.slack[q] = slack;
      }
      const auto rows_of = rows_of_units(head);
      if (!head.is_known) {
        head.choice.add_all(limits.most_rows, rows_of);
      } else {
        head.choice.add(head.bounds, head.allowed, limits.most_rows, rows_of);
      }
    }
  }

  // The second choice, by what was read. Returns whether there is anything to read.
  [[nodiscard]] bool choose_missing(const LayerAttention& work) {
    const ReadBound& limits = work.options.bound;
    const std::size_t queries = queries_of(work);
    bool any = false;
    for (std::size_t h = 0; h < heads_.size(); ++h) {
      HeadRows& head = heads_[h];
      if (!head.is_known || head.units() == 0) continue;
      for (std::size_t q = 0; q < queries; ++q) {
        const float most =
            std::log(odds(limits.epsilon)) + least(total_.log_sum_exp[row_of(work, h, q)], head.slack[q]);
        head.allowed[q] =
            most - (0x1p-10F + 0x1p-20F * std::abs(most));  // more than rounding adds to the report
      }
      any = head.choice.add(head.bounds, head.allowed, limits.most_rows, rows_of_units(head)) || any;
    }
    return any;
  }

  // What may be left for each part that was read. At 1 it would be without end.
  [[nodiscard]] static float odds(float epsilon) {
    return std::min(epsilon / (1.0F - std::min(epsilon, 1.0F)), 1e6F);
  }

  // What the rows that were read weigh at least, as a logarithm, if each logit may be off by `slack` and arithmetic
  // in float by what it is.
  [[nodiscard]] static float least(float log_sum_exp, float slack) {
    if (!is_finite(log_sum_exp)) return log_sum_exp;
    return log_sum_exp - slack - (0x1p-10F + 0x1p-18F * std::abs(log_sum_exp));
  }

  // Attends to the chosen units that were not read yet.
  template <class Engine>
  void read_chosen(Engine& engine, const LayerAttention& work) {
    bool any = false;
    for (HeadRows& head : heads_) {
      list_chosen(head);
      any = any || !head.chosen.empty();
    }
    if (!any) return;
    attend_to(engine, work, &HeadRows::chosen, {}, part_);
    const std::size_t value_dim = work.out.head_dim;
    for (std::size_t row = 0; row < total_.log_sum_exp.size(); ++row) {
      const float both =
          merge_outputs(std::span{total_.out}.subspan(row * value_dim, value_dim), total_.log_sum_exp[row],
                        std::span{part_.out}.subspan(row * value_dim, value_dim), part_.log_sum_exp[row]);
      total_.log_sum_exp[row] = both;
    }
  }

  static void list_chosen(HeadRows& head) {
    head.chosen.clear();
    head.runs.resize(std::max(head.runs.size(), head.bounded.size()));
    std::size_t unit = 0;
    for (std::size_t s = 0; s < head.bounded.size(); ++s) {
      Segment rows = head.bounded[s];
      std::vector<RowRun>& runs = head.runs[s];
      runs.clear();
      std::size_t count = 0;
      for (std::size_t first = 0; first < rows.rows; first += bounded_unit, ++unit) {
        if (head.read[unit] != 0 || !head.choice.is_chosen(unit)) continue;
        head.read[unit] = 1;
        const std::size_t own = std::min(bounded_unit, rows.rows - first);
        if (!runs.empty() && runs.back().first + runs.back().rows == first) {
          runs.back().rows += own;
        } else {
          runs.push_back({first, own});
        }
        count += own;
      }
      if (count == 0) continue;
      rows.runs = runs;
      head.chosen.push_back(rows);
    }
  }

  void write(const LayerAttention& work) {
    const std::size_t value_dim = work.out.head_dim;
    const std::size_t heads = work.queries.heads;
    for (std::size_t row = 0; row < total_.log_sum_exp.size(); ++row) {
      store_dense(work.out.encoding, std::span<const float>{total_.out}.subspan(row * value_dim, value_dim),
                  work.out.row(row / heads, row % heads));
    }
    const std::span<float> log_sum_exp = work.options.log_sum_exp;
    if (!log_sum_exp.empty()) std::ranges::copy(total_.log_sum_exp, log_sum_exp.begin());
  }

  void report(const LayerAttention& work) {
    const ReadBound& bound = work.options.bound;
    for (std::size_t h = 0; h < heads_.size(); ++h) {
      const HeadRows& head = heads_[h];
      const bool all = head.bounded.empty();
      if (!bound.rows_read.empty()) bound.rows_read[h] += head.exact_rows + (all ? 0 : head.choice.rows());
      for (std::size_t q = 0; q < queries_of(work) && !bound.unread.empty(); ++q) {
        const std::size_t row = row_of(work, h, q);
        bound.unread[row] = all ? 0.0F : unread(head, q, total_.log_sum_exp[row]);
      }
    }
  }

  // The share of the rows that query q of a head left.
  [[nodiscard]] static float unread(const HeadRows& head, std::size_t q, float log_sum_exp) {
    if (std::ranges::all_of(head.read, [](std::uint8_t read) { return read != 0; })) return 0.0F;
    if (!head.is_known || !is_finite(head.choice.left()[q]) || !is_finite(head.allowed[q])) return 1.0F;
    const double left = head.choice.left()[q] * (1.0 + 0x1p-12);
    const double beside = std::exp(static_cast<double>(least(log_sum_exp, head.slack[q])) - head.allowed[q]);
    return static_cast<float>(left / (left + beside));
  }

  std::vector<HeadRows> heads_;
  bool any_bounded_ = false;
  Part total_;  // what was read until now
  Part part_;
  std::vector<std::span<const Segment>> lists_;
  std::vector<std::span<UnitBound>> bounds_;
};

namespace detail {

/// The thread's own, for caches: what one call takes of memory the next one has.
[[nodiscard]] inline BoundedAttention& bounded_attention() {
  thread_local BoundedAttention attention;
  return attention;
}

}  // namespace detail
}  // namespace kvpolicy
