// SPDX-License-Identifier: Apache-2.0
//
// Times that were measured for heads of each kind, as costs for `balance` (plan/shards.hpp) in place of bytes. An
// engine sees rows and their format, never a policy, so a table has a curve for each format: seconds over the number
// of rows that a query reads. `io/cost_table_json.hpp` reads tables from files, which bench/shards measures and writes.
//
//   const auto costs = seconds_read(plan, tokens, table);
//   const auto shards = balance(plan, costs, bytes_held(plan, tokens), {.ranks = 8, .merge_cost = 10e-6});
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/core/codebook.hpp>
#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/head_rule.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/plan/step_costs.hpp>

namespace kvpolicy {

/// One measurement: a query read so many rows of a head in so many seconds.
struct MeasuredCost {
  std::size_t rows = 0;
  double seconds = 0;

  friend bool operator==(const MeasuredCost&, const MeasuredCost&) = default;
};

/// What was measured for heads with one format of rows.
template <Element E>
struct CostCurve {
  HeadSettings<E> settings;                 ///< of the head that was measured
  std::size_t queries = 1;                  ///< query heads that read the KV head
  std::vector<MeasuredCost> measured = {};  ///< by ascending rows
};

namespace detail {

// Whether the rows of two heads have the same format, so that an engine takes equally long over as many of them.
// Sinks, windows, budgets and the length of the residual only say which rows there are.
[[nodiscard]] inline bool has_same_format(const HeadRule& a, const HeadRule& b) {
  return a.key_encoding == b.key_encoding && a.value_encoding == b.value_encoding &&
         a.key_per_channel == b.key_per_channel && a.key_group == b.key_group &&
         a.value_group == b.value_group && a.key_hadamard == b.key_hadamard &&
         a.value_hadamard == b.value_hadamard && a.key_codebook == b.key_codebook &&
         a.value_codebook == b.value_codebook;
}

// "exact rows, 4 query heads"
[[nodiscard]] inline std::string format_text(const HeadRule& rule, std::size_t queries) {
  std::string text = "exact rows";
  if (rule.is_quantized()) {
    text = message(name_of(rule.key_encoding), " keys in groups of ", rule.key_group,
                   rule.key_per_channel ? " rows" : " channels", rule.key_hadamard ? ", rotated" : "", ", ",
                   name_of(rule.value_encoding), " values in groups of ", rule.value_group, " channels",
                   rule.value_hadamard ? ", rotated" : "");
    if (rule.key_codebook != Codebook::even || rule.value_codebook != Codebook::even) {
      text += message(", codes ", name_of(rule.key_codebook), " and ", name_of(rule.value_codebook));
    }
  }
  return message(text, ", ", queries, queries == 1 ? " query head" : " query heads");
}

}  // namespace detail

/// Seconds that one query at the end of a text takes over a head, by the format of its rows and their number.
template <Element E>
class CostTable {
 public:
  /// The costs of heads with `head_dim` channels of a key and `value_dim` of a value.
  /// @throws ConfigError if there is no curve, a curve has no measurement, two are of the same format and query heads,
  /// rows do not ascend from at least 1, or seconds are not from 1e-12 to 1e6
  CostTable(std::size_t head_dim, std::size_t value_dim, std::vector<CostCurve<E>> curves)
      : head_dim_{head_dim}, value_dim_{value_dim}, curves_{std::move(curves)} {
    require(!curves_.empty(), "CostTable: there is no curve, must be at least 1");
    for (std::size_t i = 0; i < curves_.size(); ++i) {
      check(curves_[i], i);
      for (std::size_t j = 0; j < i; ++j) {
        require(!is_of(curves_[j], rule_of(curves_[i]), curves_[i].queries), "CostTable: curves ", j, " and ",
                i, " are both of ", detail::format_text(rule_of(curves_[i]), curves_[i].queries),
                "; there must be one");
      }
    }
  }

  [[nodiscard]] std::size_t head_dim() const noexcept { return head_dim_; }
  [[nodiscard]] std::size_t value_dim() const noexcept { return value_dim_; }
  [[nodiscard]] const std::vector<CostCurve<E>>& curves() const noexcept { return curves_; }

