// SPDX-License-Identifier: Apache-2.0
//
// Tests by counting whether texts were drawn from a model: an independent implementation of
// temperature, top-k and top-p, the exact probability of every run of three tokens, and Pearson's
// chi-square test.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include <kvpolicy/speculation/sampling.hpp>

#include "table_model.hpp"

namespace test {

/// The probability of each token by the definitions: [vocabulary].
inline std::vector<double> shaped(std::span<const float> logits, const kvpolicy::SamplingOptions& options) {
  const std::size_t n = logits.size();
  std::vector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return logits[a] > logits[b]; });
  std::vector<double> share(n, 0.0);
  if (options.temperature == 0.0F) {
    share[order[0]] = 1.0;
    return share;
  }
  const auto normalise = [&] {
    const double total = std::accumulate(share.begin(), share.end(), 0.0);
    for (double& x : share) x /= total;
  };
  for (std::size_t i = 0; i < n; ++i) {
    share[i] = std::exp((static_cast<double>(logits[i]) - static_cast<double>(logits[order[0]])) /
                        static_cast<double>(options.temperature));
  }
  if (options.top_k > 0) {
    for (std::size_t rank = options.top_k; rank < n; ++rank) share[order[rank]] = 0.0;
  }
  normalise();
  double before = 0.0;  // the share of all likelier tokens
  for (const std::size_t token : order) {
    const double own = share[token];
    if (before >= static_cast<double>(options.top_p)) share[token] = 0.0;
    before += own;
  }
  normalise();
  return share;
}

/// Q(a, x), the upper regularised incomplete gamma function: by its series below a + 1, by Lentz's
/// continued fraction above (Numerical Recipes, 6.2).
inline double upper_gamma(double a, double x) {
  if (x <= 0.0) return 1.0;
  const double scale = std::exp(a * std::log(x) - x - std::lgamma(a));
  constexpr int most = 1'000'000;
  if (x < a + 1.0) {
    double term = 1.0 / a;
    double sum = term;
    for (int n = 1; n < most && term > sum * 1e-16; ++n) {
      term *= x / (a + n);
      sum += term;
    }
    return 1.0 - sum * scale;
  }
  constexpr double tiny = std::numeric_limits<double>::min();
  double b = x + 1.0 - a;
  double c = 1.0 / tiny;
  double d = 1.0 / b;
  double h = d;
  for (int n = 1; n < most; ++n) {
    const double an = -n * (n - a);
    b += 2.0;
    d = an * d + b;
    if (std::abs(d) < tiny) d = tiny;
    c = b + an / c;
    if (std::abs(c) < tiny) c = tiny;
    d = 1.0 / d;
    const double change = d * c;
    h *= change;
    if (std::abs(change - 1.0) < 1e-15) break;
  }
  return h * scale;
}

/// The probability that a chi-square statistic with so many degrees of freedom is at least as large as
/// this one.
inline double chi_square_p(double statistic, std::size_t freedom) {
  if (!(statistic >= 0.0)) return 0.0;  // NaN too
  return freedom == 0 ? 1.0 : upper_gamma(static_cast<double>(freedom) / 2.0, statistic / 2.0);
}

/// Counts runs of three tokens by the two tokens before them, on which alone a TableModel depends:
/// given those, runs that do not overlap are independent draws.
class RunCounts {
 public:
  explicit RunCounts(std::size_t vocabulary) : vocabulary_{vocabulary}, counts_(power(5), 0) {}

  /// Counts `runs` runs after the first `prompt` tokens (at least two) of `text`.
  void add(std::span<const int> text, std::size_t prompt, std::size_t runs) {
    for (std::size_t run = 0; run < runs; ++run) {
      std::size_t bin = 0;
      for (const int token : text.subspan(prompt + 3 * run - 2, 5)) {
        bin = bin * vocabulary_ + static_cast<std::size_t>(token);
      }
      ++counts_[bin];
      ++samples_;
    }
  }
  [[nodiscard]] std::size_t samples() const { return samples_; }

  /// The p-value of "these runs are draws of `model` over all rows". For each pair of tokens before
  /// them, runs that are expected less than five times are counted together.
  [[nodiscard]] double p_value(const TableModel& model, const kvpolicy::SamplingOptions& sampling) const {
    std::vector<std::vector<double>> next;
    for (std::size_t pair = 0; pair < power(2); ++pair) {
      next.push_back(
          shaped(model.logits(static_cast<int>(pair / vocabulary_), static_cast<int>(pair % vocabulary_)),
                 sampling));
    }
    double statistic = 0.0;
    std::size_t freedom = 0;
    const std::size_t runs = power(3);
    for (std::size_t pair = 0; pair < power(2); ++pair) {
      const std::span<const std::size_t> observed = std::span{counts_}.subspan(pair * runs, runs);
      const auto total =
          static_cast<double>(std::accumulate(observed.begin(), observed.end(), std::size_t{0}));
      struct Bin {
        double expected = 0.0;
        double observed = 0.0;
      };
      Bin rest;
      std::vector<Bin> bins;
      for (std::size_t run = 0; run < runs; ++run) {
        const std::array<std::size_t, 5> t{pair / vocabulary_, pair % vocabulary_, run / power(2),
                                           run / vocabulary_ % vocabulary_, run % vocabulary_};
        double share = 1.0;
        for (std::size_t i = 2; i < 5; ++i) share *= next[t[i - 2] * vocabulary_ + t[i - 1]][t[i]];
        if (share == 0.0 && observed[run] > 0) return 0.0;  // this run is impossible
        const Bin bin{share * total, static_cast<double>(observed[run])};
        if (bin.expected >= 5.0) {
          bins.push_back(bin);
        } else {
          rest.expected += bin.expected;
          rest.observed += bin.observed;
        }
      }
      if (rest.expected >= 5.0 || bins.empty()) {
        bins.push_back(rest);
      } else {
        Bin& smallest = *std::ranges::min_element(bins, {}, &Bin::expected);
        smallest.expected += rest.expected;
        smallest.observed += rest.observed;
      }
      if (total == 0.0) continue;
      for (const Bin& bin : bins) {
        const double off = bin.observed - bin.expected;
        statistic += off * off / bin.expected;
      }
      freedom += bins.size() - 1;
    }
    return chi_square_p(statistic, freedom);
  }

 private:
  [[nodiscard]] std::size_t power(int exponent) const {
    std::size_t result = 1;
    for (int i = 0; i < exponent; ++i) result *= vocabulary_;
    return result;
  }

  std::size_t vocabulary_;
  std::vector<std::size_t> counts_;  // [tokens before: 2, run: 3], each of the vocabulary
  std::size_t samples_ = 0;
};

}  // namespace test
