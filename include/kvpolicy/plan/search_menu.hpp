// SPDX-License-Identifier: Apache-2.0
//
// The choices of plan search if nobody has measured what they do to the model: a menu of policies and
// precisions, with damages guessed from how much each head retrieves.
//
// The guess, for a head of importance g (0 to 1), which keeps r of n rows at b bits:
//
//     damage = (g + 0.02) · lost(r / n) + (g + 0.05) · (k / (2^b - 1)^2 + v / (2^c - 1)^2)
//
// for keys of b bits and values of c. lost is 1 - r/n for sinks and a window, and a quarter of it for rows that
// attention chooses. The second term is proportional to the energy of the rounding errors of codes. It is 0 for exact
// rows. Keys carry most of what quantising costs (k = 0.86, v = 0.14, as measured on SmolLM2 at 4 bits), and half as
// much if they are quantised per channel, because outliers then widen the steps of no other key (KIVI,
// arXiv:2402.02750). Only the ranks matter: DuoAttention (arXiv:2410.10819) says that a streaming head of
// gate 0 loses nothing by its window, HeadKV (arXiv:2410.19258) that rows chosen by attention lose far less
// than the latest ones. Measured damages (io/damage_json.hpp) are better if the model is available.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <vector>

#include <kvpolicy/plan/duo_gates.hpp>
#include <kvpolicy/plan/headkv_budgets.hpp>
#include <kvpolicy/plan/require_fits.hpp>
#include <kvpolicy/plan/search.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/quantized_residual_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>

namespace kvpolicy {

/// Settings that the choices of a menu have in common.
struct SearchMenuConfig {
  std::size_t sinks = 16;     ///< Sinks of every window.
  std::size_t min_rows = 32;  ///< Rows of the smallest window and budget, always-kept rows included.
  std::size_t group = 32;     ///< Channels that share a scale; divides head_dim.
  std::size_t residual = 32;  ///< Exact latest rows of heads that keep every row quantised.
  SnapKvScorer::Config scorer = {};

  void validate() const {
    SnapKvScorer::validate(scorer);
    require(min_rows > sinks && min_rows > scorer.observation_window, "SearchMenuConfig: min_rows is ",
            min_rows, ", must be more than sinks = ", sinks,
            " and the scorer's window = ", scorer.observation_window);
  }
};

/// Converts HeadKV scores [layers, q_heads] to importances [layers, kv_heads]: the mean of each GQA group,
/// divided by the largest mean.
/// @throws ConfigError as `group_scores`, or if all are zero
[[nodiscard]] inline HeadGates importance_of(const HeadScores& scores, const ModelShape& shape) {
  HeadGates importance = group_scores(detail::checked_scores(scores, shape), shape.layer(0).kv_heads);
  const double most = std::ranges::max(importance.values());
  require(most > 0.0, "importance_of: all scores are zero");
  for (double& one : importance.values()) one /= most;
  return importance;
}

namespace detail {

template <Element E>
class Menu {
 public:
  using Dense = DenseStorage<E>;
  using Codes = ResidualStorage<E, Granularity::per_token>;

  Menu(const ModelShape& shape, const HeadGates& importance, std::size_t context,
       const SearchMenuConfig& config)
      : shape_{shape}, importance_{importance}, context_{context}, config_{config} {}

