// SPDX-License-Identifier: Apache-2.0
//
// What passes of a model cost, measured while it runs: times that are noisy, now and then many
// times too long (another program had the machine), and that move as the text grows. So: medians of
// the latest few, the lower one, for times err to the long side.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>
#include <vector>

#include <kvpolicy/speculation/cost_model.hpp>

namespace kvpolicy {

/// Whether `seconds` can be a time: positive, finite, and such that sums of them are as well.
[[nodiscard]] inline bool plausible_time(double seconds) {
  return seconds > 1e-30 && seconds < 1e30;
}

/// Times of one thing, of which the latest five are kept.
class RecentTimes {
 public:
  /// Times that cannot be are ignored.
  void add(double seconds) {
    if (!plausible_time(seconds)) return;
    times_[added_ % times_.size()] = seconds;
    ++added_;
  }

  /// Times kept, at most five.
  [[nodiscard]] std::size_t count() const { return std::min(added_, times_.size()); }

  /// The lower quartile: the second of five, the least of fewer. 0 if there is nothing yet.
  [[nodiscard]] double typical() const {
    if (added_ == 0) return 0.0;
    std::array<double, 5> sorted = times_;
    // By hand: of std::sort over so few g++ 12 says at -O3 that it leaves the array.
    for (std::size_t i = 1; i < count(); ++i) {
      for (std::size_t j = i; j > 0 && sorted[j] < sorted[j - 1]; --j) {
        std::swap(sorted[j], sorted[j - 1]);
      }
    }
    return sorted[(count() - 1) / 4];
  }

 private:
  std::array<double, 5> times_{};
  std::size_t added_ = 0;
};

/// Passes over one number of tokens and another, and the line through their times.
class PassTimes {
 public:
  /// Measurements of other numbers of tokens are believed for as many passes.
  static constexpr std::size_t believed_for = 256;

  /// A pass over `tokens` tokens took so long. Times that cannot be are ignored.
  void add(std::size_t tokens, double seconds) {
    if (!plausible_time(seconds)) return;
    if (tokens >= sizes_.size()) sizes_.resize(tokens + 1);
    ++passes_;
    sizes_[tokens].times.add(seconds);
    sizes_[tokens].latest = passes_;
    fit();
  }

  [[nodiscard]] bool empty() const { return passes_ == 0; }
  /// Whether the growth with the number of tokens is measured; without, it is taken as before.
  [[nodiscard]] bool has_slope() const { return has_slope_; }
  /// The line; 0 if there is nothing yet.
  [[nodiscard]] const PassCost& cost() const { return cost_; }

 private:
  struct Size {
    RecentTimes times;
    std::size_t latest = 0;  // the pass that was measured last, counting from 1; 0: none
  };

  // Least squares through the typical times, each with the weight of its measurements. A size that
  // was measured less than three times may be an outlier, and only counts where no other was
  // measured more often.
  void fit() {
    const auto fresh = [&](const Size& size) {
      return size.latest > 0 && passes_ - size.latest < believed_for;
    };
    std::size_t enough = 0;
    for (const Size& size : sizes_) {
      if (fresh(size)) enough = std::max(enough, std::min<std::size_t>(size.times.count(), 3));
    }
    double weights = 0.0;
    double mean_tokens = 0.0;
    double mean_seconds = 0.0;
    const auto each = [&](auto&& use) {
      for (std::size_t tokens = 0; tokens < sizes_.size(); ++tokens) {
        const Size& size = sizes_[tokens];
        if (!fresh(size) || size.times.count() < enough) continue;
        use(static_cast<double>(size.times.count()), static_cast<double>(tokens),
            size.times.typical());
      }
    };
    each([&](double weight, double tokens, double seconds) {
      weights += weight;
      mean_tokens += weight * tokens;
      mean_seconds += weight * seconds;
    });
    mean_tokens /= weights;
    mean_seconds /= weights;
    double spread = 0.0;
    double slope = 0.0;
    each([&](double weight, double tokens, double seconds) {
      spread += weight * (tokens - mean_tokens) * (tokens - mean_tokens);
      slope += weight * (tokens - mean_tokens) * (seconds - mean_seconds);
    });
    has_slope_ = spread > 0.0;
    if (has_slope_) cost_.per_token = std::max(slope / spread, 0.0);
    // Neither part may fall below 0: through the origin, if it comes to that.
    cost_.base = mean_seconds - cost_.per_token * mean_tokens;
    if (cost_.base >= 0.0) return;
    cost_.base = 0.0;
    cost_.per_token = mean_seconds / mean_tokens;
  }

  std::vector<Size> sizes_;  // by the number of tokens
  std::size_t passes_ = 0;
  bool has_slope_ = false;
  PassCost cost_;
};

}  // namespace kvpolicy
