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
// rows. For rows that are rounded each by itself k = 0.89 and v = 0.11; keys that share scales per channel have 0.48
// of that, if they are rotated as well 0.22, and rotated values 0.28. These follow from the divergences of SmolLM2 in
// docs/results.md ("Low bits"), in those of rotated q4_0 and at 4 bits: rows 2.00, keys per channel 1.07, with rotated
// values 0.91, with both rotated 0.45; there 3 bits in place of 4 cost rotated values 0.07 of what they cost keys
// (0.40 and 5.40 thousandths of a nat). At 2 bits a search over single heads found 72 % of the damage in keys.
// Only the ranks matter: DuoAttention (arXiv:2410.10819) says that a streaming head of
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
#include <kvpolicy/plan/low_bits.hpp>
#include <kvpolicy/plan/require_fits.hpp>
#include <kvpolicy/plan/search.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>

namespace kvpolicy {

/// Settings that the choices of a menu have in common.
struct SearchMenuConfig {
  std::size_t sinks = 16;     ///< Sinks of every window.
  std::size_t min_rows = 32;  ///< Rows of the smallest window and budget, always-kept rows included.
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
  using Codes = PerTokenStorage<E>;

  Menu(const ModelShape& shape, const HeadGates& importance, std::size_t context,
       const SearchMenuConfig& config)
      : shape_{shape}, importance_{importance}, context_{context}, config_{config} {}

  std::vector<HeadChoice<E>> make() {
    add(typename FullCache<Dense>::Config{}, 0.0);
    for (const LowBits bits : {LowBits{8, 8}, LowBits{8, 4}}) add_text(bits, Hadamard::none);
    for (const LowBits bits : {LowBits{4, 4}, LowBits{4, 2}, LowBits{3, 3}, LowBits{2, 2}}) {
      add_text(bits, Hadamard::none);
    }
    for (const LowBits bits : {LowBits{6, 4}, LowBits{5, 3}, LowBits{4, 4}, LowBits{4, 3}, LowBits{4, 2},
                               LowBits{3, 3}, LowBits{3, 2}, LowBits{2, 2}}) {
      add_text(bits, Hadamard::both);
    }
    const LowBits four{4, 4};
    const ResidualConfig in_four = LowBitFormat::of_rows(four, shape_, 0).storage;
    for (std::size_t rows = config_.min_rows; rows < context_; rows *= 2) {
      const double lost = 1.0 - static_cast<double>(rows) / static_cast<double>(context_);
      const std::size_t recent = rows - config_.sinks;
      const std::size_t budget = rows - config_.scorer.observation_window;
      add(typename SinkRecentCache<Dense>::Config{.sinks = config_.sinks, .recent = recent}, lost);
      add(typename HeadBudgetCache<Dense>::Config{.budget = budget, .scorer = config_.scorer}, lost / 4);
      add(
          typename HeadBudgetCache<Codes>::Config{
              .budget = budget, .scorer = config_.scorer, .storage = in_four},
          lost / 4, noise_of({.storage = in_four}));
    }
    return std::move(choices_);
  }

 private:
  void add_text(LowBits bits, Hadamard rotated) {
    const LowBitFormat format = LowBitFormat::of_text(bits, shape_, config_.residual).rotated(rotated);
    add(format.template head<E>(), 0.0, noise_of(format));
  }

  [[nodiscard]] static double noise_of(const LowBitFormat& format) {
    const auto energy = [](Encoding encoding) {
      const double steps = std::exp2(static_cast<double>(bits_of(encoding))) - 1.0;
      return 1.0 / (steps * steps);
    };
    const bool by_channel = format.keys == KeyScales::channel;
    const double of_keys = !by_channel ? 1.0 : format.storage.key_hadamard ? 0.22 : 0.48;
    const double of_values = format.storage.value_hadamard ? 0.28 : 1.0;
    return 0.89 * of_keys * energy(format.storage.key_encoding()) +
           0.11 * of_values * energy(format.storage.value_encoding());
  }

  void add(const HeadSettings<E>& settings, double lost, double noise = 0.0) {
    HeadChoice<E> choice{settings, HeadDamage{shape_.layers, importance_.heads()}};
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

/// Choices for `search_plan` at `context` tokens. Heads that keep every row: exact; keys of 8 bits with values of 8 and
/// 4; and keys per channel, which needs pages of at least 64 rows: of 4, 3 and 2 bits, and rotated with rotated values
/// of 6 to 2 bits, values in 4 to 2. How each is stored, plan/low_bits.hpp says. Windows and budgets: of `min_rows`,
/// twice as many, and so on below `context`, budgets also in 4 bits. `importance` [layers, kv_heads] are DuoAttention's
/// gates or the result of `importance_of`; it is clipped to 0 to 1.
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
