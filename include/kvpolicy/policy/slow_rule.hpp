// SPDX-License-Identifier: Apache-2.0
//
// Which heads have rows in slow memory, and how many bytes that takes. A policy says by its rule that every
// row stays, its storage says which rows keep their form for good (FinalRowsStorage).
#pragma once

#include <algorithm>
#include <cstddef>

#include <kvpolicy/core/head_rule.hpp>
#include <kvpolicy/policy/policy_traits.hpp>
#include <kvpolicy/storage/storage_context.hpp>

namespace kvpolicy {

/// Which rows of a head lie in slow memory, and how many bytes that takes. Counts from the settings.
template <KvPolicy P>
class SlowRule {
  using Traits = policy_traits<P>;

 public:
  using Config = typename P::Config;

  SlowRule(const Config& config, const StorageContext& context) : config_{config}, context_{context} {
    if constexpr (Traits::may_be_slow) {
      if (context.slow_tier == 0) return;
      const HeadRule rule = P::rule(config, context.head_dim);
      is_slow_ = rule.keeps_every_row();
      most_chosen_ = rule.chunk == 0 ? 0 : rule.chosen_rows + rule.chunk - 1;
      most_moved_ = rule.is_quantized() ? rule.residual + rule.key_residual().unit : 1;
    }
  }

  [[nodiscard]] bool is_slow() const { return is_slow_; }
  /// What slow memory holds once `rows` rows came, if none of them must stay in fast memory.
  [[nodiscard]] std::size_t bytes(std::size_t rows) const { return bytes_of(moved(rows)); }
  /// The copies of one choice among `rows` rows, at most: the budget, and what the last, open chunk may
  /// have in full pages.
  [[nodiscard]] std::size_t bytes_of_copies(std::size_t rows) const {
    return bytes_of(std::min(moved(rows), most_chosen_));
  }
  /// Pages that one row more may move, at most: they lie in both memories for a moment.
  [[nodiscard]] std::size_t max_bytes_of_move(std::size_t rows) const {
    const std::size_t moving = std::min(rows, most_moved_);
    if (moving == 0) return 0;
    return bytes_of(((moving + context_.page_rows - 2) / context_.page_rows + 1) * context_.page_rows);
  }

 private:
  [[nodiscard]] std::size_t moved([[maybe_unused]] std::size_t rows) const {
    if constexpr (Traits::may_be_slow) {
      if (!is_slow_) return 0;
      const std::size_t final_rows =
          P::storage_type::final_rows(config_.storage, Traits::stored_rows(config_, rows));
      return final_rows - final_rows % context_.page_rows;
    }
    return 0;
  }
  [[nodiscard]] std::size_t bytes_of([[maybe_unused]] std::size_t rows) const {
    if constexpr (Traits::may_be_slow) {
      if (is_slow_) return P::storage_type::bytes_of_final_rows(config_.storage, context_, rows);
    }
    return 0;
  }

  const Config& config_;
  const StorageContext& context_;
  bool is_slow_ = false;
  std::size_t most_chosen_ = 0;
  std::size_t most_moved_ = 0;
};

}  // namespace kvpolicy
