// SPDX-License-Identifier: Apache-2.0
//
// The cost of a model's passes, measured while it runs. Times are noisy, sometimes many times too long
// (another program used the processor), and they change as the text grows. Errors only make times longer,
// so the lower quartile of the latest few is used.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>
#include <vector>

#include <kvpolicy/speculation/cost_model.hpp>

namespace kvpolicy {

/// Whether `seconds` is a plausible time: positive, and neither too small nor too large to be
/// summed.
[[nodiscard]] inline bool plausible_time(double seconds) { return seconds > 1e-30 && seconds < 1e30; }

/// The latest five times of one kind of pass.
class RecentTimes {
 public:
  /// Adds a time; implausible times are ignored.
  void add(double seconds) {
    if (!plausible_time(seconds)) return;
    times_[added_ % times_.size()] = seconds;
    ++added_;
  }

  /// Times kept, at most five.
  [[nodiscard]] std::size_t count() const { return std::min(added_, times_.size()); }

  /// The lower quartile: the second smallest of five times, the smallest of fewer. 0 if there is
  /// none.
  [[nodiscard]] double typical() const {
    if (added_ == 0) return 0.0;
    std::array<double, 5> sorted = times_;
    // Written by hand because g++ 12 at -O3 warns that std::sort leaves such a small array.
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

/// Times of passes over different numbers of tokens, and the line fitted to them.
class PassTimes {
 public:
  /// A measurement of a number of tokens is used for this many later passes.
  static constexpr std::size_t believed_for = 256;

  /// Records the time of a pass over `tokens` tokens; implausible times are ignored.
  void add(std::size_t tokens, double seconds) {
    if (!plausible_time(seconds)) return;
    if (tokens >= sizes_.size()) sizes_.resize(tokens + 1);
    ++passes_;
    sizes_[tokens].times.add(seconds);
    sizes_[tokens].latest = passes_;
    fit();
  }

  [[nodiscard]] bool empty() const { return passes_ == 0; }
  /// Whether it is measured how times grow with the number of tokens; if not, `cost` keeps its previous
  /// slope.
  [[nodiscard]] bool has_slope() const { return has_slope_; }
  /// The fitted line; 0 if there are no times yet.
  [[nodiscard]] const PassCost& cost() const { return cost_; }

 private:
  struct Size {
    RecentTimes times;
    std::size_t latest = 0;  // number of the latest pass of this size, from 1; 0: none
  };

  // Fits a line to the typical times by least squares, weighted by the number of measurements. A
  // size that was measured fewer than three times may be an outlier, and counts only if no other
  // size was measured more often.
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
        use(static_cast<double>(size.times.count()), static_cast<double>(tokens), size.times.typical());
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
    // Neither part may be negative; if the base is, the line goes through the origin.
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