  std::vector<HeadChoice<E>> make() {
    add<FullCache<Dense>>({}, 0.0, exact);
    for (const Bits bits : {Bits{8, 8}, Bits{8, 4}, Bits{4, 4}, Bits{2, 2}}) {
      add<QuantizedResidualCache<E>>({.storage = codes(bits, config_.residual)}, 0.0, bits);
    }
    for (const Bits bits :
         {Bits{6, 4}, Bits{5, 3}, Bits{4, 4}, Bits{4, 3}, Bits{4, 2}, Bits{3, 3}, Bits{3, 2}, Bits{2, 2}}) {
      ResidualConfig by_channel = codes(bits, config_.residual);
      by_channel.key_group = key_rows;
      add<QuantizedResidualCache<E, Granularity::per_channel>>({.sinks = exact_first, .storage = by_channel},
                                                               0.0, bits, 0.5);
    }
    for (std::size_t rows = config_.min_rows; rows < context_; rows *= 2) {
      const double lost = 1.0 - static_cast<double>(rows) / static_cast<double>(context_);
      const std::size_t recent = rows - config_.sinks;
      const std::size_t budget = rows - config_.scorer.observation_window;
      add<SinkRecentCache<Dense>>({.sinks = config_.sinks, .recent = recent}, lost, exact);
      add<HeadBudgetCache<Dense>>({.budget = budget, .scorer = config_.scorer}, lost / 4, exact);
      add<HeadBudgetCache<Codes>>({.budget = budget, .scorer = config_.scorer, .storage = codes({4, 4}, 0)},
                                  lost / 4, {4, 4});
    }
    return std::move(choices_);
  }

 private:
  // Bits of a key's and of a value's number.
  struct Bits {
    std::size_t keys = 0, values = 0;
  };
  static constexpr Bits exact{};
  static constexpr std::size_t exact_first = 4;
  static constexpr std::size_t key_rows = 32;  // rows of a channel that share a scale, as in KIVI

  [[nodiscard]] ResidualConfig codes(Bits bits, std::size_t residual) const {
    return {.bits = bits.keys,
            .value_bits = bits.values == bits.keys ? 0 : bits.values,
            .key_group = config_.group,
            .value_group = config_.group,
            .residual = residual};
  }

  template <class P>
  void add(const typename P::Config& config, double lost, Bits bits, double of_key_noise = 1.0) {
    const auto energy = [](std::size_t width) {
      const double steps = std::exp2(static_cast<double>(width)) - 1.0;
      return width == 0 ? 0.0 : 1.0 / (steps * steps);
    };
    const double noise = 0.86 * of_key_noise * energy(bits.keys) + 0.14 * energy(bits.values);
    HeadChoice<E> choice{config, HeadDamage{shape_.layers, importance_.heads()}};
    for (std::size_t i = 0; i < importance_.values().size(); ++i) {
      const double g = std::clamp(importance_.values()[i], 0.0, 1.0);
      choice.damage.values()[i] = (g + 0.02) * lost + (g + 0.05) * noise;
    }
    choices_.push_back(std::move(choice));
  }

  const ModelShape& shape_;
  const HeadGates& importance_;
  std::size_t context_;
  const SearchMenuConfig& config_;
  std::vector<HeadChoice<E>> choices_;
};

}  // namespace detail

/// Choices for `search_plan` at `context` tokens. Heads that keep every row: exact, in 8, 4 and 2 bits and
/// with keys of 8 and values of 4; and with keys per channel in 6 to 2 bits, values in 4 to 2, which needs pages of at
/// least 32 rows.
/// Windows and budgets: of `min_rows`, twice as many, and so on below `context`, budgets also in 4 bits.
/// `importance` [layers, kv_heads] are DuoAttention's gates or the result of `importance_of`; it is clipped
/// to 0 to 1.
/// @throws ConfigError for an importance that is not a number or does not fit, or a setting that does
/// not work; CapacityError for a context beyond `max_text_tokens`
template <Element E>
[[nodiscard]] std::vector<HeadChoice<E>> choices_by_importance(const ModelShape& shape,
                                                               const HeadGates& importance,
                                                               std::size_t context,
                                                               const SearchMenuConfig& config = {}) {
  config.validate();
  check_text_tokens("choices_by_importance", context);
  check_gates(importance);
  detail::require_fits(importance, shape, "choices_by_importance");
  return detail::Menu<E>{shape, importance, context, config}.make();
}

}  // namespace kvpolicy
