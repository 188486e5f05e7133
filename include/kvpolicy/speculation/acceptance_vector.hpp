// SPDX-License-Identifier: Apache-2.0
//
// Measures how often a node's first, second, ... child is the accepted one, while a decoder verifies trees.
// speculation/tree_shape.hpp builds trees from these numbers.
//
// A child is only tried if its earlier siblings were refused, and nodes may have different numbers of
// children. So the vector counts how often a child is accepted when it is tried (the estimate of Kaplan and
// Meier); a verification that does not reach a child does not count for it. The acceptances of Sequoia,
// arXiv:2402.12374, follow from these counts, and their sum never exceeds 1.
#pragma once

#include <cmath>
#include <cstddef>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/speculation/tree_shape.hpp>

namespace kvpolicy {

/// The acceptances that are assumed at first, and how fast measurements lose weight.
struct AcceptanceVectorConfig {
  /// Acceptances assumed before anything is measured; its size is the number of children measured.
  std::vector<double> prior{0.6, 0.12, 0.05, 0.03, 0.02, 0.01, 0.01, 0.01};
  double prior_trials = 8.0;  ///< How many trials of a child the prior counts for; above 0.
  /// About how many of a child's latest trials count; older ones lose weight. Infinity keeps all.
  double memory = 4096.0;

  /// @throws ConfigError
  void validate() const {
    detail::check_acceptance(prior);
    require(!prior.empty(), "AcceptanceVectorConfig: prior is empty, needs 1 child or more");
    require(prior_trials > 0.0 && std::isfinite(prior_trials), "AcceptanceVectorConfig: prior_trials is ",
            prior_trials, ", must be positive");
    require(memory >= 1.0, "AcceptanceVectorConfig: memory is ", memory, ", must be at least 1");
  }
};

/// The measured frequency with which a node's first, second, ... child is the accepted one. Not
/// synchronised.
class AcceptanceVector {
 public:
  /// @throws ConfigError
  explicit AcceptanceVector(AcceptanceVectorConfig config = {}) : config_{std::move(config)} {
    config_.validate();
    counts_.resize(config_.prior.size());
  }

  /// Records that an accepted node (or the text) had `children` children, which were tried in
  /// order, and that child `accepted` was accepted. Children beyond the prior's size are not
  /// counted.
  /// @throws ConfigError if there is no child `accepted`
  void observe(std::size_t children, std::optional<std::size_t> accepted) {
    require(!accepted || *accepted < children, "AcceptanceVector: accepted child ", accepted.value_or(0),
            " of ", children);
    const std::size_t tried = accepted ? *accepted + 1 : children;
    for (std::size_t child = 0; child < counts_.size() && child < tried; ++child) {
      Count& count = counts_[child];
      const double kept = 1.0 - 1.0 / config_.memory;
      count.trials = count.trials * kept + 1.0;
      count.accepted = count.accepted * kept + (accepted == child ? 1.0 : 0.0);
    }
  }

  /// How many children of a node are measured.
  [[nodiscard]] std::size_t size() const { return counts_.size(); }
  /// How often child number `child` was tried; old trials count less.
  [[nodiscard]] double trials(std::size_t child) const { return counts_[child].trials; }

  /// For each child number, how often that child is the accepted one, given that its parent was
  /// accepted.
  [[nodiscard]] std::vector<double> acceptance() const {
    std::vector<double> shares(size());
    double prior_left = 1.0;  // how often all children so far are refused, by the prior
    double left = 1.0;        // the same, by measurement
    for (std::size_t child = 0; child < size(); ++child) {
      const double prior = prior_left > 0.0 ? std::fmin(config_.prior[child] / prior_left, 1.0) : 0.0;
      const Count& count = counts_[child];
      const double when_tried =
          (count.accepted + prior * config_.prior_trials) / (count.trials + config_.prior_trials);
      shares[child] = left * when_tried;
      left *= 1.0 - when_tried;
      prior_left -= config_.prior[child];
    }
    return shares;
  }

 private:
  struct Count {
    double trials = 0.0;
    double accepted = 0.0;
  };

  AcceptanceVectorConfig config_;
  std::vector<Count> counts_;
};

}  // namespace kvpolicy