  /// Seconds for `rows` rows in the format of `rule`, which `queries` query heads read: on the straight line between
  /// the measurements on either side. Fewer rows than were measured take as long as the fewest that were, because what
  /// a call takes besides its rows is in there.
  /// @throws ConfigError if no such format, or fewer rows, were measured
  [[nodiscard]] double seconds(const HeadRule& rule, std::size_t rows, std::size_t queries) const {
    const auto curve =
        std::ranges::find_if(curves_, [&](const CostCurve<E>& one) { return is_of(one, rule, queries); });
    require(curve != curves_.end(), "CostTable: nothing was measured for ",
            detail::format_text(rule, queries), "; there is ", known());
    const std::vector<MeasuredCost>& all = curve->measured;
    require(rows <= all.back().rows, "CostTable: ", rows, " rows were not measured for ",
            detail::format_text(rule, queries), ", at most ", all.back().rows,
            "; measure more rows, or take a shorter text");
    if (rows <= all.front().rows) return all.front().seconds;
    const auto after = std::ranges::lower_bound(all, rows, {}, &MeasuredCost::rows);
    const auto before = after - 1;
    const double share =
        static_cast<double>(rows - before->rows) / static_cast<double>(after->rows - before->rows);
    return before->seconds + share * (after->seconds - before->seconds);
  }

 private:
  [[nodiscard]] HeadRule rule_of(const CostCurve<E>& curve) const { return curve.settings.rule(head_dim_); }
  [[nodiscard]] bool is_of(const CostCurve<E>& curve, const HeadRule& rule, std::size_t queries) const {
    return curve.queries == queries && detail::has_same_format(rule_of(curve), rule);
  }
  [[nodiscard]] std::string known() const {
    std::string text;
    for (const CostCurve<E>& curve : curves_) {
      text += (text.empty() ? "" : "; ") + detail::format_text(rule_of(curve), curve.queries);
    }
    return text;
  }
  static void check(const CostCurve<E>& curve, std::size_t number) {
    require(curve.queries >= 1, "CostTable: curve ", number, " is of 0 query heads, must be at least 1");
    require(!curve.measured.empty(), "CostTable: curve ", number,
            " has no measurement, must have at least 1");
    std::size_t rows = 0;
    for (const MeasuredCost& one : curve.measured) {
      require(one.rows > rows, "CostTable: curve ", number, " has ", one.rows, " rows after ", rows,
              "; rows must ascend, from at least 1");
      require(one.seconds >= 1e-12 && one.seconds <= 1e6, "CostTable: curve ", number, " says that ",
              one.rows, " rows take ", one.seconds, " seconds, must be from 1e-12 to 1e6");
      rows = one.rows;
    }
  }

  std::size_t head_dim_, value_dim_;
  std::vector<CostCurve<E>> curves_;
};

/// Seconds that one query at the end of a text of `tokens` tokens takes over each head of a plan.
/// @throws ConfigError as `CostTable::seconds`, for a table of heads with other channels, and if a policy does not
/// state its rule
template <class... T>
[[nodiscard]] HeadCosts seconds_read(const HeadPlan<T...>& plan, std::size_t tokens,
                                     const CostTable<typename HeadPlan<T...>::element_type>& table) {
  using E = typename HeadPlan<T...>::element_type;
  HeadCosts costs(plan.shape().layers);
  plan.for_each_head([&](std::size_t layer, std::size_t, const HeadSettings<E>& settings) {
    const LayerShape own = plan.shape().layer(layer);
    require(own.head_dim == table.head_dim() && own.value_dim == table.value_dim(), "seconds_read: layer ",
            layer, " has keys of ", own.head_dim, " and values of ", own.value_dim,
            " channels, the costs were measured with ", table.head_dim(), " and ", table.value_dim());
    const HeadRule rule = settings.rule(own.head_dim);
    costs[layer].push_back(table.seconds(rule, rows_read(rule, tokens), own.queries_per_kv()));
  });
  return costs;
}

}  // namespace kvpolicy
